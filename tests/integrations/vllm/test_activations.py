"""A traced pass on the rollout side: rows of the right request at the right position, and no trace of it left."""

import random
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from blake3 import blake3

from mismatch_hooks.integrations.vllm import VllmBackend
from mismatch_hooks.integrations.vllm.activations import TracedPass, merged
from mismatch_hooks.integrations.vllm.backend import ScoringTimeout
from mismatch_hooks.schema.activation import ActivationCapture, ModuleActivations
from mismatch_hooks.schema.score import ScoringSequence
from tests.integrations.vllm.conftest import model_of
from tests.tiny_engines import recorded

pytestmark = pytest.mark.engine


def sequence(prompt: int, response: int = 6, seed: int = 0) -> ScoringSequence:
    drawn = random.Random(seed)
    return ScoringSequence(
        prompt_token_ids=tuple(drawn.randrange(512) for _ in range(prompt)),
        response_token_ids=tuple(drawn.randrange(512) for _ in range(response)),
        response_mask=(True,) * response,
    )


def tokens(one: ScoringSequence) -> tuple[int, ...]:
    return one.prompt_token_ids + one.response_token_ids


def digests(rows: torch.Tensor) -> tuple[str, ...]:
    return tuple(blake3(row.float().numpy().tobytes()).hexdigest(length=8) for row in rows.flatten(1))


def by_name(capture: ActivationCapture) -> dict[str, ModuleActivations]:
    return {module.semantic: module for module in capture.modules}


def hooks_of(model: Any) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def embedded(backend: VllmBackend, one: ScoringSequence) -> tuple[str, ...]:
    weight = model_of(backend).model.embed_tokens.weight
    return digests(weight[list(tokens(one))].detach())


BATCH = [sequence(3, seed=1), sequence(11, seed=2), sequence(7, seed=3)]


@pytest.mark.parametrize(("engine", "points"), [("llama", 25), ("qwen3", 29)])
def test_every_point_is_recorded_for_every_token(engine: str, points: int, request: pytest.FixtureRequest) -> None:
    capture = request.getfixturevalue(engine).trace(BATCH)
    assert (len(capture.modules), capture.left_out, capture.evidence.forwards) == (points, {}, (1,))
    counts = {module.semantic: [len(one.digests) for one in module.sequences] for module in capture.modules}
    assert counts.pop("head") == [8, 16, 12]
    assert {tuple(found) for found in counts.values()} == {(9, 17, 13)}


def test_rows_belong_to_the_request_and_the_position_that_they_are_listed_under(llama: VllmBackend) -> None:
    for batch in (BATCH, BATCH[::-1]):
        found = by_name(llama.trace(batch))["embedding"]
        assert [one.digests for one in found.sequences] == [embedded(llama, one) for one in batch]


def test_a_prefill_that_is_cut_into_chunks_is_put_together(llama: VllmBackend) -> None:
    long = [sequence(300, seed=1), sequence(301, seed=2), sequence(290, seed=3)]  # 909 tokens, 512 a forward
    capture = llama.trace(long)
    assert (capture.left_out, capture.evidence.forwards) == ({}, (2,))
    assert [one.digests for one in by_name(capture)["embedding"].sequences] == [embedded(llama, one) for one in long]
    assert [len(one.digests) for one in by_name(capture)["head"].sequences] == [305, 306, 295]


def test_rows_are_what_each_layers_own_modules_gave(llama: VllmBackend) -> None:
    model = model_of(llama)
    names = ("layers.1.self_attn.attn", "layers.1.post_attention_layernorm", "layers.1.mlp.act_fn", "logits_processor")
    with recorded(model, *names) as calls:
        found = by_name(llama.trace([sequence(5)]))
    given = {name.split(".")[-1]: (arguments, output) for name, arguments, output in calls.seen if len(output) != 1}
    (query, key, _), core = given["attn"]
    normalised, stream = given["post_attention_layernorm"][1]
    for semantic, rows in (
        ("layers.1.rope", torch.cat([query.flatten(1), key.flatten(1)], dim=-1)),
        ("layers.1.attention_core", core),
        ("layers.1.post_attention_norm", normalised),
        ("layers.1.attention_residual", stream),
        ("layers.1.activation", given["act_fn"][1]),
        ("head", given["logits_processor"][1]),
    ):
        assert found[semantic].sequences[0].digests == digests(rows), semantic


def test_values_stay_out_unless_they_are_asked_for(llama: VllmBackend) -> None:
    capture = llama.trace(BATCH, values_of=["final_norm"])
    assert [module.semantic for module in capture.modules if module.sequences[0].values] == ["final_norm"]


def test_a_sequence_without_a_response_takes_no_part(llama: VllmBackend) -> None:
    capture = llama.trace([sequence(4, 0), sequence(4, 2)])
    assert [len(one.digests) for one in by_name(capture)["embedding"].sequences] == [0, 6]


def test_the_run_never_notices(llama: VllmBackend) -> None:
    def cached() -> int:
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
        (output,) = llama._llm.generate([{"prompt_token_ids": list(tokens(long))}], params, use_tqdm=False)
        return int(output.num_cached_tokens)

    long = sequence(290)
    torch.manual_seed(5)
    hooks, weights, scores = hooks_of(model_of(llama)), llama.weights_digest(), llama.score(BATCH).shards
    streams = torch.get_rng_state().tolist(), random.getstate(), repr(numpy.random.get_state())
    llama._llm.reset_prefix_cache()
    llama.trace([long])
    assert (torch.get_rng_state().tolist(), random.getstate(), repr(numpy.random.get_state())) == streams
    assert cached() == 0
    assert hooks_of(model_of(llama)) == hooks
    assert (llama.weights_digest(), llama.score(BATCH).shards) == (weights, scores)


def test_a_pass_that_runs_out_of_time_leaves_no_hook(llama: VllmBackend) -> None:
    before = hooks_of(model_of(llama))
    with pytest.raises(ScoringTimeout):
        llama.trace([sequence(300, seed=1), sequence(301, seed=2)], timeout_s=1e-6)
    assert hooks_of(model_of(llama)) == before
    assert not llama._llm.llm_engine.has_unfinished_requests()


@pytest.fixture
def traced_by_hand(llama: VllmBackend) -> Iterator[Any]:
    """Start a traced pass over one sequence on the live model, as one of ``ranks``."""
    from types import SimpleNamespace

    started: list[TracedPass] = []

    def start(ranks: int = 1) -> TracedPass:
        parallel = SimpleNamespace(tensor_parallel_size=ranks)
        runner = SimpleNamespace(parallel_config=parallel, input_batch=SimpleNamespace(req_ids=[]))
        started.append(TracedPass(model_of(llama), runner, [tokens(BATCH[0])], []))
        return started[-1]

    yield start
    for traced in started:
        traced.finish()


def test_the_loops_own_requests_are_not_recorded(llama: VllmBackend, traced_by_hand: Any) -> None:
    from vllm import SamplingParams

    traced = traced_by_hand()
    params = SamplingParams(max_tokens=2, prompt_logprobs=0, detokenize=False)
    llama._llm.generate([{"prompt_token_ids": list(tokens(BATCH[0]))}], params, use_tqdm=False)
    found = traced.finish()
    assert found["modules"] == [] and len(found["left_out"]) == 25


def test_with_tensor_parallelism_what_is_cut_over_ranks_is_left_out(traced_by_hand: Any) -> None:
    left_out = traced_by_hand(ranks=2).finish()["left_out"]
    assert sorted(name for name, reason in left_out.items() if reason.startswith("its rows are cut over 2")) == [
        f"layers.{layer}.{point}"
        for layer in (0, 1)
        for point in ("activation", "attention_core", "gate_up", "query_key_value", "rope")
    ]


def plain(semantic: str, digest: str) -> dict[str, Any]:
    one = {"digests": [digest], "largest": [1.0], "values": ""}
    return {"semantic": semantic, "dtype": "bfloat16", "width": 4, "sequences": [one]}


def test_ranks_are_put_together_and_copies_that_differ_are_left_out() -> None:
    modules, left_out = merged(
        [
            {"modules": [plain("embedding", "a"), plain("layers.0.down", "b")], "left_out": {"head": "no row"}},
            {"modules": [plain("layers.0.down", "c"), plain("final_norm", "d")], "left_out": {"head": "no row"}},
        ]
    )
    assert [module.semantic for module in modules] == ["embedding", "final_norm"]
    assert left_out == {"layers.0.down": "its copies differ between ranks", "head": "no row"}


def test_a_point_that_only_the_first_rank_has_is_not_left_out() -> None:
    modules, left_out = merged(
        [{"modules": [plain("head", "a")], "left_out": {}}, {"modules": [], "left_out": {"head": "no row"}}]
    )
    assert ([module.semantic for module in modules], left_out) == (["head"], {})
