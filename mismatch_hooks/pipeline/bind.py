"""Hold implementations replaced in a live engine, count what ran, and put everything back."""

import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import FunctionType, MethodType
from typing import Any

from mismatch_hooks.pipeline.operator_call import OperatorCall
from mismatch_hooks.schema.enums import Choice, SwitchStatus, Value
from mismatch_hooks.schema.score import CallCount, SwitchState

_ABSENT = object()


class BindingError(RuntimeError):
    """A binding could not be applied; the engine is as it was."""


class RestoreError(RuntimeError):
    """Something else changed a patched attribute; the engine is not known to be as it was."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PatchSite:
    """One callable attribute of one live object that a factor replaces.

    Attributes:
        factor: factor id.
        site: the call site as the factor declares it.
        owner: the module, class or object that holds the attribute.
        name: the attribute.
        build: from the implementation found there to the replacement; called at entry, once.
        calls_per_forward: how often one model forward calls the replacement here; at least, where ``caller`` is given.
        caller: the torch module each of whose calls makes one call here, for a site that a forward calls a varying
            number of times, as an output head is when an engine scores prompts; None elsewhere.
        call: how calls made here are captured and played again; None where they cannot be.
        value: what the switch is set to while this is in place; given by whoever binds.
    """

    factor: str
    site: str
    owner: Any
    name: str
    build: Callable[[Callable[..., Any]], Callable[..., Any]]
    calls_per_forward: int
    caller: Any = None
    call: OperatorCall | None = None
    value: Value = Choice.REFERENCE


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StateSite:
    """One setting of the live process that a factor holds at another value: a flag, a mode, a field.

    Nothing of ours runs in the engine, so what counts as one call is a model forward that found the value in place.

    Attributes:
        factor: factor id.
        site: the call site as the factor declares it.
        read: returns what is in effect now.
        write: sets it.
        held: what it is set to while bound, as ``read`` then returns it.
        value: what the switch is set to meanwhile; given by whoever binds.
    """

    factor: str
    site: str
    read: Callable[[], Any]
    write: Callable[[Any], None]
    held: Any
    value: Value = Choice.REFERENCE


Site = PatchSite | StateSite


@dataclass(slots=True)
class CallCounter:
    """Calls of what is bound since the last reset, counted by the bound implementation itself."""

    _calls: dict[tuple[str, str], int] = field(default_factory=dict)
    _due: dict[tuple[str, str], int] = field(default_factory=dict)

    def reset(self) -> None:
        """Start a pass at zero."""
        self._calls.clear()
        self._due.clear()

    def add(self, site: Site) -> None:
        """Count one call."""
        key = (site.factor, site.site)
        self._calls[key] = self._calls.get(key, 0) + 1

    def add_due(self, site: Site) -> None:
        """Count one call that has to come, seen where it comes from."""
        key = (site.factor, site.site)
        self._due[key] = self._due.get(key, 0) + 1

    def see_forward(self, sites: Sequence[Site]) -> None:
        """Count every state that a model forward which begins now finds in place."""
        for site in sites:
            if isinstance(site, StateSite) and site.read() == site.held:
                self.add(site)

    def counts(self, sites: Sequence[Site], *, forwards: int, rank: int) -> tuple[CallCount, ...]:
        """Return one count per declared call site; several patched objects of one call site add up."""
        expected: dict[tuple[str, str], int] = {}
        for site in sites:
            key = (site.factor, site.site)
            once = 1 if isinstance(site, StateSite) else site.calls_per_forward
            expected[key] = expected.get(key, 0) + once * forwards
        expected = {key: max(calls, self._due.get(key, 0)) for key, calls in expected.items()}
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

    @property
    def replaced(self) -> Any:
        """What stood here before, a method's function unbound."""
        return getattr(self._original, "__func__", self._original)

    def end(self) -> None:
        self._active = False


@contextmanager
def patched(sites: Sequence[Site], counter: CallCounter) -> Iterator[None]:
    """Hold every site replaced for the length of the block; restore in reverse, whatever happens.

    Raises:
        RestoreError: an attribute holds something that is neither ours nor what was there; it is left as found.
    """
    with ExitStack() as stack:
        for site in sites:
            stack.enter_context(_held(site) if isinstance(site, StateSite) else _patched(site, counter))
        yield


@contextmanager
def held_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Hold environment variables of this process at the given values for the length of the block.

    What reads a variable once, as a communicator does when it is built, has to be built inside.
    """
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def held_now(site: Site) -> Any:
    """Return what a site holds at this moment, to be compared by identity or value before and after a binding."""
    return site.read() if isinstance(site, StateSite) else vars(site.owner).get(site.name, _ABSENT)


def is_as_before(site: Site, before: Any) -> bool:
    """Return whether a site holds what ``held_now`` returned before."""
    now = held_now(site)
    return bool(now == before) if isinstance(site, StateSite) else now is before


@contextmanager
def _held(site: StateSite) -> Iterator[None]:
    before = site.read()
    site.write(site.held)
    try:
        yield
    finally:
        found = site.read()
        if found != before:
            if found != site.held:
                raise RestoreError(f"{site.site} reads {found!r}, not the {site.held!r} that was bound; it is left so.")
            site.write(before)


@contextmanager
def _patched(site: PatchSite, counter: CallCounter) -> Iterator[None]:
    # vars, not getattr: an inherited method must not come back as the subclass's own.
    own = vars(site.owner).get(site.name, _ABSENT)
    replacement = _Replacement(site, getattr(site.owner, site.name), counter)
    setattr(site.owner, site.name, replacement)
    watch: Any = None
    try:
        if site.caller is not None:
            watch = site.caller.register_forward_pre_hook(lambda *_: counter.add_due(site))
        yield
    finally:
        replacement.end()
        if watch is not None:
            watch.remove()
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
    requested: Mapping[str, Value], sites: Mapping[str, Sequence[Site]], *, rank: int
) -> tuple[SwitchState, ...]:
    """Return what the live objects hold for each factor, whatever was asked for.

    Args:
        requested: factor id to the choice or value in the binding.
        sites: factor id to every place that the value would be bound at.
        rank: the engine rank that reads.
    """
    return tuple(_read_switch(factor, value, sites[factor], rank) for factor, value in sorted(requested.items()))


def _read_switch(factor: str, requested: Value, sites: Sequence[Site], rank: int) -> SwitchState:
    if not sites:
        return SwitchState(
            factor=factor,
            rank=rank,
            requested=requested,
            effective=None,
            status=SwitchStatus.UNSUPPORTED,
            trace=("the live model has no call site of this factor",),
        )
    found = [_value_at(site, requested) for site in sites]
    trace = tuple(
        f"{_where(site)} holds {_words(value)}" for site, value in zip(sites, found, strict=True) if value != requested
    )
    effective = found[0] if all(value == found[0] for value in found) else None
    status = SwitchStatus.APPLIED if effective == requested and effective is not None else SwitchStatus.FELL_BACK
    return SwitchState(
        factor=factor, rank=rank, requested=requested, effective=effective, status=status, trace=trace[:8]
    )


def _value_at(site: Site, requested: Value) -> Value | None:
    if isinstance(site, StateSite):
        # A state that happens to be what another value would hold is native all the same where native is asked for.
        if requested is Choice.NATIVE:
            return Choice.NATIVE
        return site.value if site.read() == site.held else None
    found = vars(site.owner).get(site.name, _ABSENT)
    while isinstance(found, _Replacement):  # two factors may share an attribute; the later one stands before the other
        if found.site.factor == site.factor:
            return found.site.value
        found = found.replaced
    return Choice.NATIVE


def _where(site: Site) -> str:
    return site.site if isinstance(site, StateSite) else f"{site.site}: {_name(site.owner)}.{site.name}"


def _words(value: Value | None) -> str:
    if isinstance(value, Choice):
        return "the reference" if value is Choice.REFERENCE else "native"
    return "another value" if value is None else repr(value)


def _name(owner: Any) -> str:
    return str(getattr(owner, "__name__", type(owner).__name__))
