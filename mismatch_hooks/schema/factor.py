"""Declarations: one possible cause of mismatch, the switch that flips it and the reference both sides can take."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from mismatch_hooks.schema.enums import ExecutionPath, FactorCategory, PolicyRole, RebindCost, ReferenceAuthority
from mismatch_hooks.schema.freeze import FrozenMapping, SchemaError, freeze

# One release as PEP 440 writes it, local label included ("2.13.0+cpu"); no specifier, wildcard or leading "v".
_EXACT_VERSION = re.compile(
    r"[0-9]+(\.[0-9]+)*((a|b|rc)[0-9]+)?(\.post[0-9]+)?(\.dev[0-9]+)?(\+[a-z0-9]+(\.[a-z0-9]+)*)?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """The setting that a factor flips.

    Attributes:
        path: dotted key, as in the readback; ``"rope.implementation"``.
        allowed: every value that may be bound; the first is native.
        roles: the sides that have this switch.
        rebind_cost: what changing it costs.
    """

    path: str
    allowed: tuple[object, ...]
    roles: tuple[PolicyRole, ...] = (PolicyRole.ROLLOUT, PolicyRole.TRAINING)
    rebind_cost: RebindCost = RebindCost.PER_REQUEST

    def __post_init__(self) -> None:
        object.__setattr__(self, "allowed", freeze(self.allowed))
        values = len(set(self.allowed))
        if values < 2 or values < len(self.allowed):
            raise SchemaError(
                f"Switch {self.path}: allowed is {self.allowed}; a switch needs two or more values, each once."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryPin:
    """An exact version that a reference was verified with.

    Attributes:
        package: distribution name.
        version: one exact version; ranges and specifiers are refused.
    """

    package: str
    version: str

    def __post_init__(self) -> None:
        if not _EXACT_VERSION.fullmatch(self.version):
            raise SchemaError(
                f"LibraryPin {self.package}: got version {self.version!r}; accepts one exact observed "
                "version such as '1.2.3'."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Prerequisites:
    """What must hold before a factor, or one implementation of its reference, can run.

    Attributes:
        packages: distribution name to a PEP 440 specifier; checked against installed versions, never by importing.
        device: ``"cuda"`` when a CUDA device is needed, else empty.
        min_device_count: devices needed.
        model_traits: traits that the model's shape must have (``"rope"``, ``"qk_norm"``, ``"moe"``).
    """

    packages: Mapping[str, str] = field(default_factory=FrozenMapping)
    device: str = ""
    min_device_count: int = 1
    model_traits: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "packages", FrozenMapping(self.packages))
        if self.device not in ("", "cuda"):
            raise SchemaError(f"Prerequisites.device: got {self.device!r}; accepts '' or 'cuda'.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceImplementation:
    """One implementation that both roles can be switched to for a factor.

    Attributes:
        name: unique within the factor; ``"fp32"``.
        authority: why it may be believed.
        covers_paths: paths on which it must agree with itself bitwise; the self-check of ``both_reference``.
        prerequisites: what must hold for it to run; the first implementation whose prerequisites hold is used.
        pins: exact versions of every library that it calls.
        verified_on: where its numbers were seen, in words (``"CPU"``); ``"not run on a GPU yet"`` where they were not.
    """

    name: str
    authority: ReferenceAuthority
    covers_paths: tuple[ExecutionPath, ...]
    prerequisites: Prerequisites = Prerequisites()
    pins: tuple[LibraryPin, ...] = ()
    verified_on: str

    def __post_init__(self) -> None:
        unpinned = sorted(set(self.prerequisites.packages) - {pin.package for pin in self.pins})
        if unpinned:
            raise SchemaError(
                f"ReferenceImplementation {self.name}: {', '.join(unpinned)} is needed and not pinned; add the exact "
                "version that it was verified with to pins."
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
        references: candidates, preferred first.
        call_sites: every place that must run the bound implementation.
        prerequisites: what must hold whatever the reference.
        pitfalls: ids of guards that concern this factor.
        recommendation: what to do when this factor is accused; ``{side}`` is filled in.
    """

    id: str
    category: FactorCategory
    question: str
    switch: Switch
    references: tuple[ReferenceImplementation, ...]
    call_sites: tuple[CallSite, ...]
    prerequisites: Prerequisites = Prerequisites()
    pitfalls: tuple[str, ...] = ()
    recommendation: str = ""

    def __post_init__(self) -> None:
        segments = self.id.split(".")
        if len(segments) != 2 or not all(part.isidentifier() and part == part.lower() for part in segments):
            raise SchemaError(
                f"MismatchFactor.id: got {self.id!r}; accepts 'operator.factor', both lower-case identifiers."
            )
        missing = [role.value for role in self.switch.roles if role not in {site.role for site in self.call_sites}]
        if missing:
            raise SchemaError(f"{self.id}: no call site for {', '.join(missing)}; every role of the switch needs one.")

    @property
    def operator(self) -> str:
        """The first segment of the id."""
        return self.id.split(".")[0]
