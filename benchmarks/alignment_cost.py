"""What keeping operators on their references costs while sampling and while training, beside native in one run.

Each set of operators is timed in turns with native: a round samples a batch of mixed lengths and makes a training
step's forward and backward over rows of those lengths, natively and aligned. A round's ratio is of its own two times;
the figures are the median ratio with the smallest and the largest. Beside each set stands how many sampled log-probs
were not, to the bit, those of the trainer.

Usage: python -m benchmarks.alignment_cost [--json] [--rounds 5] [--model smollm2|llama|qwen3|FOLDER]
       [--contexts 256 1024 4096] [--threads 1 2] [--sets smallest "zero by construction"]
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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from mismatch_hooks.live.alignment import Alignment, aligned_bindings
from mismatch_hooks.live.registry import load_registry
from mismatch_hooks.schema.enums import PolicyRole
from mismatch_hooks.schema.score import ScoringSequence
from tests.tiny_engines import TinyEngines, engines_of, megatron_of_one_rank, start_rollout
from tests.tiny_models import SHAPES, tiny_checkpoint

ROLLOUT, TRAINING = PolicyRole.ROLLOUT, PolicyRole.TRAINING
ROOT = Path(__file__).resolve().parents[1]
SMALLEST = (
    "attention.kernel",
    "attention.rope_fusion",
    "norm.rmsnorm@rollout",
    "gemm.accumulation:padded_native@rollout",
    "logprob.head_dtype:padded_native@rollout",
)
# Every operator by fixed tiles and row by row: equal whatever the batch, and not only where it was looked at.
CONSTRUCTED = "all"
SETS: dict[str, str | Sequence[str]] = {
    "smallest": SMALLEST,
    **{f"{name} alone": (name,) for name in SMALLEST},
    "gemm.accumulation alone": ("gemm.accumulation",),
    "logprob.head_dtype alone": ("logprob.head_dtype",),
    "zero by construction": CONSTRUCTED,
}
WHOLE = ("smallest", "zero by construction")


@contextmanager
def both_engines(model: str, *, longest: int) -> Iterator[TinyEngines]:
    """Start the two engines on one checkpoint."""
    from recipes.grpo_smollm2.config import load, parse
    from recipes.grpo_smollm2.prepare import prepare_model

    with tempfile.TemporaryDirectory(prefix="alignment-cost-") as scratch:
        tiny = next((shape for shape in SHAPES if shape == model), None)
        if tiny:
            folder = tiny_checkpoint(Path(scratch), shape=tiny)
        elif model == "smollm2":
            config = parse(load(ROOT / "recipes/grpo_smollm2/smollm2.yaml", []))
            folder = prepare_model(config.model, say=lambda text: print(text, file=sys.stderr))
        else:
            folder = Path(model)
        rollout = start_rollout(
            folder,
            max_model_len=longest,
            max_num_batched_tokens=max(4 * longest, 2048),
            max_num_seqs=16,
            kv_cache_memory_bytes=2**29,
        )
        try:
            with megatron_of_one_rank():
                yield engines_of(folder, rollout)
        finally:
            rollout._llm.llm_engine.engine_core.shutdown()


def lengths(context: int) -> tuple[list[int], list[int]]:
    """Prompt and response tokens of a batch: with a context all that long, else a demo's, which shrinks to one."""
    if context:
        return [context - 32] * 4, [32] * 4
    return [28 + row for row in range(16)], [4 + 36 * row // 15 for row in range(16)]


class Timed:
    """One batch on both engines."""

    def __init__(self, tiny: TinyEngines, context: int) -> None:
        self.tiny = tiny
        self.prompts, self.responses = lengths(context)
        self.words = min(tiny.shape.vocab_size, 500)

    def sample(self, salt: str) -> tuple[float, Any]:
        """Seconds, and what was sampled; nothing comes from the prefix cache."""
        from vllm import SamplingParams

        backend: Any = self.tiny.engines[ROLLOUT]
        ids = [[(7 * row + 3 * i) % self.words + 3 for i in range(count)] for row, count in enumerate(self.prompts)]
        params = [
            SamplingParams(max_tokens=count, logprobs=0, ignore_eos=True, detokenize=False, seed=row)
            for row, count in enumerate(self.responses)
        ]
        requests = [{"prompt_token_ids": one, "cache_salt": salt} for one in ids]
        started = time.perf_counter()
        outputs = backend._llm.generate(requests, params, use_tqdm=False)
        return time.perf_counter() - started, backend.sequences(outputs, params)

    def train(self) -> float:
        """Seconds of one forward and backward over right-padded rows of mixed lengths; no weight moves."""
        model = self.tiny.models[TRAINING]
        width = max(map(sum, zip(self.prompts, self.responses, strict=True)))
        ids = torch.arange(len(self.prompts) * width).view(-1, width) % self.words + 3
        positions = torch.arange(width).expand_as(ids)
        mask = torch.ones(1, 1, width, width, dtype=torch.bool).triu(1)
        started = time.perf_counter()
        # Of what was sampled alone, as a loop takes it: the fp32 copy of all logits would be most of the time.
        last = max(self.responses)
        logits = model(ids, positions, mask)[:, -last - 1 : -1]
        chosen = logits.float().log_softmax(-1).gather(2, ids[:, -last:, None])
        chosen.sum().backward()
        seconds = time.perf_counter() - started
        model.zero_grad()
        return seconds

    def unequal(self, sampled: Any) -> int:
        """How many sampled tokens the trainer does not give the same fp32 bits, under the binding in force."""
        scored = [
            ScoringSequence(
                prompt_token_ids=one.prompt_token_ids, response_token_ids=one.response_token_ids, response_mask=one.mask
            )
            for one in sampled
        ]
        rows = [piece.logprobs for piece in self.tiny.engines[TRAINING].score(scored).shards[0].slices]
        return sum(
            rollout is None or bool(torch.tensor(rollout) != torch.tensor(training))
            for one, row in zip(sampled, rows, strict=True)
            for rollout, training in zip(one.rollout_logprobs, row, strict=True)
        )


def measure(timed: Timed, entries: str | Sequence[str], rounds: int) -> dict[str, Any]:
    """Time one set in turns with native; one round that is not counted comes first."""
    tiny = timed.tiny
    alignment = Alignment(aligned_bindings(entries, load_registry(), tiny.engines, tiny.shape), tiny.engines)
    sampling, training, unequal, tokens = [], [], 0, 0
    native_s: list[float] = []
    for number in range(-1, rounds):
        native = timed.sample(f"native {number}")[0], timed.train()
        alignment.start()
        try:
            seconds, sampled = timed.sample(f"aligned {number}")
            aligned = seconds, timed.train()
            unequal += timed.unequal(sampled)
            tokens += sum(len(one.response_token_ids) for one in sampled)
        finally:
            alignment.stop()
        if number >= 0:
            sampling.append(aligned[0] / native[0])
            training.append(aligned[1] / native[1])
            native_s.append(native[0])
    return {
        "operators": {role.value: sorted(one.choices) for role, one in alignment.bindings.items()},
        "sampling_ratio": spread(sampling),
        "training_ratio": spread(training),
        "native_sampling_seconds": round(statistics.median(native_s), 3),
        "unequal_tokens": unequal,
        "tokens": tokens,
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, smallest and largest."""
    return {
        "median": round(statistics.median(values), 3),
        "min": round(min(values), 3),
        "max": round(max(values), 3),
    }


def child(model: str, context: int, rounds: int, names: Sequence[str]) -> dict[str, Any]:
    """The named sets on one model, in this process; with a context those that are whole."""
    with both_engines(model, longest=max(256, context + 8)) as tiny:
        timed = Timed(tiny, context)
        found = {}
        for name in names:
            if context and name not in WHOLE:
                continue
            found[name] = measure(timed, SETS[name], rounds)
            print(f"  {name}: {json.dumps(found[name])}", file=sys.stderr, flush=True)
        return found


def job(model: str, context: int, threads: int, rounds: int, names: Sequence[str]) -> dict[str, Any]:
    """The same in a process of its own with its number of threads, which is read once, when torch starts."""
    command = [sys.executable, "-m", "benchmarks.alignment_cost", "--child", "--model", model, "--rounds", str(rounds)]
    done = subprocess.run(
        [*command, "--contexts", str(context), "--sets", *names],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": str(threads), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        stdout=subprocess.PIPE,
        stderr=sys.stderr,
        text=True,
        check=True,
    )
    return {"model": model, "context": context, "threads": threads, "sets": json.loads(done.stdout.splitlines()[-1])}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds a set")
    parser.add_argument("--model", default="smollm2", help="smollm2, llama or qwen3 (tiny, random), or a folder")
    parser.add_argument("--contexts", type=int, nargs="*", default=[256, 1024, 4096], help="tokens, on the tiny Llama")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="of the model's own jobs")
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=list(SETS), help="the smallest has to be one")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        print(json.dumps(child(given.model, given.contexts[0], given.rounds, given.sets)))
        return 0
    jobs = [(given.model, 0, threads) for threads in given.threads]
    jobs += [("llama", context, 1) for context in given.contexts]
    found = []
    for number, (model, context, threads) in enumerate(jobs, start=1):
        print(f"{number} of {len(jobs)}: {model}, context {context or 'mixed'}, {threads} threads", file=sys.stderr)
        found.append(job(model, context, threads, given.rounds, given.sets))
        if not given.json:
            show(found[-1])
    head = found[0]["sets"]["smallest"]
    document = {
        "benchmark": "alignment_cost",
        "sampling_ratio": head["sampling_ratio"],
        "training_ratio": head["training_ratio"],
        "jobs": found,
        "rounds": given.rounds,
        "machine": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()},
    }
    if given.json:
        print(json.dumps(document))
    else:
        print(f"limits: sampling 1.3, training 1.15, of the smallest set; machine: {document['machine']}")
    return 0 if head["sampling_ratio"]["median"] <= 1.3 and head["training_ratio"]["median"] <= 1.15 else 1


def show(one: dict[str, Any]) -> None:
    """Print one job as a table."""
    print(f"{one['model']}, context {one['context'] or 'mixed'}, {one['threads']} threads")
    for name, found in one["sets"].items():
        sampling, training = found["sampling_ratio"], found["training_ratio"]
        print(
            f"  {name:<28} sampling x{sampling['median']:<6} ({sampling['min']}–{sampling['max']})  training "
            f"x{training['median']:<6} ({training['min']}–{training['max']})  {found['unequal_tokens']} of "
            f"{found['tokens']} tokens unequal"
        )


if __name__ == "__main__":
    sys.exit(main())
