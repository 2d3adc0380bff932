"""Which points of the forward are suspicious themselves, and which only pass on what came from above."""

from collections.abc import Mapping, Sequence

from mismatch_hooks.schema.trace import Hypothesis, ModuleComparison, PropagationEdge, RootCause

# Parts of a point's name to the readback keys of the numbers that its operator takes from the model file.
_PARAMETERS = {
    "norm": ("model.norm.",),
    "rope": ("model.rope.",),
    "head": ("model.head.", "model.vocab."),
    "embedding": ("model.vocab.",),
}


def trace_root_causes(
    comparisons: Sequence[ModuleComparison],
    edges: Sequence[PropagationEdge],
    differing_settings: Sequence[str] = (),
) -> tuple[RootCause, ...]:
    """Rank the points at which the two sides differ: first those whose every input is the same on both sides.

    The walk starts where both sides still agree. A point that differs although all that it is computed from agrees is a
    root: an operator that one side lacks, another parameter, or another implementation. A point with a differing input
    may be wrong as well, and from here nobody can tell: it comes last, as propagated.

    Args:
        comparisons: of the traced points, in the order of the forward.
        edges: which point is computed from which, untraced ones included.
        differing_settings: readback keys that differ between the sides, findings that a proven equivalence explains
            left out.
    """
    by_name = {one.semantic: one for one in comparisons}
    sources: dict[str, list[str]] = {}
    for edge in edges:
        sources.setdefault(edge.target, []).append(edge.source)
    causes = []
    for one in comparisons:
        if one.agrees:
            continue
        inputs = _traced_inputs(one.semantic, sources, by_name)
        differing = [name for name in inputs if not by_name[name].agrees]
        causes.append(_cause(one, inputs, differing, differing_settings))
    return tuple(sorted(causes, key=lambda cause: cause.hypothesis is Hypothesis.PROPAGATED_FROM_UPSTREAM))


def _traced_inputs(
    semantic: str, sources: Mapping[str, Sequence[str]], traced: Mapping[str, ModuleComparison]
) -> list[str]:
    """The nearest points upstream that were traced, through those that were not."""
    found: list[str] = []
    waiting, seen = list(sources.get(semantic, ())), set[str]()
    while waiting:
        name = waiting.pop(0)
        if name in seen:
            continue
        seen.add(name)
        if name in traced:
            found.append(name)
        else:
            waiting += sources.get(name, ())
    return found


def _cause(
    one: ModuleComparison, inputs: Sequence[str], differing: Sequence[str], differing_settings: Sequence[str]
) -> RootCause:
    if one.missing_on is not None:
        reason = f"{one.missing_on.value} has no complete record of it."
        return RootCause(semantic=one.semantic, hypothesis=Hypothesis.MISSING_OPERATOR, reason=reason)
    if differing:
        reason = f"what it is computed from differs already ({', '.join(differing)})."
        return RootCause(semantic=one.semantic, hypothesis=Hypothesis.PROPAGATED_FROM_UPSTREAM, reason=reason)
    same = f"its input is the same on both sides ({', '.join(inputs) or 'the tokens'})"
    prefixes = [prefix for part, found in _PARAMETERS.items() if part in one.semantic for prefix in found]
    settings = [key for key in differing_settings if key.startswith(tuple(prefixes))] if prefixes else []
    if settings:
        reason = f"{same}, and {', '.join(settings)} differ."
        return RootCause(semantic=one.semantic, hypothesis=Hypothesis.DIFFERENT_PARAMETER, reason=reason)
    reason = f"{same}, and so are the parameters that were read back."
    return RootCause(semantic=one.semantic, hypothesis=Hypothesis.DIFFERENT_IMPLEMENTATION, reason=reason)
