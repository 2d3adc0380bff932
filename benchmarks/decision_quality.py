"""False attributions from native at a production floor, and the share of real causes found, on simulated arms.

Marginals follow what two real engines showed in bf16 (1,024 tokens: mean |dlogp| 0.0465, 2.0 % clipped, largest
0.27) or have a heavier tail. A token's differences scale with how open its choice was and with its sequence; both
sides' rounding is correlated from token to token. Where the factor has no effect, a swap of a side only draws that
side's rounding anew, all of it or some, so every attribution that is published is false. Where it has one, the
reference removes a share of the mismatch on one side (the swap of the other only draws anew) or on both together.
Not covered: rounding that correlates across sequences, and matrices recorded from real runs.

Run: python benchmarks/decision_quality.py [--json] [--matrices 10000] [--repeats 200] [--seed 0] [--processes N]
"""

import argparse
import itertools
import json
import math
import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import special, stats

from mismatch_hooks.pipeline.diagnose import diagnose_from_native
from mismatch_hooks.pipeline.score import ArmTokens
from mismatch_hooks.pipeline.statistics import FAMILY_LEVEL
from mismatch_hooks.schema.enums import Arm, Diagnosis

Array = NDArray[np.float64]

ATTRIBUTIONS = (
    Diagnosis.CAUSED_BY_TRAINING_SIDE,
    Diagnosis.CAUSED_BY_ROLLOUT_SIDE,
    Diagnosis.CAUSED_BY_BOTH_SIDES,
    Diagnosis.COUPLED_WITH_OTHER_FACTORS,
)
SIZES = ((10, 64), (16, 64), (32, 128), (64, 128), (256, 64))  # sequences, tokens of each
TOO_FEW = 9
SHARES = (0.1, 0.25, 0.5, 0.9)
POWER_SIZES = ((10, 64), (16, 64), (32, 128), (128, 128), (256, 256))
EPSILON = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """How both sides' rounding behaves.

    Attributes:
        scale: brings the mean |dlogp| to 0.0465; of the marginal alone, so measured once.
        freedom: degrees of freedom of Student's t; infinite is a normal.
        openness: power of the token's openness, uniform in 0…1, that scales its differences.
        spread: logarithmic standard deviation of the sequences' own scales.
        correlation: of consecutive tokens' rounding, and of their openness.
        redrawn: share of the variance that a swap draws anew.
        grid: spacing that log-probs are rounded to; 0 = none.
        untouched: share of tokens that a swap does not change at all.
        shortest: shortest sequence as a share of the longest.
        candidates: tokens that compete at each position under the native rollout's own rounding; 1 = none does.
    """

    scale: float
    freedom: float = math.inf
    openness: float = 1.0
    spread: float = 0.2
    correlation: float = 0.5
    redrawn: float = 1.0
    grid: float = 0.0
    untouched: float = 0.0
    shortest: float = 1.0
    candidates: int = 1


NOISES = {
    "as measured": Noise(scale=0.0809),
    "heavier tail": Noise(scale=0.0648, freedom=3.0, openness=0.5, spread=0.4),
    "a tenth redrawn": Noise(scale=0.0809, redrawn=0.1),
    "long bursts": Noise(scale=0.0512, spread=1.0, correlation=0.95),
    "heavy ties": Noise(scale=0.0821, grid=2.0**-5, untouched=0.95),
    "mixed lengths": Noise(scale=0.0765, spread=0.4, shortest=0.02),
    "sampled by the native rollout": Noise(scale=0.0823, freedom=8.0, candidates=4),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One matrix.

    Attributes:
        noise: key of ``NOISES``.
        sequences: how many.
        tokens: of the longest sequence.
        seed: of everything drawn.
        removed: share of the mismatch that the reference removes.
        needs_both: True when only both sides' references together remove it, False when the rollout's does.
    """

    noise: str
    sequences: int
    tokens: int
    seed: tuple[int, ...]
    removed: float = 0.0
    needs_both: bool = False


def matrix(case: Case) -> dict[str, ArmTokens]:
    """Return the four arms; each side is drawn once natively and once on the reference, as an ablation scores it."""
    noise, rng = NOISES[case.noise], np.random.default_rng(case.seed)
    shape = (case.sequences, case.tokens)
    openness = special.ndtr(_autoregressive(rng, shape, noise.correlation, math.inf)) ** noise.openness
    size = noise.scale * openness * np.exp(noise.spread * rng.standard_normal((case.sequences, 1)))
    training = _side(rng, noise, size, candidates=1)
    rollout = _side(rng, noise, size, candidates=noise.candidates)
    lengths = np.ceil(case.tokens * np.linspace(noise.shortest, 1.0, case.sequences)).astype(int)
    active = np.arange(case.tokens) < lengths[:, None]
    arms = {}
    for arm in Arm:
        by_rollout = arm in (Arm.ROLLOUT_REFERENCE_ONLY, Arm.BOTH_REFERENCE)
        by_training = arm in (Arm.TRAINING_REFERENCE_ONLY, Arm.BOTH_REFERENCE)
        left = 1.0 - case.removed if by_rollout and (by_training or not case.needs_both) else 1.0
        arms[str(arm)] = ArmTokens(
            training=left * training[by_training][active],
            rollout=left * rollout[by_rollout][active],
            sequence=np.repeat(np.arange(case.sequences), lengths),
        )
    return arms


def judge(case: Case) -> Diagnosis:
    """Return what the product says of one matrix."""
    return diagnose_from_native(matrix(case), epsilon_low=EPSILON, epsilon_high=EPSILON).diagnosis


def healthy(matrices: int, seed: int) -> list[Case]:
    """Return matrices without an effect, every noise and size equally often."""
    designs = [(noise, size) for size in SIZES for noise in NOISES]
    return [
        Case(noise=noise, sequences=size[0], tokens=size[1], seed=(seed, 0, index))
        for index, (noise, size) in zip(range(matrices), itertools.cycle(designs), strict=False)
    ]


def caused(repeats: int, seed: int) -> list[Case]:
    """Return matrices with an effect: every share and size, on one side and on both."""
    designs = itertools.product(POWER_SIZES, SHARES, (False, True), range(repeats))
    return [
        Case(
            noise="as measured",
            sequences=size[0],
            tokens=size[1],
            removed=share,
            needs_both=needs_both,
            seed=(seed, 1, index),
        )
        for index, (size, share, needs_both, _) in enumerate(designs)
    ]


def rate(answers: Iterable[Diagnosis]) -> dict[str, Any]:
    """Return how many attributions there are among ``answers``, with the exact (Clopper-Pearson) 95 % interval."""
    said = Counter(answers)
    false, of = sum(said[diagnosis] for diagnosis in ATTRIBUTIONS), said.total()
    low, high = stats.binomtest(false, of).proportion_ci(0.95, method="exact")
    return {"false": false, "matrices": of, "rate": false / of, "interval_95": [float(low), float(high)]}


def power(cases: Sequence[Case], answers: Sequence[Diagnosis]) -> list[dict[str, Any]]:
    """Return, for each design, the share of matrices attributed rightly, wrongly and not at all."""
    said: dict[tuple[bool, float, int, int], Counter[Diagnosis]] = {}
    for case, answer in zip(cases, answers, strict=True):
        said.setdefault((case.needs_both, case.removed, case.sequences, case.tokens), Counter())[answer] += 1
    rows = []
    for (needs_both, removed, sequences, tokens), counts in sorted(said.items()):
        right = Diagnosis.CAUSED_BY_BOTH_SIDES if needs_both else Diagnosis.CAUSED_BY_ROLLOUT_SIDE
        attributed = sum(counts[diagnosis] for diagnosis in ATTRIBUTIONS)
        rows.append(
            {
                "side": "both" if needs_both else "one",
                "removed": removed,
                "sequences": sequences,
                "tokens": sequences * tokens,
                "right": counts[right] / counts.total(),
                "wrong": (attributed - counts[right]) / counts.total(),
                "undecided": 1.0 - attributed / counts.total(),
            }
        )
    return rows


def marginal(noise: str) -> dict[str, float]:
    """Return what 200 native arms of 1,024 tokens look like, beside the figures of the real engines."""
    cases = [Case(noise=noise, sequences=16, tokens=64, seed=(0, 2, index)) for index in range(200)]
    native = [np.abs(matrix(case)[Arm.BOTH_NATIVE].dlogp) for case in cases]
    signed = np.concatenate([matrix(case)[Arm.BOTH_NATIVE].dlogp for case in cases])
    clipped = (signed > math.log1p(EPSILON)) | (signed < math.log1p(-EPSILON))
    return {
        "mean_abs_dlogp": float(np.mean(np.concatenate(native))),
        "clip_fraction": float(clipped.mean()),
        "median_of_largest": float(np.median([values.max() for values in native])),
    }


def main() -> None:
    """Simulate, and print a table or one JSON document."""
    parser = argparse.ArgumentParser(description="False attributions and power of the four arms from native.")
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    parser.add_argument("--matrices", type=int, default=10_000, help="matrices without an effect")
    parser.add_argument("--repeats", type=int, default=200, help="matrices with an effect, for each design")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    options = parser.parse_args()
    if options.matrices < len(SIZES) * len(NOISES) or options.repeats < 1:
        parser.error(f"--matrices accepts {len(SIZES) * len(NOISES)} or more, --repeats 1 or more")

    started = time.perf_counter()
    clean, faulty = healthy(options.matrices, options.seed), caused(options.repeats, options.seed)
    few = [replace(case, sequences=TOO_FEW) for case in clean if case.sequences == SIZES[0][0]]
    with ProcessPoolExecutor(options.processes) as pool:
        answers = list(pool.map(judge, [*clean, *few, *faulty], chunksize=20))
    said = list(zip(clean, answers[: len(clean)], strict=True))
    document = {
        "false_attribution_rate": rate(answer for _, answer in said),
        "level": FAMILY_LEVEL,
        "by_noise": {name: rate(answer for case, answer in said if case.noise == name) for name in NOISES},
        "by_sequences": {
            sequences: rate(answer for case, answer in said if case.sequences == sequences) for sequences, _ in SIZES
        },
        "below_ten_sequences": rate(answers[len(clean) : len(clean) + len(few)]),
        "power": power(faulty, answers[len(clean) + len(few) :]),
        "marginals": {name: marginal(name) for name in NOISES},
        "seed": options.seed,
        "seconds": round(time.perf_counter() - started, 1),
        "machine": machine(),
    }
    if options.json:
        json.dump(document, sys.stdout, indent=2)
        print()
    else:
        show(document)


def show(document: dict[str, Any]) -> None:
    """Print the document as tables."""
    rows = {"all with 10 sequences or more": document["false_attribution_rate"], **document["by_noise"]}
    rows |= {f"{sequences} sequences": row for sequences, row in document["by_sequences"].items()}
    rows["9 sequences"] = document["below_ten_sequences"]
    print(f"{'no effect':32} {'false':>6} {'of':>7} {'rate':>8}   95 % interval   (stated: {document['level']:.2%})")
    for name, row in rows.items():
        low, high = row["interval_95"]
        print(f"{name:32} {row['false']:>6} {row['matrices']:>7} {row['rate']:>8.3%}   {low:.3%} to {high:.3%}")
    print(f"\n{'effect':12} {'removed':>8} {'sequences':>10} {'tokens':>8} {'right':>8} {'wrong':>8} {'undecided':>10}")
    for row in document["power"]:
        print(
            f"{row['side'] + ' side(s)':12} {row['removed']:>8.0%} {row['sequences']:>10} {row['tokens']:>8} "
            f"{row['right']:>8.1%} {row['wrong']:>8.1%} {row['undecided']:>10.1%}"
        )
    print(f"\n{'native arm, 1,024 tokens':32} {'mean |dlogp|':>13} {'clipped':>9} {'largest, median':>16}")
    for name, row in document["marginals"].items():
        mean, clipped, largest = row["mean_abs_dlogp"], row["clip_fraction"], row["median_of_largest"]
        print(f"{name:32} {mean:>13.4f} {clipped:>9.2%} {largest:>16.3f}")
    print(f"{document['seconds']} s; machine:", ", ".join(f"{key} {value}" for key, value in machine().items()))


def machine() -> dict[str, str | int | None]:
    """What the seconds depend on; the figures depend on the seed alone."""
    return {"cores": os.cpu_count(), "python": platform.python_version(), "system": platform.platform()}


def _side(rng: np.random.Generator, noise: Noise, size: Array, *, candidates: int) -> tuple[Array, Array]:
    """One side's rounding of each token, natively and with the reference, which draws some of it anew."""
    drawn = [size * _autoregressive(rng, size.shape, noise.correlation, noise.freedom) for _ in range(candidates)]
    # A token is sampled with the probability that the native rounding gives it, so what was sampled is rounded upwards.
    chosen = np.argmax([one + rng.gumbel(size=size.shape) for one in drawn], axis=0)
    native = np.take_along_axis(np.stack(drawn), chosen[None], axis=0)[0]
    anew = size * _autoregressive(rng, size.shape, noise.correlation, noise.freedom)
    reference = math.sqrt(1.0 - noise.redrawn) * native + math.sqrt(noise.redrawn) * anew
    reference = np.where(rng.random(size.shape) < noise.untouched, native, reference)
    if noise.grid:
        native, reference = (noise.grid * np.rint(values / noise.grid) for values in (native, reference))
    return native, reference


def _autoregressive(rng: np.random.Generator, shape: tuple[int, int], correlation: float, freedom: float) -> Array:
    """Rows of correlated values of variance 1, normal or of Student's t."""
    if math.isfinite(freedom):
        values = rng.standard_t(freedom, shape) * math.sqrt((freedom - 2.0) / freedom)
    else:
        values = rng.standard_normal(shape)
    for token in range(1, shape[1]):
        values[:, token] = correlation * values[:, token - 1] + math.sqrt(1.0 - correlation**2) * values[:, token]
    return values


if __name__ == "__main__":
    main()
