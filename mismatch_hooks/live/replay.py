"""Play an operator's live calls through the native and the reference implementation of both sides.

End to end a reference can be checked only where every other operator is on its own. Alone it can be checked anywhere:
two references that are one reference give one result for one set of operands.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from mismatch_hooks.schema.backend import ScoringBackend
from mismatch_hooks.schema.enums import PolicyRole
from mismatch_hooks.schema.replay import Distance, NotReplayableError, OperatorReplay, PlayedCall
from mismatch_hooks.schema.score import Binding, ScoringSequence

if TYPE_CHECKING:
    from torch import Tensor

# Of a forward that is there for its operands only; every layer is called whatever its length.
_TOKENS = 32


@runtime_checkable
class Replayable(Protocol):
    """An engine whose operators' calls can be captured and played."""

    def record_calls(
        self, binding: Binding, sequence: ScoringSequence, *, timeout_s: float | None = None
    ) -> tuple[PlayedCall, ...]:
        """Return every call of the factor that ``binding`` names, in one native prefill of a sequence.

        Raises:
            NotReplayableError: the calls cannot be captured in this engine.
            BindingError: the live model has a form that the factor's reference does not cover.
        """
        ...

    def play_calls(self, binding: Binding, captured: Sequence[PlayedCall]) -> tuple[PlayedCall, ...]:
        """Return what this engine's two implementations give for calls that the other one captured.

        Raises:
            NotReplayableError: see ``record_calls``.
            BindingError: likewise.
        """
        ...


def replay_operator(
    engines: Mapping[PolicyRole, ScoringBackend],
    bindings: Mapping[PolicyRole, Binding],
    sequences: Sequence[ScoringSequence],
    *,
    timeout_s: float | None = None,
) -> tuple[OperatorReplay, ...]:
    """Return what became of one factor's operator on the operands of either side; one record a side that has it.

    Nothing may be bound while this runs, and nothing is afterwards.

    Args:
        engines: both roles.
        bindings: role to the factor's parameters, for the roles that have the factor.
        sequences: of these the shortest is taken, and its first tokens at most.
        timeout_s: seconds for each of the short forwards.
    """
    sequence = _short(sequences)
    found = []
    for role, binding in bindings.items():
        other = next((one for one in bindings if one is not role), None)
        engine = engines[role]
        try:
            captured = _replayable(engine).record_calls(binding, sequence, timeout_s=timeout_s)
        except NotReplayableError as error:
            found.append(OperatorReplay(captured_on=role, reason=f"{role.value}: {error}"))
            continue
        played: Sequence[PlayedCall] = ()
        reason = "" if captured else f"{role.value}: no call was seen, as in a compiled or captured forward"
        if other is not None and captured:
            try:
                played = _replayable(engines[other]).play_calls(bindings[other], captured)
            except NotReplayableError as error:
                reason = f"{other.value}: {error}"
        found.append(_compared(role, other, captured, played, reason))
    return tuple(found)


def disagreement(replays: Sequence[OperatorReplay]) -> str:
    """Return the sentence that says where the two sides' references are not one; empty where none was seen apart."""
    for one in replays:
        apart = one.references
        if apart is not None and apart.differing:
            return (
                f"On the same operands, captured on {one.captured_on.value}, the two sides' references differ in "
                f"{apart.differing} of {apart.elements} values by up to {apart.max_ulp} ULP of {apart.dtype}, at "
                f"{one.place}: they are not one reference."
            )
    return ""


def distance(one: "Tensor", other: "Tensor") -> Distance:
    """Return how far two tensors of one shape are apart.

    Raises:
        NotReplayableError: they have different shapes.
    """
    import torch

    if one.shape != other.shape:
        raise NotReplayableError(f"results of shapes {list(one.shape)} and {list(other.shape)} cannot be compared")
    dtype = torch.promote_types(one.dtype, other.dtype)
    a, b = one.to(dtype), other.to(dtype)
    both_nan = a.isnan() & b.isnan()
    apart = (a != b) & ~both_nan
    absolute = (a.double() - b.double()).abs().masked_fill(~apart, 0.0).nan_to_num(nan=torch.inf, posinf=torch.inf)
    steps = (_ordered(a) - _ordered(b)).abs().masked_fill(~apart, 0)
    return Distance(
        elements=a.numel(),
        differing=int(apart.sum()),
        max_abs=float(absolute.max()) if a.numel() else 0.0,
        max_ulp=int(steps.max()) if a.numel() else 0,
        dtype=str(dtype).removeprefix("torch."),
    )


def _ordered(values: "Tensor") -> "Tensor":
    """Integers in the order of the floats, without a gap; both zeros are 0."""
    import torch

    signed = {2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()]
    bits = values.contiguous().view(signed).long()
    # Of a negative number the other bits grow with its size.
    return torch.where(bits < 0, torch.iinfo(signed).min - bits, bits)


def _compared(
    role: PolicyRole,
    other: PolicyRole | None,
    captured: Sequence[PlayedCall],
    played: Sequence[PlayedCall],
    reason: str,
) -> OperatorReplay:
    from mismatch_hooks.live.call_recorder import unpack

    rows: dict[str, list[tuple[str, Distance]]] = {}
    refused = [reason] if reason else []
    for index, own in enumerate(captured):
        theirs = played[index] if played else None
        results = {}
        for side, call in ((role, own), (other, theirs)):
            if side is None or call is None:
                continue
            if call.refused:
                refused.append(f"{side.value}: {call.refused}")
            else:
                results[side] = (unpack(call.native), unpack(call.reference))
                rows.setdefault(side.value, []).append((own.place, distance(*results[side])))
        if len(results) == len(PolicyRole):
            (a_native, a_reference), (b_native, b_reference) = results.values()
            rows.setdefault("natives", []).append((own.place, distance(a_native, b_native)))
            rows.setdefault("references", []).append((own.place, distance(a_reference, b_reference)))
    worst = {name: _largest(found) for name, found in rows.items()}
    seen = [call.reproduced for call in captured if call.reproduced is not None]
    return OperatorReplay(
        captured_on=role,
        calls=len(captured),
        departs={side: worst[side.value][1] for side in PolicyRole if side.value in worst},
        natives=worst["natives"][1] if "natives" in worst else None,
        references=worst["references"][1] if "references" in worst else None,
        place=_place(worst),
        reproduced=sum(seen) if seen else None,
        reason="; ".join(dict.fromkeys(refused)),
    )


def _largest(found: Sequence[tuple[str, Distance]]) -> tuple[str, Distance]:
    place, most = max(found, key=lambda one: one[1].max_ulp)
    return place, Distance(
        elements=sum(one.elements for _, one in found),
        differing=sum(one.differing for _, one in found),
        max_abs=max(one.max_abs for _, one in found),
        max_ulp=most.max_ulp,
        dtype=most.dtype,
    )


def _place(worst: Mapping[str, tuple[str, Distance]]) -> str:
    for name in ("references", "natives", *(role.value for role in PolicyRole)):
        if name in worst and worst[name][1].differing:
            return worst[name][0]
    return ""


def _short(sequences: Sequence[ScoringSequence]) -> ScoringSequence:
    tokens = min(
        ((*one.prompt_token_ids, *one.response_token_ids) for one in sequences if one.response_token_ids), key=len
    )[:_TOKENS]
    return ScoringSequence(prompt_token_ids=tokens[:-1], response_token_ids=tokens[-1:], response_mask=(True,))


def _replayable(engine: ScoringBackend) -> Replayable:
    if not isinstance(engine, Replayable):
        raise NotReplayableError(f"{type(engine).__name__} has no record_calls and play_calls")
    return engine
