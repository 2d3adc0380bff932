"""What a person reads while the run goes on and when it ends; as functions, so that ``tail`` shows the same."""

import io
import math
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from mismatch_hooks.schema.enums import Diagnosis, ExecutionPath
from mismatch_hooks.sinks.event import Event
from mismatch_hooks.sinks.summary import RunningSummary

WIDTH = 100
_MOST_TOKENS = 3
_MOST_DIFFERENCES = 12
_VALUE_WIDTH = 26
_SUMMARY_METRICS = (
    "clip_fraction",
    "dlogp_mean",
    "dlogp_signed_mean",
    "dlogp_p99",
    "dlogp_max",
    "ratio_max",
    "k3",
    "bitwise_fraction",
    "nonfinite",
)
_SEVERITY_STYLES = {"info": "cyan", "warning": "yellow", "critical": "bold red"}


class ConsoleSink:
    """Print verdicts, differences, alerts and the closing summary on standard error; no line for a step."""

    name = "console"
    confirms_on_emit = True

    def __init__(self) -> None:
        self._summary = RunningSummary()
        self._readback_shown: tuple[Any, Any, Any] | None = None

    def open(self) -> None:
        """Need nothing."""

    def emit(self, event: Event) -> None:
        """Print the event if a person should see it."""
        self._summary.observe(event)
        if event.ends_run:
            write(render_summary(self._summary))
        elif event.type == "error":
            return  # logged by the ledger already, with or without this sink
        elif event.type == "readback" and self._readback_shown == _readback_rows(event.payload):
            return  # the same settings at every ablation
        else:
            if event.type == "readback":
                self._readback_shown = _readback_rows(event.payload)
            rendered = render_event(event)
            if rendered is not None:
                write(rendered)

    def close(self) -> None:
        """Need nothing."""

    def where(self) -> str:
        """Return nothing: what was printed is gone."""
        return ""

    def undelivered(self) -> Sequence[int]:
        """Return nothing: an ``emit`` that returned has delivered."""
        return ()


def write(renderable: RenderableType) -> None:
    """Print on standard error, at most ``WIDTH`` columns wide, above a progress bar where one is shown."""
    # A rich console of our own would reach past the stand-in for sys.stderr that a live progress bar has put up, and
    # tear the bar apart; text written to the stand-in is shown above it.
    width = min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns)
    text = io.StringIO()
    Console(
        file=text, width=width, force_terminal=sys.stderr.isatty(), highlight=False, markup=False, emoji=False
    ).print(renderable)
    sys.stderr.write(text.getvalue())
    sys.stderr.flush()


def render_event(event: Event) -> RenderableType | None:
    """Return what a person is shown of one event when it happens; None for what is only counted."""
    match event.type:
        case "run":
            fallback = event.payload.get("plan", {}).get("fallback", "")
            return Text(f"Ablating from native: {fallback}.", style="yellow") if fallback else None
        case "verdict":
            return render_verdict(event.payload, step=event.step)
        case "readback":
            not_as_requested, differences, unpinned = _readback_rows(event.payload)
            parts = [render_not_as_requested(not_as_requested)] if not_as_requested else []
            parts += [render_differences(differences)] if differences else []
            parts += [render_unpinned(unpinned)] if unpinned else []
            return Group(*parts) if parts else None
        case "trace":
            causes = "".join(
                f"\n  {_words(cause['hypothesis'])}: {cause['semantic']}, {cause['reason']}"
                for cause in event.payload.get("causes", ())
            )
            return Text.assemble(("trace ", "bold"), f" step {event.step}  {event.payload['summary']}{causes}")
        case "alignment":
            return render_alignment(event.payload, step=event.step)
        case "alert":
            return render_alert(event.payload, step=event.step)
        case "error":
            return render_error(event.payload, step=event.step)
    return None


def render_verdict(verdict: Mapping[str, Any], *, step: int | None = None) -> RenderableType:
    """Return a verdict as a panel: the diagnosis, its reason, the arms, the gates and what to do.

    Args:
        verdict: the payload of a ``verdict`` event.
        step: the loop's step that was examined.
    """
    at = "" if step is None else f" · step {step}"
    title = f"{verdict['factor']} · {_from(verdict)}{at}"
    facts = _facts()
    facts.add_row("verdict", Text(_words(verdict["diagnosis"]), style=f"bold {_style(verdict['diagnosis'])}"))
    facts.add_row("because", verdict["reason"])
    parts: list[RenderableType] = [facts]
    if verdict.get("arms"):
        parts += ["", render_arms(verdict["arms"], verdict.get("effects", {}))]
    after = _facts()
    for name, gate in verdict["gates"].items():
        mark = Text("ok", style="green") if gate["ok"] else Text("BLOCKED", style="bold red")
        after.add_row(f"gate {name}", Text.assemble(mark, f"  {gate['reason']}"))
    if verdict.get("issues"):
        after.add_row("contracts", "; ".join(_issue(issue) for issue in verdict["issues"]))
    for one in verdict.get("replays", ()):
        after.add_row("replay", _replay(one))
    if verdict.get("recommendation"):
        after.add_row("do", Text(verdict["recommendation"], style="bold"))
    if verdict.get("paths"):
        after.add_row("paths", _paths(verdict["paths"]))
    after.add_row("spent", _spent(verdict))
    return Panel(Group(*parts, "", after), title=Text(title), title_align="left", padding=(0, 1))


def _issue(issue: Mapping[str, Any]) -> str:
    sides = ", ".join(f"{side} {_absent(value)}" for side, value in issue["values"].items())
    return f"{issue['path']} {issue['rule']}: {sides}"


def _replay(one: Mapping[str, Any]) -> str:
    """One side's calls of the operator, and how far apart its implementations are on the same operands."""
    if not one["calls"]:
        return str(one["reason"])
    apart = {f"{side} native from its reference": found for side, found in one["departs"].items()}
    apart |= {name: one[name] for name in ("natives", "references") if one[name]}
    said = [f"{name} {_apart(found)}" for name, found in apart.items()]
    said += [f"farthest at {one['place']}"] if one["place"] else []
    said += [one["reason"]] if one["reason"] else []
    return f"{one['calls']} calls on {one['captured_on']}: {'; '.join(said)}"


def _apart(found: Mapping[str, Any]) -> str:
    return f"by up to {figure(found['max_abs'])} ({found['max_ulp']} ULP)" if found["differing"] else "same bits"


def _absent(value: Any) -> str:
    return "has none" if value is None else str(value)


def render_arms(arms: Mapping[str, Mapping[str, Any]], effects: Mapping[str, Mapping[str, Any]]) -> RenderableType:
    """Return one row an arm: mean |dlogp|, clip_fraction, and the change against both_native with its interval."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for heading in ("arm", "dlogp_mean", "clip_fraction", "change of dlogp_mean [interval]"):
        table.add_column(heading, justify="left" if heading == "arm" else "right", no_wrap=True)
    for name, metrics in arms.items():
        effect = effects.get(name)
        table.add_row(name, figure(metrics.get("dlogp_mean")), figure(metrics.get("clip_fraction")), _change(effect))
    return table


def render_not_as_requested(settings: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Return the settings that somebody asked for and that are not in effect."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("setting", no_wrap=True, max_width=40)
    table.add_column("side")
    for heading in ("requested", "in effect"):
        table.add_column(heading, max_width=_VALUE_WIDTH)
    for one in settings:
        by, source = one.get("requested_by", ""), one.get("source", "")
        table.add_row(
            str(one["key"]),
            str(one["side"]),
            f"{_value(one['requested'])} ({by})" if by else _value(one["requested"]),
            f"{_value(one['effective'])} ({source})" if source else _value(one["effective"]),
        )
    head = Text(f"{_count(len(settings), 'setting')} not in effect as requested:", style="bold yellow")
    return Group(head, table)


def render_alignment(alignment: Mapping[str, Any], *, step: int | None) -> RenderableType:
    """Return what is kept on its references from now on, or what a step showed that is not equal on every token.

    Args:
        alignment: the payload of an ``alignment`` event.
        step: the loop's step; None at the start.
    """
    if step is None:
        said = Text("kept on their references while sampling and training:", style="bold")
        for side, operators in alignment["operators"].items():
            said.append(f"\n  {side}: {_held(operators)}", style="not bold")
        return said
    unequal, tokens = alignment["unequal"], alignment["tokens"]
    said = Text(f"NOT ALIGNED  step {step}  {unequal} of {tokens} tokens are not equal to the bit", style="bold yellow")
    for one in alignment["first"][:_MOST_TOKENS]:
        said.append(
            f"\n  sequence {one['sequence']}, token {one['position']}: rollout {one['rollout']:.7g}, training "
            f"{one['training']:.7g}",
            style="not bold default",
        )
    said.append(f"\n  {alignment['where']}", style="not bold default")
    return said


def _held(operators: Mapping[str, Any]) -> str:
    return ", ".join(f"{factor} ({reference})" for factor, reference in operators.items())


def _readback_rows(payload: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    return payload.get("not_as_requested", ()), payload.get("differences", ()), payload.get("unpinned", ())


def render_differences(differences: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Return the settings that the two sides do not share, in the order given."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("setting", no_wrap=True, max_width=40)
    table.add_column("training", max_width=_VALUE_WIDTH)
    table.add_column("rollout", max_width=_VALUE_WIDTH)
    for difference in differences[:_MOST_DIFFERENCES]:
        table.add_row(str(difference["key"]), _value(difference.get("training")), _value(difference.get("rollout")))
    more = len(differences) - _MOST_DIFFERENCES
    parts: list[RenderableType] = [
        Text(f"{_count(len(differences), 'setting')} in effect that the two sides do not share:"),
        table,
    ]
    if more > 0:
        parts.append(Text(f"and {more} more, in the readback events", style="dim"))
    return Group(*parts)


def render_unpinned(settings: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Return the settings that bits depend on and that are not as they have to be, one sentence each."""
    head = Text(f"{_count(len(settings), 'setting')} to pin, or bits may move by themselves:")
    return Group(head, *(Text(f"  {one['why']}") for one in settings))


def render_alert(alert: Mapping[str, Any], *, step: int | None = None) -> RenderableType:
    """Return an alert: what happened, since when, what to do."""
    style = _SEVERITY_STYLES.get(str(alert.get("severity", "")), "yellow")
    at = "" if step is None else f"  step {step}"
    head = Text.assemble((f"ALERT {alert.get('state', '')}", style), f"{at}  {alert['title']}")
    parts: list[RenderableType] = [head, Text(f"  {alert['text']}")]
    if alert.get("recommendation"):
        parts.append(Text(f"  {alert['recommendation']}"))
    return Group(*parts)


def render_error(error: Mapping[str, Any], *, step: int | None = None) -> RenderableType:
    """Return an error that the hooks kept from the run."""
    at = "" if step is None else f" at step {step}"
    head = Text("mismatch_hooks ", style="yellow")
    return Text.assemble(head, f"{error['cause']} failed{at}, training goes on: {error['message']}")


def render_step(event: Event, *, overhead: Mapping[str, Any]) -> RenderableType:
    """Return one line for a step: the loop's reward and loss where it passed them, the mismatch, the hooks' cost.

    Args:
        event: of type ``step``.
        overhead: the latest overhead metrics; empty when there are none yet.
    """
    host, metrics = event.payload.get("host", {}), event.payload.get("metrics", {})
    columns = [f"step {event.step:>5}"]
    columns += [f"{name} {figure(host[name])}" for name in ("reward", "loss") if name in host]
    columns += [f"clip_fraction {figure(metrics.get('clip_fraction'))}", f"|dlogp| {figure(metrics.get('dlogp_mean'))}"]
    if "overhead_fraction" in overhead:
        columns.append(f"hooks {overhead['overhead_fraction']:.1%}")
    return Text("  ".join(columns))


def render_summary(summary: RunningSummary) -> RenderableType:
    """Return the closing words: metrics, each factor's verdict and gates, what to do, what failed, where things are."""
    facts = _facts()
    facts.add_row("steps", f"{summary.steps} ({summary.state or 'no end recorded'})")
    known = [name for name in _SUMMARY_METRICS if name in summary.last]
    parts: list[RenderableType] = [facts]
    if known:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
        table.add_column("metric")
        table.add_column("last step", justify="right")
        table.add_column("worst step", justify="right")
        for name in known:
            peak = figure(summary.peak[name]) if name in summary.peak else ""
            table.add_row(name, figure(summary.last[name]), peak)
        parts += ["", table]
    for verdict in summary.verdicts.values():
        parts += ["", _verdict_in_short(verdict)]
    rest = _facts()
    offline = [str(left["factor"]) for left in summary.left_out if left["outcome"] == "not_switchable_in_process"]
    for left in summary.left_out:
        if left["factor"] not in offline:
            rest.add_row(Text(str(left["factor"])), f"{_words(left['outcome'])}: {left['reason']}")
    if offline:
        rest.add_row("not live", Text(f"{', '.join(offline)}: `mismatch-hooks plan` says what each would cost"))
    if summary.not_reached:
        rest.add_row("not reached", Text(f"{', '.join(summary.not_reached)}: the next ablation starts with them"))
    if summary.alignment:
        equal, steps = summary.alignment["equal_steps"], summary.alignment["steps"]
        rest.add_row("aligned", Text(f"{equal} of {steps} steps equal to the bit on every token"))
        for side, operators in summary.alignment["operators"].items():
            rest.add_row(f"  on {side}", Text(_held(operators)))
    if summary.ablation_off:
        rest.add_row("no ablation", Text(summary.ablation_off, style="yellow"))
    for alert in summary.alerts.values():
        if alert.get("state") != "closed":
            rest.add_row("open alert", Text(f"{alert['title']} (since step {alert.get('since_step', alert['step'])})"))
    if summary.differences:
        keys = ", ".join(str(difference["key"]) for difference in summary.differences[:4])
        more = len(summary.differences) - 4
        rest.add_row("sides differ in", keys + (f" and {more} more" if more > 0 else ""))
    if "run_overhead_fraction" in summary.overhead:
        spent = summary.overhead
        ablation = f", ablation {spent['run_ablation_fraction']:.1%}" if spent["run_ablation_fraction"] else ""
        rest.add_row("hooks took", f"{spent['run_overhead_fraction']:.2%} of the run's time{ablation}")
    for cause, count in summary.errors.items():
        rest.add_row("failed", Text(f"{cause}: {_count(count, 'error')}, kept from the run", style="yellow"))
    for sink, steps in summary.missing.items():
        rest.add_row("missing", Text(f"steps {spans(steps)} in {sink}", style="yellow"))
    for name, path in summary.paths.items():
        rest.add_row(name, Text(path, overflow="fold"))
    if rest.row_count:
        parts += ["", rest]
    return Panel(Group(*parts), title=Text("mismatch_hooks"), title_align="left", padding=(0, 1))


def figure(value: Any) -> str:
    """Return a number in few characters: four significant digits, exact zeros and counts as they are."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "–"}[value]
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        if value == 0 or not math.isfinite(value):
            return "0" if value == 0 else str(value)
        return f"{value:.4f}" if 1e-3 <= abs(value) < 1e4 else f"{value:.2e}"
    return str(value)


def spans(steps: Iterable[int]) -> str:
    """Return steps in order with runs drawn together: ``3–10, 12``."""
    drawn: list[list[int]] = []
    for step in sorted(steps):
        if drawn and step == drawn[-1][1] + 1:
            drawn[-1][1] = step
        else:
            drawn.append([step, step])
    return ", ".join(str(first) if first == last else f"{first}–{last}" for first, last in drawn)


def _facts() -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    return table


def _verdict_in_short(verdict: Mapping[str, Any]) -> RenderableType:
    facts = _facts()
    head = Text.assemble(
        (_words(verdict["diagnosis"]), f"bold {_style(verdict['diagnosis'])}"),
        f"  ({_from(verdict)}, step {verdict['step']})",
    )
    facts.add_row(Text(str(verdict["factor"]), style="bold"), head)
    facts.add_row("because", verdict["reason"])
    blocked = [(name, gate) for name, gate in verdict["gates"].items() if not gate["ok"]]
    passed = [name for name, gate in verdict["gates"].items() if gate["ok"]]
    if passed:
        facts.add_row("gates ok", ", ".join(passed))
    for name, gate in blocked:
        facts.add_row("gate BLOCKED", f"{name}: {gate['reason']}")
    if verdict.get("recommendation"):
        facts.add_row("do", Text(verdict["recommendation"], style="bold"))
    return facts


def _words(diagnosis: Any) -> str:
    return str(diagnosis).replace("_", " ")


def _style(diagnosis: Any) -> str:
    known = Diagnosis(diagnosis)
    if not known.judged:
        return "yellow"
    return "green" if known is Diagnosis.NOT_THIS_FACTOR else "red"


def _change(effect: Mapping[str, Any] | None) -> str:
    if effect is None:
        return ""
    low, high = effect["interval"]
    return f"{effect['dlogp_change']:+.4f} [{low:+.4f}, {high:+.4f}]"


def _paths(paths: Mapping[str, Mapping[str, Any]]) -> str:
    terms = ("cross_framework", "decode_against_prefill", "live_against_prefill")
    known = [f"{_words(term)} {figure(paths[term].get('dlogp_mean'))}" for term in terms if term in paths]
    return f"mean |dlogp| {', '.join(known)}"


def _from(verdict: Mapping[str, Any]) -> str:
    decoded = verdict["path"] == ExecutionPath.ROLLOUT_DECODE.value
    return f"from {verdict['origin']}{', rollout decodes' * decoded}"


def _spent(verdict: Mapping[str, Any]) -> str:
    spent = f"{verdict['tokens']} tokens, {verdict['passes']} passes, {verdict['seconds']:.1f} s"
    resolvable = verdict.get("resolvable")
    return spent if resolvable is None else f"{spent}; these tokens resolve a change of {figure(resolvable)} or more"


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"differs between {len(value)} modules"
    if isinstance(value, float):
        return f"{value:.10g}"
    text = str(value)
    # Of a class's path the last part tells the two sides apart.
    return text.rsplit(".", 1)[-1] if len(text) > _VALUE_WIDTH and " " not in text else text


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
