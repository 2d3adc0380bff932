"""Run the README's example as it stands there, over two real engines; prints what it recorded."""

import re
import sys
from pathlib import Path
from typing import Any

import torch

from recipes.grpo_smollm2.config import load, parse
from recipes.grpo_smollm2.grpo import make_batch
from recipes.grpo_smollm2.prepare import prepare_model
from recipes.grpo_smollm2.rollout import Rollout
from recipes.grpo_smollm2.trainer import Trainer

ROOT = Path(__file__).resolve().parents[2]


def main(run_dir: Path) -> None:
    """Give the example the names that it leaves to the reader, and run it."""
    config = parse(load(ROOT / "recipes/grpo_smollm2/tiny_llama.yaml", []))
    model_folder = prepare_model(config.model, say=lambda line: None)
    trainer = Trainer(model_folder, config)
    extension = "mismatch_hooks.integrations.vllm.worker.WorkerExtension"
    rollout = Rollout(model_folder, config, worker_extension=extension)

    def forward(model: Any, outputs: Any) -> tuple[Any, Any]:
        responses = [list(output.outputs[0].token_ids) for output in outputs]
        batch = make_batch([list(output.prompt_token_ids) for output in outputs], responses, torch.ones(len(outputs)))
        return trainer.token_logprobs(batch), batch.response_mask

    names: dict[str, Any] = {
        "model_folder": model_folder,
        "llm": rollout.llm,
        "model": trainer.model,
        "run_dir": run_dir,
        "steps": 2,
        "prompts": [{"prompt_token_ids": [5, 6, 7]}] * 8,
        "sampling_params": rollout.sampling_params(step=0, stop_token_ids=[]),
        "forward": forward,
        "update_and_sync": lambda model, llm: None,
    }
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    exec(compile(code, "README.md", "exec"), names)
    rollout.close()
    trainer.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
