"""The planted fault, in a real engine: what it changes, and that a weight reload does not heal it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny_models import tiny_checkpoint

ROOT = Path(__file__).parents[2]

PLANT = """
import json, os, sys
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
from safetensors.torch import load_file
from vllm import LLM

def tables(model):
    modules = {id(m): m for m in model.modules() if hasattr(m, "cos_sin_cache")}.values()
    return [(m.base, m.cos_sin_cache.float().clone()) for m in modules]

folder = sys.argv[1]
llm = LLM(folder, skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True, max_model_len=128,
          kv_cache_memory_bytes=2**26, worker_extension_cls="recipes.grpo_smollm2.inject.InjectingWorker")
[[(base, healthy)]] = llm.apply_model(tables)
counted = llm.collective_rpc("inject_rope_theta", args=(0.1,))
[[(base_after, planted)]] = llm.apply_model(tables)
weights = load_file(f"{folder}/model.safetensors")
llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights.items())})
[[(_, reloaded)]] = llm.apply_model(tables)
llm.collective_rpc("inject_rope_theta", args=(1.0,))
[[(_, healed)]] = llm.apply_model(tables)
print(json.dumps({
    "counted": counted,
    "bases": [base, base_after],
    "rows_changed": int((healthy != planted).any(1).sum()),
    "survives": bool((planted == reloaded).all()),
    "healed": bool((healed == healthy).all()),
}))
llm.llm_engine.engine_core.shutdown()
"""


@pytest.mark.engine
def test_the_rope_fault_changes_the_table_only_and_survives_a_reload(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PLANT, str(tiny_checkpoint(tmp_path, shape="llama"))],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["counted"] == [1]
    assert found["bases"] == [10000.0, 10000.0]
    # Position 0 is not rotated; every other position is rotated differently.
    assert found["rows_changed"] == 1023
    assert found["survives"]
    assert found["healed"]
