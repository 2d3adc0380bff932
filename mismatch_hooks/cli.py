"""The command line: parses arguments and prints; what the commands do lives below."""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from enum import Enum
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

if TYPE_CHECKING:
    from mismatch_hooks.sinks.event import Event

WRONG_CALL = 2
EVENTS = "events.jsonl"

_Member = TypeVar("_Member", bound=Enum)

app = typer.Typer(
    name="mismatch-hooks",
    help="Find which operator, on which side, makes rollout and training log-probs disagree.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


class Terminated(KeyboardInterrupt):
    """SIGTERM arrived; whatever handles Ctrl-C handles it the same way."""

    exit_code = 128 + signal.SIGTERM


@app.callback()
def _commands() -> None:
    # With a callback typer keeps commands by name, also while there is only one.
    pass


@app.command()
def run(
    recipe: Annotated[
        Path, typer.Argument(metavar="RECIPE.yaml", help="A recipe; its key `loop` names a Python file.")
    ],
    steps: Annotated[int | None, typer.Option(min=1, help="Run this many steps.")] = None,
    out: Annotated[Path | None, typer.Option(help="Where results go [default: runs/<recipe>-<time>].")] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key; the value is YAML.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")] = False,
) -> None:
    """Run a recipe with the hooks on."""
    from mismatch_hooks.live.recipe import load_recipe

    given = [f"steps={steps}", *(overrides or ())] if steps is not None else overrides or ()
    loaded = load_recipe(recipe, given)
    folder = out or Path("runs") / f"{recipe.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    code = 0
    try:
        with _standard_output_on_standard_error(), _terminated_like_ctrl_c():
            loaded.main(loaded.raw, out=folder)
    except KeyboardInterrupt as stopped:
        code = getattr(stopped, "exit_code", 128 + signal.SIGINT)
    if as_json:
        _print_json(_result(folder))
    print(f"stopped; what was done until then is in {folder}" if code else f"results in {folder}", file=sys.stderr)
    raise typer.Exit(code)


@app.command()
def tail(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The folder that a run writes to.")],
    follow: Annotated[bool, typer.Option("--follow/--no-follow", help="Wait for more until the run ends.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as one JSON document.")] = False,
) -> None:
    """Show a live or finished run: a line a step, verdicts, alerts, and the summary."""
    from mismatch_hooks.live.recipe import CallError
    from mismatch_hooks.sinks.console import render_summary, write
    from mismatch_hooks.sinks.event import follow_events, read_events
    from mismatch_hooks.sinks.summary import RunningSummary

    path = run_dir / EVENTS
    if not (run_dir.is_dir() if follow else path.is_file()):
        raise CallError(f"{run_dir}: no run there (no {EVENTS}); give the folder that `run --out` named.")
    summary = RunningSummary()
    for event in _shown(follow_events(path) if follow else read_events(path)):
        summary.observe(event)
    if as_json:
        _print_json(summary.to_plain())
    else:
        write(render_summary(summary))


@app.command("list")
def list_(
    operator: Annotated[str | None, typer.Option(help="Only this operator's factors.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")] = False,
) -> None:
    """List the factors: what each asks, its switch, what it costs, and whether it can run here."""
    from mismatch_hooks.live.overview import list_factors
    from mismatch_hooks.live.registry import load_registry

    document = list_factors(load_registry(), operator=operator)
    _print(document, "render_factors", as_json=as_json)


@app.command()
def plan(
    operator: Annotated[str | None, typer.Option(help="Only this operator's factors.")] = None,
    factor: Annotated[str | None, typer.Option(help="Only this factor; an id or a glob.")] = None,
    origin: Annotated[str, typer.Option(help="aligned, native or both.")] = "aligned",
    noise_floor: Annotated[str, typer.Option(help="How noisy the run is.")] = "production",
    model_family: Annotated[str, typer.Option(help="dense, moe or large_moe.")] = "dense",
    model: Annotated[Path | None, typer.Option(help="A model's folder, to read its traits from.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")] = False,
) -> None:
    """Show the arms that an ablation would run, in order, with their passes, and what is left out and why."""
    from mismatch_hooks.live.overview import plan_factors
    from mismatch_hooks.live.registry import load_registry
    from mismatch_hooks.schema.enums import ModelFamily, NoiseFloor, Origin

    both = origin == "both"
    plans = [
        plan_factors(
            load_registry(),
            operator=operator,
            factor=factor,
            origin=one,
            noise_floor=_member(NoiseFloor, noise_floor, "--noise-floor"),
            family=_member(ModelFamily, model_family, "--model-family"),
            model=model,
        )
        for one in ((Origin.ALIGNED, Origin.NATIVE) if both else (_member(Origin, origin, "--origin", "both"),))
    ]
    if both:
        _print({"plans": plans}, "render_plans", as_json=as_json)
    else:
        _print(plans[0], "render_plan", as_json=as_json)


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")] = False,
) -> None:
    """Check engines, versions, environment and plugins, and name the fix for each miss; 1 when something is missing."""
    from mismatch_hooks.live.overview import examine_host
    from mismatch_hooks.live.registry import load_registry

    document = examine_host(load_registry())
    _print(document, "render_host", as_json=as_json)
    raise typer.Exit(0 if document["ok"] else 1)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns 0 when done, 1 when the thing examined is bad, 2 when the call is wrong."""
    with _Refusals() as refusals:
        return int(app(args=None if arguments is None else list(arguments), standalone_mode=False) or 0)
    return refusals.exit_code


class _Refusals:
    """Turn an exception that is meant for the caller into its sentence and its exit code; let every other one pass.

    Meant for the caller are errors that carry an ``exit_code``, as those of the command line and of a recipe do, and
    the value errors of this library.
    """

    exit_code = 0

    def __enter__(self) -> "_Refusals":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        code = getattr(error, "exit_code", None)
        if code is None and isinstance(error, ValueError) and type(error).__module__.startswith("mismatch_hooks."):
            code = WRONG_CALL
        if not isinstance(code, int):
            return False
        self.exit_code = code
        say = getattr(error, "format_message", None)  # the command line's own errors leave out the option otherwise
        print(say() if callable(say) else error, file=sys.stderr)
        return True


@contextmanager
def _terminated_like_ctrl_c() -> Iterator[None]:
    def stop(signum: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once: a second one must not interrupt the clean-up
        raise Terminated

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _standard_output_on_standard_error() -> Iterator[None]:
    # By descriptor as well: engines print from native code and from processes of their own, and a reader of --json
    # must find one document on standard output.
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _result(folder: Path) -> dict[str, Any]:
    from mismatch_hooks.sinks.event import read_events
    from mismatch_hooks.sinks.summary import RunningSummary

    events, result = folder / EVENTS, folder / "result.json"
    summary = RunningSummary()
    for event in read_events(events) if events.is_file() else ():
        summary.observe(event)
    return {
        "out": str(folder),
        "summary": summary.to_plain() if events.is_file() else None,
        "result": json.loads(result.read_text(encoding="utf-8")) if result.is_file() else None,
    }


def _shown(events: "Iterator[Event]") -> "Iterator[Event]":
    """Print each event that a person should see, and pass every one on; a step's line waits for its overhead."""
    from mismatch_hooks.sinks.console import render_event, render_step, write

    step: Event | None = None
    for event in events:
        if step is not None and event.type in ("overhead", "step", "run"):
            cost: Mapping[str, Any] = event.payload.get("metrics", {}) if event.type == "overhead" else {}
            write(render_step(step, overhead=cost))
            step = None
        if event.type == "step":
            step = event
        rendered = render_event(event)
        if rendered is not None:
            write(rendered)
        yield event
    if step is not None:
        write(render_step(step, overhead={}))


def _member(kind: type[_Member], given: str, option: str, *also: str) -> _Member:
    from difflib import get_close_matches

    from mismatch_hooks.live.recipe import CallError

    known = {member.name.lower(): member for member in kind}
    if given not in known:
        accepted = [*known, *also]
        near = get_close_matches(given, accepted, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise CallError(f"{option}: got {given!r}; accepts {', '.join(accepted)}.{hint}")
    return known[given]


def _print(document: Mapping[str, Any], renderer: str, *, as_json: bool) -> None:
    if as_json:
        _print_json(document)
        return
    # Tables load slowly, and a reader of --json needs none.
    from mismatch_hooks.sinks import tables

    print(tables.to_text(getattr(tables, renderer)(document)), end="")


def _print_json(document: Mapping[str, Any]) -> None:
    from mismatch_hooks.sinks.event import spell_nonfinite

    print(json.dumps(spell_nonfinite(dict(document)), ensure_ascii=False, allow_nan=False))


if __name__ == "__main__":
    sys.exit(main())
