"""C09: processed log-probs are renormalised over the tokens that survive; clip_fraction may see none of it."""

import math
from typing import Any

import pytest

from mismatch_hooks.pipeline.guards import GuardInput, notes, tripped
from mismatch_hooks.pipeline.guards.captured import differences
from tests.ablating import figures, sampled_input
from tests.planted_faults import native_is_reference
from tests.tiny_engines import TinyEngines

pytestmark = pytest.mark.engine


def sampled(tiny: TinyEngines, **truncation: float) -> GuardInput:
    from vllm import SamplingParams

    # With every operator on its reference the truncation is all there is, and rounding moves no ratio over an edge.
    with native_is_reference(tiny):
        return sampled_input(tiny, SamplingParams(temperature=1.0, **truncation))


def test_C09_top_p_is_blocked_from_its_setting_though_clip_fraction_is_exactly_zero(chat_engines: TinyEngines) -> None:
    found = sampled(chat_engines, top_p=0.8)
    measured = figures(found)
    # A kept mass of 0.8 or more cannot leave [0.8, 1.2].
    assert measured["clip_fraction"] == 0.0
    assert measured["dlogp_signed_mean"] < -0.15
    assert sum(difference > 0.01 for difference in differences(found)) == 0
    (sentence,) = tripped(found)
    mass = math.exp(measured["dlogp_signed_mean"])
    assert sentence == (
        "Rollout log-probs are processed with top_p=0.8, which training does not apply (mean dlogp "
        f"{measured['dlogp_signed_mean']:+.4f}, a kept mass of about {mass:.3f}); sample with top_p off or return raw "
        "log-probs."
    )
    assert mass == pytest.approx(0.8, abs=0.05)


@pytest.mark.parametrize(
    "truncation", [pytest.param({"top_k": 20}, id="top_k"), pytest.param({"min_p": 0.1}, id="min_p")]
)
def test_C09_other_truncations_are_blocked_with_their_value(chat_engines: TinyEngines, truncation: Any) -> None:
    found = sampled(chat_engines, **truncation)
    (sentence,) = tripped(found)
    ((name, value),) = truncation.items()
    assert f"processed with {name}={value}, which training does not apply (mean dlogp -" in sentence
    # So few of 512 tokens survive that nearly every ratio is outside.
    assert figures(found)["clip_fraction"] > 0.9


def test_C09_control_without_truncation_nothing_is_said(chat_engines: TinyEngines) -> None:
    found = sampled(chat_engines, top_p=1.0, top_k=0)
    assert (tripped(found), notes(found)) == ((), ())


def test_C09_raw_log_probs_of_truncated_sampling_are_a_note_and_block_nothing(llama_engines: TinyEngines) -> None:
    found = sampled(llama_engines, top_p=0.8)
    (note,) = notes(found)
    assert tripped(found) == ()
    assert note.startswith("Rollout samples with top_p=0.8 and returns raw log-probs: both sides agree, and neither")
    assert figures(found)["dlogp_mean"] < 0.05
