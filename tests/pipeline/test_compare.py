"""Settings of the two sides: those that must match first, and nothing unobservable passes for equal."""

from typing import Any

import pytest

from mismatch_hooks.pipeline.compare import MUST_MATCH, differing_settings, not_as_requested, suspect_settings
from mismatch_hooks.schema.enums import Source
from mismatch_hooks.schema.readback import Readback, Reading, Unobservable
from tests.pipeline.samples import ROLLOUT, TRAINING, readback

HIDDEN = Unobservable(reason="sharded")


def test_settings_that_must_match_come_first_and_in_their_own_order() -> None:
    settings = {"a.first": 1, "model.dtype": "bf16", "model.rope.theta": 1e4, "model.norm.epsilon": 1e-5, "z.last": 1}
    others = {"a.first": 2, "model.dtype": "fp32", "model.rope.theta": 5e5, "model.norm.epsilon": 1e-6, "z.last": 2}
    assert differing_settings(readback(ROLLOUT, settings), readback(TRAINING, others)) == [
        "model.norm.epsilon",
        "model.rope.theta",
        "model.dtype",
        "a.first",
        "z.last",
    ]


@pytest.mark.parametrize(
    ("rollout", "training", "differs"),
    [
        pytest.param({"model.dtype": "bf16"}, {"model.dtype": "bf16"}, False, id="equal"),
        pytest.param({"model.dtype": "bf16"}, {"model.dtype": "fp32"}, True, id="different"),
        pytest.param({"model.dtype": "bf16"}, {}, True, id="read on one side only"),
        pytest.param({"model.dtype": HIDDEN}, {"model.dtype": HIDDEN}, True, id="unobservable on both sides"),
        pytest.param({"other": 1}, {}, False, id="another key of one side only"),
        pytest.param({"other": HIDDEN}, {"other": HIDDEN}, True, id="another key that nobody can read"),
        pytest.param({"model.layers": {"a": 1}}, {"model.layers": {"a": 1}}, False, id="equal by layer"),
        pytest.param({"model.layers": {"a": 1}}, {"model.layers": {"a": 2}}, True, id="different in one layer"),
    ],
)
def test_unobservable_is_not_equal(rollout: dict[str, Any], training: dict[str, Any], differs: bool) -> None:
    found = differing_settings(readback(ROLLOUT, rollout), readback(TRAINING, training))
    assert found == (list(rollout) if differs else [])


def test_a_setting_that_is_not_as_requested_is_named() -> None:
    found = Readback(
        role=ROLLOUT,
        settings={
            "model.rope.theta": Reading(effective=1e4, source=Source.LIVE_MODULE, requested=5e5),
            "model.dtype": Reading(effective="bf16", source=Source.LIVE_MODULE, requested="bf16"),
            "attention": Reading(effective="CPUAttention", source=Source.LIVE_MODULE, requested="FLASH_ATTN"),
            "hidden": Unobservable(reason="?", requested=1),
        },
    )
    assert not_as_requested(found) == ["attention", "model.rope.theta"]


def test_what_must_match_is_listed_once() -> None:
    assert len(set(MUST_MATCH)) == len(MUST_MATCH)


def test_what_is_suspect_by_itself_is_named_once_and_other_names_of_the_same_are_not() -> None:
    rollout = {
        "model.dtype": Reading(effective="bf16", source=Source.LIVE_MODULE),
        "model.rope.theta": Reading(effective=1e4, source=Source.LIVE_MODULE, requested=5e5),
        "model.attention.scale": Reading(effective=0.25, source=Source.LIVE_MODULE, requested=0.125),
        "operator.norm.implementation": Reading(effective="RMSNorm", source=Source.LIVE_MODULE),
    }
    training = {
        "model.dtype": "bf16",
        "model.rope.theta": 5e5,
        "model.attention.scale": 0.125,
        "operator.norm.implementation": "WrappedTorchNorm",
    }
    found = suspect_settings(Readback(role=ROLLOUT, settings=rollout), readback(TRAINING, training))
    assert found == ["model.rope.theta", "model.attention.scale"]
