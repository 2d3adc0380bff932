"""The wall between the hooks and the run: nothing that fails or hangs behind it reaches the loop.

This is the only module with ``except Exception``.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from mismatch_hooks.sinks.base import Sink
from mismatch_hooks.sinks.event import Event

_LOG = logging.getLogger("mismatch_hooks")

#: A sink that failed this many times in a row is left alone, and tried again after ``RETRY_AFTER_S``.
FAILURES_IN_A_ROW = 3
RETRY_AFTER_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The first error of one kind under one cause.

    Attributes:
        cause: what was being done.
        message: the exception's type and text, on one line.
        step: the loop's step, or None.
    """

    cause: str
    message: str
    step: int | None


@dataclass(slots=True, kw_only=True)
class Guarded:
    """How a guarded block ended.

    Attributes:
        error: what it raised; None while it runs and when it ended well.
    """

    error: Exception | None = None


@dataclass(slots=True)
class ErrorLedger:
    """Every error that was kept from the run: counted by cause, logged once per cause and type of exception."""

    _counts: dict[str, int] = field(default_factory=dict)
    _seen: set[tuple[str, type[BaseException]]] = field(default_factory=set)
    _firsts: list[Failure] = field(default_factory=list)
    _reported: int = 0

    @property
    def total(self) -> int:
        """Errors so far."""
        return sum(self._counts.values())

    def by_cause(self) -> Mapping[str, int]:
        """Return each cause with its errors so far, in order of first appearance."""
        return dict(self._counts)

    def firsts(self) -> Sequence[Failure]:
        """Return the first error of each cause and type, in order."""
        return tuple(self._firsts)

    def take_unreported(self) -> Sequence[Failure]:
        """Return the entries of ``firsts`` that no earlier call returned."""
        fresh = tuple(self._firsts[self._reported :])
        self._reported = len(self._firsts)
        return fresh

    @contextmanager
    def guard(self, cause: str, *, step: int | None = None) -> Iterator[Guarded]:
        """Keep an ``Exception`` of the block from the caller; KeyboardInterrupt and SystemExit pass through."""
        guarded = Guarded()
        try:
            yield guarded
        except Exception as error:
            guarded.error = error
            self.record(cause, error, step=step)

    def record(self, cause: str, error: BaseException, *, step: int | None = None) -> None:
        """Count an error, and log it when it is the first of its type under ``cause``."""
        self._counts[cause] = self._counts.get(cause, 0) + 1
        if (cause, type(error)) in self._seen:
            return
        self._seen.add((cause, type(error)))
        text = " ".join(str(error).split())
        failure = Failure(
            cause=cause, message=f"{type(error).__name__}: {text}" if text else type(error).__name__, step=step
        )
        self._firsts.append(failure)
        at = "" if step is None else f" at step {step}"
        _LOG.warning("%s failed%s and training goes on: %s", cause, at, failure.message)
        _LOG.debug("%s failed%s", cause, at, exc_info=error)


class Fanout:
    """Give every event to every sink, each on a daemon thread of its own that the loop waits for at most ``timeout_s``.

    - A sink that raises loses that event; its step is noted as missing there and the others get an ``error`` event.
    - After three failures in a row it is left alone for a minute at a time: a full disk may be cleared, a dead service
      must not cost every step.
    - A call that outlasts the timeout ends that sink for the run. Its thread cannot be stopped, so it is left behind.
    """

    def __init__(
        self,
        sinks: Sequence[Sink],
        ledger: ErrorLedger,
        *,
        timeout_s: float = 10.0,
        open_timeout_s: float = 30.0,
        retry_after_s: float = RETRY_AFTER_S,
    ) -> None:
        self._ledger = ledger
        self._timeout_s = timeout_s
        self._retry_after_s = retry_after_s
        self._lanes = [_Lane(sink) for sink in sinks]
        self._call(self._lanes, lambda sink: sink.open(), step=None, timeout_s=open_timeout_s)

    def emit(self, event: Event) -> None:
        """Deliver one event, then one ``error`` event for each cause in the ledger that no sink has been told of."""
        self._deliver(event, self._lanes)
        self._tell_errors(event.step, self._lanes)

    def missing(self) -> Mapping[str, tuple[int, ...]]:
        """Return the steps of which some event did not arrive, by sink; sinks that have everything are left out."""
        found = {lane.sink.name: lane.missing | lane.undelivered() for lane in self._lanes}
        return {name: tuple(sorted(steps)) for name, steps in found.items() if steps}

    def locations(self) -> Mapping[str, str]:
        """Return where each sink's output is, by sink; sinks without a place, and those given up, are left out."""
        found: dict[str, str] = {}
        for lane in self._lanes:
            with self._ledger.guard(f"sink {lane.sink.name}"):
                found[lane.sink.name] = "" if lane.hung else lane.sink.where()
        return {name: place for name, place in found.items() if place}

    def close(self, closing: Callable[[], Event] | None = None, *, timeout_s: float = 30.0) -> None:
        """Close every sink, once; no part takes longer than ``timeout_s``, whatever hangs.

        Args:
            closing: makes the last event. It is called when the sinks that deliver late are closed, so that
                ``missing``, ``locations`` and the ledger are final, and goes to the others.
            timeout_s: for each of the two groups of sinks.
        """
        late = [lane for lane in self._lanes if not lane.sink.confirms_on_emit]
        prompt = [lane for lane in self._lanes if lane.sink.confirms_on_emit]
        self._call(late, lambda sink: sink.close(), step=None, timeout_s=timeout_s)
        for lane in late:
            lane.closed = True
        self._tell_errors(None, prompt)
        if closing is not None:
            with self._ledger.guard("closing summary"):
                self._deliver(closing(), prompt)
        self._call(prompt, lambda sink: sink.close(), step=None, timeout_s=timeout_s)
        for lane in self._lanes:
            lane.end()

    def _deliver(self, event: Event, lanes: Sequence["_Lane"]) -> None:
        for lane in lanes:
            if lane.rests() and event.step is not None:
                lane.missing.add(event.step)
        awake = [lane for lane in lanes if not lane.rests()]
        self._call(awake, lambda sink: sink.emit(event), step=event.step, timeout_s=self._timeout_s)

    def _tell_errors(self, step: int | None, lanes: Sequence["_Lane"]) -> None:
        # Ends: telling can add only first errors, and a sink has as many of those as it has types of exception.
        while fresh := self._ledger.take_unreported():
            for failure in fresh:
                payload = {
                    "cause": failure.cause,
                    "message": failure.message,
                    "count": self._ledger.by_cause()[failure.cause],
                    "total": self._ledger.total,
                }
                at = failure.step if failure.step is not None else step
                told = [lane for lane in lanes if failure.cause != lane.cause]
                self._deliver(Event(type="error", step=at, payload=payload), told)

    def _call(
        self, lanes: Sequence["_Lane"], call: Callable[[Sink], None], *, step: int | None, timeout_s: float
    ) -> None:
        deadline = time.monotonic() + timeout_s
        jobs = [(lane, lane.start(call, step)) for lane in lanes if not lane.hung and not lane.ended]
        for lane, job in jobs:
            if job.wait(deadline):
                self._settle(lane, job)
            else:
                lane.hung = True
                self._note(
                    lane, step, TimeoutError(f"no answer within {timeout_s:g} s; it gets nothing more in this run")
                )

    def _settle(self, lane: "_Lane", job: "_Job") -> None:
        if job.error is None:
            lane.failures_in_a_row = 0
            return
        self._note(lane, job.step, job.error)
        lane.failures_in_a_row += 1
        if lane.failures_in_a_row == FAILURES_IN_A_ROW:
            _LOG.warning(
                "%s failed %d times in a row; it is tried again every %g s",
                lane.cause,
                FAILURES_IN_A_ROW,
                self._retry_after_s,
            )
        if lane.failures_in_a_row >= FAILURES_IN_A_ROW:
            lane.rests_until = time.monotonic() + self._retry_after_s

    def _note(self, lane: "_Lane", step: int | None, error: BaseException) -> None:
        if step is not None:
            lane.missing.add(step)
        self._ledger.record(lane.cause, error, step=step)


@dataclass(slots=True)
class _Job:
    call: Callable[[Sink], None]
    step: int | None
    done: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None

    def wait(self, deadline: float) -> bool:
        """Return whether the call has ended, at the latest at ``deadline`` of the monotonic clock."""
        return self.done.wait(max(0.0, deadline - time.monotonic()))


class _Lane:
    """One sink, its thread, and what is known of its health."""

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self.cause = f"sink {sink.name}"
        self.missing: set[int] = set()
        self.failures_in_a_row = 0
        self.rests_until = 0.0
        self.hung = False
        self.closed = False
        self.ended = False
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        # A daemon: a call that never returns must not keep the process alive.
        threading.Thread(target=self._work, name=f"mismatch_hooks {sink.name}", daemon=True).start()

    def rests(self) -> bool:
        """True while the sink gets nothing."""
        return self.hung or self.ended or time.monotonic() < self.rests_until

    def undelivered(self) -> set[int]:
        """Return the steps that the sink took and will never deliver."""
        return set(self.sink.undelivered()) if self.hung or self.closed else set()

    def start(self, call: Callable[[Sink], None], step: int | None) -> _Job:
        """Queue a call; calls of one sink never overlap."""
        job = _Job(call=call, step=step)
        self._jobs.put(job)
        return job

    def end(self) -> None:
        """Let the thread end after its last job."""
        self.ended = True
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job.call(self.sink)
            except BaseException as error:  # a client that calls sys.exit here would leave the loop waiting
                job.error = error
            job.done.set()
