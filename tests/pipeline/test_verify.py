"""The four gates: each holds on a healthy pass and fails, with its sentence, on each thing that may be wrong."""

from dataclasses import replace
from typing import Any

import pytest

from mismatch_hooks.pipeline.score import PassKey
from mismatch_hooks.pipeline.verify import (
    evidence_complete,
    pitfalls_clear,
    shards_complete,
    switch_effective,
    verify,
    words,
)
from mismatch_hooks.schema.enums import GateName, SwitchStatus
from mismatch_hooks.schema.score import LogprobShard, Score
from tests.pipeline.samples import (
    NATIVE,
    REFERENCE,
    ROLLOUT,
    ROPE,
    SEQUENCES,
    TRAINING,
    WHOLE,
    calls,
    other_side,
    passes,
    score,
    shard,
    switch_state,
)

PATH = ROPE.switch.path


def _with(key: PassKey, **evidence: Any) -> dict[PassKey, Score]:
    return {**passes(), key: score(*key, **evidence)}


def _sharded(*shards: LogprobShard) -> dict[PassKey, Score]:
    key = (ROLLOUT, REFERENCE)
    return {**passes(), key: replace(passes()[key], shards=shards)}


def test_all_gates_hold_in_order_on_healthy_passes() -> None:
    gates = verify(ROPE, passes(), other_side(), SEQUENCES, [])
    assert [(gate.name, gate.ok) for gate in gates] == [(name, True) for name in GateName]
    assert [gate.reason for gate in gates] == [
        f"{PATH} read back as requested in 4 passes, and native on the other side.",
        "All 8 calls of the bound call sites ran the reference.",
        "Each of 4 passes has every shard (1) and covers each token once.",
        "No known trap invalidates the reading.",
    ]


# ---- switch_effective ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "sentence"),
    [
        pytest.param(
            {"effective": NATIVE, "status": SwitchStatus.FELL_BACK, "trace": ("rotary_emb holds native",)},
            f"{PATH} on training rank 0: requested reference, effective native (rotary_emb holds native).",
            id="silently reverted",
        ),
        pytest.param(
            {"effective": None, "status": SwitchStatus.FELL_BACK},
            f"{PATH} on training rank 0: requested reference, effective fell_back.",
            id="partly bound",
        ),
        pytest.param(
            {"effective": None, "status": SwitchStatus.UNSUPPORTED},
            f"{PATH} on training rank 0: requested reference, effective unsupported.",
            id="unsupported",
        ),
        pytest.param(
            {"effective": None, "status": SwitchStatus.UNOBSERVABLE},
            f"{PATH} on training rank 0: requested reference, effective unobservable.",
            id="unobservable is not applied",
        ),
        pytest.param(
            {"status": SwitchStatus.ERROR},
            f"{PATH} on training rank 0: requested reference, effective reference.",
            id="an error although the value looks right",
        ),
    ],
)
def test_a_switch_that_is_not_in_effect_fails_the_gate(state: dict[str, Any], sentence: str) -> None:
    broken = _with((TRAINING, REFERENCE), switches=(switch_state(REFERENCE, **state),))
    gate = switch_effective(ROPE, broken, other_side())
    assert (gate.ok, gate.reason) == (False, sentence)


def test_a_native_pass_that_ran_the_reference_fails_the_gate() -> None:
    leaked = switch_state(NATIVE, effective=REFERENCE, status=SwitchStatus.FELL_BACK)
    gate = switch_effective(ROPE, _with((ROLLOUT, NATIVE), switches=(leaked,)), other_side())
    assert (gate.ok, gate.reason) == (False, f"{PATH} on rollout rank 0: requested native, effective reference.")


def test_a_switch_that_was_not_read_back_fails_the_gate() -> None:
    gate = switch_effective(ROPE, _with((ROLLOUT, REFERENCE), switches=()), other_side())
    assert (gate.ok, gate.reason) == (False, f"{PATH} was not read back on rollout with reference requested.")
    elsewhere = replace(switch_state(REFERENCE), factor="norm.rmsnorm")
    gate = switch_effective(ROPE, _with((ROLLOUT, REFERENCE), switches=(elsewhere,)), other_side())
    assert gate.ok is False


def test_every_rank_has_to_read_the_switch_back() -> None:
    two_ranks = {"forwards": (2, 2), "switches": (switch_state(REFERENCE),)}
    gate = switch_effective(ROPE, _with((ROLLOUT, REFERENCE), **two_ranks), other_side())
    assert (gate.ok, gate.reason) == (False, f"{PATH} was not read back on rollout ranks [1].")


def test_one_rank_that_fell_back_fails_the_gate_for_all() -> None:
    states = (
        switch_state(REFERENCE),
        switch_state(REFERENCE, rank=1, effective=NATIVE, status=SwitchStatus.FELL_BACK),
    )
    gate = switch_effective(ROPE, _with((ROLLOUT, REFERENCE), forwards=(2, 2), switches=states), other_side())
    assert (gate.ok, gate.reason) == (False, f"{PATH} on rollout rank 1: requested reference, effective native.")


def test_a_switch_that_leaks_to_the_other_side_fails_the_gate() -> None:
    leaked = switch_state(NATIVE, effective=REFERENCE, status=SwitchStatus.FELL_BACK)
    gate = switch_effective(ROPE, passes(), {**other_side(), ROLLOUT: (leaked,)})
    assert (gate.ok, gate.reason) == (
        False,
        f"{PATH} on training rank 0: requested native, effective reference while only rollout was on the reference.",
    )


def test_an_other_side_that_nobody_looked_at_fails_the_gate() -> None:
    gate = switch_effective(ROPE, passes(), {ROLLOUT: (switch_state(NATIVE),)})
    assert (gate.ok, gate.reason) == (
        False,
        f"{PATH} was not read back on rollout with native requested while only training was on the reference.",
    )


@pytest.mark.parametrize("key", list(passes()), ids=lambda key: f"{key[0].value} {words(key[1])}")
def test_a_pass_that_never_arrived_fails_switch_and_evidence(key: PassKey) -> None:
    fewer = {other: found for other, found in passes().items() if other != key}
    sentence = f"No pass of {key[0].value} with {words(key[1])} bound arrived."
    assert switch_effective(ROPE, fewer, other_side()).reason == sentence
    assert (evidence_complete(ROPE, fewer).ok, evidence_complete(ROPE, fewer).reason) == (False, sentence)


# ---- evidence_complete --------------------------------------------------------------------------------------------

SKIPPED = "a compiled graph or stored forward skips the reference, so run the engine eagerly."


@pytest.mark.parametrize(
    ("observed", "expected", "sentence"),
    [
        pytest.param(
            0, 28, f"0 of 28 calls of the bound rotary_emb ran on rollout rank 0; {SKIPPED}", id="c20 none ran"
        ),
        pytest.param(27, 28, f"27 of 28 calls of the bound rotary_emb ran on rollout rank 0; {SKIPPED}", id="one less"),
        pytest.param(29, 28, f"29 of 28 calls of the bound rotary_emb ran on rollout rank 0; {SKIPPED}", id="one more"),
        pytest.param(
            0, 0, f"0 of 0 calls of the bound rotary_emb ran on rollout rank 0; {SKIPPED}", id="none expected"
        ),
    ],
)
def test_another_number_of_calls_than_the_forwards_demand_fails_the_gate(
    observed: int, expected: int, sentence: str
) -> None:
    counted = (calls(ROLLOUT, observed=observed, expected=expected),)
    gate = evidence_complete(ROPE, _with((ROLLOUT, REFERENCE), calls=counted))
    assert (gate.ok, gate.reason) == (False, sentence)


def test_a_call_site_without_evidence_fails_the_gate() -> None:
    gate = evidence_complete(ROPE, _with((TRAINING, REFERENCE), calls=()))
    assert (gate.ok, gate.reason) == (False, "No evidence from apply_rotary on training rank 0.")
    foreign = (calls(TRAINING, factor="norm.rmsnorm"), calls(TRAINING, site="elsewhere"))
    gate = evidence_complete(ROPE, _with((TRAINING, REFERENCE), calls=foreign))
    assert (gate.ok, gate.reason) == (False, "No evidence from apply_rotary on training rank 0.")


def test_a_rank_without_evidence_fails_the_gate() -> None:
    gate = evidence_complete(ROPE, _with((ROLLOUT, REFERENCE), forwards=(2, 2), calls=(calls(ROLLOUT),)))
    assert (gate.ok, gate.reason) == (False, "No evidence from rotary_emb on rollout rank 1.")
    both = (calls(ROLLOUT), calls(ROLLOUT, rank=1))
    assert evidence_complete(ROPE, _with((ROLLOUT, REFERENCE), forwards=(2, 2), calls=both)).ok is True


@pytest.mark.parametrize("forwards", [pytest.param((), id="no rank"), pytest.param((2, 0), id="one rank idle")])
@pytest.mark.parametrize("choice", [NATIVE, REFERENCE], ids=["native", "reference"])
def test_a_pass_without_a_counted_forward_fails_the_gate(choice: Any, forwards: tuple[int, ...]) -> None:
    everywhere = tuple(calls(ROLLOUT, rank=rank) for rank in range(max(len(forwards), 1)))
    gate = evidence_complete(ROPE, _with((ROLLOUT, choice), forwards=forwards, calls=everywhere))
    assert (gate.ok, gate.reason) == (False, f"No model forward was counted on rollout with {choice.value} bound.")


# ---- shards_complete ----------------------------------------------------------------------------------------------

FIRST, SECOND = WHOLE[:1], WHOLE[1:]


@pytest.mark.parametrize(
    "shards",
    [
        pytest.param((shard(slices=WHOLE),), id="one rank"),
        pytest.param((shard(0, 2, FIRST), shard(1, 2, SECOND)), id="two ranks"),
        pytest.param((shard(1, 2, SECOND), shard(0, 2, FIRST)), id="in any order of arrival"),
        pytest.param((shard(0, 2, WHOLE), shard(1, 2)), id="one of two holds everything"),
        pytest.param((shard(slices=(*FIRST, (1, 0, (-3.0,)), (1, 2, (-5.0,)))),), id="an inactive token left out"),
    ],
)
def test_shards_that_cover_each_active_token_once_pass(shards: tuple[LogprobShard, ...]) -> None:
    assert shards_complete(_sharded(*shards), SEQUENCES).ok is True


@pytest.mark.parametrize(
    ("shards", "sentence"),
    [
        pytest.param((), "No shard arrived", id="none"),
        pytest.param(
            (shard(0, 2, WHOLE),), "Shards from ranks [0] arrived, one from each of 0 to 1 is needed", id="fewer"
        ),
        pytest.param(
            (shard(0, 1, FIRST), shard(1, 1, SECOND)),
            "Shards from ranks [0, 1] arrived, one from each of 0 to 0 is needed",
            id="more",
        ),
        pytest.param(
            (shard(0, 2, FIRST), shard(0, 2, SECOND)),
            "Shards from ranks [0, 0] arrived, one from each of 0 to 1 is needed",
            id="duplicated",
        ),
        pytest.param(
            (shard(0, 2, WHOLE), shard(1, 2), shard(1, 2)),
            "Shards from ranks [0, 1, 1] arrived, one from each of 0 to 1 is needed",
            id="an empty one duplicated",
        ),
        pytest.param(
            (shard(0, 2, FIRST), shard(1, 3, SECOND)), "Shards disagree on the world size: [2, 3]", id="disagreeing"
        ),
        pytest.param(
            (shard(0, 2, WHOLE), shard(1, 2, ((0, 1, (-2.0,)),))),
            "Token 1 of sequence 0 was covered 2 times",
            id="a token twice",
        ),
        pytest.param(
            (shard(slices=(*FIRST, (1, 0, (-3.0, -4.0)))),),
            "Token 2 of sequence 1 was covered 0 times",
            id="a token missing",
        ),
        pytest.param((shard(slices=FIRST),), "Token 0 of sequence 1 was covered 0 times", id="a sequence missing"),
        pytest.param(
            (shard(slices=(*WHOLE, (2, 0, (-1.0,)))),), "Rank 0 names sequence 2 of 2", id="a sequence too many"
        ),
        pytest.param(
            (shard(slices=(*FIRST, (1, 1, (-3.0, -4.0, -5.0)))),),
            "Rank 0 covers tokens 1 to 4 of sequence 1, which has 3",
            id="beyond the end",
        ),
        pytest.param(
            (shard(slices=(*FIRST, (1, -1, (-3.0, -4.0, -5.0)))),),
            "Rank 0 covers tokens -1 to 2 of sequence 1, which has 3",
            id="before the start",
        ),
    ],
)
def test_shards_that_do_not_add_up_fail_the_gate(shards: tuple[LogprobShard, ...], sentence: str) -> None:
    gate = shards_complete(_sharded(*shards), SEQUENCES)
    assert (gate.ok, gate.reason) == (False, f"{sentence} (rollout with reference bound).")


# ---- pitfalls_clear -----------------------------------------------------------------------------------------------


def test_every_tripped_guard_is_in_the_reason() -> None:
    gate = pitfalls_clear(["Weights differ.", "Positions are shifted."])
    assert (gate.name, gate.ok, gate.reason) == (
        GateName.PITFALLS_CLEAR,
        False,
        "Weights differ. Positions are shifted.",
    )
