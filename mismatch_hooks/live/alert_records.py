"""What an alert says, and the settings of the detector."""

from dataclasses import dataclass
from enum import Enum, IntEnum

from mismatch_hooks.schema.freeze import SchemaError

TRANSIENT_STEPS = 5  # a cause that lasted for fewer steps than this, first to last, was a spike and not a trend


class AlertKind(Enum):
    """The cause that an alert is about; at most one alert of each kind is open."""

    CLIP_FRACTION = "clip_fraction"
    DLOGP_MEAN = "dlogp_mean"
    NONFINITE = "nonfinite"
    WEIGHTS = "weights"
    ALIGNMENT = "alignment"
    TOKEN_COVERAGE = "token_coverage"
    MISSING_METRIC = "missing_metric"


class Severity(IntEnum):
    """How much an alert matters, in order."""

    INFO = 0
    WARNING = 1
    CRITICAL = 2


class AlertState(Enum):
    """What happened to the alert in this step."""

    OPENED = "opened"
    ESCALATED = "escalated"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertSettings:
    """How much of the run's own start the relative detection learns from.

    Attributes:
        window: steps in the final baseline; it is never moved again.
        min_steps: steps in the provisional baseline; until then only the absolute limits are in force.
    """

    window: int = 50
    min_steps: int = 10

    def __post_init__(self) -> None:
        for name, least in (("min_steps", 3), ("window", self.min_steps)):
            given = getattr(self, name)
            if isinstance(given, bool) or not isinstance(given, int) or given < least:
                floor = "min_steps" if name == "window" else least
                raise SchemaError(f"{name}: got {given!r}; accepts an integer of {floor} or more.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """One message about one cause.

    Attributes:
        kind: the cause.
        severity: as of this step.
        state: what happened in this step.
        title: under 64 characters, as W&B wants it.
        text: what happened, since when, and which command shows more.
        since_step: first step that shows it, as estimated now.
        step: the step that this message is about.
        value: the metric in this step; NaN where it did not arrive.
        baseline: what the run's own first steps showed, or None when there is no such figure.
        transient: True on closing when it lasted a few steps only.
        regression: False for what the first step showed already, which the scheduled ablation will explain as well.
        recommendation: what to do now; empty when there is nothing to do.
    """

    kind: AlertKind
    severity: Severity
    state: AlertState
    title: str
    text: str
    since_step: int
    step: int
    value: float
    baseline: float | None
    transient: bool = False
    regression: bool = True
    recommendation: str = ""

    def __post_init__(self) -> None:
        if len(self.title) >= 64:
            raise SchemaError(f"Alert: the title {self.title!r} has {len(self.title)} characters; accepts 63 or fewer.")
