"""What an operator promises on one side, built from that side's readback, and how two promises are compared."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from mismatch_hooks.schema.enums import DeterminismLevel, PolicyRole
from mismatch_hooks.schema.freeze import FrozenMapping, SchemaError


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveContract:
    """One collective that an operator runs.

    Attributes:
        op: ``"all_reduce"``, ``"all_gather"``, ``"reduce_scatter"``.
        group: which ranks (``"tensor"``).
        group_size: how many of them, 2 or more.
        reduction_order: in words; ``"open"`` where the backend may choose.
        accumulate_precision: dtype of the running sum.
        backend: what runs it, as read back.
        determinism: how far its result is the same bits.
    """

    op: str
    group: str
    group_size: int
    reduction_order: str
    accumulate_precision: str
    backend: str
    determinism: DeterminismLevel

    def __post_init__(self) -> None:
        if isinstance(self.group_size, bool) or not isinstance(self.group_size, int) or self.group_size < 2:
            raise SchemaError(f"CollectiveContract {self.op}: group_size is {self.group_size!r}; accepts 2 or more.")


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorContract:
    """What one operator does on one side.

    Attributes:
        precision: dtype that it stores its result in.
        collectives: in the order in which they run; none on one rank.
        layout: the implementation that runs, as read back.
        extra: the operator's own numbers (epsilon, theta), by the last parts of their readback keys.
    """

    precision: Any
    collectives: tuple[CollectiveContract, ...] = ()
    layout: Any = ""
    extra: Mapping[str, Any] = field(default_factory=FrozenMapping)

    def __post_init__(self) -> None:
        object.__setattr__(self, "collectives", tuple(self.collectives))
        object.__setattr__(self, "extra", FrozenMapping(self.extra))


class ComparisonRule(Enum):
    """How a field of two contracts is compared."""

    MUST_MATCH_BITWISE = "must match bitwise"
    MUST_MATCH_SEMANTICALLY = "must match semantically"
    RECORD_ONLY = "record only"


# What has to match unless a factor says otherwise; implementations are what factors are about, so they are recorded.
DEFAULT_RULES: Mapping[str, ComparisonRule] = FrozenMapping(
    {
        "precision": ComparisonRule.MUST_MATCH_SEMANTICALLY,
        "extra.*": ComparisonRule.MUST_MATCH_SEMANTICALLY,
        "collectives[[]*].op": ComparisonRule.MUST_MATCH_SEMANTICALLY,
        "collectives[[]*].group_size": ComparisonRule.MUST_MATCH_SEMANTICALLY,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonIssue:
    """One field that does not match.

    Attributes:
        path: dotted, with indexes (``"collectives[0].op"``).
        rule: that it broke.
        values: by role; None on a side that has no such field.
    """

    path: str
    rule: ComparisonRule
    values: Mapping[PolicyRole, Any]

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", FrozenMapping(self.values))


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownEquivalence:
    """Two different values of one field that a test has proven to give the same bits.

    Attributes:
        path: the field.
        values: by role, exactly these.
        verified_by: the test, by its node id.
    """

    path: str
    values: Mapping[PolicyRole, Any]
    verified_by: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", FrozenMapping(self.values))
        if not self.verified_by:
            raise SchemaError(f"KnownEquivalence of {self.path}: verified_by is empty; name the test that proves it.")
