"""Start a script as two tensor-parallel ranks and read what each printed."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def run_two_ranks(
    script: Sequence[str], *arguments: str, environment: Mapping[str, str] | None = None, timeout_s: float = 120
) -> list[dict[str, Any]]:
    """Return the last line of each rank's output, as JSON, in the order of ranks.

    Args:
        script: what Python is given: a file, or ``-m`` and a module.
        arguments: after the rank, which comes first.
        environment: variables that the ranks have besides this process's own.
        timeout_s: seconds for a rank; none outlives the call.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("NVTE_")}
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", *script, str(rank), *arguments],
            cwd=ROOT,
            env={**inherited, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **(environment or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        done = [process.communicate(timeout=timeout_s) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, done, strict=True):
        assert process.returncode == 0, errors
    return [json.loads(output.splitlines()[-1]) for output, _ in done]
