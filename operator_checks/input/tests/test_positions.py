"""Positions that jump within a sequence are found on the side that has them; a shift of all is no difference."""

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch

from mismatch_hooks.schema.enums import Diagnosis, Origin, PolicyRole
from mismatch_hooks.schema.score import ScoringSequence
from mismatch_hooks.schema.verdict import Verdict
from tests.ablating import ablate_tiny
from tests.planted_faults import native_is_reference
from tests.tiny_engines import TinyEngines

pytestmark = pytest.mark.engine
ROLLOUT, TRAINING = PolicyRole.ROLLOUT, PolicyRole.TRAINING
FACTORS = ["input.positions"]


def batch() -> tuple[ScoringSequence, ...]:
    drawn = Random(5)
    return tuple(
        ScoringSequence(
            prompt_token_ids=tuple(drawn.randrange(2, 512) for _ in range(6)),
            response_token_ids=tuple(drawn.randrange(2, 512) for _ in range(12)),
            response_mask=(True,) * 12,
        )
        for _ in range(16)
    )


def plant(tiny: TinyEngines, role: PolicyRole, moved: Callable[[Any], Any], patch: pytest.MonkeyPatch) -> None:
    """Let one side's positions, or the rows of its table, pass through ``moved`` first."""
    if role is ROLLOUT:
        whole_model = tiny.models[ROLLOUT]
        right = whole_model.forward
        # Above the place that the factor binds, as the runner's own numbers are.
        patch.setattr(
            whole_model, "forward", lambda **given: right(**{**given, "positions": moved(given["positions"])})
        )
        return
    table = tiny.models[TRAINING].rotary_pos_emb
    whole = table.forward
    patch.setattr(table, "forward", lambda *args, **more: whole(200)[moved(torch.arange(args[0]))])


def jump(positions: Any) -> Any:
    """From the fourth token on everything stands three positions too far, as after padding that was counted."""
    return positions + 3 * (positions >= 4)


def shift(positions: Any) -> Any:
    return positions + 11


def judged(tiny: TinyEngines, origin: Origin, leave: list[str]) -> Verdict:
    with native_is_reference(tiny, leave=leave):
        verdict, *_ = ablate_tiny(tiny, FACTORS, origin, sequences=batch()).verdicts
    assert [(gate.name, gate.reason) for gate in verdict.gates if not gate.ok] == []
    return verdict


@pytest.mark.parametrize("origin", Origin)
def test_where_every_token_stands_right_counting_anew_moves_no_bit(origin: Origin, llama_engines: TinyEngines) -> None:
    verdict = judged(llama_engines, origin, [])
    assert verdict.diagnosis is Diagnosis.NOT_THIS_FACTOR
    assert {arm.metrics["bitwise_fraction"] for arm in verdict.arms} == {1.0}


@pytest.mark.parametrize("origin", Origin)
def test_positions_that_jump_on_rollout_are_named_with_their_side(
    origin: Origin, llama_engines: TinyEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(llama_engines, ROLLOUT, jump, monkeypatch)
    assert judged(llama_engines, origin, []).diagnosis is Diagnosis.CAUSED_BY_ROLLOUT_SIDE


def test_a_table_that_jumps_on_training_is_named_where_rope_reads_it(
    llama_engines: TinyEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(llama_engines, TRAINING, jump, monkeypatch)
    # Rope's reference counts by itself, so it stays native: the rounding of both ropes is the noise of this verdict.
    verdict = judged(llama_engines, Origin.NATIVE, ["attention.rope_fusion"])
    assert verdict.diagnosis is Diagnosis.CAUSED_BY_TRAINING_SIDE


@pytest.mark.parametrize("role", PolicyRole)
def test_all_positions_shifted_by_one_number_are_no_difference(
    role: PolicyRole, llama_engines: TinyEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(llama_engines, role, shift, monkeypatch)
    verdict = judged(llama_engines, Origin.NATIVE, ["attention.rope_fusion"])
    assert {effect.bits_changed for effect in verdict.effects} == {0}
    assert verdict.diagnosis is Diagnosis.NOT_THIS_FACTOR
