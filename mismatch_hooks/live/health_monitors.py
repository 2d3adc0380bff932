"""Alerts on everything but clip_fraction: |dlogp| above its limit, non-finite values, lost tokens, missing metrics."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import median

from mismatch_hooks.live.alert_records import TRANSIENT_STEPS, Alert, AlertKind, AlertSettings, AlertState, Severity

_CONFIRMING_STEPS = 3  # in a row, before an alert that is not certain at once opens, escalates or closes
_BACK_BELOW = 0.9  # share of the limit at which |dlogp| counts as back: noise at the limit must not flap
_DLOGP_WORSE = 2.0  # times the |dlogp| that was reported last
_COUNT_WORSE = 10.0  # times the count that was reported last
_COVERAGE_KEPT = 0.95  # share of the usual token coverage
_TOKENS_KEPT = 0.5  # share of the usual tokens, where coverage is not measured: responses may well grow shorter
_REQUIRED = ("clip_fraction", "tokens")
_WATCHED = (*_REQUIRED, "dlogp_mean", "token_coverage")


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """One cause over time: streaks of steps, and whether its alert is open.

    Attributes:
        is_open: it was reported and has not closed.
        since_step: first bad step; meaningless without one.
        last_bad_step: latest bad step; meaningless without one.
        level: the value that was reported last.
        bad_steps: bad steps in a row before it opened.
        good_steps: good steps in a row since it opened.
        worse_steps: steps in a row clearly worse than ``level``.
    """

    is_open: bool = False
    since_step: int = 0
    last_bad_step: int = 0
    level: float = 0.0
    bad_steps: int = 0
    good_steps: int = 0
    worse_steps: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """What one step says about a cause.

    Attributes:
        value: the metric.
        bad: this step shows it.
        good: this step shows that it is over; a step may be neither.
        worse: this step is clearly worse than the one that was reported last.
        certain: one step is enough to report it.
    """

    value: float
    bad: bool
    good: bool
    worse: bool = False
    certain: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthState:
    """Everything that these monitors remember.

    Attributes:
        first_dlogp_step: first step with a |dlogp|.
        dlogp_mean: |dlogp| above its limit.
        nonfinite: non-finite log-probs.
        weights: tensors that differ between the sides.
        alignment: tokens that are not equal to the bit in a run that keeps operators on their references.
        coverage_metric: ``"token_coverage"`` once the loop has measured it, else ``"tokens"``.
        coverage_anchor: that metric in the run's first steps.
        token_coverage: lost tokens.
        expected: metrics that have arrived before, and those that must.
        missing_metric: metrics that do not arrive.
    """

    first_dlogp_step: int | None = None
    dlogp_mean: Watch = field(default_factory=Watch)
    nonfinite: Watch = field(default_factory=Watch)
    weights: Watch = field(default_factory=Watch)
    alignment: Watch = field(default_factory=Watch)
    coverage_metric: str = "tokens"
    coverage_anchor: tuple[float, ...] = ()
    token_coverage: Watch = field(default_factory=Watch)
    expected: tuple[str, ...] = _REQUIRED
    missing_metric: Watch = field(default_factory=Watch)


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthRules:
    """What these monitors judge by.

    Attributes:
        dlogp_limit: mean |dlogp| that no healthy run exceeds, nats, from the threshold table.
        settings: the warm-up.
        command: what shows more, for the texts.
    """

    dlogp_limit: float
    settings: AlertSettings
    command: str


def observe_dlogp_mean(
    state: HealthState, step: int, metrics: Mapping[str, float], rules: HealthRules, *, clip_alert_is_open: bool
) -> tuple[HealthState, tuple[Alert, ...]]:
    """Report a |dlogp| above its limit: at once when the run starts there, else when it has stayed there.

    An open alert on clip_fraction is the same cause and speaks for both.
    """
    value = metrics.get("dlogp_mean", math.nan)
    if not math.isfinite(value):
        return state, ()
    first_step = step if state.first_dlogp_step is None else state.first_dlogp_step
    before, limit = state.dlogp_mean, rules.dlogp_limit
    from_birth = step == first_step or (before.bad_steps > 0 and before.since_step == first_step)
    sign = Sign(
        value=value,
        bad=value > limit,
        good=value <= _BACK_BELOW * limit,
        worse=value > _DLOGP_WORSE * before.level,
        certain=from_birth,
    )
    watch, what = _advance(before, step, sign, held=clip_alert_is_open)
    state = replace(state, first_dlogp_step=first_step, dlogp_mean=watch if what is not AlertState.CLOSED else Watch())
    if what is None:
        return state, ()
    since = "present from the first step" if watch.since_step == first_step else f"since step {watch.since_step}"
    reading = f"dlogp_mean is {value:.4f} at step {step}"
    if what is AlertState.CLOSED:
        title, text = f"dlogp_mean is back at {value:.4f}", f"{reading}, below the suspect limit of {limit:g} again."
    elif what is AlertState.ESCALATED:
        title = f"dlogp_mean is worse: {value:.4f} at step {step}"
        text = f"{reading}, clearly worse than the {before.level:.4f} that was reported; {since}."
    elif watch.since_step == first_step:
        title = f"dlogp_mean {value:.4f}: {since}"
        text = f"{reading}, above the suspect limit of {limit:g}: {since}, so it is a finding and not a regression."
    else:
        title, text = f"dlogp_mean {value:.4f} {since}", f"{reading}, above the suspect limit of {limit:g} {since}."
    advice = "Read the verdicts of the examined factors; they name the operator and the side."
    alert = _alert(AlertKind.DLOGP_MEAN, Severity.WARNING, what, watch, step, value, title, text, advice, rules)
    return state, (replace(alert, regression=what is AlertState.ESCALATED or watch.since_step != first_step),)


def observe_nonfinite(
    state: HealthState, step: int, metrics: Mapping[str, float], rules: HealthRules
) -> tuple[HealthState, tuple[Alert, ...]]:
    """Report NaN or infinite log-probs in the step that brings them."""
    words = _CountWords(
        kind=AlertKind.NONFINITE,
        what="non-finite log-probs",
        over="log-probs are finite again",
        advice="Find the side that returns them; no verdict is read from such a batch.",
    )
    watch, alerts = _observe_count(state.nonfinite, step, metrics.get("nonfinite", math.nan), words, rules)
    return replace(state, nonfinite=watch), alerts


def observe_weights(
    state: HealthState, step: int, metrics: Mapping[str, float], rules: HealthRules
) -> tuple[HealthState, tuple[Alert, ...]]:
    """Report tensors whose content differs between the two sides, in the step that finds them."""
    words = _CountWords(
        kind=AlertKind.WEIGHTS,
        what="tensors differ between the sides",
        over="the weights of both sides are equal again",
        advice="Sync every tensor; the step's event names those that differ (weights.differing).",
    )
    watch, alerts = _observe_count(state.weights, step, metrics.get("weights_mismatched", math.nan), words, rules)
    return replace(state, weights=watch), alerts


def observe_alignment(
    state: HealthState, step: int, metrics: Mapping[str, float], rules: HealthRules
) -> tuple[HealthState, tuple[Alert, ...]]:
    """Report tokens that are not equal in an aligned run, in the step that has them."""
    words = _CountWords(
        kind=AlertKind.ALIGNMENT,
        what="tokens are not equal to the bit",
        over="every token is equal to the bit again",
        advice="The step's alignment event names the tokens and where the sides first differ; add that operator to "
        "mismatch_hooks.align.",
    )
    watch, alerts = _observe_count(state.alignment, step, metrics.get("unequal_tokens", math.nan), words, rules)
    return replace(state, alignment=watch), alerts


@dataclass(frozen=True, slots=True, kw_only=True)
class _CountWords:
    kind: AlertKind
    what: str
    over: str
    advice: str


def _observe_count(
    before: Watch, step: int, count: float, words: _CountWords, rules: HealthRules
) -> tuple[Watch, tuple[Alert, ...]]:
    """Follow a count that must be 0: one step is enough to report it."""
    if not math.isfinite(count):
        return before, ()
    worse = count >= _COUNT_WORSE * before.level
    watch, what = _advance(before, step, Sign(value=count, bad=count > 0, good=count == 0, worse=worse, certain=True))
    kept = watch if what is not AlertState.CLOSED else Watch()
    if what is None:
        return kept, ()
    if what is AlertState.CLOSED:
        title, text = (
            words.over,
            f"{words.over[0].upper()}{words.over[1:]}; the last bad step is {watch.last_bad_step}.",
        )
    else:
        title = f"{count:.0f} {words.what} at step {step}"
        text = f"{title}, since step {watch.since_step}."
    alert = _alert(words.kind, Severity.CRITICAL, what, watch, step, count, title, text, words.advice, rules)
    return kept, (alert,)


def observe_token_coverage(
    state: HealthState, step: int, metrics: Mapping[str, float], rules: HealthRules
) -> tuple[HealthState, tuple[Alert, ...]]:
    """Report tokens that are no longer compared, against the run's own first steps; none at all is reported at once."""
    if state.coverage_metric == "tokens" and "token_coverage" in metrics:
        state = replace(state, coverage_metric="token_coverage", coverage_anchor=())
    name = state.coverage_metric
    value = metrics.get(name, math.nan)
    if not math.isfinite(value):
        return state, ()
    settled = len(state.coverage_anchor) == rules.settings.min_steps
    usual = median(state.coverage_anchor) if settled else 0.0
    kept = _COVERAGE_KEPT if name == "token_coverage" else _TOKENS_KEPT
    bad = value < kept * usual or value == 0
    worse = value == 0 and state.token_coverage.level > 0
    sign = Sign(value=value, bad=bad, good=not bad, worse=worse, certain=value == 0)
    watch, what = _advance(state.token_coverage, step, sign)
    anchor = state.coverage_anchor if settled or bad else (*state.coverage_anchor, value)
    state = replace(state, coverage_anchor=anchor, token_coverage=watch if what is not AlertState.CLOSED else Watch())
    if what is None:
        return state, ()
    baseline = usual if settled else None
    title = f"{name} is {value:g} at step {step}"
    text = f"{name} is {value:g} at step {step}{f', usual is {usual:g}' if settled else ''}"
    if what is AlertState.CLOSED:
        title, text = f"{name} is back at {value:g}", f"{text}; it is back."
    elif name == "tokens" and value > 0:
        text += f", since step {watch.since_step}: responses grew shorter, or the capture loses some."
    else:
        text += f", since step {watch.since_step}: the capture loses tokens."
    advice = "Check what the loop hands to the hooks: masks, dropped sequences, ranks that do not report."
    kind = AlertKind.TOKEN_COVERAGE
    alert = _alert(kind, Severity.WARNING, what, watch, step, value, title, text, advice, rules, baseline)
    return state, (alert,)


def observe_missing_metrics(
    state: HealthState, step: int, metrics: Mapping[str, float], rules: HealthRules
) -> tuple[HealthState, tuple[Alert, ...]]:
    """Report metrics that stop arriving, or never do; a NaN of a step without tokens is not missing."""
    arrived = {name for name in _WATCHED if math.isfinite(metrics.get(name, math.nan))}
    expected = tuple(name for name in _WATCHED if name in arrived or name in state.expected)
    excused = {"clip_fraction", "dlogp_mean"} if metrics.get("tokens") == 0 else set[str]()
    absent = [name for name in expected if name not in arrived | excused]
    count = float(len(absent))
    sign = Sign(value=count, bad=bool(absent), good=not absent, worse=count > state.missing_metric.level)
    watch, what = _advance(state.missing_metric, step, sign)
    state = replace(state, expected=expected, missing_metric=watch if what is not AlertState.CLOSED else Watch())
    if what is None:
        return state, ()
    if what is AlertState.CLOSED:
        title, text = "metrics arrive again", f"All metrics arrive again since step {watch.last_bad_step + 1}."
    else:
        title = f"{absent[0]} does not arrive{f', nor do {len(absent) - 1} more' if len(absent) > 1 else ''}"
        text = f"{', '.join(absent)} did not arrive as a finite value since step {watch.since_step}."
    advice = "Nothing is judged without them: see the errors of the hooks."
    kind = AlertKind.MISSING_METRIC
    alert = _alert(kind, Severity.WARNING, what, watch, step, math.nan, title, text, advice, rules)
    return state, (alert,)


def _advance(watch: Watch, step: int, sign: Sign, *, held: bool = False) -> tuple[Watch, AlertState | None]:
    """Return the watch after this step, and what happened; ``held`` keeps it from opening or escalating."""
    if not watch.is_open:
        if not sign.bad:
            return Watch(), None
        since_step = watch.since_step if watch.bad_steps else step
        watch = replace(watch, since_step=since_step, last_bad_step=step, bad_steps=watch.bad_steps + 1)
        if held or not (sign.certain or watch.bad_steps >= _CONFIRMING_STEPS):
            return watch, None
        return replace(watch, is_open=True, level=sign.value), AlertState.OPENED
    watch = replace(
        watch,
        last_bad_step=step if sign.bad else watch.last_bad_step,
        good_steps=watch.good_steps + 1 if sign.good else 0,
        worse_steps=watch.worse_steps + 1 if sign.worse else 0,
    )
    if watch.good_steps >= _CONFIRMING_STEPS:
        return watch, AlertState.CLOSED
    if sign.worse and not held and (sign.certain or watch.worse_steps >= _CONFIRMING_STEPS):
        return replace(watch, level=sign.value, worse_steps=0), AlertState.ESCALATED
    return watch, None


def _alert(
    kind: AlertKind,
    severity: Severity,
    state: AlertState,
    watch: Watch,
    step: int,
    value: float,
    title: str,
    text: str,
    advice: str,
    rules: HealthRules,
    baseline: float | None = None,
) -> Alert:
    closed = state is AlertState.CLOSED
    return Alert(
        kind=kind,
        severity=Severity.INFO if closed else severity,
        state=state,
        title=title,
        text=f"{text} `{rules.command}` shows more.",
        since_step=watch.since_step,
        step=step,
        value=value,
        baseline=baseline,
        transient=closed and watch.last_bad_step - watch.since_step < TRANSIENT_STEPS,
        recommendation="" if closed else advice,
    )
