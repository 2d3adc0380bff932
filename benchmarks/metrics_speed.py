"""Tokens a second of the mismatch metrics, beside a plain copy of their inputs and, where installed, verl's function.

Usage: python benchmarks/metrics_speed.py [--json] [--runs 15] [--threads N] [--sequences 512] [--response 4096]

The two functions do not compute the same metrics: ours keeps every difference in fp64, for exact quantiles.
"""

import argparse
import importlib
import importlib.util
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable

import torch

from mismatch_hooks.pipeline.metrics import measure, merge

VERL_MODULE = "verl.trainer.ppo.rollout_corr_helper"


def batch(sequences: int, response: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """fp32 log-probs about 0.03 nats apart, of the same full-length sequences, and an all-true mask."""
    generator = torch.Generator().manual_seed(0)
    rollout = -3.0 * torch.rand(sequences, response, generator=generator)
    training = rollout + 0.04 * torch.randn(sequences, response, generator=generator)
    return training, rollout, torch.ones(sequences, response, dtype=torch.bool)


def subjects(sequences: int, response: int) -> dict[str, Callable[[], object]]:
    """What is timed, by name; all of it reads the same tensors."""
    training, rollout, mask = batch(sequences, response)
    state = measure(training, rollout, mask, epsilon_low=0.2, epsilon_high=0.2)
    halves = [
        measure(training[part], rollout[part], mask[part], epsilon_low=0.2, epsilon_high=0.2)
        for part in (slice(0, sequences // 2), slice(sequences // 2, None))
    ]
    timed: dict[str, Callable[[], object]] = {
        "copy": lambda: (training.clone(), rollout.clone(), mask.clone()),
        "metrics": lambda: measure(training, rollout, mask, epsilon_low=0.2, epsilon_high=0.2).finalize(),
        "measure": lambda: measure(training, rollout, mask, epsilon_low=0.2, epsilon_high=0.2),
        "merge": lambda: merge(halves),
        "finalize": state.finalize,
    }
    if importlib.util.find_spec("verl") is not None:
        theirs = importlib.import_module(VERL_MODULE).compute_offpolicy_metrics
        timed["verl"] = lambda: theirs(training, rollout, mask)
    return timed


def timings(timed: dict[str, Callable[[], object]], runs: int) -> dict[str, list[float]]:
    """Seconds of each subject and run, in turns, so that a slow minute of the machine falls on all."""
    seconds: dict[str, list[float]] = {name: [] for name in timed}
    for run in range(runs + 1):
        for name, call in timed.items():
            start = time.perf_counter()
            call()
            if run:  # the first round warms caches and thread pools
                seconds[name].append(time.perf_counter() - start)
    return seconds


def figures(seconds: list[float], tokens: int) -> dict[str, float]:
    """Median tokens a second with the quartiles of the runs, and the fastest run."""
    low, median, high = statistics.quantiles(seconds, n=4)
    return {
        "tokens_per_s": round(tokens / median),
        "low_quartile": round(tokens / high),
        "high_quartile": round(tokens / low),
        "best": round(tokens / min(seconds)),
        "median_s": round(median, 5),
    }


def machine() -> dict[str, str | int | float | None]:
    """What the figures depend on; a load above 0 means that others used the cores before the run."""
    with open("/proc/cpuinfo", encoding="utf-8") as lines:
        models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": models[0] if models else platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "load_1min": round(os.getloadavg()[0], 2),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--runs", type=int, default=15, help="runs of each subject (2 or more)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="torch threads (1 or more)")
    parser.add_argument("--sequences", type=int, default=512, help="rows of the batch (2 or more)")
    parser.add_argument("--response", type=int, default=4096, help="tokens of each row (1 or more)")
    arguments = parser.parse_args()
    for name, least in (("runs", 2), ("threads", 1), ("sequences", 2), ("response", 1)):
        if getattr(arguments, name) < least:
            parser.error(f"--{name} is {getattr(arguments, name)}; it takes {least} or more")

    torch.set_num_threads(arguments.threads)
    host = machine()
    seconds = timings(subjects(arguments.sequences, arguments.response), arguments.runs)
    tokens = arguments.sequences * arguments.response
    result = {name: figures(times, tokens) for name, times in seconds.items()}
    ratios = {
        f"metrics_over_{name}": round(result[name]["tokens_per_s"] / result["metrics"]["tokens_per_s"], 2)
        for name in ("copy", "verl")
        if name in result
    }
    if arguments.json:
        document = {
            "benchmark": "metrics_speed",
            "tokens": tokens,
            "runs": arguments.runs,
            "results": result,
            "time_ratios": ratios,
            "verl": "measured" if "verl" in result else "not installed",
            "machine": host,
        }
        print(json.dumps(document))
    else:
        for name, row in result.items():
            print(
                f"{name:9s} {row['tokens_per_s'] / 1e6:9.1f} M tokens/s "
                f"(quartiles {row['low_quartile'] / 1e6:.1f} and {row['high_quartile'] / 1e6:.1f}, "
                f"best {row['best'] / 1e6:.1f}; {row['median_s'] * 1e3:.2f} ms)"
            )
        print(
            ", ".join(f"{name} {value}" for name, value in ratios.items()), f"(times; {arguments.runs} runs, in turns)"
        )
        if "verl" not in result:
            print("verl is not installed; its function was not measured")
        print("machine:", ", ".join(f"{name} {value}" for name, value in host.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
