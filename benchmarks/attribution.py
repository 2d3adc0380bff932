"""Plant one known fault in the live engines, or two, and see whether the operator and the side are named.

Both engines run a tiny random Llama whose every other operator is the reference, so the planted faults are the only
causes; "native" is the faulty implementation. From native the same faults are planted into the real engines, whose own
rounding differs everywhere: there a verdict needs statistics, and most faults stay unresolved.

Usage: python benchmarks/attribution.py [--json] [--seeds 3] [--sequences 12]
"""

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch

from mismatch_hooks.live.ablation import AblationResult
from mismatch_hooks.schema.enums import Diagnosis, Origin, PolicyRole
from mismatch_hooks.schema.score import ScoringSequence
from tests.ablating import ablate_tiny, guard_input
from tests.planted_faults import (
    Fault,
    native_is_reference,
    operators,
    planted,
    rollout_norm_epsilon,
    rollout_norm_rounds_early,
    rollout_rope,
    scaled_output,
    training_norm_epsilon,
    training_norm_rounds_early,
    training_rope,
)
from tests.tiny_engines import TinyEngines, engines_of, megatron_of_one_rank, start_rollout
from tests.tiny_models import tiny_checkpoint

ROLLOUT, TRAINING = PolicyRole.ROLLOUT, PolicyRole.TRAINING
SIDES = {
    frozenset({ROLLOUT}): Diagnosis.CAUSED_BY_ROLLOUT_SIDE,
    frozenset({TRAINING}): Diagnosis.CAUSED_BY_TRAINING_SIDE,
    frozenset({ROLLOUT, TRAINING}): Diagnosis.CAUSED_BY_BOTH_SIDES,
}
ACCUSING = frozenset(SIDES.values())
Weights = Callable[[TinyEngines], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Planted:
    """One fault, or several at once.

    Attributes:
        name: in words, with its size.
        faults: (factor, role) to the faulty implementation.
        weights: changes the rollout engine's weights instead; ``weights.sync`` has to be accused.
    """

    name: str
    faults: Mapping[tuple[str, PolicyRole], Fault] = field(default_factory=dict)
    weights: Weights | None = None

    @property
    def expected(self) -> dict[str, Diagnosis]:
        """What has to be accused, and nothing else."""
        if self.weights is not None:
            return {"weights.sync": Diagnosis.CAUSED_BY_ROLLOUT_SIDE}
        factors = {factor for factor, _ in self.faults}
        return {
            factor: SIDES[frozenset(role for planted, role in self.faults if planted == factor)] for factor in factors
        }


def one(name: str, factor: str, role: PolicyRole, fault: Fault) -> Planted:
    """A single fault."""
    return Planted(name=f"{name}, {role.value}", faults={(factor, role): fault})


def layer_is_stale(tiny: TinyEngines) -> None:
    """Every tensor of layer 1 is what it was before an update."""
    for name, parameter in tiny.models[TRAINING].named_parameters():
        if "layers.1." in name:
            parameter.add_(2.0**-4)


def one_ulp(tiny: TinyEngines) -> None:
    """One value of one tensor is off by its last bit."""
    weight = tiny.models[TRAINING].decoder.layers[0].mlp.linear_fc2.weight
    bits = weight.view(torch.int16)
    bits[0, 0] = bits[0, 0] ^ 1


def gate_up_swapped(tiny: TinyEngines) -> None:
    """The fused gate and up projections of layer 0 in the other order."""
    weight = tiny.models[TRAINING].decoder.layers[0].mlp.linear_fc1.weight
    weight.copy_(weight.roll(weight.shape[0] // 2, dims=0))


FAULTS = (
    *(one(f"epsilon {size:g}", "norm.rmsnorm", ROLLOUT, rollout_norm_epsilon(size)) for size in (1.1e-5, 1e-4, 1e-3)),
    *(one(f"epsilon {size:g}", "norm.rmsnorm", TRAINING, training_norm_epsilon(size)) for size in (1.1e-5, 1e-4, 1e-3)),
    *(
        one(f"rope frequencies x{size:g}", "attention.rope_fusion", ROLLOUT, rollout_rope(frequency=size))
        for size in (1.001, 1.01, 1.1)
    ),
    *(
        one(f"rope frequencies x{size:g}", "attention.rope_fusion", TRAINING, training_rope(frequency=size))
        for size in (1.001, 1.01, 1.1)
    ),
    one("rope in bf16", "attention.rope_fusion", ROLLOUT, rollout_rope(dtype=torch.bfloat16)),
    one("rope in bf16", "attention.rope_fusion", TRAINING, training_rope(dtype=torch.bfloat16)),
    one("norm rounds before its weight", "norm.rmsnorm", ROLLOUT, rollout_norm_rounds_early),
    one("norm rounds before its weight", "norm.rmsnorm", TRAINING, training_norm_rounds_early),
    *(
        one(f"{factor} x(1 + 2^-{bits})", factor, role, partial(scaled_output, bits=bits))
        for factor in ("activation.swiglu", "attention.kernel", "embedding.lookup", "gemm.accumulation")
        for role in PolicyRole
        for bits in (7, 4)
    ),
    Planted(
        name="rope scaled on rollout, in bf16 on training",
        faults={
            ("attention.rope_fusion", ROLLOUT): rollout_rope(frequency=1.01),
            ("attention.rope_fusion", TRAINING): training_rope(dtype=torch.bfloat16),
        },
    ),
    Planted(
        name="norm on rollout and rope on training",
        faults={
            ("norm.rmsnorm", ROLLOUT): rollout_norm_rounds_early,
            ("attention.rope_fusion", TRAINING): training_rope(dtype=torch.bfloat16),
        },
    ),
    Planted(
        name="activation on training and attention on rollout",
        faults={
            ("activation.swiglu", TRAINING): scaled_output,
            ("attention.kernel", ROLLOUT): scaled_output,
        },
    ),
    Planted(name="one layer stale", weights=layer_is_stale),
    Planted(name="one value off by one ULP", weights=one_ulp),
    Planted(name="gate and up swapped", weights=gate_up_swapped),
    Planted(name="nothing planted"),
)


def batch(seed: int, sequences: int) -> tuple[ScoringSequence, ...]:
    """Random tokens of mixed lengths."""
    drawn = Random(seed)
    lengths = [(drawn.randint(4, 12), drawn.randint(2, 16)) for _ in range(sequences)]
    return tuple(
        ScoringSequence(
            prompt_token_ids=tuple(drawn.randrange(2, 512) for _ in range(prompt)),
            response_token_ids=tuple(drawn.randrange(2, 512) for _ in range(response)),
            response_mask=(True,) * response,
        )
        for prompt, response in lengths
    )


@contextmanager
def weights_changed(tiny: TinyEngines, change: Weights | None) -> Iterator[None]:
    """The trainer moved and the sync did not deliver it."""
    parameters = list(tiny.models[TRAINING].parameters()) if change else []
    before = [parameter.detach().clone() for parameter in parameters]
    try:
        with torch.no_grad():
            if change:
                change(tiny)
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
    with weights_changed(tiny, fault.weights), place(tiny, fault.faults):
        guards = guard_input(tiny, sequences) if fault.weights else None
        factors = ["weights.sync", *operators(tiny.shape)]
        return ablate_tiny(tiny, factors, origin, sequences=sequences, guards=guards)


def outcome(result: AblationResult, expected: Mapping[str, Diagnosis]) -> str:
    """``named`` when the verdicts accuse what was planted and nobody else."""
    accused = {one.factor: one.diagnosis for one in result.verdicts if one.diagnosis in ACCUSING}
    if accused == expected:
        return "named"
    if set(accused) - set(expected):
        return "innocent accused"
    return "wrong side" if set(accused) == set(expected) else "not named"


@contextmanager
def both_engines() -> Iterator[TinyEngines]:
    """Start the two engines on one random checkpoint."""
    with tempfile.TemporaryDirectory(prefix="attribution-") as scratch:
        folder = tiny_checkpoint(Path(scratch), shape="llama")
        rollout = start_rollout(folder)
        try:
            with megatron_of_one_rank():
                yield engines_of(folder, rollout)
        finally:
            rollout._llm.llm_engine.engine_core.shutdown()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--seeds", type=int, default=3, help="batches a fault")
    parser.add_argument("--sequences", type=int, default=12, help="sequences a batch")
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    started = time.perf_counter()
    with both_engines() as tiny:
        for origin in (Origin.ALIGNED, Origin.NATIVE):
            for fault in FAULTS:
                counted: dict[str, int] = {}
                passes = 0
                for seed in range(given.seeds):
                    result = examine(tiny, fault, origin, batch(seed, given.sequences))
                    passes += result.passes
                    found = outcome(result, fault.expected)
                    counted[found] = counted.get(found, 0) + 1
                rows.append({"origin": origin.value, "fault": fault.name, **counted, "passes": passes // given.seeds})
                if not given.json:
                    said = ", ".join(f"{what} {times}" for what, times in counted.items())
                    print(f"{origin.value:<8} {fault.name:<48} {said:<24} {passes // given.seeds} passes", flush=True)
                else:
                    print(f"{len(rows)} of {2 * len(FAULTS)}", end="\r", file=sys.stderr, flush=True)
    totals = {
        origin.value: {
            what: sum(row.get(what, 0) for row in rows if row["origin"] == origin.value)
            for what in ("named", "not named", "wrong side", "innocent accused")
        }
        for origin in (Origin.ALIGNED, Origin.NATIVE)
    }
    machine = {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    document = {
        "benchmark": "attribution",
        "rows": rows,
        "totals": totals,
        "seeds": given.seeds,
        "sequences": given.sequences,
        "seconds": round(time.perf_counter() - started, 1),
        "machine": machine,
    }
    if given.json:
        print(json.dumps(document))
    else:
        for name, counted in totals.items():
            print(f"{name}: " + ", ".join(f"{what} {times}" for what, times in counted.items()))
        print(f"{document['seconds']} s; machine: {machine}")
    aligned = totals[Origin.ALIGNED.value]
    return 0 if aligned["named"] == given.seeds * len(FAULTS) else 1


if __name__ == "__main__":
    sys.exit(main())
