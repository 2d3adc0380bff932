"""W&B offline, read back by W&B's own inspection command."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import wandb

from mismatch_hooks.live.isolation import ErrorLedger, Fanout
from mismatch_hooks.schema.enums import Diagnosis
from mismatch_hooks.sinks.base import SinkError
from mismatch_hooks.sinks.event import Event, read_events
from mismatch_hooks.sinks.jsonl import JsonlSink
from mismatch_hooks.sinks.wandb import STEP, VERDICT_CODES, WandbSink
from tests.sinks.samples import GATES, alert, verdict
from tests.sinks.wandb_reader import records, rows, series, tables

Log = Callable[..., None]


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    yield
    if wandb.run is not None:
        wandb.run.finish()


def open_host(folder: Path, mode: Any = "offline") -> wandb.Run:
    return wandb.init(
        project="host", dir=folder, mode=mode, settings=wandb.Settings(console="off", x_disable_stats=True)
    )


def our_sink(folder: Path) -> WandbSink:
    return WandbSink(folder, project="ours", mode="offline")


def step(number: int) -> Event:
    return Event(type="step", step=number, payload={"metrics": {"clip_fraction": number / 64, "tokens": 612}})


def overhead(number: int) -> Event:
    return Event(type="overhead", step=number, payload={"metrics": {"overhead_fraction": number / 1024}})


def explicit_step(log: Log, number: int) -> None:
    log({"train/loss": number}, step=8073 + number)
    log({"train/reward": number}, step=8073 + number)


def several_times_a_step(log: Log, number: int) -> None:
    log({"train/loss": number})
    log({"train/reward": number})


def both_ways(log: Log, number: int) -> None:
    log({"train/loss": number}, step=8073 + 2 * number)
    log({"train/reward": number})


def every_tenth_step(log: Log, number: int) -> None:
    if number % 10 == 0:
        log({"train/loss": number, "train/reward": number}, step=8073 + number)


def explicit_step_that_lags(log: Log, number: int) -> None:
    if number % 2 == 0:
        log({"train/loss": number, "train/reward": number}, step=8073 + number // 2)


def nothing(log: Log, number: int) -> None:
    pass


@pytest.mark.parametrize(
    ("before", "after", "logged"),
    [
        pytest.param(explicit_step, nothing, range(20), id="explicit step, before ours"),
        pytest.param(nothing, explicit_step, range(20), id="explicit step, after ours"),
        pytest.param(several_times_a_step, nothing, range(20), id="several times a step, before ours"),
        pytest.param(nothing, several_times_a_step, range(20), id="several times a step, after ours"),
        pytest.param(both_ways, nothing, range(20), id="explicit and implicit steps mixed"),
        pytest.param(every_tenth_step, nothing, range(0, 20, 10), id="every tenth step"),
        pytest.param(explicit_step_that_lags, nothing, range(0, 20, 2), id="a step counter slower than ours"),
        pytest.param(nothing, nothing, range(0), id="never"),
    ],
)
def test_c30_no_row_is_lost_whatever_steps_the_host_logs(
    tmp_path: Path, before: Callable[[Log, int], None], after: Callable[[Log, int], None], logged: range
) -> None:
    host = open_host(tmp_path)
    sink = our_sink(tmp_path)
    sink.open()
    for number in range(20):
        before(host.log, number)
        sink.emit(step(number))
        sink.emit(overhead(number))
        after(host.log, number)
    sink.close()
    assert sink.undelivered() == []
    host.finish()

    found = rows(tmp_path)
    assert series(found, "mismatch/clip_fraction", over=STEP) == [(number, number / 64) for number in range(20)]
    assert series(found, "hooks/overhead_fraction", over=STEP) == [(number, number / 1024) for number in range(20)]
    for name in ("train/loss", "train/reward"):
        assert [row[name] for row in found if name in row] == list(logged)
    if after is explicit_step or before is explicit_step:
        assert series(found, "train/loss", over="_step") == [(8073 + number, number) for number in range(20)]


def test_c30_the_hosts_run_is_neither_replaced_nor_finished(tmp_path: Path) -> None:
    host = open_host(tmp_path)
    sink = our_sink(tmp_path)
    sink.emit(step(0))
    sink.close()
    assert wandb.run is host
    host.log({"train/loss": 1.0})
    host.finish()
    assert len(list(tmp_path.rglob("*.wandb"))) == 1
    assert sink.where() == str(next(tmp_path.rglob("*.wandb")).parent)


def test_a_run_of_our_own_has_every_series_on_our_axis(tmp_path: Path) -> None:
    sink = our_sink(tmp_path)
    sink.emit(Event(type="run", payload={"state": "started", "config": {"ablate_every": 20}}))
    assert wandb.run is None  # the host may still open its own
    settings = {"model.dtype": {side: {"effective": "bfloat16", "source": "live module"} for side in ("training",)}}
    sink.emit(Event(type="readback", payload={"settings": settings, "differences": [{"key": "model.dtype"}]}))
    sink.emit(Event(type="verdict", step=0, payload=verdict(blocked="shards_complete")))
    sink.emit(Event(type="error", step=0, payload={"cause": "capture", "message": "no", "count": 1, "total": 4}))
    sink.emit(Event(type="step", step=0, payload={"metrics": {"clip_fraction": math.nan, "constant_difference": True}}))
    sink.emit(Event(type="verdict", step=1, payload=verdict(diagnosis="caused_by_rollout_side")))
    decoded = verdict(diagnosis="not_this_factor", path="rollout_decode")
    sink.emit(Event(type="verdict", step=1, payload=decoded))
    sink.emit(Event(type="alert", step=1, payload=alert(title="a" * 70)))
    sink.emit(Event(type="alert", step=1, payload=alert(state="closed", title="closed again")))
    sink.close()
    assert wandb.run is None

    found = rows(tmp_path)
    points = {name: [value for _, value in series(found, name, over=STEP)] for row in found for name in row}
    factor = "attention.rope_fusion/native"
    assert (points[f"verdict/{factor}"], points[f"verdict/{factor}/decode"]) == ([-2, 2], [0])
    assert {gate: points[f"gate/{factor}/{gate}"] for gate in GATES} == {
        gate: [0, 1] if gate == "shards_complete" else [1, 1] for gate in GATES
    }
    assert points[f"verdict/{factor}/both_native/clip_fraction"] == [0.0115]
    assert points["mismatch/clip_fraction"] == ["NaN"]  # W&B's spelling: shown as a gap, not as 0
    assert points["mismatch/constant_difference"] == [1]
    assert points["hooks/errors"] == [4]
    assert points["hooks/settings_that_differ"] == [1]

    all_records = records(tmp_path)
    globs = {
        record["metric"]["glob_name"]: record["metric"]["step_metric"]
        for record in all_records
        if record["type"] == "metric" and "glob_name" in record["metric"]
    }
    assert globs == {f"{section}/*": STEP for section in ("mismatch", "gate", "verdict", "hooks")}
    summaries = [record["metric"] for record in all_records if record["type"] == "metric"]
    assert {"last": True, "max": True} in [
        one.get("summary") for one in summaries if one.get("name") == "mismatch/clip_fraction"
    ]
    [message] = [record["alert"] for record in all_records if record["type"] == "alert"]
    assert message["title"] == "a" * 64
    assert message["level"] == "ERROR"
    assert "Compare the rope settings" in message["text"]
    last = tables(tmp_path, "table")[-1]
    assert [row[:5] for row in last["data"]] == [
        [0, "attention.rope_fusion", "native", "rollout_full_prefill", "insufficient_evidence"],
        [1, "attention.rope_fusion", "native", "rollout_full_prefill", "caused_by_rollout_side"],
        [1, "attention.rope_fusion", "native", "rollout_decode", "not_this_factor"],
    ]
    [readback] = tables(tmp_path, "readback")
    assert readback["data"] == [["model.dtype", "bfloat16", "", 1, "live module", ""]]


def test_every_diagnosis_has_a_code_and_only_judged_ones_are_zero_or_more() -> None:
    assert {name: code >= 0 for name, code in VERDICT_CODES.items()} == {one.value: one.judged for one in Diagnosis}
    assert len(set(VERDICT_CODES.values())) == len(Diagnosis)


def test_a_disabled_run_takes_everything_and_keeps_nothing(tmp_path: Path) -> None:
    host = open_host(tmp_path, mode="disabled")
    sink = our_sink(tmp_path)
    for number in range(3):
        sink.emit(step(number))
    assert sink.undelivered() == []
    sink.close()
    assert sink.where() == ""
    host.finish()


def test_a_folder_that_cannot_be_written_is_said_and_no_run_is_opened(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    sink = our_sink(tmp_path / "file" / "run")
    with pytest.raises(SinkError, match=r"file/run: W&B cannot write there; choose another --out"):
        sink.emit(step(0))
    assert wandb.run is None


@pytest.mark.parametrize("in_the_hosts_run", [True, False], ids=["in the host's run", "in a run of our own"])
def test_c29_log_that_raises_from_step_3_on_costs_w_and_b_its_steps_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, in_the_hosts_run: bool
) -> None:
    host = open_host(tmp_path) if in_the_hosts_run else None
    fanout = Fanout([our_sink(tmp_path), JsonlSink(tmp_path / "events.jsonl")], ledger := ErrorLedger())
    for number in range(10):
        if number == 3:
            monkeypatch.setattr(wandb.Run, "log", _raise_for_ours(wandb.Run.log))
        if host is not None:
            host.log({"train/loss": number}, step=8073 + number)
        fanout.emit(step(number))
    fanout.close(lambda: Event(type="run", payload={"state": "finished", "missing": fanout.missing()}))
    if host is not None:
        host.finish()

    events = list(read_events(tmp_path / "events.jsonl"))
    assert [event.step for event in events if event.type == "step"] == list(range(10))
    assert [(event.step, event.payload["cause"]) for event in events if event.type == "error"] == [(3, "sink wandb")]
    assert events[-1].payload["missing"] == {"wandb": tuple(range(3, 10))}
    assert ledger.by_cause() == {"sink wandb": 3}  # then it is left alone
    assert [record.getMessage() for record in caplog.records if "went away" in record.getMessage()] == [
        "sink wandb failed at step 3 and training goes on: CommError: the service went away"
    ]
    found = rows(tmp_path)
    assert series(found, "mismatch/clip_fraction", over=STEP) == [(number, number / 64) for number in range(3)]
    assert [row["train/loss"] for row in found if "train/loss" in row] == list(range(10) if host is not None else ())


@pytest.mark.parametrize("in_the_hosts_run", [True, False], ids=["in the host's run", "in a run of our own"])
def test_a_server_that_refuses_tables_is_asked_once_and_gets_every_series(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_the_hosts_run: bool
) -> None:
    log = wandb.Run.log

    def refuse_tables(run: wandb.Run, data: dict[str, Any], *arguments: Any, **options: Any) -> None:
        if any(isinstance(value, wandb.Table) for value in data.values()):
            raise wandb.errors.CommError("no artifacts here")
        log(run, data, *arguments, **options)

    monkeypatch.setattr(wandb.Run, "log", refuse_tables)
    host = open_host(tmp_path) if in_the_hosts_run else None
    fanout = Fanout([our_sink(tmp_path)], ledger := ErrorLedger())
    for number in range(6):
        if host is not None:
            host.log({"train/loss": number}, step=8073 + number)
        fanout.emit(Event(type="verdict", step=number, payload=verdict()))
        fanout.emit(step(number))
    fanout.close(lambda: Event(type="run", payload={"state": "finished"}))
    if host is not None:
        host.finish()
    assert ledger.by_cause() == {"sink wandb": 1}
    assert series(rows(tmp_path), "mismatch/clip_fraction", over=STEP) == [(n, n / 64) for n in range(6)]


def test_c29_a_finish_that_fails_is_said_in_the_closing_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fanout = Fanout([our_sink(tmp_path), JsonlSink(tmp_path / "events.jsonl")], ledger := ErrorLedger())
    fanout.emit(step(0))
    run = wandb.run
    assert run is not None
    with monkeypatch.context() as broken:
        broken.setattr(type(run), "finish", _raise)
        fanout.close(lambda: Event(type="run", payload={"state": "finished", "errors": ledger.by_cause()}))
    assert list(read_events(tmp_path / "events.jsonl"))[-1].payload["errors"] == {"sink wandb": 1}
    run.finish()


def _raise(*_: object, **__: object) -> None:
    raise wandb.errors.CommError("the service went away")


def _raise_for_ours(log: Log) -> Log:
    def raising(run: wandb.Run, data: dict[str, Any], **options: Any) -> None:
        if STEP in data:
            _raise()
        log(run, data, **options)

    return raising
