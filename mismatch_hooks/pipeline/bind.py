"""Hold implementations replaced in a live engine, count what ran, and put everything back."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import FunctionType, MethodType
from typing import Any

from mismatch_hooks.schema.enums import Choice, SwitchStatus
from mismatch_hooks.schema.score import CallCount, SwitchState

_ABSENT = object()


class BindingError(RuntimeError):
    """A binding could not be applied; the engine is as it was."""


class RestoreError(RuntimeError):
    """Something else changed a patched attribute; the engine is not known to be as it was."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PatchSite:
    """One attribute of one live object that a factor's reference replaces.

    Attributes:
        factor: factor id.
        site: the call site as the factor declares it.
        owner: the module, class or object that holds the attribute.
        name: the attribute.
        build: from the implementation found there to the replacement; called at entry, once.
        calls_per_forward: how often one model forward calls the replacement here.
    """

    factor: str
    site: str
    owner: Any
    name: str
    build: Callable[[Callable[..., Any]], Callable[..., Any]]
    calls_per_forward: int


@dataclass(slots=True)
class CallCounter:
    """Calls of each bound implementation since the last reset, counted by the implementation itself."""

    _calls: dict[tuple[str, str], int] = field(default_factory=dict)

    def reset(self) -> None:
        """Start a pass at zero."""
        self._calls.clear()

    def add(self, site: PatchSite) -> None:
        """Count one call."""
        key = (site.factor, site.site)
        self._calls[key] = self._calls.get(key, 0) + 1

    def counts(self, sites: Sequence[PatchSite], *, forwards: int, rank: int) -> tuple[CallCount, ...]:
        """Return one count per declared call site; several patched objects of one call site add up."""
        expected: dict[tuple[str, str], int] = {}
        for site in sites:
            key = (site.factor, site.site)
            expected[key] = expected.get(key, 0) + site.calls_per_forward * forwards
        return tuple(
            CallCount(factor=factor, site=name, rank=rank, expected=calls, observed=self._calls.get((factor, name), 0))
            for (factor, name), calls in sorted(expected.items())
        )


class _Replacement:
    """What stands in a patched attribute: counts and runs the reference; once its block has ended, the original."""

    __slots__ = ("_active", "_counter", "_is_method", "_original", "_reference", "site")

    def __init__(self, site: PatchSite, original: Callable[..., Any], counter: CallCounter) -> None:
        self.site = site
        self._original = original
        self._reference = site.build(original)
        self._counter = counter
        self._active = True
        # A function in a class body binds to its instance; so must what stands in its place.
        found = inspect.getattr_static(site.owner, site.name)
        self._is_method: bool = isinstance(site.owner, type) and (
            found._is_method if isinstance(found, _Replacement) else isinstance(found, FunctionType)
        )

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return MethodType(self, instance) if self._is_method and instance is not None else self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._active:  # a wrapper of somebody else may hold on to us
            return self._original(*args, **kwargs)
        self._counter.add(self.site)
        return self._reference(*args, **kwargs)

    def end(self) -> None:
        self._active = False


@contextmanager
def patched(sites: Sequence[PatchSite], counter: CallCounter) -> Iterator[None]:
    """Hold every site replaced for the length of the block; restore in reverse, whatever happens.

    Raises:
        RestoreError: an attribute holds something that is neither ours nor what was there; it is left as found.
    """
    with ExitStack() as stack:
        for site in sites:
            stack.enter_context(_patched(site, counter))
        yield


@contextmanager
def _patched(site: PatchSite, counter: CallCounter) -> Iterator[None]:
    # vars, not getattr: an inherited method must not come back as the subclass's own.
    own = vars(site.owner).get(site.name, _ABSENT)
    replacement = _Replacement(site, getattr(site.owner, site.name), counter)
    setattr(site.owner, site.name, replacement)
    try:
        yield
    finally:
        replacement.end()
        _restore(site, own, replacement)


def _restore(site: PatchSite, own: Any, replacement: _Replacement) -> None:
    found = vars(site.owner).get(site.name, _ABSENT)
    if found is own:
        return  # somebody put the original back before us; the readback of the pass has shown it
    if found is not replacement:
        raise RestoreError(
            f"{_name(site.owner)}.{site.name} holds {found!r}, not ours; unload the tool that patched it."
        )
    if own is _ABSENT:
        delattr(site.owner, site.name)
    else:
        setattr(site.owner, site.name, own)


def read_switches(
    requested: dict[str, Choice], sites: dict[str, Sequence[PatchSite]], *, rank: int
) -> tuple[SwitchState, ...]:
    """Return what the live objects hold for each factor, whatever was asked for.

    Args:
        requested: factor id to the choice in the binding.
        sites: factor id to every place its reference would replace.
        rank: the engine rank that reads.
    """
    return tuple(_read_switch(factor, choice, sites[factor], rank) for factor, choice in sorted(requested.items()))


def _read_switch(factor: str, requested: Choice, sites: Sequence[PatchSite], rank: int) -> SwitchState:
    if not sites:
        return SwitchState(
            factor=factor,
            rank=rank,
            requested=requested,
            effective=None,
            status=SwitchStatus.UNSUPPORTED,
            trace=("the live model has no call site of this factor",),
        )
    held = [_holds_reference(site) for site in sites]
    trace = tuple(
        f"{site.site}: {_name(site.owner)}.{site.name} holds {'the reference' if is_ours else 'native'}"
        for site, is_ours in zip(sites, held, strict=True)
        if is_ours is not (requested is Choice.REFERENCE)
    )
    if all(held) or not any(held):
        effective = Choice.REFERENCE if all(held) else Choice.NATIVE
        status = SwitchStatus.APPLIED if effective is requested else SwitchStatus.FELL_BACK
        return SwitchState(
            factor=factor, rank=rank, requested=requested, effective=effective, status=status, trace=trace[:8]
        )
    return SwitchState(
        factor=factor, rank=rank, requested=requested, effective=None, status=SwitchStatus.FELL_BACK, trace=trace[:8]
    )


def _name(owner: Any) -> str:
    return str(getattr(owner, "__name__", type(owner).__name__))


def _holds_reference(site: PatchSite) -> bool:
    found = vars(site.owner).get(site.name, _ABSENT)
    return isinstance(found, _Replacement) and found.site.factor == site.factor
