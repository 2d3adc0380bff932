"""From the names in the configuration to sinks."""

from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from mismatch_hooks.sinks.base import Sink, SinkError


def build_sinks(
    names: Sequence[str], *, run_dir: Path, project: str = "mismatch_hooks", wandb_mode: str | None = None
) -> list[Sink]:
    """Return the named sinks in the order given; nothing is opened yet.

    Args:
        names: of ``wandb``, ``jsonl``, ``console``.
        run_dir: where files go.
        project: of a W&B run that the sink has to open itself.
        wandb_mode: of such a run (``"online"``, ``"offline"``); the variable WANDB_MODE wins, None leaves it to W&B.

    Raises:
        SinkError: a name is unknown or given twice, or the package of a sink is not installed.
    """
    builders: Mapping[str, Callable[[], Sink]] = {
        "wandb": lambda: _wandb(run_dir, project=project, mode=wandb_mode),
        "jsonl": lambda: _jsonl(run_dir),
        "console": _console,
    }
    for name in names:
        if name not in builders:
            near = get_close_matches(name, builders, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise SinkError(f"mismatch_hooks.sinks: got {name!r}; accepts {', '.join(builders)}.{hint}")
        if names.count(name) > 1:
            raise SinkError(f"mismatch_hooks.sinks: got {name!r} more than once; name each sink once.")
    return [builders[name]() for name in names]


def _wandb(run_dir: Path, *, project: str, mode: str | None) -> Sink:
    # By its distribution: the folder ./wandb that an earlier run left behind passes for a package.
    try:
        version("wandb")
    except PackageNotFoundError:
        raise SinkError(
            "mismatch_hooks.sinks: got 'wandb', which is not installed; "
            "install mismatch-hooks[wandb] or drop it from sinks."
        ) from None
    from mismatch_hooks.sinks.wandb import WandbSink

    return WandbSink(run_dir, project=project, mode=mode)


def _jsonl(run_dir: Path) -> Sink:
    from mismatch_hooks.sinks.jsonl import JsonlSink

    return JsonlSink(run_dir / "events.jsonl")


def _console() -> Sink:
    from mismatch_hooks.sinks.console import ConsoleSink

    return ConsoleSink()
