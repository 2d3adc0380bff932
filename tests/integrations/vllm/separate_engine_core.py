"""A loop whose engine core lives in its own process; prints what the backend found there, as JSON.

Run by ``test_separate_engine_core.py`` with a checkpoint whose head is tied.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from mismatch_hooks.integrations.vllm import FORCED_DECODE, WORKER_EXTENSION, VllmBackend
from mismatch_hooks.integrations.vllm.weights import digest
from mismatch_hooks.live.registry import load_registry
from mismatch_hooks.pipeline.bind import CallCounter, PatchSite, patched
from mismatch_hooks.pipeline.diagnose import blocked
from mismatch_hooks.pipeline.score import PassKey
from mismatch_hooks.pipeline.verify import verify
from mismatch_hooks.schema.enums import Choice, ExecutionPath, PolicyRole
from mismatch_hooks.schema.freeze import thaw
from mismatch_hooks.schema.score import Binding, Score, ScoringSequence

FACTOR = "attention.rope_fusion"
ROPE = {"theta": 10000.0, "rotary_dim": 32, "scaling": {}, "implementation": "fp32"}


def bound_in_the_parent(backend: VllmBackend, batch: list[ScoringSequence]) -> dict[str, Any]:
    """C20, second half: the norm's reference stands in this process's class, which the engine core never sees."""
    from vllm.model_executor.layers.layernorm import RMSNorm

    factor = load_registry().factors["norm.rmsnorm"]
    ran = CallCounter()
    here = PatchSite(
        factor=factor.id,
        site="",
        owner=RMSNorm,
        name="forward_native",
        build=lambda original: original,
        calls_per_forward=1,
    )
    native = backend.score(batch)
    with patched([here], ran):
        bound = backend.score(batch)
        parameters = {factor.id: {"epsilon": 1e-5, "implementation": "fp32"}}
        asked = Binding(role=PolicyRole.ROLLOUT, choices={factor.id: Choice.REFERENCE}, parameters=parameters)
        states = backend.switch_states(asked)
    evidence = replace(bound.evidence, switches=states)
    passes: dict[PassKey, Score] = {
        (PolicyRole.ROLLOUT, Choice.REFERENCE): replace(bound, evidence=evidence),
        (PolicyRole.ROLLOUT, Choice.NATIVE): native,
    }
    gates = verify(factor, passes, {}, batch, ())
    finding = blocked(gates)
    return {
        "calls_here": sum(count.observed for count in ran.counts([here], forwards=1, rank=0)),
        "effective": [thaw(state.effective) for state in states],
        "diagnosis": None if finding is None else finding.diagnosis.value,
        "reason": None if finding is None else finding.reason,
    }


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
    found["bound_in_the_parent"] = bound_in_the_parent(backend, batch)
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
