"""The trainer's log-probs against transformers' own model of the same checkpoint, in fp32, on real megatron-core."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest

from tests.tiny_models import tiny_checkpoint

ROOT = Path(__file__).parents[2]

# In a process of its own: megatron-core's process group is one a process, and other tests have theirs.
COMPARE = """
import json, sys
from pathlib import Path
import torch, transformers
from recipes.grpo_smollm2.config import parse
from recipes.grpo_smollm2.grpo import make_batch
from recipes.grpo_smollm2.trainer import Trainer

folder = Path(sys.argv[1])
config = parse({"model": {"name": "tiny_llama", "dtype": "float32"}, "task": {"kind": "even_tokens"}})
trainer = Trainer(folder, config)
generator = torch.Generator().manual_seed(0)
draw = lambda count: torch.randint(512, (count,), generator=generator).tolist()
prompts, responses = [draw(5), draw(90), draw(17)], [draw(8), draw(3), draw(30)]
batch = make_batch(prompts, responses, torch.zeros(3))
ours = trainer.token_logprobs(batch)
reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
worst = 0.0
with torch.no_grad():
    for row, (prompt, response) in enumerate(zip(prompts, responses)):
        logits = reference(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        theirs = logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]
        worst = max(worst, (ours[row, : len(response)] - theirs).abs().max().item())
before = dict(trainer.export())["model.norm.weight"].clone()
ours.sum().backward()
norm = trainer.update()
after = dict(trainer.export())["model.norm.weight"]
print(json.dumps({
    "worst": worst,
    "dtype": str(ours.dtype),
    "padding": ours[batch.response_mask.logical_not()].abs().max().item(),
    "norm": norm,
    "largest_move": (after - before).abs().max().item(),
    "version": trainer.weight_version,
    "kinds_of_state": sorted({key.split(".")[0] for key in trainer.optimizer_tensors()}),
}))
"""


@pytest.mark.engine
@pytest.mark.parametrize(("shape", "tied"), [("llama", False), ("qwen3", True)], ids=["llama", "qwen3, tied head"])
def test_the_trainer_computes_what_the_model_file_describes(
    tmp_path: Path, shape: Literal["llama", "qwen3"], tied: bool
) -> None:
    folder = tiny_checkpoint(tmp_path, shape=shape, tied=tied)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", COMPARE, str(folder)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    # fp32 on both sides: what is left is the order of sums. A wrong theta, epsilon or norm is off by 1e-2 and more.
    assert found["worst"] < 1e-4
    assert found["dtype"] == "torch.float32"
    assert found["padding"] == 0.0
    assert found["norm"] > 0
    # AdamW's first step moves a weight by the learning rate, 1e-5.
    assert found["largest_move"] == pytest.approx(1e-5, rel=0.05)
    assert found["version"] == "1"
    assert found["kinds_of_state"] == ["exp_avg", "exp_avg_sq", "master", "step"]
