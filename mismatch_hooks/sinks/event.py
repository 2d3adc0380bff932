"""One thing that happened in a run, and the line of ``events.jsonl`` that holds it.

JSON has no number for NaN and the infinities. They are written as the strings ``"NaN"``, ``"Infinity"`` and
``"-Infinity"``, and read back as floats wherever one of those strings is a whole value.
"""

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mismatch_hooks.schema.enums import Arm, PolicyRole
from mismatch_hooks.schema.environment import RequiredSetting
from mismatch_hooks.schema.freeze import FrozenMapping, SchemaError, thaw
from mismatch_hooks.schema.readback import Readback, Reading
from mismatch_hooks.schema.verdict import Verdict

VERSION = 1

#: Type of event to the keys of its payload that readers use; a payload may hold more.
EVENT_TYPES: Mapping[str, str] = {
    "run": "state (started, finished, stopped, failed), config, fingerprints, plan {origins, fallback, off, left_out "
    "[{factor, outcome, reason}]}; at the end errors {cause: count}, missing {sink: steps}, paths {name: path}, "
    "ablation {off}, alignment {operators, steps, equal_steps}",
    "step": "metrics {name: value}, host {name: value}: what the loop passed as host_metrics, weights {checked, "
    "differing, rollout and training: {version, digest}}",
    "readback": "settings {key: {side: {effective, source, where, requested} or {unobservable}}}, "
    "differences [{key, training, rollout}], those that matter first, not_as_requested [{key, side, effective, source, "
    "where, requested, requested_by}], unpinned [{key, side, readback, guards, why}]",
    "gate": "factor, origin, path, gate, ok, reason",
    "arm": "factor, origin, path, arm, metrics {name: value}",
    "verdict": "factor, origin, noise_floor, path, diagnosis, reason, recommendation, arms {arm: {metric: value}}, "
    "gates {gate: {ok, reason}}, effects {arm: {...}}, issues [{path, rule, values {side}}], "
    "replays [{captured_on, calls, departs {side: distance}, natives, references, place, reproduced, reason}], a "
    "distance being {elements, differing, max_abs, max_ulp, dtype}, tokens, interval, resolvable, passes, seconds, "
    "fingerprint, paths {term: {metric: value}}, not_reached [factor], ablation_passes, ablation_seconds",
    "trace": "summary, comparisons [{semantic, tokens, equal_tokens, max_abs, first_difference, missing_on}] in the "
    "order of the forward, causes [{semantic, hypothesis, reason}] ranked, left_out {side: {point: reason}}, passes, "
    "seconds",
    "alignment": "operators {side: {factor: reference}}, steps, equal_steps; of a step that is not equal on every "
    "token also tokens, unequal, first [{sequence, position, rollout, training}], where",
    "alert": "kind, severity, state, title, text, since_step, value, baseline, transient, recommendation",
    "error": "cause, message, count: of this cause so far, total: of all causes so far",
    "overhead": "metrics {name: value}, streamed as hooks/<name>; overhead_fraction is a share of wall time",
}

_FIXED = ("v", "type", "step", "time")
_NONFINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_MARKS = ("null", *(f'"{name}"' for name in _NONFINITE))
_ENDED = ("finished", "stopped", "failed")


class _Plain(FrozenMapping):
    """What a line held: no records and no enums, so nothing to turn into plain data again."""

    __slots__ = ()


class EventError(ValueError):
    """A line is no event of a version that this reader knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One thing that happened.

    Attributes:
        type: one of ``EVENT_TYPES``.
        step: the loop's step; None where the event belongs to no step.
        payload: the keys are those of ``EVENT_TYPES``; records and enums are turned into plain data here.
        time: seconds since the epoch.
    """

    type: str
    step: int | None = None
    payload: Mapping[str, Any] = field(default_factory=FrozenMapping)
    time: float = field(default_factory=time.time)

    def __post_init__(self) -> None:
        if not isinstance(self.payload, _Plain):
            object.__setattr__(self, "payload", _Plain(thaw(self.payload)))
        if self.type not in EVENT_TYPES:
            raise SchemaError(f"Event.type: got {self.type!r}; accepts {', '.join(EVENT_TYPES)}.")
        if self.step is not None and (isinstance(self.step, bool) or not isinstance(self.step, int)):
            raise SchemaError(f"Event.step: got {self.step!r}; accepts an integer or None.")
        taken = [key for key in _FIXED if key in self.payload]
        if taken:
            raise SchemaError(f"Event.payload: holds {', '.join(taken)}; every line has keys of that name already.")

    @property
    def ends_run(self) -> bool:
        """True for the last event of a run."""
        return self.type == "run" and self.payload.get("state") in _ENDED


def to_line(event: Event) -> str:
    """Return the event as one line of JSON, without the line break."""
    document = {"v": VERSION, "type": event.type, "step": event.step, "time": event.time, **thaw(event.payload)}
    try:
        return json.dumps(document, allow_nan=False, separators=(",", ":"))
    except ValueError:  # a non-finite float somewhere; rare, so only then is the document walked
        return json.dumps(spell_nonfinite(document), allow_nan=False, separators=(",", ":"))


def from_line(line: str | bytes) -> Event:
    """Return the event of one line; a null among metrics is NaN, never 0.

    Raises:
        EventError: the line is no JSON object, of another version, or of an unknown type.
    """
    text = line if isinstance(line, str) else line.decode(errors="replace")
    try:
        document = json.loads(text)
    except ValueError as error:
        raise EventError(f"is not JSON ({error}).") from None
    if not isinstance(document, dict):
        raise EventError(f"holds a JSON {type(document).__name__}; accepts one object.")
    version, kind, step, seconds = (document.pop(key, None) for key in _FIXED)
    if version != VERSION:
        raise EventError(f"has v {version!r}; this reader knows v {VERSION}.")
    if not isinstance(seconds, int | float):
        raise EventError(f"has the time {seconds!r}; accepts seconds since the epoch.")
    # Most lines hold neither a null nor a spelled number, and a long run has many lines.
    if any(mark in text for mark in _MARKS):
        document = _revived(document, in_metrics=False)
    try:
        return Event(type=kind, step=step, time=float(seconds), payload=_Plain(document))
    except SchemaError as error:
        raise EventError(str(error)) from None


def read_events(path: Path) -> Iterator[Event]:
    """Yield the events of a file in order; a last line that was torn by a kill or a full disk is left out.

    Raises:
        EventError: another line is garbage; names the file and the line.
    """
    with path.open("rb") as file:
        number, line = 0, file.readline()
        while line:
            number, following = number + 1, file.readline()
            try:
                event = from_line(line)
            except EventError as error:
                if not following and not _is_json(line):
                    return
                raise EventError(f"{path} line {number} {error}") from None
            yield event
            line = following


def follow_events(path: Path, *, poll_s: float = 0.2) -> Iterator[Event]:
    """Yield the events of a file that is being written, waiting for more, until the run ends.

    A line that is not finished yet is waited for. A file that does not exist yet is waited for as well.

    Raises:
        EventError: a finished line is garbage; names the file and the line.
    """
    while not path.exists():
        time.sleep(poll_s)
    number = 0
    with path.open("rb") as file:
        while True:
            start = file.tell()
            line = file.readline()
            if not line.endswith(b"\n"):
                # Read again from its start: a writer that comes back after a kill cuts a torn line off and goes on.
                file.seek(start)
                time.sleep(poll_s)
                continue
            number += 1
            try:
                event = from_line(line)
            except EventError as error:
                raise EventError(f"{path} line {number} {error}") from None
            yield event
            if event.ends_run:
                return


def spell_nonfinite(value: Any) -> Any:
    """Return plain data with every NaN and infinity as the string that stands for it in a file."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: spell_nonfinite(member) for key, member in value.items()}
    return [spell_nonfinite(member) for member in value] if isinstance(value, list) else value


def verdict_payload(verdict: Verdict) -> dict[str, Any]:
    """Return the payload of a verdict's event: gates, arms and effects by name.

    ``interval`` and ``resolvable`` are those of the ``both_reference`` arm's effect; None when no arm was read.
    """
    payload: dict[str, Any] = thaw(verdict)
    payload["gates"] = {gate.pop("name"): gate for gate in payload["gates"]}
    payload["arms"] = {arm["arm"]: arm["metrics"] for arm in payload["arms"]}
    payload["effects"] = {effect.pop("arm"): effect for effect in payload["effects"]}
    both = payload["effects"].get(Arm.BOTH_REFERENCE.value, {})
    return payload | {"interval": both.get("interval"), "resolvable": both.get("resolvable")}


def readback_payload(
    *,
    rollout: Readback,
    training: Readback,
    differences: Sequence[str],
    not_as_requested: Mapping[PolicyRole, Sequence[str]] | None = None,
    unpinned: Mapping[PolicyRole, Sequence[tuple[RequiredSetting, str]]] | None = None,
) -> dict[str, Any]:
    """Return the payload of a readback's event.

    Args:
        rollout: the settings in effect on the rollout side.
        training: the settings in effect on the training side.
        differences: keys that differ between the sides, those that matter first.
        not_as_requested: role to the keys whose effective value there is not the one that was asked for.
        unpinned: role to the settings that have to be pinned there and are not, each with its sentence.
    """
    sides = {"training": training, "rollout": rollout}
    settings: dict[str, dict[str, Any]] = {}
    for side, readback in sides.items():
        for key, found in readback.settings.items():
            plain = thaw(found) if isinstance(found, Reading) else {"unobservable": found.reason}
            settings.setdefault(key, {})[side] = plain
    return {
        "settings": settings,
        "differences": [
            {"key": key} | {side: _shown(settings.get(key, {}).get(side)) for side in sides} for key in differences
        ],
        "not_as_requested": [
            {"key": key, "side": role.value, **settings[key][role.value]}
            for role, keys in (not_as_requested or {}).items()
            for key in keys
        ],
        "unpinned": [
            {"key": setting.key, "side": role.value, "readback": setting.readback, "guards": setting.guards, "why": why}
            for role, found in (unpinned or {}).items()
            for setting, why in found
        ],
    }


def _shown(setting: Mapping[str, Any] | None) -> Any:
    if setting is None:
        return "no such setting"
    return setting["effective"] if "effective" in setting else f"unobservable: {setting['unobservable']}"


def _revived(value: Any, *, in_metrics: bool) -> Any:
    if isinstance(value, dict):
        return {
            key: _revived(member, in_metrics=in_metrics or key in ("metrics", "arms")) for key, member in value.items()
        }
    if isinstance(value, list):
        return [_revived(member, in_metrics=in_metrics) for member in value]
    if value is None:
        return math.nan if in_metrics else None
    return _NONFINITE.get(value, value) if isinstance(value, str) else value


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True
