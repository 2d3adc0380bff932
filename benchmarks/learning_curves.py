"""Whether the demo learns: its reward over the steps, for three seeds, and where the time of a step goes.

The runs are those of ``make demo`` without the hooks, which change no bit of them. Beside printing, it writes
``docs/learning_curves.json`` and draws ``docs/learning_curves.svg``.

Usage: python benchmarks/learning_curves.py [--json] [--seeds 0 1 2] [--steps 24] [--from RUN_DIR ...]
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
COLOURS = ("#2563eb", "#d97706", "#059669", "#7c3aed", "#dc2626")
WINDOW = 5


def run(seed: int, steps: int, out: Path) -> None:
    """One run of the demo's loop; its progress goes to standard error."""
    settings = ["mismatch_hooks.enabled=false", "wandb.mode=disabled", f"seed={seed}", f"steps={steps}"]
    subprocess.run(
        [sys.executable, "-m", "recipes.grpo_smollm2.train", "recipes/grpo_smollm2/smollm2.yaml", "--out", str(out)]
        + [part for setting in settings for part in ("--set", setting)],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "WANDB_MODE"},
        stdout=sys.stderr,
        check=True,
    )


def curve(folder: Path) -> dict[str, Any]:
    """What a run's ``result.json`` says about learning and time."""
    steps = json.loads((folder / "result.json").read_text(encoding="utf-8"))["steps"]
    rewards = [step["reward"] for step in steps]
    # The first step compiles a function and fills caches.
    phases = {
        name: round(statistics.median(step["phases"][name] for step in steps[1:]), 3) for name in steps[0]["phases"]
    }
    return {
        "rewards": [round(reward, 4) for reward in rewards],
        "response_lengths": [round(step["response_length"], 2) for step in steps],
        "first_five": round(statistics.mean(rewards[:WINDOW]), 4),
        "last_five": round(statistics.mean(rewards[-WINDOW:]), 4),
        "median_seconds": {"step": round(statistics.median(step["seconds"] for step in steps[1:]), 2), **phases},
    }


def draw(curves: Sequence[dict[str, Any]], seeds: Sequence[int]) -> str:
    """An SVG of the reward over the steps, one line a seed, each a mean over five steps."""
    width, height, left, top = 640, 320, 56, 24
    inner_width, inner_height = width - left - 110, height - top - 48
    steps = max(len(found["rewards"]) for found in curves)
    highest = max(reward for found in curves for reward in found["rewards"])

    def at(step: float, reward: float) -> str:
        x, y = left + inner_width * step / max(1, steps - 1), top + inner_height * (1 - reward / highest)
        return f"{x:.1f},{y:.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for share in (0, 0.25, 0.5, 0.75, 1):
        y = top + inner_height * (1 - share)
        parts.append(f'<path d="M{left},{y:.1f} h{inner_width}" stroke="#e5e7eb"/>')
        parts.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{share * highest:.2f}</text>')
    for step in range(0, steps, 4):
        x = left + inner_width * step / max(1, steps - 1)
        parts.append(f'<text x="{x:.1f}" y="{top + inner_height + 18}" text-anchor="middle">{step}</text>')
    parts.append(f'<text x="{left + inner_width / 2}" y="{height - 8}" text-anchor="middle">step</text>')
    parts.append(f'<text x="{left}" y="14">reward: dots are steps, lines the mean of the last five</text>')
    for colour, found, seed in zip(COLOURS, curves, seeds, strict=False):
        rewards = found["rewards"]
        means = [statistics.mean(rewards[max(0, i - WINDOW + 1) : i + 1]) for i in range(len(rewards))]
        line = " ".join(at(step, mean) for step, mean in enumerate(means))
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for step, reward in enumerate(rewards):
            across, down = at(step, reward).split(",")
            parts.append(f'<circle cx="{across}" cy="{down}" r="2" fill="{colour}" fill-opacity="0.5"/>')
        across, down = at(len(rewards) - 1, means[-1]).split(",")
        parts.append(f'<text x="{float(across) + 8}" y="{float(down) + 4}" fill="{colour}">seed {seed}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def machine() -> dict[str, str | int | None]:
    """What the figures depend on."""
    with open("/proc/cpuinfo", encoding="utf-8") as lines:
        models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": models[0] if models else platform.machine(),
        "cores": os.cpu_count(),
        "threads": os.environ.get("OMP_NUM_THREADS", "all"),
        "python": platform.python_version(),
        "system": platform.platform(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--from", dest="folders", type=Path, nargs="+", help="finished runs, one a seed, not new ones")
    arguments = parser.parse_args()
    if arguments.folders and len(arguments.folders) != len(arguments.seeds):
        parser.error(f"--from names {len(arguments.folders)} runs for {len(arguments.seeds)} seeds; give one for each")

    with tempfile.TemporaryDirectory() as temporary:
        folders = arguments.folders or [Path(temporary) / f"seed-{seed}" for seed in arguments.seeds]
        if not arguments.folders:
            for seed, folder in zip(arguments.seeds, folders, strict=True):
                run(seed, arguments.steps, folder)
        curves = [curve(folder) for folder in folders]

    gains = [found["last_five"] - found["first_five"] for found in curves]
    result = {
        "benchmark": "learning_curves",
        "seeds": arguments.seeds,
        "curves": curves,
        "gain": {"mean": round(statistics.mean(gains), 4), "least": round(min(gains), 4), "most": round(max(gains), 4)},
        "every_seed_improves": min(gains) > 0,
        "machine": machine(),
    }
    DOCS.mkdir(exist_ok=True)
    (DOCS / "learning_curves.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    (DOCS / "learning_curves.svg").write_text(draw(curves, arguments.seeds), encoding="utf-8")
    if arguments.json:
        print(json.dumps(result))
    else:
        for seed, found in zip(arguments.seeds, curves, strict=True):
            seconds = ", ".join(f"{name} {value}" for name, value in found["median_seconds"].items())
            print(
                f"seed {seed}: reward {found['first_five']:.3f} -> {found['last_five']:.3f}; median seconds: {seconds}"
            )
        print("machine:", ", ".join(f"{name} {value}" for name, value in result["machine"].items()))
    return 0 if result["every_seed_improves"] else 1


if __name__ == "__main__":
    sys.exit(main())
