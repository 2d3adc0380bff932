"""One operator's calls, captured in one engine and played again through every implementation of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from mismatch_hooks.schema.enums import PolicyRole
from mismatch_hooks.schema.freeze import FrozenMapping


class NotReplayableError(ValueError):
    """An engine cannot capture or play this operator's calls; the sentence says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedCall:
    """What the two implementations of one side give for one set of operands; plain data that crosses processes.

    Tensors are base64 of the safetensors format, so that no dtype is lost.

    Attributes:
        site: the call site as the factor declares it.
        place: the module, as the rollout's model names it (``"model.layers.0.input_layernorm"``).
        operands: what the call was given, in the form that both sides understand; empty for what was only played.
        native: one tensor, ``rows``; empty where it was refused.
        reference: likewise.
        reproduced: whether playing the native implementation again gave the captured call's own bits; None where the
            call was not captured here, or has no result of its own to look at.
        refused: why there is nothing to compare; empty where there is.
    """

    site: str = ""
    place: str
    operands: str = ""
    native: str = ""
    reference: str = ""
    reproduced: bool | None = None
    refused: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Distance:
    """How far two tensors of one shape are apart.

    Attributes:
        elements: values compared.
        differing: values that are not equal; −0.0 equals +0.0, and NaN equals NaN.
        max_abs: largest absolute difference, in the values' own unit; infinite where one side alone is NaN.
        max_ulp: the same in units in the last place: how many numbers of ``dtype`` lie between the two, plus one;
            thousands around zero, where they lie close together, so it is read beside ``max_abs``.
        dtype: the wider of the two dtypes, by which ``max_ulp`` counts.
    """

    elements: int
    differing: int
    max_abs: float
    max_ulp: int
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorReplay:
    """All calls of one operator in one short forward of one side, played through both sides' implementations.

    Every distance is the largest over the calls; None where nothing could be played.

    Attributes:
        captured_on: the side whose live forward gave the operands.
        calls: calls captured.
        departs: role to how far its native implementation is from its reference, on the same operands.
        natives: how far the two sides' native implementations are apart.
        references: how far the two sides' references are apart; anything but 0 means that they are not one reference.
        place: the module at which ``references``, or else ``natives``, or else ``departs`` is largest.
        reproduced: of ``calls``, those whose own bits came out again when they were played.
        reason: why something is missing; empty where nothing is.
    """

    captured_on: PolicyRole
    calls: int = 0
    departs: Mapping[PolicyRole, Distance] = field(default_factory=FrozenMapping)
    natives: Distance | None = None
    references: Distance | None = None
    place: str = ""
    reproduced: int | None = None
    reason: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "departs", FrozenMapping(self.departs))
