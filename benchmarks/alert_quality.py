"""False alarms and delays of the clip_fraction alert on simulated series, beside a fixed threshold and a plain EWMA.

A healthy series is harder than binomial noise: its rate wanders slowly (relative standard deviation 0.10, correlation
0.98 from step to step) and fast (0.12, 0.5), and tokens of one sequence clip together (sequences of 256 tokens with
beta-distributed rates, correlation inside a sequence 0.005). Three rates by three token counts, runs of 2,000 steps
from their first step, warm-up included. A regression begins at a random step from 20 to 150 of such a series. Delays
count the step of the change as 1. Not covered: series recorded from real runs.

Run: python benchmarks/alert_quality.py [--json] [--steps 20000] [--repeats 200] [--seed 0]
"""

import argparse
import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mismatch_hooks.live.alert_records import AlertSettings, AlertState
from mismatch_hooks.live.change_detection import Reading
from mismatch_hooks.live.clip_monitor import ALARM, ClipRules, ClipState, observe_clip_fraction
from mismatch_hooks.schema.enums import ModelFamily, NoiseFloor
from mismatch_hooks.schema.thresholds import threshold

RATES = (0.005, 0.01, 0.02)
TOKENS = (1024, 8192, 65536)
RUN_STEPS = 2000
SEQUENCE_TOKENS = 256
SEQUENCE_CORRELATION = 0.005
WARM_UP = 10
ALARMS = (5.0, 10.0, 15.0, ALARM, 30.0)
HORIZON = 200  # steps after the change; not found by then counts as infinite

Detector = Callable[[Sequence[Reading]], list[int]]  # a series in, the steps at which an alarm opens out


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """How one detector did.

    Attributes:
        false_alarms: over all healthy steps.
        healthy_steps: how many those were.
        runs_with_false_alarm: share of the healthy runs with one or more.
        doubling: delays in steps for 0.5 % to 1 % at 8,192 tokens; infinite when not found.
        jump: the same for 0.5 % to 5 %.
    """

    false_alarms: int
    healthy_steps: int
    runs_with_false_alarm: float
    doubling: tuple[float, ...]
    jump: tuple[float, ...]

    def document(self) -> dict[str, Any]:
        """Return the figures under the names that the project reports."""
        return {
            "false_alarms_per_20000": round(self.false_alarms * 20000 / self.healthy_steps, 3),
            "false_alarms": self.false_alarms,
            "healthy_steps": self.healthy_steps,
            "runs_with_false_alarm": round(self.runs_with_false_alarm, 4),
            "median_delay_doubling": _finite(statistics.median(self.doubling)),
            "delay_doubling_p10_p90": _spread(self.doubling),
            "missed_doubling": sum(math.isinf(delay) for delay in self.doubling),
            "median_delay_jump": _finite(statistics.median(self.jump)),
            "delay_jump_p10_p90": _spread(self.jump),
            "missed_jump": sum(math.isinf(delay) for delay in self.jump),
        }


def series(rng: np.random.Generator, rates: NDArray[np.float64], tokens: int) -> list[Reading]:
    """Return readings of one run whose rate wanders around ``rates``, one per step."""
    wander = _autoregressive(rng, len(rates), 0.10, 0.98) + _autoregressive(rng, len(rates), 0.12, 0.5)
    rate = np.minimum(rates * np.exp(wander - (0.10**2 + 0.12**2) / 2), 0.99)
    sequences = tokens // SEQUENCE_TOKENS
    spread = 1.0 / SEQUENCE_CORRELATION - 1.0
    each = rng.beta((rate * spread)[:, None], ((1.0 - rate) * spread)[:, None], size=(len(rate), sequences))
    clipped = rng.binomial(SEQUENCE_TOKENS, each).sum(axis=1)
    return [Reading(step=step, tokens=tokens, clipped=int(count)) for step, count in enumerate(clipped)]


def ours(alarm: float) -> Detector:
    """Return the product's monitor with the given amount of evidence per alert; its absolute limit is on, as always."""
    row = threshold(ModelFamily.DENSE, NoiseFloor.PRODUCTION, routing_replay=False)
    rules = ClipRules(
        limit=row.clip_fraction_suspect_above, settings=AlertSettings(min_steps=WARM_UP), command="", alarm=alarm
    )

    def detect(readings: Sequence[Reading]) -> list[int]:
        state = ClipState()
        opened: list[int] = []
        for reading in readings:
            state, alerts = observe_clip_fraction(state, reading, rules)
            opened += [alert.step for alert in alerts if alert.state is AlertState.OPENED]
        return opened

    return detect


def fixed_threshold(multiple: float) -> Detector:
    """Return an alarm at every crossing of a multiple of the mean of the warm-up."""

    def detect(readings: Sequence[Reading]) -> list[int]:
        limit = multiple * statistics.fmean(reading.fraction for reading in readings[:WARM_UP])
        above = [reading.fraction > limit for reading in readings]
        return [readings[i].step for i in range(WARM_UP, len(readings)) if above[i] and not above[i - 1]]

    return detect


def plain_ewma(weight: float, deviations: float) -> Detector:
    """Return the textbook chart: mean and deviation of the warm-up, an alarm at every crossing of the upper limit."""

    def detect(readings: Sequence[Reading]) -> list[int]:
        warm_up = [reading.fraction for reading in readings[:WARM_UP]]
        mean = statistics.fmean(warm_up)
        limit = mean + deviations * statistics.stdev(warm_up) * math.sqrt(weight / (2.0 - weight))
        average, was_above = mean, False
        alarms: list[int] = []
        for reading in readings[WARM_UP:]:
            average += weight * (reading.fraction - average)
            if average > limit and not was_above:
                alarms.append(reading.step)
            was_above = average > limit
        return alarms

    return detect


def measure(detectors: dict[str, Detector], *, steps: int, repeats: int, seed: int) -> dict[str, Quality]:
    """Return each detector's quality on the same series.

    Args:
        detectors: name to detector.
        steps: healthy steps for each of the nine combinations of rate and token count.
        repeats: regressions of each kind.
        seed: of every series.
    """
    alarms: dict[str, list[int]] = {name: [] for name in detectors}
    healthy_steps = 0
    for readings in _healthy(np.random.default_rng([seed, 0]), steps):
        healthy_steps += len(readings)
        for name, detect in detectors.items():
            alarms[name].append(len(detect(readings)))
    delays: dict[str, dict[str, list[float]]] = {
        kind: {name: [] for name in detectors} for kind in ("doubling", "jump")
    }
    for index, (kind, raised) in enumerate((("doubling", 0.01), ("jump", 0.05))):
        rng = np.random.default_rng([seed, 1 + index])
        for _ in range(repeats):
            change = int(rng.integers(20, 151))
            rates = np.where(np.arange(change + HORIZON) < change, 0.005, raised)
            readings = series(rng, rates, 8192)
            for name, detect in detectors.items():
                found = [step for step in detect(readings) if step >= change]
                delays[kind][name].append(found[0] - change + 1 if found else math.inf)
    return {
        name: Quality(
            false_alarms=sum(alarms[name]),
            healthy_steps=healthy_steps,
            runs_with_false_alarm=statistics.fmean(count > 0 for count in alarms[name]),
            doubling=tuple(delays["doubling"][name]),
            jump=tuple(delays["jump"][name]),
        )
        for name in detectors
    }


def main() -> None:
    """Measure, and print a table or one JSON document."""
    parser = argparse.ArgumentParser(description="False alarms and delays of the clip_fraction alert.")
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    parser.add_argument("--steps", type=int, default=20000, help="healthy steps per rate and token count")
    parser.add_argument("--repeats", type=int, default=200, help="regressions of each kind")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.steps < RUN_STEPS or options.repeats < 1:
        parser.error(f"--steps accepts {RUN_STEPS} or more, --repeats 1 or more")

    detectors = {f"ours, {alarm:g} nats": ours(alarm) for alarm in ALARMS}
    detectors |= {f"fixed, {multiple:g} times the warm-up": fixed_threshold(multiple) for multiple in (2.0, 3.0)}
    detectors |= {f"EWMA 0.2, {deviations:g} deviations": plain_ewma(0.2, deviations) for deviations in (3.0, 6.0)}
    started = time.perf_counter()
    qualities = measure(detectors, steps=options.steps, repeats=options.repeats, seed=options.seed)
    curve = {name: quality.document() for name, quality in qualities.items()}
    document = {
        **curve[f"ours, {ALARM:g} nats"],
        "operating_curve": curve,
        "series": {"rates": RATES, "tokens": TOKENS, "run_steps": RUN_STEPS, "repeats": options.repeats},
        "seed": options.seed,
        "seconds": round(time.perf_counter() - started, 1),
        "machine": machine(),
    }
    if options.json:
        json.dump(document, sys.stdout, indent=2)
        print()
        return
    print(f"{'detector':30} {'false/20000':>12} {'doubling: p10 median p90':>26} {'jump: p10 median p90':>22}")
    for name, figures in curve.items():
        doubling = _row(figures["median_delay_doubling"], figures["delay_doubling_p10_p90"])
        jump = _row(figures["median_delay_jump"], figures["delay_jump_p10_p90"])
        print(f"{name:30} {figures['false_alarms_per_20000']:>12.2f} {doubling:>26} {jump:>22}")
    healthy_steps = document["healthy_steps"]
    print(f"{healthy_steps:,} healthy steps, {options.repeats} regressions of each kind, {document['seconds']} s")
    print("machine:", ", ".join(f"{name} {value}" for name, value in machine().items()))


def machine() -> dict[str, str | int | None]:
    """What the seconds depend on; the figures depend on the seed alone."""
    return {"cores": os.cpu_count(), "python": platform.python_version(), "system": platform.platform()}


def _row(median: float | None, spread: Sequence[float | None]) -> str:
    return " ".join("none" if delay is None else f"{delay:g}" for delay in (spread[0], median, spread[1]))


def _healthy(rng: np.random.Generator, steps: int) -> Iterator[list[Reading]]:
    for rate in RATES:
        for tokens in TOKENS:
            for _ in range(steps // RUN_STEPS):
                yield series(rng, np.full(RUN_STEPS, rate), tokens)


def _autoregressive(rng: np.random.Generator, steps: int, deviation: float, correlation: float) -> NDArray[np.float64]:
    noise = rng.normal(0.0, deviation * math.sqrt(1.0 - correlation**2), size=steps)
    noise[0] = rng.normal(0.0, deviation)
    for step in range(1, steps):
        noise[step] += correlation * noise[step - 1]
    return noise


def _spread(delays: Sequence[float]) -> list[float | None]:
    ordered = sorted(delays)
    return [_finite(ordered[len(ordered) // 10]), _finite(ordered[len(ordered) * 9 // 10])]


def _finite(delay: float) -> float | None:
    return delay if math.isfinite(delay) else None


if __name__ == "__main__":
    main()
