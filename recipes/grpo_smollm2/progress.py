"""What a person sees while a run goes on, all of it on standard error."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


@dataclass(frozen=True, slots=True, kw_only=True)
class Display:
    """A bar, and lines above it.

    Attributes:
        progress: the bar.
        task: the bar's only task.
    """

    progress: Progress
    task: TaskID

    def say(self, line: str) -> None:
        """Show one line."""
        self.progress.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def step(self, step: int, figures: Mapping[str, float], *, hooks: Mapping[str, float] | None) -> None:
        """Show a finished step: the loop's figures, and the hooks' where there are any."""
        columns = [
            f"step {step:>3}",
            f"reward {figures['reward']:.3f}",
            f"loss {figures['loss']:+.4f}",
            f"grad {figures['grad_norm']:.2f}",
            f"tokens {figures['response_length']:.1f}",
        ]
        if hooks is not None:
            # A step whose capture failed has no metrics; that is shown, and is no reason to stop.
            columns += [
                f"clip_fraction {hooks.get('clip_fraction', math.nan):.4f}",
                f"|dlogp| {hooks.get('dlogp_mean', math.nan):.4f}",
                f"hooks {hooks.get('overhead_fraction', math.nan):.1%}",
            ]
        self.say("  ".join([*columns, f"{figures['seconds']:.1f} s"]))
        self.progress.advance(self.task)


@contextmanager
def display(steps: int) -> Iterator[Display]:
    """The display of a run of ``steps`` steps."""
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
    )
    with progress:
        yield Display(progress=progress, task=progress.add_task("GRPO", total=steps))
