"""A traced pass on the training side: the right rows, in the layout that both sides share, and no trace of it left."""

import random
from typing import Any

import numpy
import pytest
import torch
from blake3 import blake3

from mismatch_hooks.integrations.megatron import MegatronBackend, ScoringTimeout, token_logprobs
from mismatch_hooks.schema.activation import ActivationCapture, ModuleActivations
from mismatch_hooks.schema.score import ScoringSequence
from tests.integrations.megatron.tiny_gpt import LLAMA, QWEN3, build_model, sequences
from tests.tiny_engines import recorded

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("megatron")]

LENGTHS = ((5, 7), (3, 12), (9, 1))


def digests(rows: torch.Tensor) -> tuple[str, ...]:
    return tuple(blake3(row.float().numpy().tobytes()).hexdigest(length=8) for row in rows.flatten(1))


def by_name(capture: ActivationCapture) -> dict[str, ModuleActivations]:
    return {module.semantic: module for module in capture.modules}


def hooks_of(model: Any) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


@pytest.mark.parametrize(
    ("shape", "points"), [pytest.param(LLAMA, 25, id="Llama"), pytest.param(QWEN3, 29, id="Qwen3")]
)
def test_every_point_is_recorded_for_every_token(shape: Any, points: int) -> None:
    capture = MegatronBackend(build_model(shape), shape=shape, micro_batch=2).trace(sequences(*LENGTHS))
    assert (len(capture.modules), capture.left_out, capture.evidence.forwards) == (points, {}, (2,))
    counts = {module.semantic: [len(one.digests) for one in module.sequences] for module in capture.modules}
    assert counts.pop("head") == [11, 14, 9]
    assert {tuple(found) for found in counts.values()} == {(12, 15, 10)}


def test_rows_are_what_the_module_gave_without_the_padding() -> None:
    model = build_model(LLAMA)
    with recorded(model, "decoder.layers.1.input_layernorm", "decoder.layers.0.mlp.linear_fc2") as calls:
        found = by_name(MegatronBackend(model, micro_batch=3).trace(sequences(*LENGTHS)))
    given = {name: (arguments, output) for name, arguments, output in calls.seen}
    arguments, (down, _) = given["decoder.layers.0.mlp.linear_fc2"]
    norm = given["decoder.layers.1.input_layernorm"][1]
    for semantic, tensor in (
        ("layers.1.input_norm", norm),
        ("layers.0.activation", arguments[0]),
        ("layers.0.down", down),
        ("layers.0.output", given["decoder.layers.1.input_layernorm"][0][0]),
    ):
        for index, (prompt, response) in enumerate(LENGTHS):
            assert found[semantic].sequences[index].digests == digests(tensor[: prompt + response, index]), semantic


@pytest.mark.parametrize("shape", [pytest.param(LLAMA, id="Llama"), pytest.param(QWEN3, id="Qwen3")])
def test_queries_keys_and_values_are_taken_out_of_their_groups(shape: Any) -> None:
    model = build_model(shape)
    with recorded(model, "layers.0.self_attention.linear_qkv") as calls:
        capture = MegatronBackend(model).trace(sequences((6, 4)))
    ((_, _, (stored, _)),) = calls.seen
    heads = stored[:, 0].split(32, dim=-1)  # two groups of two queries, a key and a value
    plain = torch.cat([heads[place] for place in (0, 1, 4, 5, 2, 6, 3, 7)], dim=-1)
    assert by_name(capture)["layers.0.query_key_value"].sequences[0].digests == digests(plain)


def test_rope_is_what_the_layers_own_attention_takes_in() -> None:
    model = build_model(LLAMA)
    with recorded(model, "layers.1.self_attention.core_attention") as calls:
        capture = MegatronBackend(model).trace(sequences((6, 4)))
    ((_, (query, key, *_), _),) = calls.seen
    expected = digests(torch.cat([query[:, 0].flatten(1), key[:, 0].flatten(1)], dim=-1))
    assert by_name(capture)["layers.1.rope"].sequences[0].digests == expected


@pytest.mark.parametrize(("shape", "width"), [pytest.param(LLAMA, 512, id="words"), pytest.param(None, 640, id="all")])
def test_the_head_is_cut_to_the_words_of_the_model_file(shape: Any, width: int) -> None:
    capture = MegatronBackend(build_model(LLAMA, padded_vocab=640), shape=shape).trace(sequences((6, 4)))
    assert by_name(capture)["head"].width == width


def test_a_sequence_without_a_response_takes_no_part() -> None:
    capture = MegatronBackend(build_model(LLAMA)).trace(sequences((5, 7), (4, 0)))
    assert [len(one.digests) for one in by_name(capture)["embedding"].sequences] == [12, 0]


def test_a_loop_whose_function_feeds_other_rows_records_nothing() -> None:
    def turned_round(model: Any, input_ids: torch.Tensor) -> torch.Tensor:
        return token_logprobs(model, input_ids.flip(0)).flip(0)

    capture = MegatronBackend(build_model(LLAMA), token_logprobs=turned_round).trace(sequences(*LENGTHS))
    assert capture.modules == () and len(capture.left_out) == 25
    assert all(reason.startswith("no row was recorded") for reason in capture.left_out.values())


def test_values_stay_out_unless_they_are_asked_for() -> None:
    capture = MegatronBackend(build_model(LLAMA)).trace(sequences((6, 4)), values_of=["final_norm"])
    assert [module.semantic for module in capture.modules if module.sequences[0].values] == ["final_norm"]


def test_the_run_never_notices() -> None:
    model = build_model(LLAMA)
    backend, batch = MegatronBackend(model), sequences(*LENGTHS)
    torch.manual_seed(5)
    before = (torch.get_rng_state().tolist(), random.getstate(), repr(numpy.random.get_state()), hooks_of(model))
    weights, scores = backend.weights_digest(), backend.score(batch).shards
    backend.trace(batch)
    assert (
        torch.get_rng_state().tolist(),
        random.getstate(),
        repr(numpy.random.get_state()),
        hooks_of(model),
    ) == before
    assert (backend.weights_digest(), backend.score(batch).shards) == (weights, scores)
    assert {module.training for module in model.modules()} == {True}


def test_a_pass_that_runs_out_of_time_leaves_no_hook() -> None:
    model = build_model(LLAMA)
    before = hooks_of(model)
    with pytest.raises(ScoringTimeout):
        MegatronBackend(model).trace(sequences(*LENGTHS), timeout_s=0.0)
    assert hooks_of(model) == before


def test_a_foreign_token_is_refused() -> None:
    foreign = ScoringSequence(prompt_token_ids=(1,), response_token_ids=(512,), response_mask=(True,))
    with pytest.raises(ValueError, match="token id 512; accepts 0 to 511"):
        MegatronBackend(build_model(LLAMA)).trace([foreign])
