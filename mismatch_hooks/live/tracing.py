"""Where inside the model the two sides stop agreeing: one traced pass on each engine, and one more for the sizes."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from mismatch_hooks.model_meta.correspondence import propagation_edges
from mismatch_hooks.pipeline.activations import compare_activations, differing, incomparable, summarise
from mismatch_hooks.pipeline.contracts import contract_findings
from mismatch_hooks.pipeline.trace import trace_root_causes
from mismatch_hooks.schema.activation import ActivationCapture
from mismatch_hooks.schema.backend import ScoringBackend
from mismatch_hooks.schema.enums import PolicyRole
from mismatch_hooks.schema.factor import MismatchFactor
from mismatch_hooks.schema.freeze import FrozenMapping
from mismatch_hooks.schema.score import ScoringSequence
from mismatch_hooks.schema.shape import ModelShape
from mismatch_hooks.schema.trace import ModuleComparison, RootCause

# Points whose sizes are measured by a second pass: where the two sides part, and what follows from it at once.
_SIZED = 3
_MOST_CAUSES = 5


class TracingError(ValueError):
    """The engines or the batch cannot be traced."""


@runtime_checkable
class Traceable(Protocol):
    """An engine that can tell what its modules give."""

    def trace(
        self,
        sequences: Sequence[ScoringSequence],
        *,
        values_of: Sequence[str] = (),
        timeout_s: float | None = None,
    ) -> ActivationCapture:
        """Return a digest of what each module gave for every token, by prefill, under the binding in force."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceReport:
    """What a trace found; numbers and names only.

    Attributes:
        summary: one sentence: up to where both sides agree, and where they first differ.
        comparisons: one per traced point, in the order of the forward.
        causes: the most suspicious points, ranked; none where the shape of the model was not given.
        left_out: role to points that exist there and were not compared, each with the reason.
        passes: traced passes made, over both engines.
        seconds: wall time.
    """

    summary: str
    comparisons: tuple[ModuleComparison, ...]
    causes: tuple[RootCause, ...] = ()
    left_out: Mapping[PolicyRole, Mapping[str, str]] = field(default_factory=FrozenMapping)
    passes: int
    seconds: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "left_out", FrozenMapping(self.left_out))


def trace_batch(
    engines: Mapping[PolicyRole, ScoringBackend],
    sequences: Sequence[ScoringSequence],
    *,
    timeout_s: float,
    shape: ModelShape | None = None,
    factors: Sequence[MismatchFactor] = (),
) -> TraceReport:
    """Trace the same tokens through both engines, each under the binding in force, and say where they first differ.

    The engines score nothing for the run and keep nothing. Where the sides differ, and a pass more on each fits into
    the time, that pass keeps the values of the first points that differ for as long as it takes to measure by how much.

    Args:
        engines: both roles.
        sequences: captured sequences; those with an empty response take no part.
        timeout_s: seconds for all passes.
        shape: of the model, by which suspicious points are told from those that pass on what came from above.
        factors: by whose rules the two sides' parameters are compared, and whose proven equivalences are left out.

    Raises:
        TracingError: an engine has no ``trace``, or no sequence has a response.
        TimeoutError: a pass ran out of time; its engine is idle again.
    """
    started = time.perf_counter()
    traceable = {role: _traceable(role, engine) for role, engine in engines.items()}
    if not any(sequence.response_token_ids for sequence in sequences):
        raise TracingError("sequences: got no response token; accepts at least one sequence with a response.")

    def left() -> float:
        return timeout_s - (time.perf_counter() - started)

    captures = {role: engine.trace(sequences, timeout_s=left()) for role, engine in traceable.items()}
    comparisons, passes = compare_activations(captures), len(captures)
    parted = differing(comparisons)[:_SIZED]
    if parted and left() > timeout_s - left():
        sized = {
            role: engine.trace(sequences, values_of=parted, timeout_s=left()) for role, engine in traceable.items()
        }
        comparisons, passes = compare_activations(sized), passes + len(sized)
    return TraceReport(
        summary=summarise(comparisons),
        comparisons=comparisons,
        causes=_causes(engines, comparisons, shape, factors),
        left_out={role: {**capture.left_out, **incomparable(captures)} for role, capture in captures.items()},
        passes=passes,
        seconds=time.perf_counter() - started,
    )


def _causes(
    engines: Mapping[PolicyRole, ScoringBackend],
    comparisons: Sequence[ModuleComparison],
    shape: ModelShape | None,
    factors: Sequence[MismatchFactor],
) -> tuple[RootCause, ...]:
    if shape is None or all(one.agrees for one in comparisons):
        return ()
    rollout, training = (engines[role].read_back() for role in (PolicyRole.ROLLOUT, PolicyRole.TRAINING))
    findings = contract_findings(rollout, training, factors)
    return trace_root_causes(comparisons, propagation_edges(shape), findings)[:_MOST_CAUSES]


def _traceable(role: PolicyRole, engine: ScoringBackend) -> Traceable:
    if not isinstance(engine, Traceable):
        raise TracingError(
            f"the {role.value} engine is a {type(engine).__name__}, which has no trace; set mismatch_hooks.trace to "
            "false, or give that backend a trace method."
        )
    return engine
