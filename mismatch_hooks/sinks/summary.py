"""What a run has come to, folded from its events: the document of ``--json`` and the closing words of the console."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mismatch_hooks.schema.freeze import thaw
from mismatch_hooks.sinks.event import Event, spell_nonfinite

#: Metrics of which the largest value of the run is kept beside the last one.
PEAKS = ("clip_fraction", "clip_fraction_signed", "dlogp_mean", "dlogp_p99", "dlogp_max", "ratio_max", "nonfinite")


@dataclass(slots=True)
class RunningSummary:
    """The state of a run after the events observed so far.

    Attributes:
        state: ``started`` until the run's last event says otherwise; empty before its first.
        steps: steps seen.
        last_step: the latest step; None before the first.
        last: metrics of the latest step.
        peak: largest finite value of each of ``PEAKS``.
        host: what the loop logged in the latest step.
        overhead: the latest overhead metrics.
        verdicts: the latest verdict of each factor, origin and path, with its step.
        left_out: factors that are not examined, with the reason.
        not_reached: factors for which the latest ablation had no time left.
        ablation_off: why no ablation runs; empty while they do.
        differences: settings that differ between the sides, from the latest readback.
        alignment: what is kept on its references, by side, and in how many steps every token was equal; empty where
            nothing is.
        alerts: the latest event of each kind of alert, with its step.
        errors: cause to count.
        missing: sink to the steps of which something is missing there.
        paths: name to path.
    """

    state: str = ""
    steps: int = 0
    last_step: int | None = None
    last: dict[str, Any] = field(default_factory=dict)
    peak: dict[str, float] = field(default_factory=dict)
    host: dict[str, Any] = field(default_factory=dict)
    overhead: dict[str, Any] = field(default_factory=dict)
    verdicts: dict[tuple[str, str, str], dict[str, Any]] = field(default_factory=dict)
    left_out: list[dict[str, Any]] = field(default_factory=list)
    not_reached: list[str] = field(default_factory=list)
    ablation_off: str = ""
    differences: list[dict[str, Any]] = field(default_factory=list)
    alignment: dict[str, Any] = field(default_factory=dict)
    alerts: dict[str, dict[str, Any]] = field(default_factory=dict)
    errors: dict[str, int] = field(default_factory=dict)
    missing: dict[str, list[int]] = field(default_factory=dict)
    paths: dict[str, str] = field(default_factory=dict)

    def observe(self, event: Event) -> None:
        """Take in the next event."""
        payload = event.payload
        match event.type:
            case "run":
                self.state = payload.get("state", "started")
                plan, ablation = payload.get("plan", {}), payload.get("ablation", {})
                self.left_out = thaw(plan.get("left_out", self.left_out))
                self.not_reached = thaw(ablation.get("not_reached", self.not_reached))
                self.ablation_off = ablation.get("off", plan.get("off", self.ablation_off))
                self.errors |= thaw(payload.get("errors", {}))
                self.missing |= thaw(payload.get("missing", {}))
                self.paths |= thaw(payload.get("paths", {}))
                self.alignment = thaw(payload.get("alignment", {})) or self.alignment
            case "alignment":
                self.alignment = {key: thaw(payload[key]) for key in ("operators", "steps", "equal_steps")}
            case "step":
                self.steps += 1
                self.last_step = event.step
                self.last = thaw(payload.get("metrics", {}))
                self.host = thaw(payload.get("host", {}))
                self._raise_peaks(self.last)
            case "overhead":
                self.overhead = thaw(payload.get("metrics", {}))
            case "verdict":
                key = (str(payload["factor"]), str(payload["origin"]), str(payload["path"]))
                self.not_reached = thaw(payload.get("not_reached", ()))
                self.verdicts[key] = {"step": event.step} | thaw(payload)
            case "readback":
                self.differences = thaw(payload.get("differences", ()))
            case "alert":
                self.alerts[str(payload["kind"])] = {"step": event.step} | thaw(payload)
            case "error":
                self.errors[str(payload["cause"])] = int(payload["count"])

    def to_plain(self) -> dict[str, Any]:
        """Return JSON-ready data; non-finite values are spelled as in the event file."""
        document = {
            "state": self.state,
            "steps": self.steps,
            "last_step": self.last_step,
            "metrics": {"last": self.last, "peak": self.peak},
            "host": self.host,
            "overhead": self.overhead,
            "verdicts": list(self.verdicts.values()),
            "left_out": self.left_out,
            "not_reached": self.not_reached,
            "ablation_off": self.ablation_off,
            "differences": self.differences,
            "alignment": self.alignment,
            "alerts": list(self.alerts.values()),
            "errors": self.errors,
            "missing": self.missing,
            "paths": self.paths,
        }
        plain: dict[str, Any] = spell_nonfinite(document)
        return plain

    def _raise_peaks(self, metrics: Mapping[str, Any]) -> None:
        for name in PEAKS:
            found = metrics.get(name)
            if isinstance(found, int | float) and not math.isnan(found):
                self.peak[name] = max(found, self.peak.get(name, -math.inf))
