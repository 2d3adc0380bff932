"""The run's own W&B run, as any training script opens one."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, cast, get_args

from recipes.grpo_smollm2.config import Config
from recipes.grpo_smollm2.errors import RecipeError

Log = Callable[[int, Mapping[str, float]], None]

Mode = Literal["offline", "online", "disabled"]


@contextmanager
def tracking(config: Config, *, out: Path) -> Iterator[Log]:
    """A function that logs one step's figures; a disabled run imports no wandb and logs nowhere.

    Raises:
        RecipeError: WANDB_MODE holds a mode that does not exist.
    """
    mode = _mode(os.environ.get("WANDB_MODE") or config.wandb.mode)
    if mode == "disabled":
        yield lambda step, figures: None
        return
    # wandb finds vLLM's imports of other clients and advertises a product for them.
    os.environ.setdefault("WANDB_DISABLE_WEAVE", "true")
    import wandb

    run = wandb.init(
        project=config.wandb.project,
        name=config.wandb.name,
        dir=out,
        mode=mode,
        config=config.model_dump(),
        settings=wandb.Settings(console="off", silent=True),
    )
    try:
        yield lambda step, figures: run.log({f"train/{name}": value for name, value in figures.items()}, step=step)
    except BaseException:
        run.finish(exit_code=1)
        raise
    run.finish()


def _mode(given: str) -> Mode:
    for mode in get_args(Mode):
        if mode == given:
            return cast(Mode, mode)
    raise RecipeError(f"WANDB_MODE: got {given!r}; accepts {', '.join(get_args(Mode))}.")
