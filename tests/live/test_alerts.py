"""Alerts: regressions of clip_fraction on the published series C26, C27, C28 and their controls; the other causes."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mismatch_hooks.live.alerts import (
    Alert,
    AlertBook,
    AlertKind,
    AlertMetricError,
    AlertSettings,
    AlertState,
    Severity,
)
from mismatch_hooks.schema.enums import ModelFamily, NoiseFloor
from mismatch_hooks.schema.freeze import SchemaError
from mismatch_hooks.schema.thresholds import threshold

DENSE = threshold(ModelFamily.DENSE, NoiseFloor.PRODUCTION, routing_replay=False)
TOKENS = 4096
OPENED, ESCALATED, CLOSED = AlertState
BEFORE_FIRST_UPDATE = "present before the first optimizer step: neither drift nor staleness"


def drawn(
    rates: Sequence[float] | NDArray[np.floating[Any]], tokens: int = TOKENS, seed: int = 0
) -> list[dict[str, float]]:
    """Return one step's metrics per rate, with counts drawn as the cases say."""
    counts = np.random.default_rng(seed).binomial(tokens, np.asarray(rates))
    return [{"tokens": tokens, "clip_fraction": int(count) / tokens} for count in counts]


def watched(series: Iterable[Mapping[str, float]], book: AlertBook | None = None) -> tuple[list[Alert], AlertBook]:
    """Return every alert of a series that starts at step 0, and the book at its end."""
    book = book if book is not None else AlertBook(threshold=DENSE, run_dir="runs/demo")
    return [alert for step, metrics in enumerate(series) for alert in book.observe(step, metrics)], book


def in_state(alerts: Sequence[Alert], state: AlertState) -> list[Alert]:
    """Return the alerts of one state."""
    return [alert for alert in alerts if alert.state is state]


def test_C26_slow_drift_is_one_alert_by_step_25_that_stays_open() -> None:
    alerts, book = watched(drawn(0.010 + 0.0009 * np.arange(60)))
    (opened,) = in_state(alerts, OPENED)
    assert opened.kind is AlertKind.CLIP_FRACTION
    assert opened.step <= 25
    assert opened.since_step <= 5
    assert f"rising by 0.001 a step since step {opened.since_step}" in opened.text
    assert "`mismatch-hooks tail runs/demo` shows more." in opened.text
    assert not in_state(alerts, CLOSED)
    assert book.open_kinds == {AlertKind.CLIP_FRACTION}


def test_C26_slow_drift_is_found_by_step_25_whatever_the_draw() -> None:
    for seed in range(100):
        alerts, _ = watched(drawn(0.010 + 0.0009 * np.arange(60), seed=seed))
        assert len(in_state(alerts, OPENED)) == 1, f"seed {seed}"
        assert alerts[0].step <= 25, f"seed {seed}"


def test_C26_drift_past_the_absolute_limit_escalates_the_same_alert() -> None:
    alerts, _ = watched(drawn(0.010 + 0.0009 * np.arange(60)))
    last = alerts[-1]
    assert (last.state, last.severity) == (ESCALATED, Severity.CRITICAL)
    assert "got worse" in last.text and "above the suspect limit of 0.05" in last.text


def test_C26_control_two_thousand_healthy_steps_raise_nothing() -> None:
    assert watched(drawn(np.full(2000, 0.010)))[0] == []


def test_C27a_a_jump_inside_the_warm_up_is_reported_in_its_step() -> None:
    alerts, book = watched(drawn([0.005] * 3 + [0.20] * 27))
    (opened,) = in_state(alerts, OPENED)
    assert (opened.step, opened.since_step, opened.severity) == (3, 3, Severity.CRITICAL)
    assert "times the baseline of 0.0043, raised since step 3." in opened.text
    assert book.open_kinds == {AlertKind.CLIP_FRACTION}


def test_C27b_a_run_bad_from_birth_is_reported_at_step_0_as_neither_drift_nor_staleness() -> None:
    alerts, book = watched(drawn([0.30] * 60))
    (opened,) = alerts
    assert (opened.step, opened.since_step, opened.severity) == (0, 0, Severity.CRITICAL)
    assert BEFORE_FIRST_UPDATE in opened.text
    assert opened.baseline is None
    assert book.open_kinds == {AlertKind.CLIP_FRACTION}


def test_C27_control_a_healthy_start_raises_nothing() -> None:
    assert watched(drawn([0.005] * 60))[0] == []


def test_C27_hooks_that_start_late_do_not_claim_to_have_seen_the_first_update() -> None:
    (opened,) = AlertBook(threshold=DENSE).observe(500, {"tokens": TOKENS, "clip_fraction": 0.3})
    assert BEFORE_FIRST_UPDATE not in opened.text
    assert "present from the first observed step (500) on" in opened.text


def test_C27_a_jump_inside_the_warm_up_below_the_limit_is_reported_when_the_warm_up_ends() -> None:
    (opened,) = watched(drawn([0.005] * 3 + [0.04] * 27))[0]
    assert (opened.step, opened.since_step, opened.severity) == (9, 3, Severity.WARNING)


def test_C28_each_spike_is_reported_in_its_step_and_closes_by_itself_as_transient() -> None:
    rates = np.full(120, 0.006)
    rates[[17, 58, 91]] = 0.05
    alerts, book = watched(drawn(rates))
    opened, closed = in_state(alerts, OPENED), in_state(alerts, CLOSED)
    assert [alert.step for alert in opened] == [17, 58, 91]
    assert [alert.since_step for alert in closed] == [17, 58, 91]
    assert all(end.transient and end.step - start.step <= 5 for start, end in zip(opened, closed, strict=True))
    assert len(alerts) == 6
    assert book.open_kinds == frozenset()
    assert not any("rising" in alert.text + alert.title for alert in alerts)


def test_C28_control_a_trend_is_one_alert_that_stays_open() -> None:
    alerts, book = watched(drawn(0.006 + 0.0005 * np.arange(120)))
    assert len(in_state(alerts, OPENED)) == 1
    assert not in_state(alerts, CLOSED)
    assert "rising by 0.0005 a step" in in_state(alerts, OPENED)[0].text
    assert book.open_kinds == {AlertKind.CLIP_FRACTION}


def test_a_regression_that_is_fixed_closes_and_is_not_called_transient() -> None:
    alerts, book = watched(drawn([0.006] * 60 + [0.03] * 30 + [0.006] * 30))
    opened, closed = alerts
    assert (opened.state, opened.step, opened.since_step) == (OPENED, 60, 60)
    assert (closed.state, closed.transient, closed.severity) == (CLOSED, False, Severity.INFO)
    assert 91 <= closed.step <= 95
    assert "raised in steps 60–89" in closed.text
    assert book.open_kinds == frozenset()


def test_a_clearly_worse_level_escalates_the_open_alert_once() -> None:
    alerts, _ = watched(drawn([0.004] * 60 + [0.012] * 30 + [0.04] * 30))
    assert [(alert.state, alert.step) for alert in alerts[1:]] == [(ESCALATED, 90)]
    assert alerts[0].state is OPENED and 60 <= alerts[0].step <= 66


def test_a_run_that_recovers_from_birth_gets_a_fresh_baseline() -> None:
    alerts, _ = watched(drawn([0.30] * 20 + [0.006] * 60 + [0.03] * 20))
    assert [alert.state for alert in alerts] == [OPENED, CLOSED, OPENED]
    assert alerts[2].step == 80
    assert alerts[2].baseline == pytest.approx(0.006, rel=0.1)


def test_the_baseline_does_not_move_with_the_series() -> None:
    rates = np.concatenate([np.full(50, 0.01), 0.01 + 0.00005 * np.arange(400)])
    alerts, book = watched(drawn(rates))
    assert len(in_state(alerts, OPENED)) == 1
    assert alerts[0].baseline == pytest.approx(0.01, rel=0.05)
    assert book.open_kinds == {AlertKind.CLIP_FRACTION}


def test_a_slow_drift_that_begins_inside_the_window_is_found_after_it() -> None:
    alerts, book = watched(drawn(0.008 + 0.0001 * np.arange(200)))
    (opened,) = in_state(alerts, OPENED)
    assert 50 <= opened.step <= 120
    assert opened.since_step <= 10 and "rising by 0.000092 a step" in opened.text
    assert book.open_kinds == {AlertKind.CLIP_FRACTION}


@pytest.mark.parametrize(
    "metrics",
    [
        pytest.param({"tokens": 20, "clip_fraction": 0.1}, id="two tokens of twenty are no evidence"),
        pytest.param({"tokens": TOKENS, "clip_fraction": 0.049}, id="below the limit"),
    ],
)
def test_the_absolute_limit_stays_quiet(metrics: Mapping[str, float]) -> None:
    assert AlertBook(threshold=DENSE).observe(0, metrics) == ()


def test_small_batches_above_the_limit_add_up_over_steps() -> None:
    alerts, _ = watched([{"tokens": 100, "clip_fraction": 0.10}] * 6)
    (opened,) = alerts
    assert (opened.step, opened.since_step) == (1, 0)
    assert BEFORE_FIRST_UPDATE in opened.text


def test_a_baseline_of_zero_does_not_alarm_on_single_tokens() -> None:
    assert watched(drawn([0.0] * 60 + [1e-4] * 200))[0] == []
    opened = watched(drawn([0.0] * 60 + [0.01] * 20))[0][0]
    assert "against the baseline of 0.0000" in opened.text


def test_a_mean_above_its_limit_from_the_first_step_is_one_finding_said_once() -> None:
    series = [{**metrics, "dlogp_mean": 0.044} for metrics in drawn([0.015] * 60)]
    (finding,) = watched(series)[0]
    assert (finding.kind, finding.step, finding.since_step, finding.regression) == (AlertKind.DLOGP_MEAN, 0, 0, False)
    assert "present from the first step, so it is a finding and not a regression" in finding.text


def test_a_mean_that_crosses_its_limit_later_must_stay_there_to_be_reported() -> None:
    means = [0.005] * 20 + [0.02] + [0.005] * 9 + [0.02] * 10 + [0.05] * 5 + [0.005] * 5
    alerts, _ = watched({"tokens": TOKENS, "clip_fraction": 0.001, "dlogp_mean": mean} for mean in means)
    assert [(alert.state, alert.step, alert.since_step) for alert in alerts] == [
        (OPENED, 32, 30),
        (ESCALATED, 42, 30),
        (CLOSED, 47, 30),
    ]
    assert all(alert.regression for alert in alerts)


def test_an_open_clip_fraction_alert_speaks_for_the_mean_too() -> None:
    fractions, means = [0.005] * 20 + [0.04] * 20, [0.005] * 20 + [0.05] * 20
    series = [
        {"tokens": TOKENS, "clip_fraction": fraction, "dlogp_mean": mean}
        for fraction, mean in zip(fractions, means, strict=True)
    ]
    assert [alert.kind for alert in watched(series)[0]] == [AlertKind.CLIP_FRACTION]


def test_nonfinite_log_probs_are_reported_in_their_step_and_close() -> None:
    counts = [0] * 4 + [2] + [0] * 6
    alerts, book = watched({"tokens": TOKENS, "clip_fraction": 0.0, "nonfinite": count} for count in counts)
    assert [(alert.state, alert.step) for alert in alerts] == [(OPENED, 4), (CLOSED, 7)]
    assert (alerts[0].severity, alerts[0].value, alerts[1].transient) == (Severity.CRITICAL, 2.0, True)
    assert book.open_kinds == frozenset()


@pytest.mark.parametrize("absent", [{}, {"tokens": TOKENS}, {"tokens": TOKENS, "clip_fraction": math.nan}])
def test_a_metric_that_stops_arriving_is_one_alert(absent: Mapping[str, float]) -> None:
    alerts, _ = watched([*drawn([0.005] * 20), *[absent] * 10, *drawn([0.005] * 5)])
    assert [(alert.kind, alert.state, alert.step) for alert in alerts] == [
        (AlertKind.MISSING_METRIC, OPENED, 22),
        (AlertKind.MISSING_METRIC, CLOSED, 32),
    ]
    assert "clip_fraction" in alerts[0].text and "since step 20" in alerts[0].text


def test_metrics_that_never_arrive_are_an_alert() -> None:
    (alert,) = watched([{}] * 10)[0]
    assert (alert.kind, alert.step, alert.since_step) == (AlertKind.MISSING_METRIC, 2, 0)
    assert alert.text.startswith("clip_fraction, tokens did not arrive as a finite value since step 0.")


def test_a_step_without_tokens_is_lost_coverage_and_not_a_missing_metric() -> None:
    empty = {"tokens": 0, "clip_fraction": math.nan, "dlogp_mean": math.nan}
    alerts, _ = watched([*drawn([0.005] * 20), *[empty] * 5])
    assert [(alert.kind, alert.step) for alert in alerts] == [(AlertKind.TOKEN_COVERAGE, 20)]


@pytest.mark.parametrize(
    ("usual", "fallen"),
    [
        pytest.param({"token_coverage": 1.0}, {"token_coverage": 0.9}, id="measured coverage"),
        pytest.param({}, {"tokens": 1000}, id="tokens a step, where coverage is not measured"),
    ],
)
def test_token_coverage_that_falls_and_stays_is_one_alert(
    usual: Mapping[str, float], fallen: Mapping[str, float]
) -> None:
    healthy = {"tokens": TOKENS, "clip_fraction": 0.0, **usual}
    alerts, _ = watched([healthy] * 20 + [{**healthy, **fallen}] * 10 + [healthy] * 5)
    assert [(alert.kind, alert.state, alert.step, alert.since_step) for alert in alerts] == [
        (AlertKind.TOKEN_COVERAGE, OPENED, 22, 20),
        (AlertKind.TOKEN_COVERAGE, CLOSED, 32, 20),
    ]


def test_responses_that_grow_shorter_under_full_coverage_raise_nothing() -> None:
    series = [{"tokens": max(500, 4000 - 50 * step), "clip_fraction": 0.0, "token_coverage": 1.0} for step in range(90)]
    assert watched(series)[0] == []


@pytest.mark.parametrize(
    "rates",
    [
        pytest.param(0.010 + 0.0009 * np.arange(60), id="drift"),
        pytest.param(np.array([0.30] * 20 + [0.006] * 40 + [0.05] + [0.006] * 9), id="birth, recovery and spike"),
    ],
)
def test_a_book_saved_and_restored_at_every_step_says_the_same(rates: NDArray[np.floating[Any]]) -> None:
    series = [
        {**metrics, "dlogp_mean": 0.02, "nonfinite": step % 11 == 10} for step, metrics in enumerate(drawn(rates))
    ]
    expected, _ = watched(series)
    found: list[Alert] = []
    saved: dict[str, Any] = AlertBook(threshold=DENSE).state()
    for step, metrics in enumerate(series):
        book = AlertBook(threshold=DENSE, run_dir="runs/demo")
        book.restore(json.loads(json.dumps(saved)))
        found += book.observe(step, metrics)
        saved = book.state()
    assert found == expected
    assert len(found) > 2


def test_a_state_of_another_version_or_with_holes_is_refused() -> None:
    book = AlertBook(threshold=DENSE)
    with pytest.raises(AlertMetricError, match="v is 2; accepts 1"):
        book.restore({**book.state(), "v": 2})
    with pytest.raises(AlertMetricError, match=r"incomplete \('anchor'\)"):
        book.restore({**book.state(), "clip": {"regression": None, "first_step": 0, "history": []}})


def test_a_step_out_of_order_and_a_fraction_above_one_are_refused() -> None:
    book = AlertBook(threshold=DENSE)
    book.observe(7, {"tokens": TOKENS, "clip_fraction": 0.01})
    with pytest.raises(AlertMetricError, match="step 7 came after step 7"):
        book.observe(7, {"tokens": TOKENS, "clip_fraction": 0.01})
    with pytest.raises(AlertMetricError, match="clip_fraction: got 1.5 at step 8; accepts 0 to 1"):
        book.observe(8, {"tokens": TOKENS, "clip_fraction": 1.5})


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"min_steps": True}, "min_steps: got True; accepts an integer of 3 or more."),
        ({"min_steps": 2}, "min_steps: got 2; accepts an integer of 3 or more."),
        ({"window": 5}, "window: got 5; accepts an integer of min_steps or more."),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: Mapping[str, Any], sentence: str) -> None:
    with pytest.raises(SchemaError) as raised:
        AlertSettings(**settings)
    assert str(raised.value) == sentence


def test_a_shorter_warm_up_starts_relative_detection_earlier() -> None:
    series = drawn([0.006] * 5 + [0.03] * 5)
    early = AlertBook(threshold=DENSE, settings=AlertSettings(min_steps=5))
    assert [alert.step for alert in watched(series, early)[0]] == [5]
