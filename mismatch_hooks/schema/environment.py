"""Where and how a comparison ran: what has to be set, what was reused, and the two fingerprints of an execution."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mismatch_hooks.schema.enums import PolicyRole, SettingChannel
from mismatch_hooks.schema.fingerprint import fingerprint
from mismatch_hooks.schema.freeze import FrozenMapping, SchemaError, freeze
from mismatch_hooks.schema.identity import ComparisonIdentity
from mismatch_hooks.schema.readback import Readback, Unobservable


@dataclass(frozen=True, slots=True, kw_only=True)
class RequiredSetting:
    """A setting of an engine that must have a value, or stay within bounds, for a measurement to mean something.

    Attributes:
        key: what a person sets (``"enable_chunked_prefill"``); what findings are reported under.
        readback: where the value in effect is read (``"rollout.chunked_prefill"``); what is looked up.
        channel: where it is set.
        value: that it must have; None where bounds are given, or where any value will do that can be read.
        at_least: smallest integer that will do; None where a value is given.
        only_where: readback key to a text that its effective value contains where this is required at all; everywhere
            when empty.
        guards: id of the pitfall that it guards against.
    """

    key: str
    readback: str
    channel: SettingChannel
    value: Any = None
    at_least: int | None = None
    only_where: Mapping[str, str] = field(default_factory=FrozenMapping)
    guards: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "value", freeze(self.value))
        object.__setattr__(self, "only_where", FrozenMapping(self.only_where))
        if self.value is not None and self.at_least is not None:
            raise SchemaError(f"RequiredSetting {self.key}: give value or at_least, and not both.")
        if self.at_least is not None and not _is_integer(self.at_least):
            raise SchemaError(f"RequiredSetting {self.key}: at_least is {self.at_least!r}; accepts an integer.")

    def broken(self, readback: Readback) -> str:
        """Return one sentence where the setting in effect will not do, else the empty string."""
        if any(text not in str(readback.effective(key)) for key, text in self.only_where.items()):
            return ""
        found = readback.effective(self.readback)
        if isinstance(found, Unobservable):
            return f"{self.key} on {readback.role.value} cannot be read ({found.reason})."
        if self.value is None and self.at_least is None:
            return ""
        if self.at_least is None:
            if type(found) is type(self.value) and found == self.value:
                return ""
            return f"{self.key} on {readback.role.value} is {found!r}; it has to be {self.value!r}."
        if not _is_integer(found):
            return (
                f"{self.key} on {readback.role.value} is {found!r}; accepts an integer, not a {type(found).__name__}."
            )
        if found < self.at_least:
            return f"{self.key} on {readback.role.value} is {found}; it has to be {self.at_least} or more."
        return ""


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReuseKey:
    """What a case needs of the run before it; equal parts are kept, from the process inwards.

    Attributes:
        process: settings that only a new process takes.
        process_group: settings that need new process groups.
        engine: settings that need a new engine.
        request: settings of a single request.
    """

    process: Mapping[str, Any] = field(default_factory=FrozenMapping)
    process_group: Mapping[str, Any] = field(default_factory=FrozenMapping)
    engine: Mapping[str, Any] = field(default_factory=FrozenMapping)
    request: Mapping[str, Any] = field(default_factory=FrozenMapping)

    def __post_init__(self) -> None:
        for name in ("process", "process_group", "engine", "request"):
            object.__setattr__(self, name, FrozenMapping(getattr(self, name)))

    def kept_from(self, before: "ReuseKey") -> tuple[str, ...]:
        """Return the parts that may be kept when a case with the key ``before`` ran last, outermost first."""
        kept: list[str] = []
        for name in ("process", "process_group", "engine", "request"):
            if getattr(self, name) != getattr(before, name):
                break
            kept.append(name)
        return tuple(kept)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentFingerprint:
    """The host and the software that a comparison ran on.

    Attributes:
        python: version.
        torch: version, build label included.
        driver: of the accelerator, by role; empty on a CPU.
        device: in words, by role.
        libraries: ``role:distribution`` to version.
        determinism: environment variables and flags that bear on bits, by ``role:key``.
        own_version: of this library.
        own_revision: digest of this library's sources.
    """

    python: str
    torch: str
    driver: str
    device: str
    libraries: Mapping[str, str]
    determinism: Mapping[str, str]
    own_version: str
    own_revision: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "libraries", FrozenMapping(self.libraries))
        object.__setattr__(self, "determinism", FrozenMapping(self.determinism))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionFingerprint:
    """Everything that a verdict depends on; two verdicts with one digest were made of the same measurement.

    Attributes:
        identity: what was compared.
        environment: where.
        settings: role to its readback.
        implementations: role to (operator to what ran), as read back.
        weights: role to the digest of what is loaded.
        collectives: role to the collectives that ran, in words.
        origin: what the factors that are not examined were bound to.
        thresholds: fingerprint of the threshold table.
    """

    identity: ComparisonIdentity
    environment: EnvironmentFingerprint
    settings: Mapping[PolicyRole, Readback]
    implementations: Mapping[PolicyRole, Mapping[str, Any]]
    weights: Mapping[PolicyRole, str]
    collectives: Mapping[PolicyRole, tuple[str, ...]]
    origin: str
    thresholds: str

    def __post_init__(self) -> None:
        for name in ("settings", "implementations", "weights", "collectives"):
            object.__setattr__(self, name, FrozenMapping(getattr(self, name)))

    @property
    def digest(self) -> str:
        """SHA-256 of all of it, equal across processes and hash seeds."""
        return fingerprint(
            {
                "identity": self.identity,
                "environment": self.environment,
                "origin": self.origin,
                "thresholds": self.thresholds,
                **{
                    name: {role.value: getattr(self, name)[role] for role in getattr(self, name)}
                    for name in ("settings", "implementations", "weights", "collectives")
                },
            }
        )
