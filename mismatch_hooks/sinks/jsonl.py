"""``events.jsonl``: one event a line, on disk when ``emit`` returns."""

import os
from collections.abc import Sequence
from pathlib import Path

from mismatch_hooks.sinks.base import SinkError
from mismatch_hooks.sinks.event import Event, to_line


class JsonlSink:
    """Append events to ``path``; one write call a line, so that a kill loses at most the line being written."""

    name = "jsonl"
    confirms_on_emit = True

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def open(self) -> None:
        """Open the file; a torn last line of an earlier run is cut off.

        Raises:
            OSError: the folder or the file cannot be written.
        """
        self._opened()

    def emit(self, event: Event) -> None:
        """Write one line.

        Raises:
            SinkError: the line could not be written whole; what was written of it is cut off again.
        """
        descriptor = self._opened()
        line = to_line(event).encode() + b"\n"
        before = os.fstat(descriptor).st_size
        written = 0
        try:
            # A full disk takes a part of the line first and refuses the rest.
            while written < len(line):
                written += os.write(descriptor, line[written:])
        except OSError as error:
            os.ftruncate(descriptor, before)
            raise SinkError(f"{self._path}: {error.strerror}; free space or choose another --out.") from error

    def close(self) -> None:
        """Close the file."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def where(self) -> str:
        """Return the path."""
        return str(self._path)

    def undelivered(self) -> Sequence[int]:
        """Return nothing: an ``emit`` that returned has delivered."""
        return ()

    def _opened(self) -> int:
        if self._descriptor is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            os.ftruncate(self._descriptor, _end_of_last_line(self._descriptor))
        return self._descriptor


def _end_of_last_line(descriptor: int, *, block_bytes: int = 65536) -> int:
    """Return the offset after the last line break; 0 when there is none."""
    end = os.fstat(descriptor).st_size
    while end > 0:
        start = max(0, end - block_bytes)
        found = os.pread(descriptor, end - start, start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0
