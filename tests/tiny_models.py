"""Random two-layer checkpoints for tests, made by the recipe's own maker."""

from pathlib import Path
from typing import Literal

from recipes.grpo_smollm2.tiny import write_tiny

SHAPES: tuple[Literal["llama", "qwen3"], ...] = ("llama", "qwen3")


def tiny_checkpoint(
    root: Path, *, shape: Literal["llama", "qwen3"], seed: int = 0, tied: bool = False, kv_heads: int = 2
) -> Path:
    """The folder, inside ``root``, of a bf16 checkpoint without a tokenizer; see ``write_tiny`` for what it holds."""
    folder = root / f"{shape}-{'tied' if tied else 'untied'}-kv{kv_heads}-seed{seed}"
    if not folder.is_dir():
        folder.mkdir(parents=True)
        write_tiny(folder, shape=shape, seed=seed, tied=tied, kv_heads=kv_heads)
    return folder
