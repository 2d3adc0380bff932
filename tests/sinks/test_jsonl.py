import errno
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mismatch_hooks.sinks.base import SinkError
from mismatch_hooks.sinks.event import Event, read_events
from mismatch_hooks.sinks.jsonl import JsonlSink


def step(number: int) -> Event:
    return Event(type="step", step=number, payload={"metrics": {"clip_fraction": 0.5}})


def test_an_event_is_on_disk_when_emit_returns(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "run" / "events.jsonl")
    sink.open()
    for number in range(3):
        sink.emit(step(number))
        assert [event.step for event in read_events(tmp_path / "run" / "events.jsonl")] == list(range(number + 1))
    sink.close()


@pytest.mark.parametrize(
    ("tail", "kept"),
    [
        pytest.param(b'{"v":1,"ty', [0], id="torn line"),
        pytest.param(b"", [0], id="whole lines"),
        pytest.param(b"x" * 200_000, [0], id="torn line longer than a block"),
    ],
)
def test_a_torn_line_of_an_earlier_run_is_cut_off_before_the_next_event(
    tmp_path: Path, tail: bytes, kept: list[int]
) -> None:
    path = tmp_path / "events.jsonl"
    sink = JsonlSink(path)
    sink.emit(step(0))
    sink.close()
    with path.open("ab") as file:
        file.write(tail)
    sink.emit(step(1))
    assert [event.step for event in read_events(path)] == [*kept, 1]


def test_a_disk_that_fills_up_within_a_line_leaves_whole_lines_and_recovers(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    sink = JsonlSink(path)
    sink.emit(step(0))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, hard))
    try:
        with pytest.raises(SinkError, match=os.strerror(errno.EFBIG)):
            sink.emit(step(1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert path.read_bytes().endswith(b"\n")
    sink.emit(step(2))
    assert [event.step for event in read_events(path)] == [0, 2]


def test_a_kill_at_any_moment_leaves_a_readable_file(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    program = (
        "import pathlib, sys\n"
        "from mismatch_hooks.sinks.event import Event\n"
        "from mismatch_hooks.sinks.jsonl import JsonlSink\n"
        f"sink = JsonlSink(pathlib.Path({str(path)!r}))\n"
        "for number in range(10**9):\n"
        "    sink.emit(Event(type='step', step=number, payload={'metrics': {'a': 0.1}}))\n"
    )
    writer = subprocess.Popen([sys.executable, "-c", program])
    while not path.exists() or path.stat().st_size < 10_000:
        assert writer.poll() is None
    writer.kill()
    writer.wait()
    steps = [event.step for event in read_events(path)]
    assert steps == list(range(len(steps)))
    assert len(steps) > 50
