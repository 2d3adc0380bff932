"""What surrounds any run: seeds, a clean stop, and the record of what happened."""

import hashlib
import json
import logging
import os
import random
import signal
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import numpy
import torch
from torch import Tensor


class Terminated(KeyboardInterrupt):
    """The run was asked to end by SIGTERM; everything that handles Ctrl-C handles it the same way."""

    exit_code = 143


@contextmanager
def stop_on_sigterm() -> Iterator[None]:
    """Raise ``Terminated`` in the block when SIGTERM arrives; outside the main thread signals are left alone."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(signum: int, frame: FrameType | None) -> None:
        # Once: a second signal must not interrupt the clean-up that the first one started.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Terminated

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def quiet_engines() -> None:
    """Keep the engines' start-up advice (deprecations, absent CUDA kernels) from burying the progress lines."""
    warnings.filterwarnings("ignore", module=r"(megatron|vllm|torch|transformers)\b")
    logging.getLogger("torch._library.triton").setLevel(logging.ERROR)


def seed_everything(seed: int) -> random.Random:
    """Seed Python, NumPy and torch; returns the generator that prompts are drawn from."""
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
    return random.Random(seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What a finished run comes back with.

    Attributes:
        steps: steps done.
        reward_first: mean reward of the first five steps.
        reward_last: mean reward of the last five steps.
        result: path of ``result.json``.
    """

    steps: int
    reward_first: float
    reward_last: float
    result: Path


@dataclass(slots=True, kw_only=True)
class Record:
    """The run's own record, ``result.json``, whole after every step.

    Attributes:
        path: the file.
        steps: one mapping of figures a step.
        tokens: running digest of every sampled token.
    """

    path: Path
    steps: list[dict[str, Any]] = field(default_factory=list)
    tokens: Any = field(default_factory=hashlib.sha256)

    def add(self, figures: Mapping[str, Any], *, responses: list[list[int]]) -> None:
        """Append one step and write the file."""
        self.tokens.update(json.dumps(responses).encode())
        self.steps.append(dict(figures))
        self._write(completed=False, digests={"tokens": self.tokens.hexdigest()})

    def would_end_late(self, elapsed_s: float, *, limit_s: float) -> bool:
        """Whether one more step, as long as the longest so far, would end after ``limit_s`` seconds; 0 is no limit.

        The phase of the hooks is left out: one step in many ablates, and that one says nothing about the next.
        """
        lengths = [sum(s for phase, s in figures["phases"].items() if phase != "hooks") for figures in self.steps]
        longest = max(lengths, default=0.0)
        return bool(limit_s and self.steps and elapsed_s + longest > limit_s)

    def finish(
        self, *, weights: Mapping[str, Tensor], optimizer: Mapping[str, Tensor], prompts: random.Random
    ) -> Summary:
        """Write the file with digests of everything that the run ends with."""
        self._write(
            completed=True,
            digests={
                "tokens": self.tokens.hexdigest(),
                "weights": digest(weights),
                "optimizer": digest(optimizer),
                "rng": _rng_digest(prompts),
            },
        )
        rewards = [figures["reward"] for figures in self.steps]
        first, last = rewards[:5], rewards[-5:]
        return Summary(
            steps=len(rewards),
            reward_first=sum(first) / len(first),
            reward_last=sum(last) / len(last),
            result=self.path,
        )

    def _write(self, *, completed: bool, digests: Mapping[str, str]) -> None:
        document = {"completed": completed, "digests": digests, "steps": self.steps}
        unfinished = self.path.with_suffix(".json.part")
        unfinished.write_text(json.dumps(document, indent=1), encoding="utf-8")
        os.replace(unfinished, self.path)


def digest(tensors: Mapping[str, Tensor]) -> str:
    """sha256 over names, dtypes, shapes and bytes, in the order of names."""
    running = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        running.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        running.update(tensor.flatten().view(torch.uint8).numpy().data)
    return running.hexdigest()


def _rng_digest(prompts: random.Random) -> str:
    running = hashlib.sha256(torch.get_rng_state().numpy().data)
    running.update(repr([prompts.getstate(), random.getstate()]).encode())
    for part in numpy.random.get_state():
        running.update(numpy.asarray(part).tobytes())
    return running.hexdigest()
