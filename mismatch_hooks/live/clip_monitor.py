"""Regressions of clip_fraction: relative to the run's own first steps, and above the absolute limit from step 0 on.

Both are one cause and share one alert. A likelihood-ratio CUSUM opens it, a second one, the other way round, closes it,
and a third one, against the level at which it opened, escalates it.
"""

import math
from dataclasses import dataclass, replace

from mismatch_hooks.live.alert_records import TRANSIENT_STEPS, Alert, AlertKind, AlertSettings, AlertState, Severity
from mismatch_hooks.live.change_detection import (
    WANDER_EXPECTED,
    Baseline,
    Onset,
    Reading,
    estimate_baseline,
    find_onset,
    is_above,
    judgeable,
    log_likelihood_ratio,
    pooled,
    significant,
)

ALARM = 20.0  # nats of evidence; chosen on the operating curve of benchmarks/alert_quality.py
ODDS_RATIO = 2.25  # the rise that is looked for; evidence grows from about 1.5 times the baseline on
_RECOVERED = 5.0  # nats of evidence for the baseline that close an alert
_RECOVERED_ODDS_RATIO = 1.5  # against this rise: between 1.2 and 1.5 times the baseline nothing opens or closes
_SPIKE_OVER = 4.0  # nats against a rise of ODDS_RATIO, for an alert that one step opened
_SPIKE_STEPS = 4  # later steps that such an alert gets to be borne out, or it closes
_CALM_STEPS = 2  # in a row, whatever the evidence
_CALM_STEPS_BLIND = 3  # the same, where there is no baseline yet
_LIMIT_DEVIATIONS = 3.0  # counting noise of a small batch must not cross the absolute limit
_CALM_BELOW_LIMIT = 0.8  # share of the absolute limit, where there is no baseline yet
_FEWEST_SETTLED_STEPS = 2  # of a warm-up before a jump in it, to tell the jump from the run's own noise
_SMALLEST_OF_LIMIT = 0.01  # share of the absolute limit below which a rate is as good as this rate
_CORRELATED_STEPS = 10  # in which a healthy rate wanders the same way
_HISTORY_STEPS = 256  # how far back the start of a rise is looked for


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitRun:
    """Steps in a row above the absolute limit, pooled.

    Attributes:
        first_step: where they began.
        tokens: compared in all of them.
        clipped: of those.
    """

    first_step: int
    tokens: int
    clipped: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Regression:
    """The open alert.

    Attributes:
        since_step: first raised step.
        severity: as last reported.
        level: clip_fraction when it was last reported.
        from_birth: above the absolute limit in every step since the first.
        sudden: one step opened it, and later steps have not borne it out yet.
        last_raised_step: the last step that does not look like the baseline.
        readings_since: steps observed since it opened.
        evidence_since: summed log-likelihood ratio of those.
        recovery: CUSUM towards the baseline.
        worse: CUSUM away from ``level``.
        calm_steps: steps in a row that look like the baseline.
    """

    since_step: int
    severity: Severity
    level: float
    from_birth: bool
    sudden: bool
    last_raised_step: int
    readings_since: int = 0
    evidence_since: float = 0.0
    recovery: float = 0.0
    worse: float = 0.0
    calm_steps: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipState:
    """Everything the monitor remembers.

    Attributes:
        first_step: first observed step.
        history: latest readings, without closed regressions.
        anchor: the run's first readings outside alerts; complete at ``window`` of them.
        baseline: from ``anchor``, or None during the warm-up.
        cusum: evidence for a rise over the baseline, nats.
        limit_run: current run of steps above the absolute limit.
        regression: the open alert.
    """

    first_step: int | None = None
    history: tuple[Reading, ...] = ()
    anchor: tuple[Reading, ...] = ()
    baseline: Baseline | None = None
    cusum: float = 0.0
    limit_run: LimitRun | None = None
    regression: Regression | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipRules:
    """What the monitor judges by.

    Attributes:
        limit: clip_fraction that no healthy run exceeds, from the threshold table.
        settings: warm-up and window.
        command: what shows more, for the texts.
        alarm: nats of evidence that open or escalate an alert.
    """

    limit: float
    settings: AlertSettings
    command: str
    alarm: float = ALARM

    @property
    def smallest(self) -> float:
        """The rate below which a rise does not matter."""
        return _SMALLEST_OF_LIMIT * self.limit


def observe_clip_fraction(state: ClipState, reading: Reading, rules: ClipRules) -> tuple[ClipState, tuple[Alert, ...]]:
    """Return the state after one more step, and what there is to say about it."""
    state = replace(
        state,
        first_step=reading.step if state.first_step is None else state.first_step,
        history=(*state.history, reading)[-_HISTORY_STEPS:],
        limit_run=_extended(state.limit_run, reading, rules.limit),
    )
    if state.regression is None:
        return _watch(state, reading, rules)
    return _follow(state, state.regression, reading, rules)


def _watch(state: ClipState, reading: Reading, rules: ClipRules) -> tuple[ClipState, tuple[Alert, ...]]:
    cusum = 0.0 if state.baseline is None else max(0.0, state.cusum + _evidence(reading, state.baseline))
    if _is_over_limit(state, rules) or cusum >= rules.alarm:
        return _open(state, reading, rules, sudden=state.cusum < rules.alarm / 2)
    state = replace(state, cusum=cusum)
    if len(state.anchor) == rules.settings.window:
        return state, ()
    state = replace(state, anchor=(*state.anchor, reading))
    if len(state.anchor) == rules.settings.min_steps:
        settled = _before_jump(state.anchor, rules)
        state = replace(state, anchor=settled, baseline=_provisional_baseline(settled, rules))
        if len(settled) < rules.settings.min_steps:
            return _open(state, reading, rules, sudden=False)
    if len(state.anchor) == rules.settings.window:
        state = replace(state, baseline=_final_baseline(state.anchor, rules))
    return state, ()


def _open(state: ClipState, reading: Reading, rules: ClipRules, *, sudden: bool) -> tuple[ClipState, tuple[Alert, ...]]:
    crossing = state.limit_run.first_step if state.limit_run is not None else reading.step
    onset = _onset(state, crossing)
    raised = [past for past in state.history if past.step >= onset.step]
    level = pooled(raised) if onset.rise_per_step is None else reading.fraction
    regression = Regression(
        since_step=onset.step,
        severity=Severity.CRITICAL if _is_over_limit(state, rules) else Severity.WARNING,
        level=judgeable(level, smallest=rules.smallest),
        from_birth=state.baseline is None and onset.step == state.first_step,
        sudden=sudden and onset.step == reading.step,
        last_raised_step=reading.step,
    )
    if state.baseline is None:  # the first steps above the limit were not yet known to be
        state = replace(state, anchor=tuple(past for past in state.anchor if past.step < onset.step))
    state = replace(state, cusum=0.0, regression=regression)
    return state, (_describe(state, regression, AlertState.OPENED, reading, rules, onset),)


def _follow(
    state: ClipState, regression: Regression, reading: Reading, rules: ClipRules
) -> tuple[ClipState, tuple[Alert, ...]]:
    regression = _updated(regression, state.baseline, reading, rules)
    if _has_recovered(regression, state.baseline):
        alert = _describe(state, regression, AlertState.CLOSED, reading, rules, None)
        raised = range(regression.since_step, regression.last_raised_step + 1)
        history = tuple(past for past in state.history if past.step not in raised)
        return replace(state, history=history, regression=None), (alert,)
    crossed = regression.severity < Severity.CRITICAL and _is_over_limit(state, rules)
    if not crossed and regression.worse < rules.alarm:
        return replace(state, regression=regression), ()
    onset = _onset(state, regression.since_step)
    regression = replace(
        regression,
        since_step=min(regression.since_step, onset.step),
        severity=Severity.CRITICAL if crossed else regression.severity,
        level=judgeable(max(regression.level, reading.fraction), smallest=rules.smallest),
        worse=0.0,
    )
    alert = _describe(state, regression, AlertState.ESCALATED, reading, rules, onset)
    return replace(state, regression=regression), (alert,)


def _updated(regression: Regression, baseline: Baseline | None, reading: Reading, rules: ClipRules) -> Regression:
    if baseline is None:
        evidence, still_raised, wander = 0.0, 0.0, WANDER_EXPECTED
        calm = reading.fraction <= _CALM_BELOW_LIMIT * rules.limit
    else:
        evidence, wander = _evidence(reading, baseline), baseline.wander
        ratio = ODDS_RATIO if regression.sudden else _RECOVERED_ODDS_RATIO
        still_raised = _evidence(reading, baseline, odds_ratio=ratio)
        calm = evidence < 0.0 and reading.fraction <= rules.limit
    worse = log_likelihood_ratio(reading, fraction=regression.level, wander=wander, odds_ratio=ODDS_RATIO)
    return replace(
        regression,
        sudden=regression.sudden and regression.readings_since < _SPIKE_STEPS,
        readings_since=regression.readings_since + 1,
        evidence_since=regression.evidence_since + evidence,
        recovery=max(0.0, regression.recovery - still_raised),
        worse=max(0.0, regression.worse + worse),
        calm_steps=regression.calm_steps + 1 if calm else 0,
        last_raised_step=regression.last_raised_step if calm else reading.step,
    )


def _has_recovered(regression: Regression, baseline: Baseline | None) -> bool:
    if baseline is None:
        return regression.calm_steps >= _CALM_STEPS_BLIND
    if regression.sudden and regression.readings_since == _SPIKE_STEPS and regression.evidence_since < 0.0:
        return True
    needed = _SPIKE_OVER if regression.sudden else _RECOVERED
    return regression.calm_steps >= _CALM_STEPS and regression.recovery >= needed


def _evidence(reading: Reading, baseline: Baseline, *, odds_ratio: float = ODDS_RATIO) -> float:
    return log_likelihood_ratio(reading, fraction=baseline.fraction, wander=baseline.wander, odds_ratio=odds_ratio)


def _extended(run: LimitRun | None, reading: Reading, limit: float) -> LimitRun | None:
    if reading.fraction <= limit:
        return None
    if run is None:
        return LimitRun(first_step=reading.step, tokens=reading.tokens, clipped=reading.clipped)
    return replace(run, tokens=run.tokens + reading.tokens, clipped=run.clipped + reading.clipped)


def _is_over_limit(state: ClipState, rules: ClipRules) -> bool:
    run = state.limit_run
    return run is not None and is_above(run.tokens, run.clipped, rules.limit, deviations=_LIMIT_DEVIATIONS)


def _onset(state: ClipState, otherwise: int) -> Onset:
    # Before there are steps to compare with, a rise has no start but the step at which the limit was crossed.
    if state.baseline is None or len(state.history) < 2:
        return Onset(step=otherwise, rise_per_step=None)
    return find_onset(state.history)


def _before_jump(anchor: tuple[Reading, ...], rules: ClipRules) -> tuple[Reading, ...]:
    """Return the warm-up, cut where its own later part is a regression against its earlier part."""
    step = find_onset(anchor).step
    earlier = tuple(reading for reading in anchor if reading.step < step)
    if len(earlier) < _FEWEST_SETTLED_STEPS:
        return anchor
    # The few earlier steps are taken at the upper end of what they allow: two standard deviations of counting noise.
    tokens, clipped = sum(reading.tokens for reading in earlier), sum(reading.clipped for reading in earlier)
    upper = judgeable((clipped + 2.0 * math.sqrt(clipped + 1.0)) / tokens, smallest=rules.smallest)
    evidence = sum(
        log_likelihood_ratio(reading, fraction=upper, wander=WANDER_EXPECTED, odds_ratio=ODDS_RATIO)
        for reading in anchor[len(earlier) :]
    )
    return earlier if evidence >= rules.alarm else anchor


def _provisional_baseline(anchor: tuple[Reading, ...], rules: ClipRules) -> Baseline:
    # A few steps that may all be wandering the same way: that risk is taken for as long as the window is not full.
    return estimate_baseline(anchor, smallest=rules.smallest, correlated_steps=0)


def _final_baseline(anchor: tuple[Reading, ...], rules: ClipRules) -> Baseline:
    # A steep drift inside the window has raised its alert against the provisional baseline by now, and steps under an
    # alert do not enter; a slow one raises this baseline a little, and is found later against it, since it stays put.
    return estimate_baseline(anchor, smallest=rules.smallest, correlated_steps=_CORRELATED_STEPS)


def _describe(
    state: ClipState,
    regression: Regression,
    what: AlertState,
    reading: Reading,
    rules: ClipRules,
    onset: Onset | None,
) -> Alert:
    baseline = _shown_baseline(state)
    transient = False
    recommendation = ""
    if what is AlertState.CLOSED:
        transient = regression.last_raised_step - regression.since_step < TRANSIENT_STEPS
        title, text = _closing_words(regression, reading, baseline, transient=transient)
    else:
        title, text = _opening_words(state, regression, what, reading, rules, onset, baseline)
        recommendation = _recommend(regression)
    return Alert(
        kind=AlertKind.CLIP_FRACTION,
        severity=Severity.INFO if what is AlertState.CLOSED else regression.severity,
        state=what,
        title=title,
        text=f"{text} `{rules.command}` shows more.",
        since_step=regression.since_step,
        step=reading.step,
        value=reading.fraction,
        baseline=baseline,
        transient=transient,
        recommendation=recommendation,
    )


def _opening_words(
    state: ClipState,
    regression: Regression,
    what: AlertState,
    reading: Reading,
    rules: ClipRules,
    onset: Onset | None,
    baseline: float | None,
) -> tuple[str, str]:
    over_limit = _is_over_limit(state, rules)
    rise = onset.rise_per_step if onset is not None else None
    change = f"rising by {significant(rise)} a step" if rise is not None else "raised"
    worse = "got worse: it " if what is AlertState.ESCALATED else ""
    text = f"clip_fraction {worse}is {reading.fraction:.4f} at step {reading.step}"
    if over_limit:
        text += f", above the suspect limit of {rules.limit:g}"
    if regression.from_birth:
        title = f"clip_fraction {reading.fraction:.4f} from the first step on"
        return title, f"{text}; {_birth_words(regression.since_step)}."
    if baseline is not None:
        times = f"{reading.fraction / baseline:.1f} times " if baseline > 0.0 else "against "
        text += f", {times}the baseline of {baseline:.4f}"
    text += f", {change} since step {regression.since_step}."
    title = f"clip_fraction {'rising, ' if rise is not None else ''}{reading.fraction:.4f} at step {reading.step}"
    return title, text


def _closing_words(
    regression: Regression, reading: Reading, baseline: float | None, *, transient: bool
) -> tuple[str, str]:
    since, last = regression.since_step, regression.last_raised_step
    when = f"at step {since}" if since == last else f"in steps {since}–{last}"
    reference = f", the baseline is {baseline:.4f}" if baseline is not None else ""
    back = f"clip_fraction is back at {reading.fraction:.4f} at step {reading.step}{reference}"
    if transient:
        return f"clip_fraction: spike at step {since} is over", f"{back}; a transient spike {when}, not a trend."
    return f"clip_fraction recovered at step {reading.step}", f"{back}; it was raised {when}."


def _birth_words(first_step: int) -> str:
    # Loops count from 0 or from 1; hooks that start later have not seen the state before the first update.
    if first_step <= 1:
        return "present before the first optimizer step: neither drift nor staleness"
    return f"present from the first observed step ({first_step}) on: its start was not seen"


def _recommend(regression: Regression) -> str:
    if regression.from_birth:
        return "Compare the effective settings of the two sides and their weight digests before training any further."
    return (
        f"Look for what changed at step {regression.since_step} (weight sync, effective settings, gates), then examine "
        "the factors on the bundle of this step."
    )


def _shown_baseline(state: ClipState) -> float | None:
    if state.baseline is not None:
        return state.baseline.observed
    return pooled(state.anchor) if state.anchor else None
