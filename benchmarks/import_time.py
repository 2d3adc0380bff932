"""How long ``import mismatch_hooks`` takes, beside an interpreter that imports nothing.

Usage: python benchmarks/import_time.py [--json] [--runs 15]
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time

LIMIT_S = 0.3


def seconds(code: str) -> float:
    """Wall time of a fresh interpreter that runs ``code``; bytecode is cached by the first, unmeasured, start."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.perf_counter() - start


def machine() -> dict[str, str | int | None]:
    """What the figures depend on."""
    with open("/proc/cpuinfo", encoding="utf-8") as lines:
        models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": models[0] if models else platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "system": platform.platform(),
    }


def summary(times: list[float]) -> dict[str, float]:
    """Median and quartiles, in seconds."""
    low, median, high = statistics.quantiles(times, n=4)
    return {"median_s": round(median, 4), "low_quartile_s": round(low, 4), "high_quartile_s": round(high, 4)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--runs", type=int, default=15, help="fresh interpreters of each kind (2 or more)")
    arguments = parser.parse_args()
    if arguments.runs < 2:
        parser.error(f"--runs is {arguments.runs}; a spread needs 2 or more")

    bare_code, import_code = "pass", "import mismatch_hooks"
    seconds(bare_code), seconds(import_code)
    # In turns, so that a slow minute of the machine falls on both.
    pairs = [(seconds(bare_code), seconds(import_code)) for _ in range(arguments.runs)]
    bare, imported = (list(times) for times in zip(*pairs, strict=True))
    added = summary([after - before for before, after in pairs])
    ratio = round(statistics.median(imported) / statistics.median(bare), 2)
    within_limit = added["median_s"] < LIMIT_S
    if arguments.json:
        result = {
            "benchmark": "import_time",
            "bare_interpreter": summary(bare),
            "with_import": summary(imported),
            "import_alone": added,
            "ratio": ratio,
            "limit_s": LIMIT_S,
            "within_limit": within_limit,
            "runs": arguments.runs,
            "machine": machine(),
        }
        print(json.dumps(result))
    else:
        low, median, high = added["low_quartile_s"], added["median_s"], added["high_quartile_s"]
        print(f"import mismatch_hooks: {median:.3f} s (quartiles {low:.3f} and {high:.3f}), limit {LIMIT_S} s")
        print(f"with import / bare interpreter: {ratio:.2f}, {arguments.runs} starts of each, in turns")
        print("machine:", ", ".join(f"{name} {value}" for name, value in machine().items()))
    return 0 if within_limit else 1


if __name__ == "__main__":
    sys.exit(main())
