"""Each guard, tripped by its fault on the live engines, and all of them quiet on what healthy engines gave.

The cases of the sampling settings, the prefix cache and the padded vocabulary have files of their own. What no engine
of this host can be asked for is tested on values, in tests/pipeline/test_guards.py: routing replay (no model with
experts), and a collective of NCCL that is not pinned (no GPU).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from mismatch_hooks.pipeline.guards import GUARDS, GuardInput, notes, tripped
from mismatch_hooks.schema.enums import PolicyRole
from tests.ablating import SEQUENCES, guard_input
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
