"""Compare what two traced passes saw, point by point in the order of the forward."""

import base64
import math
from collections.abc import Mapping, Sequence

import numpy as np

from mismatch_hooks.schema.activation import ActivationCapture, ModuleActivations, forward_position
from mismatch_hooks.schema.enums import PolicyRole
from mismatch_hooks.schema.trace import ModuleComparison

_POINTS = {
    "embedding": "the embedding",
    "final_norm": "the final norm",
    "head": "the head",
    "query_key_value": "query, key and value",
    "rope": "query and key after rope",
    "attention_residual": "residual stream after attention",
    "gate_up": "gate and up",
}


def compare_activations(captures: Mapping[PolicyRole, ActivationCapture]) -> tuple[ModuleComparison, ...]:
    """Return one comparison of each point that at least one side recorded, in the order of the forward.

    Points whose rows are not of one width on both sides are not compared; see ``incomparable``.

    Args:
        captures: one of each role.

    Raises:
        ValueError: the two went over different tokens, or one is not of the role that it is given for.
    """
    rollout, training = captures[PolicyRole.ROLLOUT], captures[PolicyRole.TRAINING]
    for role, capture in captures.items():
        if capture.role is not role:
            raise ValueError(f"captures: got a capture of {capture.role.value} for {role.value}; accepts its own.")
    if rollout.token_digests != training.token_digests:
        raise ValueError("captures: got traces of different tokens; accepts two over the same sequences, in one order.")
    sides = _by_name(captures)
    skipped = incomparable(captures)
    return tuple(
        _compared(semantic, {role: modules.get(semantic) for role, modules in sides.items()})
        for semantic in sorted(set().union(*sides.values()) - set(skipped), key=forward_position)
    )


def incomparable(captures: Mapping[PolicyRole, ActivationCapture]) -> dict[str, str]:
    """Return the points that both sides recorded in rows of different widths, each with the reason."""
    sides = _by_name(captures)
    rollout, training = sides[PolicyRole.ROLLOUT], sides[PolicyRole.TRAINING]
    widths = {name: (training[name].width, module.width) for name, module in rollout.items() if name in training}
    return {
        name: f"its rows hold {there} values on training and {here} on rollout"
        for name, (there, here) in widths.items()
        if there != here
    }


def differing(comparisons: Sequence[ModuleComparison]) -> tuple[str, ...]:
    """Return the points at which both sides have rows and some differ, in the order given."""
    return tuple(one.semantic for one in comparisons if one.missing_on is None and not one.agrees)


def summarise(comparisons: Sequence[ModuleComparison]) -> str:
    """Return one sentence: up to where the two sides agree to the bit, and where they first do not.

    Args:
        comparisons: in the order of the forward.
    """
    compared = [one for one in comparisons if one.missing_on is None]
    missing = len(comparisons) - len(compared)
    unseen = f"; {missing} more points were recorded on one side only" if missing else ""
    if not compared:
        return f"Nothing was compared{unseen}."
    first = next((one for one in compared if not one.agrees), None)
    if first is None:
        return f"No difference in any layer: {len(compared)} points, {compared[0].tokens} tokens{unseen}."
    last = next((one for one in reversed(compared[: compared.index(first)]) if one.agrees), None)
    until = "" if last is None else f"identical up to {describe(last.semantic)}, "
    size = "" if math.isnan(first.max_abs) else f", by up to {first.max_abs:.3g}"
    differ = f"{first.tokens - first.equal_tokens} of {first.tokens} tokens{size}"
    sentence = f"{until}first difference at {describe(first.semantic)} ({differ}){unseen}."
    return sentence[0].upper() + sentence[1:]


def describe(semantic: str) -> str:
    """Return a traced point as a person would say it: ``"layer 1 input norm"``, ``"layer 0's output"``."""
    start, _, point = semantic.rpartition(".")
    if not start:
        return _POINTS[semantic]
    layer = start.removeprefix("layers.")
    if point == "output":
        return f"layer {layer}'s output"
    return f"layer {layer} {_POINTS.get(point, point.replace('_', ' '))}"


def _by_name(captures: Mapping[PolicyRole, ActivationCapture]) -> dict[PolicyRole, dict[str, ModuleActivations]]:
    return {role: {module.semantic: module for module in capture.modules} for role, capture in captures.items()}


def _compared(semantic: str, sides: Mapping[PolicyRole, ModuleActivations | None]) -> ModuleComparison:
    rollout, training = sides[PolicyRole.ROLLOUT], sides[PolicyRole.TRAINING]
    if rollout is None or training is None:
        missing = PolicyRole.ROLLOUT if rollout is None else PolicyRole.TRAINING
        return ModuleComparison(semantic=semantic, tokens=0, equal_tokens=0, max_abs=math.nan, missing_on=missing)
    rows = [
        ((index, position), ours == theirs)
        for index, (mine, other) in enumerate(zip(rollout.sequences, training.sequences, strict=True))
        for position, (ours, theirs) in enumerate(zip(mine.digests, other.digests, strict=True))
    ]
    different = [place for place, equal in rows if not equal]
    return ModuleComparison(
        semantic=semantic,
        tokens=len(rows),
        equal_tokens=len(rows) - len(different),
        max_abs=_largest_difference(rollout, training) if different else 0.0,
        first_difference=different[0] if different else None,
    )


def _largest_difference(rollout: ModuleActivations, training: ModuleActivations) -> float:
    pairs = list(zip(rollout.sequences, training.sequences, strict=True))
    if not all(one.values and other.values for one, other in pairs if one.digests):
        return math.nan
    return max(float(np.abs(_values(one.values) - _values(other.values)).max()) for one, other in pairs if one.digests)


def _values(encoded: str) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    return np.frombuffer(base64.b64decode(encoded), dtype="<f4").astype(np.float64)
