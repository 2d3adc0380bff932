"""A loop whose engine core lives in its own process; prints what the backend found there, as JSON.

Run by ``test_separate_engine_core.py`` with a checkpoint whose head is tied.
"""

import json
import sys
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from mismatch_hooks.integrations.vllm import FORCED_DECODE, WORKER_EXTENSION, VllmBackend
from mismatch_hooks.integrations.vllm.weights import digest
from mismatch_hooks.schema.enums import Choice, ExecutionPath, PolicyRole
from mismatch_hooks.schema.freeze import thaw
from mismatch_hooks.schema.score import Binding, ScoringSequence

FACTOR = "attention.rope_fusion"
ROPE = {"theta": 10000.0, "rotary_dim": 32, "scaling": {}, "implementation": "fp32"}


def main(folder: Path, scratch: Path) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    llm = LLM(
        str(folder),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=512,
        max_num_batched_tokens=512,
        kv_cache_memory_bytes=64 * 2**20,
        disable_log_stats=True,
        use_tqdm_on_load=False,
        worker_extension_cls=WORKER_EXTENSION,
        logits_processors=[FORCED_DECODE],
    )
    backend = VllmBackend(llm)
    sampling = SamplingParams(max_tokens=8, temperature=1.0, seed=1, logprobs=0, detokenize=False, ignore_eos=True)
    captured = backend.sequences(llm.generate([{"prompt_token_ids": [5, 6, 7]}], sampling, use_tqdm=False), sampling)
    batch = [
        ScoringSequence(
            prompt_token_ids=found.prompt_token_ids,
            response_token_ids=found.response_token_ids,
            response_mask=found.mask,
        )
        for found in captured
    ]
    checkpoint = load_file(folder / "model.safetensors")
    found: dict[str, Any] = {
        "own_process": not hasattr(llm.llm_engine.engine_core, "engine_core"),
        "captured": thaw(captured[0]),
        "rope": backend.read_back().effective("operator.rope.implementation"),
        "digests": backend.weights_digest().tensors == {name: digest(tensor) for name, tensor in checkpoint.items()},
        "native": thaw(backend.score(batch).shards),
        "traced": thaw(backend.trace(batch)),
        "decoded": thaw(backend.score(batch, path=ExecutionPath.ROLLOUT_DECODE)),
    }
    with backend.bind(Binding(role=PolicyRole.ROLLOUT, choices={FACTOR: Choice.REFERENCE}, parameters={FACTOR: ROPE})):
        found["bound_rope"] = backend.read_back().effective("operator.rope.implementation")
        found["evidence"] = thaw(backend.score(batch).evidence)
    found["native_again"] = thaw(backend.score(batch).shards)
    found["rope_again"] = backend.read_back().effective("operator.rope.implementation")
    start = backend.mutation_count()
    for name, extra in (("without_head", False), ("with_head", True)):
        trained = {key: tensor * 1.25 for key, tensor in checkpoint.items()}
        if extra:
            trained["lm_head.weight"] = trained["model.embed_tokens.weight"].clone()
        save_file(trained, scratch / "model.safetensors", metadata={"format": "pt"})
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(scratch)})
        tensors = backend.weights_digest().tensors
        expected = {key: digest(tensor) for key, tensor in trained.items() if key in checkpoint}
        found[name] = sorted(key for key in tensors if tensors[key] != expected.get(key))
        found["reloads"] = backend.mutation_count() - start
    llm.llm_engine.engine_core.shutdown()
    return found


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), Path(sys.argv[2]))))
