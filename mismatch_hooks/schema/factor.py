"""Declarations: one possible cause of mismatch, the switch that flips it and the reference both sides can take."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product

from mismatch_hooks.schema.contract import DEFAULT_RULES, ComparisonRule, KnownEquivalence
from mismatch_hooks.schema.enums import (
    Arm,
    Choice,
    DeterminismLevel,
    ExecutionPath,
    Expansion,
    FactorCategory,
    PolicyRole,
    RebindCost,
    ReferenceAuthority,
    SettingChannel,
    Value,
)
from mismatch_hooks.schema.environment import RequiredSetting
from mismatch_hooks.schema.freeze import FrozenMapping, SchemaError, freeze

# The arm of a sweep in which both sides are native.
BASELINE = "native"
# Evidence that a verdict of any factor needs; operators add their own.
BASE_EVIDENCE = ("effective-config readback", "model-state fingerprint", "library versions")
# One release as PEP 440 writes it, local label included ("2.13.0+cpu"); no specifier, wildcard or leading "v".
_EXACT_VERSION = re.compile(
    r"[0-9]+(\.[0-9]+)*((a|b|rc)[0-9]+)?(\.post[0-9]+)?(\.dev[0-9]+)?(\+[a-z0-9]+(\.[a-z0-9]+)*)?"
)
_COMMIT, _DIGEST = re.compile(r"[0-9a-f]{7,40}"), re.compile(r"sha256:[0-9a-f]{64}")
_OPERATOR = re.compile(r"\w+::\w+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """The setting that a factor flips.

    Attributes:
        path: dotted key, as in the readback; ``"rope.implementation"``.
        allowed: every value that may be bound; the first is native.
        roles: the sides that have this switch.
        rebind_cost: what changing it costs.
        channel: where it is set; an argument of a scoring pass is set by the engine, everything else by the adapter.
    """

    path: str
    allowed: tuple[str | int | float, ...]
    roles: tuple[PolicyRole, ...] = (PolicyRole.ROLLOUT, PolicyRole.TRAINING)
    rebind_cost: RebindCost = RebindCost.PER_REQUEST
    channel: SettingChannel = SettingChannel.MODULE_PATCH

    def __post_init__(self) -> None:
        object.__setattr__(self, "allowed", freeze(self.allowed))
        values = len(set(self.allowed))
        if values < 2 or values < len(self.allowed):
            raise SchemaError(
                f"Switch {self.path}: allowed is {self.allowed}; a switch needs two or more values, each once."
            )
        if self.allowed[0] != Choice.NATIVE.value:
            raise SchemaError(f"Switch {self.path}: the first value is {self.allowed[0]!r}; accepts 'native' there.")

    @property
    def values(self) -> tuple[Value, ...]:
        """What may be bound besides native, as a binding spells it."""
        return tuple(Choice.REFERENCE if value == Choice.REFERENCE.value else value for value in self.allowed[1:])


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryPin:
    """An exact build that a reference was verified with.

    Attributes:
        package: distribution name.
        version: one exact version; ranges and specifiers are refused.
        commit: of the source, where a version does not name it: 7 to 40 hexadecimal digits.
        container_digest: of the image that it was verified in, ``sha256:`` and 64 hexadecimal digits.
    """

    package: str
    version: str
    commit: str = ""
    container_digest: str = ""

    def __post_init__(self) -> None:
        if not _EXACT_VERSION.fullmatch(self.version):
            raise SchemaError(
                f"LibraryPin {self.package}: got version {self.version!r}; accepts one exact observed "
                "version such as '1.2.3'."
            )
        if self.commit and not _COMMIT.fullmatch(self.commit):
            raise SchemaError(
                f"LibraryPin {self.package}: got commit {self.commit!r}; accepts 7 to 40 hexadecimal digits, not a "
                "branch or a tag."
            )
        if self.container_digest and not _DIGEST.fullmatch(self.container_digest):
            raise SchemaError(
                f"LibraryPin {self.package}: got container_digest {self.container_digest!r}; accepts 'sha256:' and 64 "
                "hexadecimal digits, not a tag."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Prerequisites:
    """What must hold before a factor, or one implementation of its reference, can run.

    Attributes:
        required_packages: distribution name to a PEP 440 specifier; checked against installed versions, never by
            importing.
        required_ops: torch operators that have to be registered in this process (``"_C::rms_norm"``).
        device: ``"cuda"`` when a CUDA device is needed, else empty.
        min_device_count: devices needed.
        required_model_traits: traits that the model's shape must have (``"rope"``, ``"qk_norm"``, ``"moe"``).
        blocked_by: what is missing here and nothing on a host can supply, one phrase each; while there is one, it is
            declared, listed and never run.
    """

    required_packages: Mapping[str, str] = field(default_factory=FrozenMapping)
    required_ops: tuple[str, ...] = ()
    device: str = ""
    min_device_count: int = 1
    required_model_traits: tuple[str, ...] = ()
    blocked_by: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "required_packages", FrozenMapping(self.required_packages))
        if self.device not in ("", "cuda"):
            raise SchemaError(f"Prerequisites.device: got {self.device!r}; accepts '' or 'cuda'.")
        for name in self.required_ops:
            if not _OPERATOR.fullmatch(name):
                raise SchemaError(f"Prerequisites.required_ops: got {name!r}; accepts 'namespace::name'.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceImplementation:
    """One implementation that both roles can be switched to for a factor.

    Attributes:
        name: unique within the factor; ``"fp32"``.
        authority: why it may be believed.
        covers_paths: paths on which it must agree with itself bitwise; the self-check of ``both_reference``.
        prerequisites: what must hold for it to run; the first implementation whose prerequisites hold is used.
        required_settings: what each side that has the switch must have in effect for its bits to mean anything.
        pinned_libraries: the exact build of every library that it calls.
        determinism: how far its result is the same bits; one that claims every topology is repeated under each
            environment of its factor's ``repeat_under`` before an arm is read.
        verified_on: where its numbers were seen, in words (``"CPU"``); ``"not run on a GPU yet"`` where they were not.
    """

    name: str
    authority: ReferenceAuthority
    covers_paths: tuple[ExecutionPath, ...]
    prerequisites: Prerequisites = Prerequisites()
    required_settings: tuple[RequiredSetting, ...] = ()
    pinned_libraries: tuple[LibraryPin, ...] = ()
    determinism: DeterminismLevel = DeterminismLevel.STABLE_ACROSS_RUNS
    verified_on: str

    def __post_init__(self) -> None:
        pinned = {pin.package for pin in self.pinned_libraries}
        unpinned = sorted(set(self.prerequisites.required_packages) - pinned)
        if unpinned:
            raise SchemaError(
                f"ReferenceImplementation {self.name}: {', '.join(unpinned)} is needed and not pinned; add the exact "
                "version that it was verified with to pinned_libraries."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSite:
    """A place in one role's engine that the factor covers.

    Attributes:
        role: the side.
        name: as a person would name it (``"model.layers.*.self_attn.rotary_emb"``).
    """

    role: PolicyRole
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MismatchFactor:
    """One possible cause of rollout–training mismatch.

    Attributes:
        id: ``operator.factor``; the declaring file is named after the last segment.
        category: where the difference enters.
        question: what a person would ask, one sentence.
        switch: the setting that is flipped.
        expansion: which arms it is examined with.
        references: candidates, preferred first; none in a sweep, which measures and cannot attribute.
        call_sites: every place that must run what is bound; none where nothing is bound in the live process.
        prerequisites: what must hold whatever the reference.
        pitfalls: ids of guards that concern this factor.
        comparison_rules: how the two sides' contracts of this operator are compared: field path or glob to rule, first
            match wins; what no rule names is recorded only.
        equivalences: different values of one field that a test has proven to give the same bits.
        required_evidence: what a verdict needs beside ``BASE_EVIDENCE``: names of ``pipeline.evidence.EVIDENCE``, or
            dotted readback keys that have to be observable on every role of the switch.
        repeat_under: environment variable to the values under every combination of which the reference must give the
            same bits; never a setting that the run has to have.
        live_value: of a sweep, the value that the live run itself has where a scoring pass has another; empty where
            native is what the run has.
        recommendation: what to do when this factor is accused; ``{side}`` is filled in.
    """

    id: str
    category: FactorCategory
    question: str
    switch: Switch
    expansion: Expansion = Expansion.STANDARD_FOUR
    references: tuple[ReferenceImplementation, ...] = ()
    call_sites: tuple[CallSite, ...] = ()
    prerequisites: Prerequisites = Prerequisites()
    pitfalls: tuple[str, ...] = ()
    comparison_rules: Mapping[str, ComparisonRule] = DEFAULT_RULES
    equivalences: tuple[KnownEquivalence, ...] = ()
    required_evidence: tuple[str, ...] = ()
    repeat_under: Mapping[str, tuple[str, ...]] = field(default_factory=FrozenMapping)
    live_value: str = ""
    recommendation: str = ""

    def __post_init__(self) -> None:
        for name in ("comparison_rules", "repeat_under"):
            object.__setattr__(self, name, FrozenMapping(getattr(self, name)))
        for name in ("equivalences", "required_evidence"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        segments = self.id.split(".")
        if len(segments) != 2 or not all(part.isidentifier() and part == part.lower() for part in segments):
            raise SchemaError(
                f"MismatchFactor.id: got {self.id!r}; accepts 'operator.factor', both lower-case identifiers."
            )
        if self.expansion is Expansion.PAIRWISE:
            raise SchemaError(
                f"{self.id}: pairwise is what follows for a factor that was found to be coupled; declare standard_four."
            )
        if self.expansion is Expansion.STANDARD_FOUR and not self.prerequisites.blocked_by:
            if not self.references or self.switch.values != (Choice.REFERENCE,) or len(self.switch.roles) < 2:
                raise SchemaError(
                    f"{self.id}: four arms need a reference, the values ('native', 'reference') and both roles."
                )
        elif self.references and self.expansion is not Expansion.STANDARD_FOUR:
            raise SchemaError(f"{self.id}: {self.expansion.value} has no use for references; remove them.")
        empty = [name for name, values in self.repeat_under.items() if not values]
        if empty:
            raise SchemaError(f"{self.id}: repeat_under names no value of {', '.join(empty)}; name one or drop it.")
        claims = [one.name for one in self.references if one.determinism is DeterminismLevel.STABLE_ACROSS_TOPOLOGY]
        if bool(claims) != bool(self.repeat_under):
            raise SchemaError(
                f"{self.id}: {', '.join(claims) or 'no reference'} claims to be stable across topologies and "
                f"repeat_under is {dict(self.repeat_under)}; a claim needs environments to be repeated under, and they "
                "need a claim."
            )
        if self.live_value and (self.live_value not in self.switch.values or len(self.switch.roles) != 1):
            raise SchemaError(
                f"{self.id}: live_value is {self.live_value!r}; accepts one of {self.switch.values}, of one role."
            )
        missing = [role.value for role in self.switch.roles if role not in {site.role for site in self.call_sites}]
        if self._is_bound_live and missing:
            raise SchemaError(f"{self.id}: no call site for {', '.join(missing)}; every role of the switch needs one.")

    @property
    def needs_adapter(self) -> bool:
        """True when an adapter has to find places in the live models."""
        return self._is_bound_live and self.switch.channel is not SettingChannel.SCORING_PASS

    @property
    def _is_bound_live(self) -> bool:
        if self.expansion is Expansion.CONTENT or self.prerequisites.blocked_by:
            return False
        return self.switch.rebind_cost is RebindCost.PER_REQUEST

    @property
    def operator(self) -> str:
        """The first segment of the id."""
        return self.id.split(".")[0]

    @property
    def contract(self) -> str:
        """The operator whose contracts the two sides are compared by, as in ``operator.<operator>.*``; "" if none."""
        first, *rest = self.switch.path.split(".")
        return rest[0] if first == "operator" and len(rest) == 2 else ""

    def is_about(self, setting: str) -> bool:
        """Return whether this factor's own arms show what a readback key changes: its switch, or its operator's."""
        area, operator, *_ = *setting.split("."), ""
        return setting == self.switch.path or (area in ("model", "operator") and operator == self.contract != "")

    @property
    def evidence(self) -> tuple[str, ...]:
        """Everything that a verdict needs to have seen beside the passes."""
        return BASE_EVIDENCE + self.required_evidence

    @property
    def repeats(self) -> tuple[Mapping[str, str], ...]:
        """Every combination of the environments of ``repeat_under``."""
        names = tuple(self.repeat_under)
        found = product(*self.repeat_under.values()) if names else ()
        return tuple(FrozenMapping(zip(names, values, strict=True)) for values in found)

    @property
    def arms(self) -> dict[str, dict[PolicyRole, Value]]:
        """Every arm by name with what each role is bound to, the one in which both sides are native first."""
        if self.expansion is Expansion.STANDARD_FOUR:
            return {arm: {**arm.choices} for arm in Arm}
        native: dict[PolicyRole, Value] = dict.fromkeys(PolicyRole, Choice.NATIVE)
        arms = {BASELINE: native}
        if self.expansion is Expansion.VALUE_SWEEP:
            arms |= {
                f"{role.value}={value}": {**native, role: value}
                for role in self.switch.roles
                for value in self.switch.values
            }
        return arms

    @property
    def live_arm(self) -> tuple[str, PolicyRole] | None:
        """The arm of a sweep that the live run is in, and whose value it is; None where that is the native one."""
        (role, *_) = self.switch.roles
        return (f"{role.value}={self.live_value}", role) if self.live_value else None

    @property
    def passes(self) -> tuple[tuple[PolicyRole, Value], ...]:
        """The scoring passes that this factor adds to a native one of each role."""
        if self.expansion is Expansion.CONTENT:
            return ()
        return tuple((role, value) for role in self.switch.roles for value in self.switch.values)
