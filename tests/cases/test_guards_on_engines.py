"""Each guard, tripped by its fault on the live engines, and all of them quiet on what healthy engines gave.

The cases of the sampling settings, the prefix cache and the padded vocabulary have files of their own. What no engine
of this host can be asked for is tested on values, in tests/pipeline/test_guards.py: routing replay (no model with
experts), and a collective of NCCL that is not pinned (no GPU).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from mismatch_hooks.integrations.megatron import MegatronBackend
from mismatch_hooks.pipeline.guards import GUARDS, GuardInput, notes, tripped
from mismatch_hooks.schema.enums import PolicyRole
from tests.ablating import SEQUENCES, guard_input
from tests.planted_faults import training_logprobs_at
from tests.tiny_engines import TinyEngines

pytestmark = pytest.mark.engine
TRAINING = PolicyRole.TRAINING


@contextmanager
def _weight(tiny: TinyEngines, change: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """One weight of the trainer is another one for the length of the block."""
    weight = tiny.models[TRAINING].decoder.layers[1].mlp.linear_fc2.weight
    before = weight.detach().clone()
    with torch.no_grad():
        weight.copy_(change(before))
    try:
        yield
    finally:
        with torch.no_grad():
            weight.copy_(before)


def _one_ulp(weight: torch.Tensor) -> torch.Tensor:
    changed = weight.clone()
    changed.view(torch.int16)[3, 5] += 1
    return changed


def _one_nan(weight: torch.Tensor) -> torch.Tensor:
    changed = weight.clone()
    changed[0, 0] = torch.nan
    return changed


def _weights_differ(tiny: TinyEngines) -> GuardInput:
    with _weight(tiny, _one_ulp):
        return guard_input(tiny)


def _captured_after_update(tiny: TinyEngines) -> GuardInput:
    healthy, engine = guard_input(tiny), tiny.engines[TRAINING]
    before = engine.mutation_count()
    with _weight(tiny, lambda weight: weight * 1.01):
        written = engine.mutation_count() - before
    engine.mutation_count()
    return replace(healthy, weights_written=written)


def _stale_rollout(tiny: TinyEngines) -> GuardInput:
    healthy = guard_input(tiny)
    assert healthy.training_weights is not None
    return replace(
        healthy,
        sequences=[replace(one, weight_version="6") for one in healthy.sequences],
        training_weights=replace(healthy.training_weights, version="7"),
    )


def _placeholder(tiny: TinyEngines) -> GuardInput:
    healthy = guard_input(tiny)
    tool = [
        replace(one, rollout_logprobs=(*one.rollout_logprobs[:-2], 0.0, 0.0)) if len(one.rollout_logprobs) > 2 else one
        for one in healthy.sequences
    ]
    return replace(healthy, sequences=tool)


def _shifted(tiny: TinyEngines) -> GuardInput:
    healthy = guard_input(tiny)
    # The value of each next token stands at the place of this one.
    return replace(healthy, training_logprobs=[[*row[1:], row[0]] for row in healthy.training_logprobs])


def _retokenised(tiny: TinyEngines) -> GuardInput:
    ids = [list(one.response_token_ids) for one in SEQUENCES]
    ids[2][3] += 1
    return replace(guard_input(tiny), training_token_ids=ids)


def _stop_token(tiny: TinyEngines) -> GuardInput:
    healthy = guard_input(tiny)
    masks = [[True] * len(one.response_token_ids) for one in SEQUENCES]
    masks[1][-1] = False
    return replace(
        healthy, sequences=[replace(one, finish_reason="stop") for one in healthy.sequences], rollout_masks=masks
    )


def _below_fp32(tiny: TinyEngines) -> GuardInput:
    healthy = guard_input(tiny)
    rows = [torch.tensor(row).bfloat16().float().tolist() for row in healthy.training_logprobs]
    return replace(healthy, training_logprobs=rows)


def _nonfinite(tiny: TinyEngines) -> GuardInput:
    with _weight(tiny, _one_nan):
        broken = guard_input(tiny)
    return replace(broken, training_weights=broken.rollout_weights)


def _dropout(tiny: TinyEngines) -> GuardInput:
    model = tiny.models[TRAINING]
    attention = model.decoder.layers[0].self_attention.core_attention.attention_dropout
    was, mode = attention.p, model.training
    attention.p = 0.1
    model.train()
    try:
        return replace(guard_input(tiny), training=tiny.engines[TRAINING].read_back())
    finally:
        attention.p = was
        model.train(mode)


def packing(model: Any, input_ids: torch.Tensor, **boundaries: Any) -> torch.Tensor:
    """A loop's own scoring function, which packs all rows into one."""
    packed = input_ids.reshape(1, -1)
    positions = torch.arange(packed.shape[1])[None]
    mask = torch.ones(1, 1, packed.shape[1], packed.shape[1], dtype=torch.bool).triu(1)
    logits = model(packed, positions, mask, **boundaries).float().reshape(*input_ids.shape, -1)[:, :-1]
    found: torch.Tensor = logits.log_softmax(dim=-1).gather(2, input_ids[:, 1:, None])[..., 0]
    return found


def _packed(tiny: TinyEngines) -> GuardInput:
    trainer = MegatronBackend(tiny.models[TRAINING], shape=tiny.shape, token_logprobs=packing)
    return replace(guard_input(tiny), training=trainer.read_back())


FAULTS: dict[str, tuple[Callable[[TinyEngines], GuardInput], str]] = {
    "weights_differ": (_weights_differ, "1 of 21 tensors differ between rollout and training (model.layers.1.mlp.down"),
    "captured_after_update": (_captured_after_update, "The trainer's weights were written 2 times"),
    "stale_rollout": (_stale_rollout, "Samples come from weight version 6 and the trainer is at 7"),
    "placeholder_logprobs": (_placeholder, "carry placeholder log-probs (exact 0) on rollout, first tokens 10–11"),
    "positions_shifted": (_shifted, "Training is one position ahead of rollout: at lag 1"),
    "retokenised": (_retokenised, "first at index 3 of sequence 2"),
    "masks_differ": (_stop_token, "Only training counts the stop token of sequence 1"),
    "stored_below_fp32": (_below_fp32, "All 44 training log-probs are bf16 values"),
    "nonfinite_logprobs": (_nonfinite, "44 of 44 training log-probs are NaN"),
    "packed_without_reset": (_packed, "Training packs several sequences into one row without packed_seq_params"),
    "dropout_active": (_dropout, "attention dropout of 0.1 is active while training scores"),
}


@pytest.mark.parametrize("id", FAULTS)
def test_the_guard_is_tripped_by_its_fault_and_by_nothing_else(id: str, llama_engines: TinyEngines) -> None:
    plant, sentence = FAULTS[id]
    found = plant(llama_engines)
    (said, *_) = GUARDS[id](found)
    assert sentence in said
    assert said in tripped(found)
    # A NaN forward and a random one have more to say; every other fault trips its own guard alone.
    if id not in ("nonfinite_logprobs", "dropout_active"):
        assert tripped(found) == (said,)


@pytest.mark.parametrize("engines", ["llama_engines", "qwen3_engines"])
def test_every_guard_is_quiet_on_healthy_engines(engines: str, request: pytest.FixtureRequest) -> None:
    found = guard_input(request.getfixturevalue(engines))
    assert (tripped(found), notes(found)) == ((), ())


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        pytest.param(training_logprobs_at(1.0), "one sequence a row", id="rows as given"),
        pytest.param(
            lambda model, ids: torch.stack([training_logprobs_at(1.0)(model, row[None])[0] for row in ids]),
            "one sequence a row",
            id="row by row",
        ),
        pytest.param(packing, "several sequences a row, positions run on", id="packed"),
    ],
)
def test_how_a_loops_own_function_fills_the_rows_is_read_from_what_the_model_gets(
    own: Any, expected: str, llama_engines: TinyEngines
) -> None:
    model = llama_engines.models[TRAINING]
    native = llama_engines.engines[TRAINING].score(SEQUENCES).shards
    found = MegatronBackend(model, shape=llama_engines.shape, token_logprobs=own).read_back()
    assert found.effective("training.logprobs.packing") == expected
    assert llama_engines.engines[TRAINING].score(SEQUENCES).shards == native


def test_a_function_that_packs_with_boundaries_is_told_from_one_that_packs_without(
    llama_engines: TinyEngines,
) -> None:
    """The local spec's attention refuses packed sequences, so the forward is cut off once it has its arguments."""

    class Enough(RuntimeError):
        pass

    def own(model: Any, ids: torch.Tensor) -> torch.Tensor:
        hook = model.embedding.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(Enough()))
        try:
            packing(model, ids, packed_seq_params=object())
        except Enough:
            pass
        finally:
            hook.remove()
        return torch.zeros(ids.shape[0], ids.shape[1] - 1)

    trainer = MegatronBackend(llama_engines.models[TRAINING], shape=llama_engines.shape, token_logprobs=own)
    found = trainer.read_back().effective("training.logprobs.packing")
    assert found == "several sequences a row, positions start anew"
    quiet = replace(guard_input(llama_engines), training=trainer.read_back())
    assert GUARDS["packed_without_reset"](quiet) == []
