"""Keep operators on their references while the loop samples and trains, and say which tokens differ all the same.

Everything else in the hooks leaves the run's numbers alone; this changes them on purpose, and only where the config's
``align`` names operators.
"""

import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from mismatch_hooks.live.capture import StepCapture
from mismatch_hooks.live.config import SECTION, ConfigError
from mismatch_hooks.live.overview import surroundings
from mismatch_hooks.live.registry import Registry, UnknownFactorError
from mismatch_hooks.live.tracing import trace_batch
from mismatch_hooks.pipeline.bind import BindingError, RestoreError
from mismatch_hooks.pipeline.discover import discover, unmet_prerequisites
from mismatch_hooks.schema.backend import ScoringBackend
from mismatch_hooks.schema.enums import Choice, Expansion, PlanOutcome, PolicyRole
from mismatch_hooks.schema.plan import Candidate, Surroundings
from mismatch_hooks.schema.score import Binding
from mismatch_hooks.schema.shape import ModelShape

_MOST_TOKENS = 8
_TRACED_STEPS = 3  # a run that is never equal is not traced in every step
_SIDES = {role.value: (role,) for role in PolicyRole}


class Alignment:
    """Bindings that stand for the whole run; without an entry it does nothing and is false.

    Attributes:
        bindings: what each role keeps on its reference.
        steps: steps that were looked at.
        equal_steps: those in which every active token was equal to the bit.
        last_step: the step that was looked at last; None before the first.
        last_unequal: its active tokens that were not equal.
    """

    def __init__(self, bindings: Mapping[PolicyRole, Binding], engines: Mapping[PolicyRole, ScoringBackend]) -> None:
        """Bind nothing yet.

        Args:
            bindings: what each role keeps on its reference; see ``aligned_bindings``.
            engines: both roles.
        """
        self.bindings = bindings
        self.steps = self.equal_steps = self.last_unequal = 0
        self.last_step: int | None = None
        self._engines = engines
        self._held = ExitStack()

    def __bool__(self) -> bool:
        return bool(self.bindings)

    def report(self) -> dict[str, Any]:
        """Return what is kept on its reference, by side, and the account of the steps."""
        operators = {
            role.value: {factor: told["implementation"] for factor, told in sorted(binding.parameters.items())}
            for role, binding in self.bindings.items()
        }
        return {"operators": operators, "steps": self.steps, "equal_steps": self.equal_steps}

    def start(self) -> None:
        """Put every named operator on its reference.

        Raises:
            BindingError: a live model has a form that a reference does not cover; nothing is bound then.
        """
        with ExitStack() as stack:
            for role, binding in self.bindings.items():
                stack.enter_context(self._engines[role].hold(binding))
            self._held = stack.pop_all()

    def stop(self) -> None:
        """Put every operator back; again without an effect.

        Raises:
            RestoreError: an engine is not as it was.
        """
        self._held.close()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Leave the engines as nobody touches them for the length of the block.

        Raises:
            RestoreError: an engine was not as it was before the run, or the operators could not be put back on their
                references.
        """
        self.stop()
        try:
            yield
        finally:
            try:
                self.start()
            except BindingError as refused:
                raise RestoreError(f"{SECTION}.align is not in force any more: {refused}") from refused

    def check(self, capture: StepCapture, *, timeout_s: float) -> "UnequalStep | None":
        """Compare the bits of every active token of a step; None where all are equal.

        Of the first steps that are not, the sequence with the first such token is traced through both engines, which
        has to happen before the step's weights move.

        Args:
            capture: a step whose training log-probs have arrived.
            timeout_s: seconds for the trace.
        """
        tokens, unequal, first = unequal_tokens(capture)
        self.steps += 1
        self.equal_steps += tokens > 0 and not unequal
        self.last_step, self.last_unequal = capture.step, unequal
        if not unequal:
            return None
        where = "not traced: the first unequal steps of the run were"
        if self.steps - self.equal_steps <= _TRACED_STEPS:
            where = self._where(capture, first[0].sequence, timeout_s)
        return UnequalStep(tokens=tokens, unequal=unequal, first=first, where=where)

    def _where(self, capture: StepCapture, sequence: int, timeout_s: float) -> str:
        try:
            found = trace_batch(self._engines, [capture.scoring_sequence(sequence)], timeout_s=timeout_s)
        except (RuntimeError, ValueError, TimeoutError) as error:
            return f"not traced: {type(error).__name__}: {error}"
        said = f"sequence {sequence} by prefill: {found.summary}"
        if all(one.agrees for one in found.comparisons):
            said += " So the difference is in how it was sampled: decoded, in another batch, or from cached blocks."
        return said


def aligned_bindings(
    entries: str | Sequence[str],
    registry: Registry,
    engines: Mapping[PolicyRole, ScoringBackend],
    shape: ModelShape,
) -> dict[PolicyRole, Binding]:
    """Return what each role is kept on for a config's ``align``.

    Args:
        entries: ``"all"``, or ids and globs, each with ``:name`` behind it for another reference than the factor's
            first, and then with ``@rollout`` or ``@training`` for one side alone. ``"all"`` is every operator of the
            model that has a reference here.
        registry: where factors and adapters are.
        engines: both roles.
        shape: parameters of the references.

    Raises:
        ConfigError: an entry names nothing, or something that cannot be kept on a reference here; one sentence.
    """
    every = tuple(registry.factors.values())
    here = surroundings(every, shape.traits, {role: engine.capabilities for role, engine in engines.items()})
    found = {one.factor.id: one for one in discover(every, here)}
    chosen: dict[PolicyRole, dict[str, str]] = {}
    for entry in ("*",) if entries == "all" else entries:
        pattern, side = _split(entry, "@", tuple(_SIDES))
        pattern, _, name = pattern.partition(":")
        for candidate in _candidates(pattern, registry, found, some=entries == "all"):
            for role in _SIDES.get(side, candidate.factor.switch.roles):
                chosen.setdefault(role, {})[candidate.factor.id] = _reference(candidate, name, here)
    return {
        role: Binding(
            role=role,
            choices=dict.fromkeys(references, Choice.REFERENCE),
            parameters={
                factor: {**registry.adapter(factor).parameters(factor, shape), "implementation": reference}
                for factor, reference in references.items()
            },
        )
        for role, references in chosen.items()
    }


def _split(entry: str, mark: str, accepted: Sequence[str]) -> tuple[str, str]:
    name, _, rest = entry.partition(mark)
    if mark in entry and rest not in accepted:
        raise ConfigError(f"{SECTION}.align: got {entry!r}; accepts {' or '.join(accepted)} behind the {mark}.")
    return name, rest


def _candidates(
    pattern: str, registry: Registry, found: Mapping[str, Candidate], *, some: bool
) -> tuple[Candidate, ...]:
    try:
        factors = registry.select([pattern])
    except UnknownFactorError as error:
        raise ConfigError(f"{SECTION}.align: {error}") from None
    some = some or pattern not in registry.factors  # a glob takes what it can; a name has to be kept
    able = tuple(found[factor.id] for factor in factors if not _why_not(found[factor.id]))
    if not able or (not some and len(able) < len(factors)):
        first = next(found[factor.id] for factor in factors if _why_not(found[factor.id]))
        raise ConfigError(f"{SECTION}.align: {first.factor.id} has no reference to be kept on: {_why_not(first)}.")
    return able


def _why_not(candidate: Candidate) -> str:
    if candidate.factor.expansion is not Expansion.STANDARD_FOUR:
        return f"it is a {candidate.factor.expansion.value.replace('_', ' ')}, which measures"
    return "" if candidate.outcome is PlanOutcome.PLANNED else candidate.reason


def _reference(candidate: Candidate, name: str, here: Surroundings) -> str:
    if not name and candidate.reference is not None:
        return candidate.reference.name
    known = {one.name: one for one in candidate.factor.references}
    if name not in known:
        raise ConfigError(
            f"{SECTION}.align: {candidate.factor.id} has no reference {name!r}; accepts {', '.join(known)}."
        )
    unmet = unmet_prerequisites(known[name].prerequisites, here)
    if unmet:
        raise ConfigError(f"{SECTION}.align: {candidate.factor.id}:{name} cannot run here: {'; '.join(unmet)}.")
    return name


@dataclass(frozen=True, slots=True, kw_only=True)
class UnequalToken:
    """An active token whose two log-probs are not the same bits.

    Attributes:
        sequence: index among the step's rollouts.
        position: index in its response.
        rollout: fp32 nats, as sampled.
        training: fp32 nats, as the trainer's forward gave it.
    """

    sequence: int
    position: int
    rollout: float
    training: float


@dataclass(frozen=True, slots=True, kw_only=True)
class UnequalStep:
    """A step of an aligned run that is not equal on every token.

    Attributes:
        tokens: active tokens.
        unequal: those that are not the same bits on both sides.
        first: the first of them.
        where: one sentence: the first module that differs, or why that is not known.
    """

    tokens: int
    unequal: int
    first: tuple[UnequalToken, ...]
    where: str


def unequal_tokens(capture: StepCapture, *, most: int = _MOST_TOKENS) -> tuple[int, int, tuple[UnequalToken, ...]]:
    """Return how many active tokens there are, how many are not equal as fp32 bits, and the first of those.

    A log-prob that is missing, or no number, equals nothing.
    """
    tokens, unequal = 0, 0
    first: list[UnequalToken] = []
    for index in capture.covered:
        sampled = capture.sequences[index].rollout_logprobs
        mask = capture.masks[index].tolist()
        for position, (training, rollout, active) in enumerate(
            zip(capture.training_row(index), sampled, mask, strict=True)
        ):
            if not active:
                continue
            tokens += 1
            if rollout is not None and rollout == rollout and _bits(rollout) == _bits(training):
                continue
            unequal += 1
            if len(first) < most:
                value = float("nan") if rollout is None else rollout
                first.append(UnequalToken(sequence=index, position=position, rollout=value, training=training))
    return tokens, unequal, tuple(first)


def _bits(value: float) -> bytes:
    return struct.pack(">f", value)
