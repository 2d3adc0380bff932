"""Order what can run by what it costs to bind, and keep what cannot with its reason."""

from collections.abc import Mapping, Sequence

from mismatch_hooks.schema.enums import Origin, PlanOutcome, PolicyRole, RebindCost
from mismatch_hooks.schema.plan import Candidate, Plan

# Trait of a model to the switch of the operator that it has by it; every model has those under "".
_OPERATORS = {
    "": (
        "operator.embedding.implementation",
        "operator.linear.implementation",
        "operator.attention.kernel",
        "operator.head.implementation",
    ),
    "rmsnorm": ("operator.norm.implementation",),
    "qk_norm": ("operator.qk_norm.implementation",),
    "rope": ("operator.rope.implementation",),
    "gated_mlp": ("operator.activation.implementation",),
    "moe": ("operator.moe.router", "operator.moe.grouped_gemm"),
}
_OVER_RANKS = "operator.linear.reduction"


def plan(
    candidates: Sequence[Candidate], *, origin: Origin, beside: Sequence[Candidate] = (), needed: Sequence[str] = ()
) -> Plan:
    """Return the cases in order of rebind cost, passes and id, and everything that is left out.

    ALIGNED is a floor only where every operator of the model is on a reference. Where one has none that can run, the
    plan is from NATIVE and says so.

    Args:
        candidates: what is examined.
        origin: what is asked for.
        beside: where the references of operators that are not examined are found; ALIGNED binds them all the same.
        needed: ``needed_operators`` of the model.
    """
    runnable = [candidate for candidate in candidates if candidate.outcome is PlanOutcome.PLANNED]
    runnable.sort(key=lambda one: (one.factor.switch.rebind_cost, len(one.factor.passes), one.factor.id))
    left_out = tuple(candidate for candidate in candidates if candidate.outcome is not PlanOutcome.PLANNED)
    if origin is Origin.NATIVE:
        return Plan(origin=origin, cases=tuple(runnable), left_out=left_out)
    examined = {candidate.factor.id for candidate in runnable}
    background = tuple(
        one
        for one in beside
        if one.factor.switch.path in needed and one.reference is not None and one.factor.id not in examined
    )
    covered = {one.factor.switch.path for one in (*runnable, *background) if one.reference is not None}
    missing = [path for path in needed if path not in covered]
    if missing:
        known = {one.factor.switch.path: one for one in (*candidates, *beside)}
        why = "; ".join(f"{path}: {known[path].reason if path in known else 'no factor has it'}" for path in missing)
        fallback = f"aligned needs a reference for every operator of the model, and some have none here ({why})"
        return Plan(origin=Origin.NATIVE, cases=tuple(runnable), left_out=left_out, fallback=fallback)
    return Plan(origin=origin, cases=tuple(runnable), left_out=left_out, background=background)


def needed_operators(
    traits: Sequence[str], capabilities: Mapping[PolicyRole, Mapping[str, RebindCost]]
) -> tuple[str, ...]:
    """Return the switches of every operator that a model with these traits has, sums over ranks where there are any."""
    of_model = [path for trait, paths in _OPERATORS.items() if not trait or trait in traits for path in paths]
    over_ranks = any(found.get(_OVER_RANKS) is RebindCost.PER_REQUEST for found in capabilities.values())
    return (*of_model, _OVER_RANKS) if over_ranks else tuple(of_model)
