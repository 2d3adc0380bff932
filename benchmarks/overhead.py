"""What capture, metrics and sinks cost a step of the demo, ablation left out.

Two figures, from runs of the recipe that differ in the hooks alone: the hooks' own account of their time (streamed as
hooks/overhead_fraction), and the wall time of a step with and without them, in turns.

Usage: python benchmarks/overhead.py [--json] [--config smollm2] [--steps 6] [--pairs 2]
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 0.02
WARM_UP_STEPS = 1
HOOKS = "mismatch_hooks={enabled: true, ablate_every: 0, sinks: [wandb, jsonl, console]}"


def run(config: str, steps: int, folder: Path, *settings: str) -> list[float]:
    """Run the recipe in a process of its own; returns the seconds of every step after the first."""
    command = [sys.executable, "-m", "recipes.grpo_smollm2.train", f"recipes/grpo_smollm2/{config}.yaml"]
    command += ["--out", str(folder), "--set", f"steps={steps}"]
    command += [part for setting in settings for part in ("--set", setting)]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, stderr=sys.stderr)
    record: list[dict[str, Any]] = json.loads((folder / "result.json").read_text())["steps"]
    return [sum(step["phases"].values()) for step in record[WARM_UP_STEPS:]]


def account(folder: Path) -> list[float]:
    """The hooks' own account: share of each step's wall time."""
    events = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    shares = [event["metrics"]["overhead_fraction"] for event in events if event["type"] == "overhead"]
    return shares[WARM_UP_STEPS:]


def spread(values: list[float], digits: int = 5) -> dict[str, float]:
    """Median, smallest and largest."""
    return {
        "median": round(statistics.median(values), digits),
        "min": round(min(values), digits),
        "max": round(max(values), digits),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--config", default="smollm2", help="a YAML of recipes/grpo_smollm2")
    parser.add_argument("--steps", type=int, default=6, help="steps a run, the first one not counted (2 or more)")
    parser.add_argument("--pairs", type=int, default=2, help="pairs of runs")
    arguments = parser.parse_args()
    if arguments.steps < 2 or arguments.pairs < 1:
        parser.error("--steps takes 2 or more, --pairs 1 or more")

    shares: list[float] = []
    ratios: list[float] = []
    seconds: dict[str, list[float]] = {"without": [], "with": []}
    with tempfile.TemporaryDirectory(prefix="overhead-") as scratch:
        for pair in range(arguments.pairs):
            without = run(
                arguments.config, arguments.steps, Path(scratch) / f"off{pair}", "mismatch_hooks.enabled=false"
            )
            folder = Path(scratch) / f"on{pair}"
            with_hooks = run(arguments.config, arguments.steps, folder, HOOKS)
            shares += account(folder)
            # Step by step: both runs sample the same tokens, so a step is the same work.
            ratios += [b / a for a, b in zip(without, with_hooks, strict=True)]
            seconds["without"] += without
            seconds["with"] += with_hooks
    result = {
        "benchmark": "overhead",
        "config": arguments.config,
        "overhead_fraction": spread(shares),
        "step_ratio_with_over_without": spread(ratios, 3),
        "step_seconds": {name: spread(values, 2) for name, values in seconds.items()},
        "limit": LIMIT,
        "within_limit": statistics.median(shares) < LIMIT,
        "steps_counted": len(shares),
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "threads": os.environ.get("OMP_NUM_THREADS", "not set"),
            "python": platform.python_version(),
        },
    }
    if arguments.json:
        print(json.dumps(result))
    else:
        own, ratio = result["overhead_fraction"], result["step_ratio_with_over_without"]
        print(f"capture, metrics and sinks: {own['median']:.2%} of a step ({own['min']:.2%} to {own['max']:.2%})")
        print(f"step with hooks over step without: {ratio['median']:.3f} ({ratio['min']:.3f} to {ratio['max']:.3f})")
        print(f"limit {LIMIT:.0%}: {'held' if result['within_limit'] else 'NOT held'}; {result['machine']}")
    return 0 if result["within_limit"] else 1


if __name__ == "__main__":
    sys.exit(main())
