"""What is really in effect on one side: a flat mapping of dotted keys, each value with its source, or unobservable."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mismatch_hooks.schema.enums import PolicyRole, Source
from mismatch_hooks.schema.freeze import FrozenMapping, SchemaError, freeze

NOTHING_REQUESTED = "nothing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The effective value of one setting.

    Attributes:
        effective: plain data as read; a mapping from module names to values where layers differ.
        source: where ``effective`` came from. ``LIVE_MODULE``: a live object has it. ``CLASS_DEFAULT``: likewise, and
            it is what the class takes unasked, while somebody asked for another. The others repeat what was said.
        where: the object that was read, as a person would name it (``"model.layers.0.self_attn.rotary_emb"``).
        requested: what somebody asked for, or ``"nothing"``; its own fact, never a stand-in for ``effective``.
        requested_by: who asked (``"engine argument"``, ``"model file"``); empty when nobody did.
    """

    effective: Any
    source: Source
    where: str = ""
    requested: Any = NOTHING_REQUESTED
    requested_by: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "effective", freeze(self.effective))
        object.__setattr__(self, "requested", freeze(self.requested))

    @property
    def differs_from_request(self) -> bool:
        """True when somebody asked for a value and another one is in effect."""
        return bool(self.requested != NOTHING_REQUESTED and self.requested != self.effective)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unobservable:
    """A setting that exists and could not be read; it equals nothing, not even another unobservable."""

    reason: str
    requested: Any = NOTHING_REQUESTED

    def __post_init__(self) -> None:
        if not self.reason:
            raise SchemaError("Unobservable.reason is empty; say why the setting cannot be read.")
        object.__setattr__(self, "requested", freeze(self.requested))


@dataclass(frozen=True, slots=True, kw_only=True)
class Readback:
    """All settings of one side at one moment.

    Attributes:
        role: the side.
        settings: dotted key to ``Reading`` or ``Unobservable``; both sides spell a shared setting the same way.
    """

    role: PolicyRole
    settings: Mapping[str, Reading | Unobservable] = field(default_factory=FrozenMapping)

    def __post_init__(self) -> None:
        object.__setattr__(self, "settings", FrozenMapping(self.settings))

    def effective(self, key: str) -> Any:
        """Return the effective value of ``key``; an ``Unobservable`` where it was not read or does not exist."""
        found = self.settings.get(key)
        if found is None:
            return Unobservable(reason=f"the {self.role.value} engine reports no setting {key}")
        return found.effective if isinstance(found, Reading) else found
