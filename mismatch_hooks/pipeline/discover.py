"""Decide which factors can run here, and with which implementation of their reference."""

from collections.abc import Sequence

from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from mismatch_hooks.schema.enums import Expansion, PlanOutcome, RebindCost
from mismatch_hooks.schema.factor import MismatchFactor, Prerequisites, ReferenceImplementation
from mismatch_hooks.schema.plan import Candidate, Surroundings


def discover(factors: Sequence[MismatchFactor], surroundings: Surroundings) -> tuple[Candidate, ...]:
    """Return one candidate per factor, in the given order; nothing is dropped silently."""
    return tuple(_discover(factor, surroundings) for factor in factors)


def _discover(factor: MismatchFactor, surroundings: Surroundings) -> Candidate:
    unmet = unmet_prerequisites(factor.prerequisites, surroundings)
    if unmet:
        return Candidate(factor=factor, outcome=PlanOutcome.SKIPPED, reference=None, reason="; ".join(unmet))
    if factor.expansion is Expansion.CONTENT:
        return Candidate(factor=factor, outcome=PlanOutcome.PLANNED, reference=None, reason="")
    for role in factor.switch.roles:
        cost = surroundings.capabilities.get(role, {}).get(factor.switch.path)
        if cost is None:
            reason = f"the {role.value} engine has no live switch {factor.switch.path}"
            return Candidate(
                factor=factor, outcome=PlanOutcome.NOT_SWITCHABLE_IN_PROCESS, reference=None, reason=reason
            )
        if cost is not RebindCost.PER_REQUEST:
            reason = f"flipping {factor.switch.path} on the {role.value} engine costs {_words(cost)}"
            return Candidate(
                factor=factor, outcome=PlanOutcome.NOT_SWITCHABLE_IN_PROCESS, reference=None, reason=reason
            )
    if factor.expansion is not Expansion.STANDARD_FOUR:
        return Candidate(factor=factor, outcome=PlanOutcome.PLANNED, reference=None, reason="")
    reference, passed_over = _choose(factor, surroundings)
    if reference is None:
        return Candidate(
            factor=factor, outcome=PlanOutcome.SKIPPED, reference=None, reason="no reference can run: " + passed_over
        )
    return Candidate(factor=factor, outcome=PlanOutcome.PLANNED, reference=reference, reason=passed_over)


def _choose(factor: MismatchFactor, surroundings: Surroundings) -> tuple[ReferenceImplementation | None, str]:
    passed_over: list[str] = []
    for reference in factor.references:
        unmet = unmet_prerequisites(reference.prerequisites, surroundings)
        if not unmet:
            return reference, "; ".join(passed_over)
        passed_over.append(f"{reference.name}: {', '.join(unmet)}")
    return None, "; ".join(passed_over)


def unmet_prerequisites(needs: Prerequisites, surroundings: Surroundings) -> tuple[str, ...]:
    """Return what is missing, one phrase each; installed versions are compared by PEP 440, nothing is imported."""
    unmet = list(needs.blocked_by)
    # A distribution may spell its own name with underscores (transformer_engine does); PEP 503 makes both one name.
    found = {canonicalize_name(name): version for name, version in surroundings.packages.items()}
    for package, wanted in needs.required_packages.items():
        installed = found.get(canonicalize_name(package))
        if installed is None:
            unmet.append(f"{package}{wanted} is not installed")
        elif not SpecifierSet(wanted).contains(installed, prereleases=True):
            unmet.append(f"{package} {installed} is installed and {package}{wanted} is needed")
    if needs.device == "cuda" and surroundings.cuda_devices < needs.min_device_count:
        unmet.append(f"{needs.min_device_count} CUDA device(s) needed, {surroundings.cuda_devices} found")
    unmet += [
        f"the model has no {trait}" for trait in needs.required_model_traits if trait not in surroundings.model_traits
    ]
    unmet += [f"torch has no operator {name} here" for name in needs.required_ops if name not in surroundings.ops]
    return tuple(unmet)


def _words(cost: RebindCost) -> str:
    return {
        RebindCost.PER_REQUEST: "nothing",
        RebindCost.ENGINE_REBUILD: "an engine rebuild",
        RebindCost.PROCESS_GROUP_REBUILD: "new process groups",
        RebindCost.PROCESS_RESTART: "a process restart",
    }[cost]
