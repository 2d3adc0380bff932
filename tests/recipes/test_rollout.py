"""The rollout engine after a weight sync, against an engine that loaded the same weights from the start."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_models import tiny_checkpoint

ROOT = Path(__file__).parents[2]

SAMPLE = """
import json, sys
from pathlib import Path
import recipes.grpo_smollm2
from safetensors.torch import load_file
from recipes.grpo_smollm2.config import parse
from recipes.grpo_smollm2.rollout import Rollout

before, after, in_process = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "True"
config = parse({
    "model": {"name": "tiny_llama"},
    "task": {"kind": "even_tokens", "prompts": 2, "samples": 2, "max_response_tokens": 8},
    "rollout": {
        "engine_core_in_process": in_process, "prefix_caching": True, "max_model_len": 400, "kv_cache_mib": 64
    },
})
# Longer than two cache blocks of 128 tokens: shorter prompts are never cached.
prompts = [[7 + (row * 31 + place * 5) % 500 for place in range(300)] for row in (0, 0, 1, 1)]

def sampled(rollout, step):
    outputs = rollout.sample(prompts, rollout.sampling_params(step=step, stop_token_ids=[1]))
    return [
        [(token, found[token].logprob) for token, found in zip(o.outputs[0].token_ids, o.outputs[0].logprobs)]
        for o in outputs
    ], sum(o.num_cached_tokens for o in outputs)

rollout = Rollout(before, config, worker_extension=None)
old, _ = sampled(rollout, 0)
_, cached = sampled(rollout, 1)
tensors = load_file(after / "model.safetensors")
rollout.sync(tensors.items(), weight_version="1")
synced, _ = sampled(rollout, 0)
version = rollout.weight_version
rollout.close()
fresh_engine = Rollout(after, config, worker_extension=None)
fresh, _ = sampled(fresh_engine, 0)
fresh_engine.close()
print(json.dumps({
    "moved": synced != old,
    "equal": synced == fresh,
    "cached": cached,
    "version": version,
}))
"""


def sampling(*arguments: object) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SAMPLE, *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.engine
@pytest.mark.parametrize("in_process", [True, False], ids=["in process", "in its own process"])
def test_an_engine_samples_with_exactly_the_weights_that_were_delivered(tmp_path: Path, in_process: bool) -> None:
    # Tied: the head is the tensor that a sync can miss.
    before, after = (tiny_checkpoint(tmp_path, shape="llama", seed=seed, tied=True) for seed in (0, 1))
    found = sampling(before, after, in_process)
    assert found["moved"]
    # A tensor left out, a head that stays behind or a cached prefix of the old weights would each show here.
    assert found["equal"]
    assert found["cached"] > 0
    assert found["version"] == "1"
