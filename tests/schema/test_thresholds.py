"""The threshold table: the published figures, the order of lookup, and what has no row."""

import dataclasses

import pytest

from mismatch_hooks.schema import thresholds
from mismatch_hooks.schema.enums import ModelFamily, NoiseFloor
from mismatch_hooks.schema.freeze import SchemaError
from mismatch_hooks.schema.thresholds import THRESHOLDS, fingerprint, threshold

DENSE, MOE, LARGE_MOE = ModelFamily.DENSE, ModelFamily.MOE, ModelFamily.LARGE_MOE
ANCHOR, SINGLE, SHARDED, PRODUCTION = NoiseFloor


@pytest.mark.parametrize(
    ("family", "floor", "replay", "expected", "suspect"),
    [
        pytest.param(DENSE, PRODUCTION, False, (0.002, 0.008), 0.01, id="dense in production"),
        pytest.param(MOE, PRODUCTION, False, (0.007, 0.008), 0.02, id="moe without replay"),
        pytest.param(MOE, PRODUCTION, True, (0.0, 0.008), 0.008, id="moe with replay"),
        pytest.param(LARGE_MOE, PRODUCTION, False, (0.01, 0.03), 0.05, id="large moe without replay"),
        pytest.param(LARGE_MOE, PRODUCTION, True, (0.0, 0.008), 0.008, id="large moe with replay"),
        pytest.param(DENSE, ANCHOR, False, (0.0, 0.0), 1e-6, id="one layer, any family"),
        pytest.param(MOE, ANCHOR, True, (0.0, 0.0), 1e-6, id="one layer, any family, replay"),
        pytest.param(LARGE_MOE, SINGLE, False, (0.0, 1e-6), 1e-5, id="full model, any family"),
        pytest.param(DENSE, SHARDED, False, (0.0, 1e-4), 1e-3, id="sharded, any family"),
    ],
)
def test_a_row_holds_the_published_figures(
    family: ModelFamily, floor: NoiseFloor, replay: bool, expected: tuple[float, float], suspect: float
) -> None:
    row = threshold(family, floor, routing_replay=replay)
    assert (row.dlogp_mean_expected, row.dlogp_mean_suspect_above) == (expected, suspect)


def test_the_clip_fraction_limit_of_dense_models_is_five_percent() -> None:
    assert threshold(DENSE, PRODUCTION, routing_replay=False).clip_fraction_suspect_above == 0.05


@pytest.mark.parametrize("row", THRESHOLDS, ids=lambda row: f"{row.model_family} {row.noise_floor.name}")
def test_the_clip_fraction_limit_is_what_the_mean_can_explain(row: thresholds.Threshold) -> None:
    assert row.clip_fraction_suspect_above == pytest.approx(row.dlogp_mean_suspect_above / 0.2, rel=1e-12)


def test_an_exact_family_beats_the_row_for_every_family(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = dataclasses.replace(THRESHOLDS[0], model_family=MOE, dlogp_mean_suspect_above=2e-6)
    monkeypatch.setattr(thresholds, "THRESHOLDS", (*THRESHOLDS, exact))
    assert threshold(MOE, ANCHOR, routing_replay=False) is exact
    assert threshold(DENSE, ANCHOR, routing_replay=False) is THRESHOLDS[0]


def test_a_combination_without_a_row_is_an_error_that_names_it() -> None:
    with pytest.raises(SchemaError) as raised:
        threshold(DENSE, PRODUCTION, routing_replay=True)
    assert str(raised.value) == (
        "no threshold for model_family dense, noise_floor production, routing_replay true; this floor has rows for "
        "dense without replay, moe without replay, moe with replay, large_moe without replay, large_moe with replay: "
        "correct model_family, or the replay setting."
    )


def test_a_row_whose_expectation_exceeds_its_limit_is_refused() -> None:
    with pytest.raises(SchemaError, match="out of order"):
        dataclasses.replace(THRESHOLDS[3], dlogp_mean_suspect_above=0.001)


def test_the_fingerprint_moves_with_every_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    before = fingerprint()
    assert len(before) == 64 and before == fingerprint()
    changed = dataclasses.replace(THRESHOLDS[3], clip_fraction_suspect_above=0.051)
    monkeypatch.setattr(thresholds, "THRESHOLDS", (*THRESHOLDS[:3], changed, *THRESHOLDS[4:]))
    assert fingerprint() != before
