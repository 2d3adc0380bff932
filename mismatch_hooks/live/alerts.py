"""The alert book: one step's metrics in, what there is to say about them out; no clock, no file, no engine."""

import math
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, TypeVar

from mismatch_hooks.live.alert_records import Alert, AlertKind, AlertSettings, AlertState, Severity
from mismatch_hooks.live.change_detection import Baseline, Reading
from mismatch_hooks.live.clip_monitor import ClipRules, ClipState, LimitRun, Regression, observe_clip_fraction
from mismatch_hooks.live.health_monitors import (
    HealthRules,
    HealthState,
    Watch,
    observe_alignment,
    observe_dlogp_mean,
    observe_missing_metrics,
    observe_nonfinite,
    observe_token_coverage,
    observe_weights,
)
from mismatch_hooks.schema.freeze import thaw
from mismatch_hooks.schema.thresholds import Threshold

__all__ = ["Alert", "AlertBook", "AlertKind", "AlertMetricError", "AlertSettings", "AlertState", "Severity"]

_STATE_VERSION = 1
Record = TypeVar("Record")


class AlertMetricError(ValueError):
    """A step's metrics, or a saved state, are not what the alert book takes."""


class AlertBook:
    """Watches the metrics of one run, step by step, and keeps at most one alert open for each cause."""

    def __init__(
        self, *, threshold: Threshold, settings: AlertSettings | None = None, run_dir: str = "RUN_DIR"
    ) -> None:
        """Start with an empty memory.

        Args:
            threshold: the row of the threshold table for this run; its limits hold from the first step on.
            settings: warm-up and window of the relative detection.
            run_dir: where the run's files are, for the command in the texts.
        """
        settings = settings if settings is not None else AlertSettings()
        command = f"mismatch-hooks tail {run_dir}"
        self._clip_rules = ClipRules(limit=threshold.clip_fraction_suspect_above, settings=settings, command=command)
        self._health_rules = HealthRules(
            dlogp_limit=threshold.dlogp_mean_suspect_above, settings=settings, command=command
        )
        self._clip = ClipState()
        self._health = HealthState()
        self._last_step: int | None = None

    @property
    def open_kinds(self) -> frozenset[AlertKind]:
        """The causes with an open alert."""
        watched = {
            AlertKind.CLIP_FRACTION: self._clip.regression is not None,
            AlertKind.DLOGP_MEAN: self._health.dlogp_mean.is_open,
            AlertKind.NONFINITE: self._health.nonfinite.is_open,
            AlertKind.WEIGHTS: self._health.weights.is_open,
            AlertKind.ALIGNMENT: self._health.alignment.is_open,
            AlertKind.TOKEN_COVERAGE: self._health.token_coverage.is_open,
            AlertKind.MISSING_METRIC: self._health.missing_metric.is_open,
        }
        return frozenset(kind for kind, is_open in watched.items() if is_open)

    def observe(self, step: int, metrics: Mapping[str, float]) -> tuple[Alert, ...]:
        """Return what opened, got worse or closed in this step.

        Args:
            step: larger than the step before; steps may be left out.
            metrics: as in a ``step`` event, of which ``tokens``, ``clip_fraction``, ``dlogp_mean``, ``nonfinite`` are
                read, and ``token_coverage`` (tokens compared, out of the active tokens that were sampled, 0 to 1) if
                the loop measures it. A step without metrics is observed too: it is how their absence is noticed.

        Raises:
            AlertMetricError: the step does not come after the last one, or clip_fraction is no fraction.
        """
        if self._last_step is not None and step <= self._last_step:
            raise AlertMetricError(
                f"step {step} came after step {self._last_step}; observe takes each step once, in order."
            )
        reading = _reading(step, metrics)
        alerts: tuple[Alert, ...] = ()
        clip = self._clip
        if reading is not None:
            clip, alerts = observe_clip_fraction(clip, reading, self._clip_rules)
        rules = self._health_rules
        health, more = observe_dlogp_mean(
            self._health, step, metrics, rules, clip_alert_is_open=clip.regression is not None
        )
        alerts += more
        for monitor in (
            observe_nonfinite,
            observe_weights,
            observe_alignment,
            observe_token_coverage,
            observe_missing_metrics,
        ):
            health, more = monitor(health, step, metrics, rules)
            alerts += more
        self._clip, self._health, self._last_step = clip, health, step
        return alerts

    def state(self) -> dict[str, Any]:
        """Return everything the book remembers as plain data that JSON takes."""
        return {
            "v": _STATE_VERSION,
            "last_step": self._last_step,
            "clip": thaw(self._clip),
            "health": thaw(self._health),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a state that ``state()`` returned, in this process or another one.

        Raises:
            AlertMetricError: the state is of another version, or incomplete.
        """
        if state.get("v") != _STATE_VERSION:
            raise AlertMetricError(
                f"alert state: v is {state.get('v')!r}; accepts {_STATE_VERSION}; start the run without it."
            )
        try:
            clip, health = _clip_state(state["clip"]), _health_state(state["health"])
            last_step = state["last_step"]
        except (KeyError, TypeError) as missing:
            raise AlertMetricError(f"alert state: incomplete ({missing}); start the run without it.") from missing
        self._clip, self._health, self._last_step = clip, health, last_step


def _reading(step: int, metrics: Mapping[str, float]) -> Reading | None:
    tokens, fraction = metrics.get("tokens", math.nan), metrics.get("clip_fraction", math.nan)
    if not math.isfinite(tokens) or not math.isfinite(fraction) or tokens < 1:
        return None
    if not 0.0 <= fraction <= 1.0:
        raise AlertMetricError(
            f"clip_fraction: got {fraction!r} at step {step}; accepts 0 to 1, or NaN without tokens."
        )
    return Reading(step=step, tokens=round(tokens), clipped=round(fraction * tokens))


def _clip_state(plain: Mapping[str, Any]) -> ClipState:
    regression = _optional(Regression, plain["regression"])
    if regression is not None:
        regression = replace(regression, severity=Severity[plain["regression"]["severity"].upper()])
    return ClipState(
        first_step=plain["first_step"],
        history=tuple(Reading(**past) for past in plain["history"]),
        anchor=tuple(Reading(**past) for past in plain["anchor"]),
        baseline=_optional(Baseline, plain["baseline"]),
        cusum=plain["cusum"],
        limit_run=_optional(LimitRun, plain["limit_run"]),
        regression=regression,
    )


def _health_state(plain: Mapping[str, Any]) -> HealthState:
    known = {name: plain[name] for name in (entry.name for entry in fields(HealthState))}
    for name in ("dlogp_mean", "nonfinite", "weights", "alignment", "token_coverage", "missing_metric"):
        known[name] = Watch(**plain[name])
    for name in ("coverage_anchor", "expected"):
        known[name] = tuple(plain[name])
    return HealthState(**known)


def _optional(record: type[Record], plain: Mapping[str, Any] | None) -> Record | None:
    return None if plain is None else record(**plain)
