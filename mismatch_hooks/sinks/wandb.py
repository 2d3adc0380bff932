"""Series, tables and alerts in W&B, on a step axis of our own, without disturbing whose run it is.

A W&B run has one step counter that only grows: a row logged for a smaller step is dropped. When the host logs with
explicit steps, every row that we finish pushes the counter past a step that the host has yet to log. So in the host's
run our values ride: they are added to the row that is open (``commit=False``) and are written when the host moves on.
While the host has not moved, the row still holds our previous step under the same keys, and our next step waits here.
What waits is written by ``close``, in rows of its own, so the hooks are closed after the host's last ``log``. A host
that logs at least once a step, explicit step or not, has our values one row late at most.
"""

import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mismatch_hooks.schema.enums import Diagnosis, ExecutionPath
from mismatch_hooks.schema.freeze import thaw
from mismatch_hooks.sinks.base import SinkError
from mismatch_hooks.sinks.event import Event

if TYPE_CHECKING:
    import wandb

STEP = "mismatch/step"

#: What ``verdict/<factor>/<origin>`` draws, and ``…/decode`` where rollout decoded: below zero nothing could be judged,
#: zero is clean.
VERDICT_CODES: Mapping[str, int] = {
    Diagnosis.VARIANT_DID_NOT_APPLY.value: -3,
    Diagnosis.INSUFFICIENT_EVIDENCE.value: -2,
    Diagnosis.REFERENCE_ITSELF_IS_BROKEN.value: -1,
    Diagnosis.NOT_THIS_FACTOR.value: 0,
    Diagnosis.CAUSED_BY_TRAINING_SIDE.value: 1,
    Diagnosis.CAUSED_BY_ROLLOUT_SIDE.value: 2,
    Diagnosis.CAUSED_BY_BOTH_SIDES.value: 3,
    Diagnosis.COUPLED_WITH_OTHER_FACTORS.value: 4,
}

VERDICT_COLUMNS = (
    "step",
    "factor",
    "origin",
    "path",
    "diagnosis",
    "reason",
    "recommendation",
    "arms",
    "gates",
    "tokens",
)
READBACK_COLUMNS = ("setting", "training", "rollout", "differs", "training read from", "rollout read from")

_SECTIONS = ("mismatch", "gate", "verdict", "hooks")
_SUMMARIES = {
    "mismatch/clip_fraction": "max,last",
    "mismatch/dlogp_mean": "max,last",
    "mismatch/dlogp_max": "max,last",
    "mismatch/nonfinite": "max,last",
    "hooks/errors": "last",
    "hooks/overhead_fraction": "last",
}
_ARM_SERIES = ("clip_fraction", "dlogp_mean")
_ALERT_LEVELS = {"info": "INFO", "warning": "WARN", "critical": "ERROR"}
_TITLE_LENGTH = 64
_MOST_VERDICTS = 1000
_QUIET_BETWEEN_ALERTS = timedelta(minutes=1)  # of one title; W&B drops the ones in between


class WandbSink:
    """Log into the run that is open, or into one of our own where none is by the first ``step`` event.

    Args:
        run_dir: where a run of our own keeps its files, under ``wandb/``.
        project: of a run of our own.
        mode: of a run of our own; the variable WANDB_MODE wins, None leaves it to W&B.
    """

    name = "wandb"
    confirms_on_emit = False

    def __init__(self, run_dir: Path, *, project: str, mode: str | None) -> None:
        self._run_dir = run_dir
        self._project = project
        self._mode = mode
        self._run: wandb.Run | None = None
        self._ours = False
        self._place = ""
        self._waiting: list[dict[str, Any]] = []
        self._trying: list[int] = []
        self._rides = False
        self._sends_tables = True
        self._ridden_at = -1
        self._ridden_step: int | None = None
        self._last_step = 0
        self._config: dict[str, Any] = {"verdict_codes": dict(VERDICT_CODES)}
        self._verdicts: list[list[Any]] = []

    def open(self) -> None:
        """Import wandb, which takes a moment; the run is looked for when there is something to log."""
        import wandb  # noqa: F401

    def emit(self, event: Event) -> None:
        """Log the numbers of one event; the tables and alerts too.

        Raises:
            SinkError: there is no run, and none can be opened.
            wandb.Error: W&B refuses, as it does once the host has finished its run.
        """
        if event.type == "run":
            self._config |= thaw(event.payload)
            if self._run is not None:
                self._publish_config(self._run)
            return
        values = self._values(event)
        run = self._find_run(needed=event.type in ("step", "alert"))
        if event.step is not None:
            self._last_step = event.step
        if values:
            self._hold(values)
        if run is not None:
            self._write(run)
            if event.type == "alert" and event.payload.get("state") != "closed":
                _alert(run, event.payload)

    def close(self) -> None:
        """Write what waits; finish the run if it is ours.

        Raises:
            SinkError: there is no run for the rows that wait, and none can be opened.
            wandb.Error: W&B refuses; ``undelivered`` says what is lost.
        """
        run = self._find_run(needed=bool(self._waiting))
        if run is None:
            return
        for _ in range(len(self._waiting)):
            self._write(run)
            if self._waiting:
                run.log({}, commit=True)  # ends the open row, which holds the step before
        self._write(run)
        if self._ours:
            run.finish()

    def where(self) -> str:
        """Return the run's address when it is online, its folder when it is offline."""
        return self._place

    def undelivered(self) -> Sequence[int]:
        """Return the steps that wait, and those whose log call did not return."""
        return [*self._trying, *(row[STEP] for row in self._waiting)]

    def _find_run(self, *, needed: bool) -> "wandb.Run | None":
        if self._run is not None:
            return self._run
        import wandb

        found = wandb.run
        if found is None:
            if not needed:
                return None
            found = self._open_run()
            self._ours = True
        self._rides = not self._ours and not found.disabled and found.settings.mode != "shared"
        self._place = "" if found.disabled else found.settings.sync_dir if found.offline else found.url or ""
        found.define_metric(STEP, hidden=True)
        for section in _SECTIONS:
            found.define_metric(f"{section}/*", step_metric=STEP)
        for name, summary in _SUMMARIES.items():
            found.define_metric(name, step_metric=STEP, summary=summary)
        self._publish_config(found)
        self._run = found
        return found

    def _open_run(self) -> "wandb.Run":
        import wandb

        # W&B falls back to the system's temporary folder without an error, where nobody looks for the run.
        try:
            self._run_dir.mkdir(parents=True, exist_ok=True)
            writable = os.access(self._run_dir, os.W_OK)
        except OSError:
            writable = False
        if not writable:
            raise SinkError(f"{self._run_dir}: W&B cannot write there; choose another --out or drop wandb from sinks.")
        mode: Any = os.environ.get("WANDB_MODE") or self._mode
        settings = wandb.Settings(console="off", silent=True)
        return wandb.init(project=self._project, dir=self._run_dir, mode=mode, settings=settings)

    def _publish_config(self, run: "wandb.Run") -> None:
        run.config.update({"mismatch_hooks_run": self._config}, allow_val_change=True)  # type: ignore[no-untyped-call]

    def _hold(self, values: dict[str, Any]) -> None:
        if self._waiting and self._waiting[-1][STEP] == self._last_step:
            self._waiting[-1] |= values
        else:
            self._waiting.append({STEP: self._last_step} | values)

    def _write(self, run: "wandb.Run") -> None:
        """Log the rows that wait, as far as the open row has room for them."""
        import wandb

        while self._waiting:
            if self._rides:
                open_at = run.step
                if open_at == self._ridden_at and self._waiting[0][STEP] != self._ridden_step:
                    return
                self._ridden_at = open_at
            row = self._waiting.pop(0)
            tables = {name: value for name, value in row.items() if isinstance(value, wandb.Table)}
            # Left in the list when the call raises or hangs: that step is then lost.
            self._trying.append(row[STEP])
            run.log({name: value for name, value in row.items() if name not in tables}, commit=False)
            self._trying.pop()
            self._ridden_step = row[STEP]
            # Apart, because a table is an artifact to W&B: where the server refuses it, only the tables are given up.
            try:
                if tables and self._sends_tables:
                    self._sends_tables = False
                    run.log(tables, commit=False)
                    self._sends_tables = True
            finally:
                if not self._rides:
                    run.log({}, commit=True)

    def _values(self, event: Event) -> dict[str, Any]:
        payload = event.payload
        match event.type:
            case "step":
                return _numbers("mismatch", payload.get("metrics", {}))
            case "overhead":
                return _numbers("hooks", payload.get("metrics", {}))
            case "error":
                return _numbers("hooks", {"errors": payload.get("total")})
            case "verdict":  # carries its gates and arms, whose own events add nothing here
                return self._verdict(payload, event.step)
            case "readback":
                return _readback(payload)
        return {}

    def _verdict(self, payload: Mapping[str, Any], step: int | None) -> dict[str, Any]:
        import wandb

        decoded = payload["path"] == ExecutionPath.ROLLOUT_DECODE.value
        series = f"{payload['factor']}/{payload['origin']}" + "/decode" * decoded
        values: dict[str, Any] = {f"verdict/{series}": VERDICT_CODES[payload["diagnosis"]]}
        for name, gate in payload["gates"].items():
            values[f"gate/{series}/{name}"] = int(gate["ok"])
        for arm, metrics in payload["arms"].items():
            shown = {name: metrics[name] for name in _ARM_SERIES if name in metrics}
            values |= _numbers(f"verdict/{series}/{arm}", shown)
        self._verdicts.append(
            [
                self._last_step if step is None else step,
                *(str(payload[name]) for name in ("factor", "origin", "path", "diagnosis", "reason")),
                str(payload.get("recommendation", "")),
                "; ".join(f"{arm} {_brief(metrics)}" for arm, metrics in payload["arms"].items()),
                "; ".join(
                    f"{name} {'ok' if gate['ok'] else gate['reason']}" for name, gate in payload["gates"].items()
                ),
                payload["tokens"],
            ]
        )
        del self._verdicts[:-_MOST_VERDICTS]
        table = wandb.Table(columns=list(VERDICT_COLUMNS), data=[list(row) for row in self._verdicts])
        return values | {"verdict/table": table}


def _numbers(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        f"{prefix}/{name}": int(found) if isinstance(found, bool) else found
        for name, found in values.items()
        if isinstance(found, int | float)
    }


def _brief(metrics: Mapping[str, Any]) -> str:
    shown = (f"{name} {metrics[name]:.4g}" for name in _ARM_SERIES if isinstance(metrics.get(name), int | float))
    return ", ".join(shown)


def _readback(payload: Mapping[str, Any]) -> dict[str, Any]:
    import wandb

    differing = {difference["key"]: place for place, difference in enumerate(payload["differences"])}
    rows = [
        [
            key,
            _effective(sides.get("training")),
            _effective(sides.get("rollout")),
            int(key in differing),
            str(sides.get("training", {}).get("source", "")),
            str(sides.get("rollout", {}).get("source", "")),
        ]
        for key, sides in sorted(
            payload["settings"].items(), key=lambda item: (differing.get(item[0], 1 << 30), item[0])
        )
    ]
    table = wandb.Table(columns=list(READBACK_COLUMNS), data=rows)
    return {"hooks/readback": table, "hooks/settings_that_differ": len(differing)}


def _effective(setting: Mapping[str, Any] | None) -> str:
    if setting is None:
        return ""
    return str(thaw(setting["effective"])) if "effective" in setting else f"unobservable: {setting['unobservable']}"


def _alert(run: "wandb.Run", alert: Mapping[str, Any]) -> None:
    run.alert(
        title=str(alert["title"])[:_TITLE_LENGTH],
        text="\n".join(str(alert[key]) for key in ("text", "recommendation") if alert.get(key)),
        level=_ALERT_LEVELS.get(str(alert.get("severity")), "WARN"),
        wait_duration=_QUIET_BETWEEN_ALERTS,
    )
