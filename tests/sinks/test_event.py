import json
import math
import threading
import time
from pathlib import Path

import pytest

from mismatch_hooks.schema.enums import (
    Arm,
    Diagnosis,
    ExecutionPath,
    GateName,
    NoiseFloor,
    Origin,
    PolicyRole,
    Source,
)
from mismatch_hooks.schema.freeze import SchemaError
from mismatch_hooks.schema.readback import Readback, Reading, Unobservable
from mismatch_hooks.schema.verdict import ArmReading, Gate, Verdict
from mismatch_hooks.sinks.event import (
    Event,
    EventError,
    follow_events,
    from_line,
    read_events,
    readback_payload,
    to_line,
    verdict_payload,
)

LINE = '{"v":1,"type":"step","step":3,"time":12.5,"metrics":{"clip_fraction":0.25}}'


def test_an_event_is_one_line_with_the_fixed_keys_first() -> None:
    event = Event(type="step", step=3, time=12.5, payload={"metrics": {"clip_fraction": 0.25}})
    assert to_line(event) == LINE
    assert from_line(LINE) == event


def test_non_finite_numbers_survive_as_valid_json() -> None:
    metrics = {"ratio_max": math.inf, "low": -math.inf, "clip_fraction": math.nan, "tokens": 0}
    line = to_line(Event(type="step", step=0, payload={"metrics": metrics}))
    spelled = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))["metrics"]
    assert spelled == {"ratio_max": "Infinity", "low": "-Infinity", "clip_fraction": "NaN", "tokens": 0}
    read = from_line(line).payload["metrics"]
    assert (read["ratio_max"], read["low"], read["tokens"]) == (math.inf, -math.inf, 0)
    assert math.isnan(read["clip_fraction"])


def test_c24d_null_among_metrics_is_non_finite_and_not_zero() -> None:
    line = '{"v":1,"type":"verdict","step":0,"time":0,"arms":{"both_native":{"dlogp_mean":null}},"interval":null}'
    payload = from_line(line).payload
    assert math.isnan(payload["arms"]["both_native"]["dlogp_mean"])
    assert payload["interval"] is None


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        pytest.param({"type": "stp"}, "Event.type: got 'stp'; accepts run, step", id="unknown type"),
        pytest.param({"step": True}, "Event.step: got True; accepts an integer or None.", id="a bool as step"),
        pytest.param({"payload": {"time": 3}}, "Event.payload: holds time", id="payload shadows a fixed key"),
    ],
)
def test_an_event_that_readers_would_misread_is_refused(changed: dict[str, object], said: str) -> None:
    with pytest.raises(SchemaError, match="Event") as refused:
        Event(**{"type": "step", "step": 0, **changed})  # type: ignore[arg-type]
    assert said in str(refused.value)


@pytest.mark.parametrize("cut", range(1, len(LINE)))
def test_a_last_line_torn_anywhere_is_left_out(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(f"{LINE}\n{LINE[:cut]}")
    assert [event.step for event in read_events(path)] == [3]


@pytest.mark.parametrize(
    ("garbage", "said"),
    [
        pytest.param(LINE[:20], "line 2 is not JSON", id="torn in the middle"),
        pytest.param("[]", "line 2 holds a JSON list; accepts one object.", id="no object"),
        pytest.param(LINE.replace('"v":1', '"v":2'), "line 2 has v 2; this reader knows v 1.", id="another version"),
        pytest.param(LINE.replace('"step",', '"stp",'), "line 2 Event.type: got 'stp'", id="unknown type"),
    ],
)
def test_other_garbage_is_refused_by_line(tmp_path: Path, garbage: str, said: str) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(f"{LINE}\n{garbage}\n{LINE}\n")
    with pytest.raises(EventError) as refused:
        list(read_events(path))
    assert said in str(refused.value)
    assert str(path) in str(refused.value)


def test_a_whole_last_line_of_another_version_is_not_mistaken_for_a_torn_one(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(LINE.replace('"v":1', '"v":2'))
    with pytest.raises(EventError, match="line 1 has v 2"):
        list(read_events(path))


def test_following_waits_for_the_file_and_for_unfinished_lines_and_ends_with_the_run(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    end = to_line(Event(type="run", payload={"state": "finished"}))

    def write() -> None:
        time.sleep(0.05)
        with path.open("w") as file:
            for part in (f"{LINE}\n{LINE[:30]}", f"{LINE[30:]}\n", f"{end}\n", "never read"):
                file.write(part)
                file.flush()
                time.sleep(0.05)

    writer = threading.Thread(target=write)
    writer.start()
    assert [event.type for event in follow_events(path, poll_s=0.01)] == ["step", "step", "run"]
    writer.join()


def test_a_verdicts_payload_names_gates_and_arms() -> None:
    verdict = Verdict(
        factor="attention.rope_fusion",
        origin=Origin.NATIVE,
        noise_floor=NoiseFloor.PRODUCTION,
        path=ExecutionPath.ROLLOUT_DECODE,
        diagnosis=Diagnosis.NOT_THIS_FACTOR,
        reason="nothing moved",
        gates=tuple(Gate(name=name, ok=True, reason="holds") for name in GateName),
        arms=(ArmReading(arm=Arm.BOTH_NATIVE, metrics={"dlogp_mean": math.nan}),),
        tokens=0,
        passes=4,
        seconds=1.5,
        fingerprint="ab",
    )
    payload = from_line(to_line(Event(type="verdict", step=1, payload=verdict_payload(verdict)))).payload
    assert payload["gates"]["shards_complete"] == {"ok": True, "reason": "holds"}
    assert math.isnan(payload["arms"]["both_native"]["dlogp_mean"])
    assert (payload["origin"], payload["noise_floor"], payload["path"]) == ("native", "production", "rollout_decode")
    assert (payload["interval"], payload["resolvable"]) == (None, None)


def test_a_readbacks_payload_puts_the_sides_of_a_difference_next_to_each_other() -> None:
    training = Readback(
        role=PolicyRole.TRAINING,
        settings={"model.rope.theta": Reading(effective=1e4, source=Source.LIVE_MODULE), "only.training": _one()},
    )
    rollout = Readback(role=PolicyRole.ROLLOUT, settings={"model.rope.theta": Unobservable(reason="no table")})
    payload = readback_payload(rollout=rollout, training=training, differences=["model.rope.theta", "only.training"])
    assert payload["differences"] == [
        {"key": "model.rope.theta", "training": 1e4, "rollout": "unobservable: no table"},
        {"key": "only.training", "training": 1, "rollout": "no such setting"},
    ]
    assert payload["settings"]["model.rope.theta"]["training"]["source"] == "live module"


def _one() -> Reading:
    return Reading(effective=1, source=Source.REQUESTED)
