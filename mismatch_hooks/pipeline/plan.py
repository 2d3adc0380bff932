"""Order what can run by what it costs to bind, and keep what cannot with its reason."""

from collections.abc import Sequence

from mismatch_hooks.schema.enums import Origin, PlanOutcome
from mismatch_hooks.schema.plan import Candidate, Plan


def plan(candidates: Sequence[Candidate], *, origin: Origin) -> Plan:
    """Return the cases in order of rebind cost, passes and id, and everything that is left out."""
    runnable = [candidate for candidate in candidates if candidate.outcome is PlanOutcome.PLANNED]
    runnable.sort(key=lambda one: (one.factor.switch.rebind_cost, len(one.factor.passes), one.factor.id))
    left_out = tuple(candidate for candidate in candidates if candidate.outcome is not PlanOutcome.PLANNED)
    return Plan(origin=origin, cases=tuple(runnable), left_out=left_out)
