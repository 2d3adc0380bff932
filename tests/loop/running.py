"""Run the recipe in a process of its own, as a user does, and read what it left behind."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HOOKS_ON = (
    "mismatch_hooks={enabled: true, ablate_every: 1, time_budget: 1.0, origin: both, sinks: [jsonl], trace: true}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A finished run: where it wrote, how it ended, and what it said."""

    folder: Path
    exit_code: int
    stderr: str

    @property
    def result(self) -> dict[str, Any]:
        """The loop's own record: per-step figures and digests of everything that it ended with."""
        document: dict[str, Any] = json.loads((self.folder / "result.json").read_text())
        return document

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Events of one type, read without the library's own reader."""
        lines = (self.folder / "events.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["type"] == kind]


def command(config: str, folder: Path, *settings: str) -> list[str]:
    """The command line of one run."""
    overrides = [part for setting in settings for part in ("--set", setting)]
    return [
        sys.executable,
        "-m",
        "recipes.grpo_smollm2.train",
        f"recipes/grpo_smollm2/{config}.yaml",
        "--out",
        str(folder),
        *overrides,
    ]


def run(config: str, folder: Path, *settings: str, timeout_s: float = 240) -> Run:
    """Run to the end."""
    done = subprocess.run(
        command(config, folder, *settings), cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    return Run(folder=folder, exit_code=done.returncode, stderr=done.stderr)
