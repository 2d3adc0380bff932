"""What an ablation will do: which factors run, in which order, at what cost, and what is left out and why."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from mismatch_hooks.schema.enums import DeterminismLevel, Origin, PlanOutcome, PolicyRole, RebindCost
from mismatch_hooks.schema.factor import MismatchFactor, ReferenceImplementation
from mismatch_hooks.schema.freeze import FrozenMapping


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What discovery may rely on; gathered by the caller, so that discovery itself reads nothing.

    Attributes:
        packages: installed distribution name to version.
        cuda_devices: visible CUDA devices.
        model_traits: traits of the model's shape.
        ops: torch operators that are registered in this process, of those that a declaration asks for.
        capabilities: role to (switch path to the cost of flipping it there).
    """

    packages: Mapping[str, str]
    cuda_devices: int
    model_traits: tuple[str, ...]
    ops: tuple[str, ...] = ()
    capabilities: Mapping[PolicyRole, Mapping[str, RebindCost]] = field(default_factory=FrozenMapping)

    def __post_init__(self) -> None:
        object.__setattr__(self, "packages", FrozenMapping(self.packages))
        object.__setattr__(self, "capabilities", FrozenMapping(self.capabilities))


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One factor after discovery.

    Attributes:
        factor: the declaration.
        outcome: ``PLANNED`` when it can run here and now.
        reference: the implementation that will run; None when it will not, or the factor has none.
        reason: why it does not run, or which preferred implementations were passed over and why.
    """

    factor: MismatchFactor
    outcome: PlanOutcome
    reference: ReferenceImplementation | None
    reason: str

    @property
    def repeats(self) -> tuple[Mapping[str, str], ...]:
        """The environments that the chosen reference is repeated under; none where it claims less."""
        topology = DeterminismLevel.STABLE_ACROSS_TOPOLOGY
        return self.factor.repeats if self.reference and self.reference.determinism is topology else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The factors of one ablation, cheapest rebind first.

    Attributes:
        origin: what the other factors are bound to.
        cases: what runs, in order.
        left_out: what does not, with the reason.
        background: what is not examined and is on its reference all the same, from ALIGNED.
        fallback: why the origin is not the one that was asked for; empty where it is.
    """

    origin: Origin
    cases: tuple[Candidate, ...]
    left_out: tuple[Candidate, ...]
    background: tuple[Candidate, ...] = ()
    fallback: str = ""

    def starting_with(self, factors: Sequence[str]) -> "Plan":
        """Return the same plan with the named factors first, the others in the order in which they were."""
        first = [case for case in self.cases if case.factor.id in factors]
        return replace(self, cases=(*first, *(case for case in self.cases if case.factor.id not in factors)))

    @property
    def passes(self) -> int:
        """Scoring passes: native once a role, and what each factor adds: its reference, or each value, once a role."""
        added = sum(len(case.factor.passes) for case in self.cases)
        return 2 + added if added else 0

    @property
    def passes_with_proofs(self) -> int:
        """``passes``, one repeat of the origin a role, which proves determinism and restoration, and all repeats.

        Where a reference claims to be stable across topologies, it is repeated under each environment, once a role.
        """
        repeats = sum(len(case.repeats) * len(case.factor.switch.roles) for case in self.cases)
        return self.passes + 2 + repeats if self.passes else 0
