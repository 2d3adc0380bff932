"""Where the two sides stop agreeing inside the model, point by point."""

from dataclasses import dataclass
from enum import Enum

from mismatch_hooks.schema.enums import PolicyRole
from mismatch_hooks.schema.freeze import SchemaError


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleComparison:
    """What the two sides gave at one point of the forward, for the same tokens.

    Attributes:
        semantic: the point, spelled alike on both sides (``"layers.0.input_norm"``).
        tokens: rows compared; 0 where a side has none.
        equal_tokens: rows whose every bit is the same on both sides.
        max_abs: largest absolute difference of two values, in the values' own unit; NaN where values were not kept.
        first_difference: (sequence, token position) of the first row that differs, by sequence, then position.
        missing_on: the side that has no complete record of the point; None where both have one.
    """

    semantic: str
    tokens: int
    equal_tokens: int
    max_abs: float
    first_difference: tuple[int, int] | None = None
    missing_on: PolicyRole | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.equal_tokens <= self.tokens:
            raise SchemaError(f"{self.semantic}: {self.equal_tokens} of {self.tokens} rows cannot be equal.")
        if (self.first_difference is None) != (self.equal_tokens == self.tokens):
            raise SchemaError(
                f"{self.semantic}: {self.equal_tokens} of {self.tokens} rows are equal and the first difference is "
                f"{self.first_difference}; one of the two is wrong."
            )

    @property
    def agrees(self) -> bool:
        """True when both sides have the point and every row of it is the same."""
        return self.missing_on is None and self.equal_tokens == self.tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class PropagationEdge:
    """One point of the forward is computed from another one.

    Attributes:
        source: semantic name of what is read.
        target: semantic name of what is computed.
    """

    source: str
    target: str


class Hypothesis(Enum):
    """Why the two sides differ at a point."""

    MISSING_OPERATOR = "missing_operator"
    DIFFERENT_PARAMETER = "different_parameter"
    DIFFERENT_IMPLEMENTATION = "different_implementation"
    PROPAGATED_FROM_UPSTREAM = "propagated_from_upstream"


@dataclass(frozen=True, slots=True, kw_only=True)
class RootCause:
    """One suspicious point.

    Attributes:
        semantic: the point.
        hypothesis: why it differs.
        reason: one sentence with what it rests on.
    """

    semantic: str
    hypothesis: Hypothesis
    reason: str
