"""An independent reader of offline W&B runs: the command that W&B ships for it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any


def records(folder: Path) -> list[dict[str, Any]]:
    """Every record of the only run below ``folder``."""
    [log] = folder.rglob("*.wandb")
    command = [str(Path(sys.executable).parent / "wandb"), "leet", "inspect", "--json", str(log)]
    read = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return [json.loads(line) for line in read.stdout.splitlines()]


def rows(folder: Path) -> list[dict[str, Any]]:
    """The history of the only run below ``folder``."""
    return [record["history"]["item"] for record in records(folder) if record["type"] == "history"]


def series(found: list[dict[str, Any]], name: str, *, over: str) -> list[tuple[Any, Any]]:
    """The points of one series against the axis ``over``, in the order written."""
    return [(row[over], row[name]) for row in found if name in row]


def tables(folder: Path, name: str) -> list[dict[str, Any]]:
    """Every version of a table, oldest first."""
    files = sorted(folder.rglob(f"{name}*.table.json"), key=lambda file: file.stat().st_mtime_ns)
    return [json.loads(file.read_text(encoding="utf-8")) for file in files]
