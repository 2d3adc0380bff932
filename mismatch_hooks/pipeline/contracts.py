"""Build an operator's contract from a readback, and compare the contracts of the two sides field by field."""

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from fnmatch import fnmatchcase
from typing import Any

from mismatch_hooks.schema.contract import (
    DEFAULT_RULES,
    CollectiveContract,
    ComparisonIssue,
    ComparisonRule,
    KnownEquivalence,
    OperatorContract,
)
from mismatch_hooks.schema.enums import DeterminismLevel, PolicyRole
from mismatch_hooks.schema.factor import MismatchFactor
from mismatch_hooks.schema.readback import Readback, Unobservable
from mismatch_hooks.schema.score import Score

# Readback keys that hold an operator's own numbers.
_EXTRA = {"rope": "model.rope.", "norm": "model.norm.", "head": "model.head.", "embedding": "model.vocab."}
# Operators that add up, or put together, what the ranks of a tensor-parallel group hold.
_COLLECTIVES = {"linear": ("all_reduce", "all_reduce"), "embedding": ("all_reduce",), "head": ("all_gather",)}

# fp64 values that passed through fp32, or through the text of a config file, agree to this share of themselves.
SEMANTIC_TOLERANCE = 2.0**-23


def contract_of(readback: Readback, operator: str) -> OperatorContract:
    """Return what one side does for an operator, from nothing but its readback.

    Args:
        readback: of the side.
        operator: as in ``operator.<operator>.implementation``.
    """
    precision = readback.effective(_precision_key(operator))
    prefix = _EXTRA.get(operator, "")
    own = [key for key in readback.settings if prefix and key.startswith(prefix)]
    return OperatorContract(
        precision=precision,
        collectives=tuple(_collectives(readback, operator, precision)),
        layout=readback.effective(f"operator.{operator}.implementation"),
        extra={key.removeprefix(prefix): readback.effective(key) for key in own},
    )


def _collectives(readback: Readback, operator: str, precision: Any) -> Iterator[CollectiveContract]:
    ranks = readback.effective("parallel.tensor")
    if not isinstance(ranks, int) or ranks < 2:
        return
    backend = readback.effective("parallel.tensor.backend")
    # The variable pins NCCL's choice and nobody else's.
    pinned = "nccl" in str(backend) and not isinstance(readback.effective("environment.NCCL_ALGO"), Unobservable)
    for op in _COLLECTIVES.get(operator, ()):
        yield CollectiveContract(
            op=op,
            group="tensor",
            group_size=ranks,
            reduction_order="none" if op == "all_gather" else "pinned by NCCL_ALGO" if pinned else "open",
            accumulate_precision=str(precision),
            backend=str(backend),
            determinism=DeterminismLevel.STABLE_ACROSS_RUNS if pinned else DeterminismLevel.NONE,
        )


def compare_contracts(
    rollout: OperatorContract,
    training: OperatorContract,
    rules: Mapping[str, ComparisonRule] = DEFAULT_RULES,
    equivalences: Sequence[KnownEquivalence] = (),
) -> tuple[ComparisonIssue, ...]:
    """Return every field that breaks its rule; a collective that only one side has is one issue, never cut off.

    Args:
        rollout: what the rollout side does.
        training: what the training side does.
        rules: path or glob to rule, first match wins; a field that no rule names is recorded only.
        equivalences: proven; each suppresses exactly the finding whose path and values it names.
    """
    ours, theirs = dict(_flat(training)), dict(_flat(rollout))
    issues = []
    for path in sorted(ours.keys() | theirs.keys()):
        rule = next((rule for pattern, rule in rules.items() if fnmatchcase(path, pattern)), ComparisonRule.RECORD_ONLY)
        left, right = theirs.get(path), ours.get(path)
        if _matches(rule, left, right) or any(_explains(one, path, left, right) for one in equivalences):
            continue
        values = {PolicyRole.ROLLOUT: left, PolicyRole.TRAINING: right}
        issues.append(ComparisonIssue(path=path, rule=rule, values=values))
    return tuple(issues)


def contract_findings(rollout: Readback, training: Readback, factors: Sequence[MismatchFactor]) -> tuple[str, ...]:
    """Return the readback keys of everything that the operators' contracts demand to match and that does not.

    Args:
        rollout: the settings in effect on the rollout side.
        training: likewise.
        factors: their rules and proven equivalences are applied, each to its own operator.
    """
    found: dict[str, None] = {}
    for factor in factors:
        if factor.contract:
            left, right = (contract_of(side, factor.contract) for side in (rollout, training))
            for issue in compare_contracts(left, right, factor.comparison_rules, factor.equivalences):
                found[_readback_key(factor.contract, issue.path)] = None
    return tuple(found)


def _readback_key(operator: str, path: str) -> str:
    if path.startswith("extra."):
        return _EXTRA[operator] + path.removeprefix("extra.")
    if path == "precision":
        return _precision_key(operator)
    return f"operator.{operator}.implementation" if path == "layout" else f"operator.{operator}.{path}"


def _precision_key(operator: str) -> str:
    return "model.head.dtype" if operator == "head" else "model.dtype"


def _explains(known: KnownEquivalence, path: str, left: Any, right: Any) -> bool:
    # Not ==: what was proven for 0.0 or 1 says nothing of -0.0 or True.
    rollout, training = known.values[PolicyRole.ROLLOUT], known.values[PolicyRole.TRAINING]
    return known.path == path and same_bits(rollout, left) and same_bits(training, right)


def _flat(contract: OperatorContract) -> Iterator[tuple[str, Any]]:
    yield "precision", contract.precision
    yield "layout", contract.layout
    for name, value in contract.extra.items():
        yield f"extra.{name}", value
    for index, collective in enumerate(contract.collectives):
        for one in fields(collective):
            yield f"collectives[{index}].{one.name}", getattr(collective, one.name)


def _matches(rule: ComparisonRule, left: Any, right: Any) -> bool:
    if rule is ComparisonRule.RECORD_ONLY:
        return True
    if isinstance(left, Unobservable) or isinstance(right, Unobservable):
        return False  # unobservable is not equal
    if rule is ComparisonRule.MUST_MATCH_BITWISE:
        return same_bits(left, right)
    return same_meaning(left, right)


def same_bits(left: Any, right: Any) -> bool:
    """Return whether two values are one and the same: −0.0 is not 0.0, and a NaN equals a NaN of the same payload."""
    if isinstance(left, float) and isinstance(right, float):
        return struct.pack(">d", left) == struct.pack(">d", right)
    return type(left) is type(right) and bool(left == right)


def same_meaning(left: Any, right: Any) -> bool:
    """Return whether two values mean the same: numbers within ``SEMANTIC_TOLERANCE``, NaN equal to NaN."""
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in (left, right))
    if numbers and math.isnan(left) and math.isnan(right):
        return True
    return math.isclose(left, right, rel_tol=SEMANTIC_TOLERANCE) if numbers else bool(left == right)


def repeats_differ(first: Score, repeats: Mapping[str, Score]) -> dict[str, int]:
    """Return the environments in which a pass gave other bits than in the first one, with how many shards differ.

    A contract that claims STABLE_ACROSS_TOPOLOGY has to survive this. Metrics are those of ``first``, whatever came
    after it: a repeat is compared and then forgotten.

    Args:
        first: the pass in the environment that the metrics are of.
        repeats: by the environment's name, the same pass again.
    """
    differing = {
        name: sum(one != other for one, other in zip(first.shards, again.shards, strict=False))
        + abs(len(first.shards) - len(again.shards))
        for name, again in repeats.items()
    }
    return {name: shards for name, shards in differing.items() if shards}
