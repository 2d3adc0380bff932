"""How long ``mismatch-hooks list`` and ``plan`` take from the shell, with many registered factors.

A throw-away distribution with that many factors is put on the path of each command and found by entry point.

Usage: python benchmarks/command_start.py [--json] [--runs 9] [--factors 50 100 200]
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LIMIT_S = 0.5
COMMANDS = ("list", "plan")
DECLARATION = """
from mismatch_hooks.schema.enums import Expansion, FactorCategory, PolicyRole, SettingChannel
from mismatch_hooks.schema.factor import CallSite, MismatchFactor, Switch

FACTOR = MismatchFactor(
    id="many.{name}",
    category=FactorCategory.ENVIRONMENT,
    question="?",
    expansion=Expansion.VALUE_SWEEP,
    switch=Switch(
        path="many.{name}", allowed=("native", 1), roles=(PolicyRole.TRAINING,), channel=SettingChannel.SCORING_PASS
    ),
    call_sites=(CallSite(role=PolicyRole.TRAINING, name="many.{name}"),),
)
"""


def make_distribution(root: Path, factors: int) -> Path:
    """Return a folder to put on the path, in which one more distribution declares ``factors`` factors."""
    folder = root / str(factors)
    declared = folder / "many_checks" / "many" / "factors"
    declared.mkdir(parents=True)
    for package in (declared.parent.parent, declared.parent, declared):
        (package / "__init__.py").touch()
    for index in range(factors):
        name = f"f{index:03d}"
        (declared / f"{name}.py").write_text(DECLARATION.format(name=name))
    info = folder / "many_checks-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: many-checks\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[mismatch_hooks.operator_checks]\nmany = many_checks\n")
    return folder


def seconds(command: str, folder: Path, factors: int) -> float:
    """Wall time of a whole command; the listed factors are counted, so that none can be missing."""
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "mismatch_hooks", command, "--json"],
        check=True,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
    )
    taken = time.perf_counter() - start
    assert done.stdout.count('"many.f') >= factors, f"{command} lost some of {factors} factors"
    return taken


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--runs", type=int, default=9, help="starts of each command and size (2 or more)")
    parser.add_argument("--factors", type=int, nargs="+", default=[50, 100, 200], help="how many are added")
    given = parser.parse_args()
    if given.runs < 2:
        parser.error(f"--runs is {given.runs}; a spread needs 2 or more")
    rows = []
    with tempfile.TemporaryDirectory() as root:
        folders = {factors: make_distribution(Path(root), factors) for factors in given.factors}
        for factors, folder in folders.items():
            for command in COMMANDS:
                seconds(command, folder, factors)  # the first start compiles
                times = [seconds(command, folder, factors) for _ in range(given.runs)]
                low, median, high = (round(value, 4) for value in statistics.quantiles(times, n=4))
                rows.append({"command": command, "factors": factors, "median_s": median, "quartiles_s": [low, high]})
    within = all(row["median_s"] < LIMIT_S for row in rows)
    machine = {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    if given.json:
        print(
            json.dumps(
                {
                    "benchmark": "command_start",
                    "rows": rows,
                    "limit_s": LIMIT_S,
                    "within_limit": within,
                    "runs": given.runs,
                    "machine": machine,
                }
            )
        )
    else:
        for row in rows:
            low, high = row["quartiles_s"]
            print(
                f"{row['command']:<5} {row['factors']:>4} more factors  {row['median_s']:.3f} s  ({low:.3f}–{high:.3f})"
            )
        print(f"limit {LIMIT_S} s; {given.runs} starts each; machine: {machine}")
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
