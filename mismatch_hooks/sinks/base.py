"""What every sink offers."""

from collections.abc import Sequence
from typing import Protocol

from mismatch_hooks.sinks.event import Event


class SinkError(ValueError):
    """A sink cannot be built or cannot deliver; one sentence that says what to do."""


class Sink(Protocol):
    """A place that events go to.

    Every call but the construction may raise anything and take any time: the fan-out guards them, and makes them from
    one thread, so a sink needs no lock.
    """

    @property
    def name(self) -> str:
        """As in the configuration; unique in a run."""
        ...

    @property
    def confirms_on_emit(self) -> bool:
        """True when an ``emit`` that returned has delivered; else only ``close`` proves it, so it is closed first."""
        ...

    def open(self) -> None:
        """Take what ``emit`` needs: a file, a connection."""
        ...

    def emit(self, event: Event) -> None:
        """Deliver one event."""
        ...

    def close(self) -> None:
        """Deliver what is held back and release everything."""
        ...

    def where(self) -> str:
        """Return where a person finds what was delivered, a path or an address; answers at once, empty for nowhere."""
        ...

    def undelivered(self) -> Sequence[int]:
        """Return the steps that ``emit`` took and that are not known to have arrived; answers at once."""
        ...
