import errno
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from mismatch_hooks.live.isolation import FAILURES_IN_A_ROW, ErrorLedger, Fanout
from mismatch_hooks.sinks.event import Event


class Recorder:
    """A sink that keeps what it got, and does what a test asks before it does."""

    def __init__(self, name: str, *, before: Callable[[Event], object] | None = None, confirms: bool = True) -> None:
        self.name = name
        self.confirms_on_emit = confirms
        self.got: list[Event] = []
        self.calls: list[str] = []
        self._before = before

    def open(self) -> None:
        self.calls.append("open")

    def emit(self, event: Event) -> None:
        self.calls.append("emit")
        if self._before is not None:
            self._before(event)
        self.got.append(event)

    def close(self) -> None:
        self.calls.append("close")

    def where(self) -> str:
        return f"/runs/{self.name}"

    def undelivered(self) -> tuple[int, ...]:
        return ()


def step(number: int) -> Event:
    return Event(type="step", step=number, payload={"metrics": {}})


def types(sink: Recorder) -> list[str]:
    return [event.type for event in sink.got]


def steps(sink: Recorder) -> list[int | None]:
    return [event.step for event in sink.got if event.type == "step"]


@pytest.fixture
def released() -> Iterator[threading.Event]:
    """Set when the test ends, so that no thread is left hanging."""
    release = threading.Event()
    yield release
    release.set()


def failing(event: Event) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_guarded_error_is_counted_logged_once_and_kept_from_the_caller(caplog: pytest.LogCaptureFixture) -> None:
    ledger = ErrorLedger()
    for number in range(3):
        with caplog.at_level(logging.INFO), ledger.guard("capture", step=number) as guarded:
            raise ValueError(f"bad\nvalue {number}")
        assert isinstance(guarded.error, ValueError)
    assert (ledger.total, ledger.by_cause()) == (3, {"capture": 3})
    assert [(failure.step, failure.message) for failure in ledger.firsts()] == [(0, "ValueError: bad value 0")]
    [record] = caplog.records
    assert record.getMessage() == "capture failed at step 0 and training goes on: ValueError: bad value 0"
    assert record.exc_info is None


def test_the_traceback_is_logged_at_debug_level(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG), ErrorLedger().guard("capture"):
        raise ValueError("bad")
    assert [record.levelname for record in caplog.records if record.exc_info] == ["DEBUG"]


def test_another_type_of_error_under_the_same_cause_is_logged_too(caplog: pytest.LogCaptureFixture) -> None:
    ledger = ErrorLedger()
    for error in (ValueError("a"), KeyError("b"), ValueError("c")):
        with ledger.guard("capture"):
            raise error
    assert ledger.by_cause() == {"capture": 3}
    assert [failure.message for failure in ledger.firsts()] == ["ValueError: a", "KeyError: 'b'"]


def test_a_block_that_ends_well_leaves_nothing() -> None:
    ledger = ErrorLedger()
    with ledger.guard("capture") as guarded:
        pass
    assert (guarded.error, ledger.total, ledger.by_cause()) == (None, 0, {})


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_an_interruption_passes_through_the_guard(interruption: type[BaseException]) -> None:
    ledger = ErrorLedger()
    with pytest.raises(interruption), ledger.guard("capture"):
        raise interruption
    assert ledger.total == 0


def test_every_sink_gets_every_event_in_order() -> None:
    sinks = [Recorder("a"), Recorder("b")]
    fanout = Fanout(sinks, ErrorLedger())
    for number in range(5):
        fanout.emit(step(number))
    fanout.close()
    assert [steps(sink) for sink in sinks] == [[0, 1, 2, 3, 4]] * 2
    assert [sink.calls for sink in sinks] == [["open", *["emit"] * 5, "close"]] * 2
    assert fanout.missing() == {}
    assert fanout.locations() == {"a": "/runs/a", "b": "/runs/b"}


def test_a_sink_that_raises_disturbs_no_other_and_they_are_told_once() -> None:
    bad, good = Recorder("bad", before=failing), Recorder("good")
    fanout = Fanout([bad, good], ledger := ErrorLedger())
    for number in range(6):
        fanout.emit(step(number))
    assert types(good) == ["step", "error", "step", "step", "step", "step", "step"]
    assert good.got[1].payload == {
        "cause": "sink bad",
        "message": "OSError: [Errno 28] No space left on device",
        "count": 1,
        "total": 1,
    }
    assert good.got[1].step == 0
    assert fanout.missing() == {"bad": (0, 1, 2, 3, 4, 5)}
    assert ledger.by_cause() == {"sink bad": FAILURES_IN_A_ROW}
    fanout.close()


def test_a_sink_that_failed_three_times_in_a_row_is_tried_again_later_and_recovers() -> None:
    full = [True]
    sink = Recorder("disk", before=lambda event: failing(event) if full[0] else None)
    fanout = Fanout([sink], ErrorLedger(), retry_after_s=0.2)
    for number in range(5):
        fanout.emit(step(number))
    assert sink.calls.count("emit") == FAILURES_IN_A_ROW
    full[0] = False
    time.sleep(0.25)
    for number in range(5, 8):
        fanout.emit(step(number))
    fanout.close()
    assert steps(sink) == [5, 6, 7]
    assert fanout.missing() == {"disk": (0, 1, 2, 3, 4)}


def test_failures_that_are_not_in_a_row_do_not_rest_a_sink() -> None:
    sink = Recorder("flaky", before=lambda event: failing(event) if event.step is not None and event.step % 2 else None)
    fanout = Fanout([sink], ErrorLedger())
    for number in range(10):
        fanout.emit(step(number))
    fanout.close()
    assert steps(sink) == [0, 2, 4, 6, 8]
    assert fanout.missing() == {"flaky": (1, 3, 5, 7, 9)}


def test_a_sink_that_hangs_costs_the_timeout_once(released: threading.Event) -> None:
    slow = Recorder("slow", before=lambda event: released.wait())
    good = Recorder("good")
    fanout = Fanout([slow, good], ledger := ErrorLedger(), timeout_s=0.3)
    started = time.monotonic()
    for number in range(20):
        fanout.emit(step(number))
    fanout.close(timeout_s=5)
    assert 0.3 <= time.monotonic() - started < 1.0
    assert steps(good) == list(range(20))
    assert fanout.missing() == {"slow": tuple(range(20))}
    assert ledger.firsts()[0].message == "TimeoutError: no answer within 0.3 s; it gets nothing more in this run"
    assert "close" not in slow.calls


def test_two_sinks_that_hang_cost_one_timeout_together(released: threading.Event) -> None:
    sinks = [Recorder(name, before=lambda event: released.wait()) for name in ("a", "b")]
    fanout = Fanout(sinks, ErrorLedger(), timeout_s=0.3)
    started = time.monotonic()
    fanout.emit(step(0))
    assert time.monotonic() - started < 0.5
    assert fanout.missing() == {"a": (0,), "b": (0,)}


def test_a_sink_that_calls_exit_neither_ends_the_run_nor_holds_it_up() -> None:
    bad, good = Recorder("bad", before=lambda event: sys.exit(3)), Recorder("good")
    fanout = Fanout([bad, good], ErrorLedger(), timeout_s=5)
    started = time.monotonic()
    fanout.emit(step(0))
    assert time.monotonic() - started < 1.0
    assert types(good) == ["step", "error"]
    fanout.close()


def test_a_sink_that_cannot_be_opened_or_closed_does_not_stop_the_run() -> None:
    class Closed(Recorder):
        def open(self) -> None:
            raise PermissionError("read-only file system")

        def close(self) -> None:
            raise RuntimeError("already gone")

    bad, good = Closed("bad"), Recorder("good")
    fanout = Fanout([bad, good], ledger := ErrorLedger())
    fanout.emit(step(0))
    fanout.close()
    assert steps(good) == [0]
    assert [failure.message for failure in ledger.firsts()] == [
        "PermissionError: read-only file system",
        "RuntimeError: already gone",
    ]


def test_errors_of_the_hooks_reach_the_sinks_with_the_next_event() -> None:
    sink = Recorder("a")
    fanout = Fanout([sink], ledger := ErrorLedger())
    for _ in range(2):
        with ledger.guard("ablation", step=4):
            raise RuntimeError("out of memory")
    fanout.emit(step(5))
    fanout.emit(step(6))
    fanout.close()
    assert [(event.type, event.step) for event in sink.got] == [("step", 5), ("error", 4), ("step", 6)]
    assert sink.got[1].payload == {
        "cause": "ablation",
        "message": "RuntimeError: out of memory",
        "count": 2,
        "total": 2,
    }


def test_the_closing_event_knows_what_a_late_sink_lost_while_closing() -> None:
    class Late(Recorder):
        def close(self) -> None:
            raise ConnectionError("gone")

        def undelivered(self) -> tuple[int, ...]:
            return (7, 8)

    late, prompt = Late("late", confirms=False), Recorder("prompt")
    fanout = Fanout([late, prompt], ledger := ErrorLedger())
    assert fanout.missing() == {}  # they may still arrive
    fanout.close(lambda: Event(type="run", payload={"missing": fanout.missing(), "errors": ledger.by_cause()}))
    assert types(prompt) == ["error", "run"]
    assert prompt.got[-1].payload == {"missing": {"late": (7, 8)}, "errors": {"sink late": 1}}
    assert late.got == []


def test_closing_twice_and_emitting_afterwards_does_nothing() -> None:
    sink = Recorder("a")
    fanout = Fanout([sink], ErrorLedger())
    fanout.close()
    fanout.close()
    fanout.emit(step(3))
    assert sink.calls == ["open", "close"]
    assert fanout.missing() == {"a": (3,)}


def test_ctrl_c_while_a_sink_works_passes_through_and_the_event_still_arrives(
    monkeypatch: pytest.MonkeyPatch, released: threading.Event
) -> None:
    sink = Recorder("a", before=lambda event: released.wait())
    fanout = Fanout([sink], ErrorLedger(), timeout_s=5)

    def interrupted(job: object, deadline: float) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("mismatch_hooks.live.isolation._Job.wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            fanout.emit(step(0))
    released.set()
    fanout.close()
    assert steps(sink) == [0]
