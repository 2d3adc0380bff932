"""The vocabularies that judging rests on, member by member: one more, one less or another order is a decision."""

from enum import IntEnum

import pytest

from mismatch_hooks.schema.enums import Arm, DeterminismLevel, Diagnosis, ExpectedOutcome, NoiseFloor, Origin

# True: the arms were read. False: nothing could be concluded, which never mixes with "judged, clean".
JUDGED = {
    "VARIANT_DID_NOT_APPLY": False,
    "INSUFFICIENT_EVIDENCE": False,
    "REFERENCE_ITSELF_IS_BROKEN": False,
    "CAUSED_BY_TRAINING_SIDE": True,
    "CAUSED_BY_ROLLOUT_SIDE": True,
    "CAUSED_BY_BOTH_SIDES": True,
    "NOT_THIS_FACTOR": True,
    "COUPLED_WITH_OTHER_FACTORS": True,
}


@pytest.mark.parametrize(
    ("vocabulary", "members"),
    [
        pytest.param(
            DeterminismLevel,
            ["NONE", "STABLE_WITHIN_PROCESS", "STABLE_ACROSS_RUNS", "STABLE_ACROSS_TOPOLOGY"],
            id="determinism, weakest first",
        ),
        pytest.param(
            NoiseFloor,
            ["SINGLE_LAYER_ANCHOR", "FULL_MODEL_SINGLE_DEVICE", "SHARDED_SINGLE_NODE", "PRODUCTION"],
            id="noise floors, in the order in which noise is added",
        ),
    ],
)
def test_an_ordered_vocabulary_has_these_members_in_this_order(vocabulary: type[IntEnum], members: list[str]) -> None:
    # __members__, not the class itself: iterating a class leaves out a second name of one value.
    assert [(name, int(member)) for name, member in vocabulary.__members__.items()] == [
        (name, index) for index, name in enumerate(members)
    ]
    ordered = list(vocabulary)
    assert all(weaker < stronger for weaker, stronger in zip(ordered, ordered[1:], strict=False))


def test_a_diagnosis_is_one_of_eight_words_and_says_whether_anything_was_judged() -> None:
    found = [(name, member.value, member.judged) for name, member in Diagnosis.__members__.items()]
    assert found == [(name, name.lower(), judged) for name, judged in JUDGED.items()]


@pytest.mark.parametrize(("origin", "exact"), [(Origin.NATIVE, []), (Origin.ALIGNED, [Arm.BOTH_REFERENCE])])
def test_an_arm_checks_the_measurement_only_where_every_operator_is_on_its_reference(
    origin: Origin, exact: list[Arm]
) -> None:
    assert [arm for arm in Arm if arm.expected(origin) is ExpectedOutcome.BITWISE_IDENTICAL] == exact
