"""Capture calls of an operator inside a live forward, and play captured calls; both engines use this one."""

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from mismatch_hooks.pipeline.bind import BindingError, PatchSite, Site
from mismatch_hooks.pipeline.operator_call import Operands, OperatorCall
from mismatch_hooks.schema.replay import NotReplayableError, PlayedCall

_Implementation = Callable[..., Any]


class CallRecorder:
    """Stands at every site of one factor for one forward: lets the native call happen, and keeps what it was about.

    The forward computes what it would without it. Operands are copied before a call, since an engine's kernel may write
    over them.
    """

    def __init__(self, sites: Sequence[Site], device: torch.device) -> None:
        """Record nothing yet; patch ``sites`` of this object in, one forward long.

        Args:
            sites: every site of the factor.
            device: where this side computes.

        Raises:
            NotReplayableError: no call of the factor can be taken apart.
        """
        self.calls: list[PlayedCall] = []
        self._device = device
        self._seen: dict[int, int] = {}
        self.sites = [replace(site, build=self._recording(site, call)) for site, call in _replayable(sites)]

    def _recording(self, site: PatchSite, call: OperatorCall) -> Callable[[_Implementation], _Implementation]:
        def build(original: _Implementation) -> _Implementation:
            reference = site.build(original)

            def recorded(*args: Any, **kwargs: Any) -> Any:
                place = self._place(site, call)
                operands = call.take(args, kwargs)
                if operands is None:
                    return original(*args, **kwargs)
                kept = _packed(operands)
                returned = original(*args, **kwargs)
                if call.play is None:
                    found = _repeated(call, reference, returned, args, kwargs)
                else:
                    found = _played(call, original, reference, kept, self._device)
                    if call.result is not None and not found.refused:
                        found = replace(found, reproduced=_same_bits(found.native, _rows(call, returned)))
                self.calls.append(replace(found, site=site.site, place=place, operands=kept))
                return returned

            return recorded

        return build

    def _place(self, site: PatchSite, call: OperatorCall) -> str:
        number = self._seen.get(id(site), 0)
        self._seen[id(site)] = number + 1
        return call.places[number % len(call.places)]


def play_calls(sites: Sequence[Site], captured: Sequence[PlayedCall], device: torch.device) -> list[PlayedCall]:
    """Return what this side's two implementations give for calls that the other side captured.

    Args:
        sites: every site of the factor on this side, with nothing bound.
        captured: as the other side's recorder gave them.
        device: where this side computes.

    Raises:
        NotReplayableError: no call of the factor can be taken apart here.
    """
    by_place = {place: (site, call) for site, call in _replayable(sites) for place in call.places}
    references: dict[int, _Implementation] = {}
    played = []
    with torch.no_grad():
        for one in captured:
            site, call = by_place.get(one.place, (None, None))
            if site is None or call is None:
                played.append(PlayedCall(place=one.place, refused=f"there is no {one.place} here"))
                continue
            native = getattr(site.owner, site.name)
            reference = references.setdefault(id(site), site.build(native))
            found = _played(call, native, reference, one.operands, device)
            played.append(replace(found, site=site.site, place=one.place))
    return played


def unpack(packed: str) -> Tensor:
    """Return the result of a played call."""
    return load(base64.b64decode(packed))["rows"]


def _replayable(sites: Sequence[Site]) -> list[tuple[PatchSite, OperatorCall]]:
    found = [(site, site.call) for site in sites if isinstance(site, PatchSite) and site.call is not None]
    if not found:
        raise NotReplayableError("its calls cannot be taken apart into operands")
    return found


def _played(
    call: OperatorCall,
    native: _Implementation,
    reference: _Implementation,
    operands: str,
    device: torch.device,
) -> PlayedCall:
    if call.play is None:
        return PlayedCall(place="", refused="it cannot be called outside a forward of its engine")
    packed = []
    for implementation in (native, reference):
        # Unpacked for each anew: an engine's kernel may write its result over its operands.
        given = {name: tensor.to(device) for name, tensor in load(base64.b64decode(operands)).items()}
        try:
            packed.append(_rows(call, call.play(implementation, given)))
        except (BindingError, NotReplayableError) as error:
            return PlayedCall(place="", refused=str(error).rstrip("."))
    return PlayedCall(place="", native=packed[0], reference=packed[1])


def _repeated(
    call: OperatorCall, reference: _Implementation, returned: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> PlayedCall:
    """What cannot be called outside a forward is called once more inside it."""
    if call.repeat is None:
        return PlayedCall(place="", refused="its calls can be neither played nor repeated")
    native = _rows(call, returned)
    try:
        return PlayedCall(place="", native=native, reference=_rows(call, call.repeat(reference, args, kwargs)))
    except BindingError as error:
        return PlayedCall(place="", refused=str(error).rstrip("."))


def _rows(call: OperatorCall, returned: Any) -> str:
    return _packed({"rows": returned if call.result is None else call.result(returned)})


def _packed(tensors: Operands) -> str:
    plain = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
    return base64.b64encode(save(plain)).decode()


def _same_bits(one: str, other: str) -> bool:
    a, b = unpack(one), unpack(other)
    # As bytes, so that a NaN equals itself.
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
