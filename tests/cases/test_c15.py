"""C15: a zero that was never measured, and the zero that was."""

from collections.abc import Callable, Sequence

import pytest
import torch

from mismatch_hooks.schema.enums import Diagnosis, Origin, PolicyRole
from tests.ablating import SEQUENCES, ablate_tiny, guard_input, live_values
from tests.planted_faults import native_is_reference
from tests.tiny_engines import TinyEngines

pytestmark = pytest.mark.engine
Row = Sequence[float | None]


def _as_it_is(row: Row) -> Row:
    return row


def _through_fp32(row: Row) -> Row:
    return torch.tensor([value or 0.0 for value in row]).tolist()


def _last_changed(row: Row) -> Row:
    return [*row[:-1], (row[-1] or 0.0) - 0.5]


@pytest.mark.parametrize("origin", Origin)
@pytest.mark.parametrize("hand_over", [_as_it_is, list, _through_fp32, _last_changed])
def test_C15_the_rollouts_log_probs_handed_over_as_the_trainers_are_blocked(
    hand_over: Callable[[Row], Row], origin: Origin, llama_engines: TinyEngines
) -> None:
    live = live_values(llama_engines, SEQUENCES)
    rows = [hand_over(row) for row in live[PolicyRole.ROLLOUT]]
    found = guard_input(llama_engines, training_logprobs=rows)
    copied = {**live, PolicyRole.TRAINING: rows}
    (verdict,) = ablate_tiny(llama_engines, ["norm.rmsnorm"], origin, live=copied, guards=found).verdicts
    assert verdict.diagnosis is Diagnosis.INSUFFICIENT_EVIDENCE
    assert "Training log-probs are a copy of the rollout's (" in verdict.reason
    assert "nothing was compared" in verdict.reason
    assert verdict.arms == ()


@pytest.mark.parametrize("origin", Origin)
def test_C15_control_two_independent_forwards_that_are_equal_on_every_token_are_judged(
    origin: Origin, llama_engines: TinyEngines
) -> None:
    with native_is_reference(llama_engines):
        live = live_values(llama_engines, SEQUENCES)
        found = guard_input(llama_engines)
        result = ablate_tiny(llama_engines, ["norm.rmsnorm"], origin, live=live, guards=found)
    assert live[PolicyRole.TRAINING] == live[PolicyRole.ROLLOUT]
    assert result.paths["cross_framework"]["bitwise_fraction"] == 1.0
    assert [verdict.diagnosis for verdict in result.verdicts] == [Diagnosis.NOT_THIS_FACTOR]


def test_C15_control_the_trainers_own_values_are_judged(llama_engines: TinyEngines) -> None:
    found = guard_input(llama_engines)
    (verdict,) = ablate_tiny(llama_engines, ["norm.rmsnorm"], Origin.ALIGNED, guards=found).verdicts
    assert verdict.diagnosis is Diagnosis.CAUSED_BY_ROLLOUT_SIDE
