"""Plant known faults in the live engines, one at a time and two at a time, and see whether operator and side are named.

From aligned every other operator of both engines is the reference, natively: the planted fault is the only cause, and
"native" is the faulty implementation. From native the same faults go into the real engines, whose own rounding differs
everywhere: there a verdict needs statistics, and what it accuses beside the fault may be true. A fault that changes no
bit of any log-prob from aligned is counted apart, because nothing was planted that anybody could find.

Usage: python -m benchmarks.attribution [--json] [--quick] [--model llama|qwen3|FOLDER] [--seeds 3] [--pairs 16]
"""

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch

from mismatch_hooks.live.ablation import AblationResult
from mismatch_hooks.schema.enums import Diagnosis, Origin, PolicyRole
from mismatch_hooks.schema.score import ScoringSequence
from mismatch_hooks.schema.verdict import Verdict
from tests.ablating import ablate_tiny, guard_input
from tests.fault_kinds import NOT_PLANTED, OPERATOR_KINDS, WEIGHT_KINDS, FaultKind, StaleWeights
from tests.planted_faults import Fault, native_is_reference, operators, planted
from tests.tiny_engines import TinyEngines, engines_of, megatron_of_one_rank, start_rollout
from tests.tiny_models import SHAPES, tiny_checkpoint

ROLLOUT, TRAINING = PolicyRole.ROLLOUT, PolicyRole.TRAINING
SIDES = {
    frozenset({ROLLOUT}): Diagnosis.CAUSED_BY_ROLLOUT_SIDE,
    frozenset({TRAINING}): Diagnosis.CAUSED_BY_TRAINING_SIDE,
    frozenset({ROLLOUT, TRAINING}): Diagnosis.CAUSED_BY_BOTH_SIDES,
}
ACCUSING = frozenset(SIDES.values())
WEIGHTS = "weights.sync"


@dataclass(frozen=True, slots=True, kw_only=True)
class Planted:
    """What is wrong in one run of the engines.

    Attributes:
        kind: in words.
        size: of the fault; 0 where it has none.
        faults: (factor, role) to the faulty implementation.
        weights: what the trainer moved and the sync did not deliver, instead.
    """

    kind: str
    size: float = 0.0
    faults: Mapping[tuple[str, PolicyRole], Fault] = field(default_factory=dict)
    weights: StaleWeights | None = None

    @property
    def expected(self) -> dict[str, Diagnosis]:
        """What has to be accused, and nothing else."""
        if self.weights is not None:
            return {WEIGHTS: Diagnosis.CAUSED_BY_ROLLOUT_SIDE}
        factors = {factor for factor, _ in self.faults}
        return {
            factor: SIDES[frozenset(role for planted, role in self.faults if planted == factor)] for factor in factors
        }

    @property
    def side(self) -> str:
        """Where the fault is."""
        return "rollout" if self.weights else " and ".join(sorted({role.value for _, role in self.faults})) or "nowhere"

    @property
    def name(self) -> str:
        """Kind, size and side."""
        return " ".join(word for word in (self.kind, f"{self.size:g}" if self.size else "", f"on {self.side}") if word)


def single(kind: FaultKind, role: PolicyRole, size: float) -> Planted:
    """One fault."""
    return Planted(kind=f"{kind.factor}: {kind.name}", size=size, faults={(kind.factor, role): kind.plant(role, size)})


def double(first: tuple[FaultKind, PolicyRole], second: tuple[FaultKind, PolicyRole]) -> Planted:
    """Two faults at once, each at its coarsest."""
    faults = {(kind.factor, role): kind.plant(role, kind.sizes[0]) for kind, role in (first, second)}
    return Planted(
        kind=" with ".join(f"{kind.factor}: {kind.name} ({role.value})" for kind, role in (first, second)),
        faults=faults,
    )


def cases(*, quick: bool, pairs: int) -> list[Planted]:
    """Every kind on both sides in every size (its coarsest only, when quick), pairs of kinds drawn, and nothing."""
    sizes = slice(1 if quick else None)
    found = [single(kind, role, size) for kind in OPERATOR_KINDS for role in PolicyRole for size in kind.sizes[sizes]]
    found += [
        Planted(kind=f"{WEIGHTS}: {kind.name}", size=size, weights=kind)
        for kind in WEIGHT_KINDS
        for size in kind.sizes[sizes]
    ]
    drawn = Random(0)
    places = [(kind, role) for kind in OPERATOR_KINDS for role in PolicyRole]
    while pairs:
        first, second = drawn.sample(places, 2)
        if (first[0].factor, first[1]) != (second[0].factor, second[1]):  # one implementation is replaced once
            found.append(double(first, second))
            pairs -= 1
    return [*found, Planted(kind="nothing planted")]


def batch(seed: int, sequences: int, words: int) -> tuple[ScoringSequence, ...]:
    """Random tokens of mixed lengths."""
    drawn = Random(seed)
    lengths = [(drawn.randint(4, 12), drawn.randint(2, 16)) for _ in range(sequences)]
    return tuple(
        ScoringSequence(
            prompt_token_ids=tuple(drawn.randrange(2, words) for _ in range(prompt)),
            response_token_ids=tuple(drawn.randrange(2, words) for _ in range(response)),
            response_mask=(True,) * response,
        )
        for prompt, response in lengths
    )


@contextmanager
def weights_changed(tiny: TinyEngines, change: StaleWeights | None, size: float) -> Iterator[None]:
    """The trainer moved and the sync did not deliver it."""
    parameters = list(tiny.models[TRAINING].parameters()) if change else []
    before = [parameter.detach().clone() for parameter in parameters]
    try:
        with torch.no_grad():
            if change:
                change.change(tiny, size)
        yield
    finally:
        with torch.no_grad():
            for parameter, held in zip(parameters, before, strict=True):
                parameter.copy_(held)


def examine(
    tiny: TinyEngines, fault: Planted, origin: Origin, sequences: tuple[ScoringSequence, ...]
) -> AblationResult:
    """Plant, ablate, take out again."""
    place = native_is_reference if origin is Origin.ALIGNED else planted
    with weights_changed(tiny, fault.weights, fault.size), place(tiny, fault.faults):
        guards = guard_input(tiny, sequences) if fault.weights else None
        factors = [WEIGHTS, *operators(tiny.shape)]
        return ablate_tiny(tiny, factors, origin, sequences=sequences, guards=guards)


def without_effect(verdicts: Sequence[Verdict], factor: str) -> bool:
    """Whether no arm of the factor's differs from the origin in a bit."""
    arms = [arm for verdict in verdicts if verdict.factor == factor for arm in verdict.arms]
    return bool(arms) and all(arm.metrics["bitwise_fraction"] == 1.0 for arm in arms)


@dataclass(slots=True)
class Account:
    """What came of the faults planted from one origin.

    Attributes:
        planted: faults that changed a bit.
        no_effect: faults that changed none.
        right: faults whose operator and side were named.
        wrong_side: faults whose operator was named with another side.
        unresolved: faults whose operator was not accused.
        wrongly_accused: accusations of operators in which nothing was planted.
        rows: by fault.
        confusion: (planted factor and side, what was said) to times.
        passes: scoring passes.
    """

    planted: int = 0
    no_effect: int = 0
    right: int = 0
    wrong_side: int = 0
    unresolved: int = 0
    wrongly_accused: int = 0
    rows: dict[str, Counter[str]] = field(default_factory=dict)
    confusion: Counter[tuple[str, str]] = field(default_factory=Counter)
    passes: int = 0

    def add(self, fault: Planted, result: AblationResult, silent: set[str]) -> str:
        """Count one run; ``silent`` holds the planted factors that changed no bit. Returns what to print."""
        row = self.rows.setdefault(fault.name, Counter())
        said = {one.factor: one.diagnosis for one in result.verdicts}
        outcomes = []
        for factor, wanted in fault.expected.items():
            if factor in silent:
                self.no_effect += 1
                outcomes.append("no effect")
                continue
            self.planted += 1
            found = said.get(factor)
            if found is wanted:
                outcome = "right"
            else:
                outcome = "wrong side" if found in ACCUSING else "unresolved"
            counter = outcome.replace(" ", "_")
            setattr(self, counter, getattr(self, counter) + 1)
            outcomes.append(outcome)
            self.confusion[f"{factor} {_side(wanted)}", f"{factor} {found.value if found else 'not judged'}"] += 1
        for factor, found in said.items():
            if found in ACCUSING and factor not in fault.expected:
                self.wrongly_accused += 1
                outcomes.append(f"accused {factor}")
                planted = " and ".join(sorted(fault.expected)) or "nothing"
                self.confusion[planted, f"{factor} {found.value}"] += 1
        row.update(outcomes or ["quiet"])
        self.passes += result.passes
        return ", ".join(outcomes) or "quiet"

    def smallest(self, faults: Sequence[Planted]) -> dict[str, float | None]:
        """The smallest size of each kind and side that was named every time; None where none was."""
        found: dict[str, float | None] = {}
        for fault in faults:
            if len(fault.expected) == 1 and fault.size and fault.name in self.rows:
                key = f"{fault.kind} on {fault.side}"
                found.setdefault(key, None)
                if set(self.rows[fault.name]) == {"right"}:
                    found[key] = fault.size  # sizes come coarse first
        return found

    def as_json(self, faults: Sequence[Planted]) -> dict[str, Any]:
        """Return the account as plain data."""
        return {
            "planted": self.planted,
            "right": self.right,
            "wrongly_accused": self.wrongly_accused,
            "wrong_side": self.wrong_side,
            "unresolved": self.unresolved,
            "no_effect": self.no_effect,
            "passes": self.passes,
            "smallest": self.smallest(faults),
            "confusion": [
                {"planted": planted, "said": said, "times": times}
                for (planted, said), times in self.confusion.most_common()
            ],
            "by_fault": {name: dict(row) for name, row in self.rows.items()},
        }


def _side(diagnosis: Diagnosis) -> str:
    return diagnosis.value.removeprefix("caused_by_")


@contextmanager
def both_engines(model: str) -> Iterator[TinyEngines]:
    """Start the two engines on one checkpoint: a random tiny one by its shape, or a folder."""
    with tempfile.TemporaryDirectory(prefix="attribution-") as scratch:
        tiny = next((shape for shape in SHAPES if shape == model), None)
        folder = tiny_checkpoint(Path(scratch), shape=tiny, tied=tiny == "qwen3") if tiny else Path(model)
        rollout = start_rollout(folder)
        try:
            with megatron_of_one_rank():
                yield engines_of(folder, rollout)
        finally:
            rollout._llm.llm_engine.engine_core.shutdown()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--quick", action="store_true", help="one batch, the coarsest size of each kind, four pairs")
    parser.add_argument("--model", default="llama", help="llama or qwen3 (tiny, random), or a model's folder")
    parser.add_argument("--seeds", type=int, default=3, help="batches a fault")
    parser.add_argument("--pairs", type=int, default=16, help="cases with two faults")
    parser.add_argument("--sequences", type=int, default=12, help="sequences a batch")
    parser.add_argument("--origins", nargs="+", default=["aligned", "native"], choices=["aligned", "native"])
    parser.add_argument("--every", type=int, default=1, help="take every n-th case only")
    given = parser.parse_args()
    seeds, pairs = (1, 4) if given.quick else (given.seeds, given.pairs)
    faults = cases(quick=given.quick, pairs=pairs)[:: given.every]
    origins = [Origin(name) for name in given.origins]
    accounts = {origin: Account() for origin in origins}
    silent: dict[tuple[str, int], set[str]] = {}
    started = time.perf_counter()
    runs = len(faults) * seeds * len(origins)
    with both_engines(given.model) as tiny:
        words = min(tiny.shape.vocab_size, 512)
        for origin in origins:
            for fault in faults:
                for seed in range(seeds):
                    result = examine(tiny, fault, origin, batch(seed, given.sequences, words))
                    if origin is Origin.ALIGNED:
                        silent[fault.name, seed] = {
                            factor for factor in fault.expected if without_effect(result.verdicts, factor)
                        }
                    said = accounts[origin].add(fault, result, silent.get((fault.name, seed), set()))
                    runs -= 1
                    print(f"{runs:>4} left  {origin.value:<8} {fault.name:<80} {said}", file=sys.stderr, flush=True)
    document = {
        "benchmark": "attribution",
        "model": given.model,
        "kinds": len(OPERATOR_KINDS) + len(WEIGHT_KINDS),
        "not_planted": NOT_PLANTED,
        "seeds": seeds,
        "sequences": given.sequences,
        **{origin.value: account.as_json(faults) for origin, account in accounts.items()},
        "seconds": round(time.perf_counter() - started, 1),
        "machine": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()},
    }
    if given.json:
        print(json.dumps(document))
    else:
        for origin, account in accounts.items():
            _print(origin, account, faults)
        print(f"{document['kinds']} kinds, {seeds} batches each; {document['seconds']} s; {document['machine']}")
    aligned = accounts.get(Origin.ALIGNED)
    return 0 if aligned is None or (aligned.right == aligned.planted and not aligned.wrongly_accused) else 1


def _print(origin: Origin, account: Account, faults: Sequence[Planted]) -> None:
    print(
        f"{origin.value}: {account.planted} planted, {account.right} right, {account.wrong_side} on the wrong side, "
        f"{account.unresolved} unresolved, {account.wrongly_accused} innocent accused; {account.no_effect} without "
        f"effect; {account.passes} passes"
    )
    for (wanted, said), times in account.confusion.most_common():
        if said != wanted.replace(" ", " caused_by_"):
            print(f"  {wanted:<36} said {said:<56} {times}")
    for kind, size in account.smallest(faults).items():
        print(f"  smallest named every time: {kind:<64} {'none' if size is None else f'{size:g}'}")


if __name__ == "__main__":
    sys.exit(main())
