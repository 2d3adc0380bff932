"""Known traps as data: what each looks like, what it really is, and what stands guard over it."""

from dataclasses import dataclass
from enum import Enum

from mismatch_hooks.schema.enums import NoiseFloor
from mismatch_hooks.schema.freeze import SchemaError


class FailureMode(Enum):
    """How a trap misleads."""

    STRUCTURAL_FALSE_POSITIVE = "structural false positive"
    SILENT_FALSE_NEGATIVE = "silent false negative"
    MISSING_INSTRUMENTATION = "missing instrumentation"
    CONFIG_DEFAULT_TRAP = "config-default trap"
    CONVENTION_MISMATCH = "convention mismatch"
    RESOURCE_LIMIT = "resource limit"


class GuardPlace(Enum):
    """Where a trap is caught."""

    PITFALLS_CLEAR = "gate pitfalls_clear"
    NOTE = "note on gate pitfalls_clear"
    EVIDENCE_COMPLETE = "gate evidence_complete"
    SHARDS_COMPLETE = "gate shards_complete"
    READBACK = "row of the readback report"
    CAPTURE = "refused by the capture"
    BINDING = "refused by the binding"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pitfall:
    """One way to misread a measurement.

    Attributes:
        id: unique; what a factor's ``pitfalls`` name.
        failure_mode: how it misleads.
        symptom: what a person sees.
        actual_cause: what is really going on.
        guard: where it is caught.
        lowest_floor: the lowest noise floor at which the guard runs.
    """

    id: str
    failure_mode: FailureMode
    symptom: str
    actual_cause: str
    guard: GuardPlace = GuardPlace.PITFALLS_CLEAR
    lowest_floor: NoiseFloor = NoiseFloor.SINGLE_LAYER_ANCHOR

    def __post_init__(self) -> None:
        if not self.id.isidentifier() or self.id != self.id.lower():
            raise SchemaError(f"Pitfall.id: got {self.id!r}; accepts a lower-case identifier.")
        if not self.symptom or not self.actual_cause:
            raise SchemaError(f"Pitfall {self.id}: symptom and actual_cause say something; one of them is empty.")
