"""One of two tensor-parallel trainer ranks; rank 0 leads, and prints what it found as JSON.

Run by ``test_forward_reduce.py`` as ``python two_rank_reduction.py RANK STORE FOLDER``; with ``both`` as a fourth
argument rank 0 also builds a vLLM engine of two ranks on the same checkpoint and ablates the factor.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mismatch_hooks.integrations.megatron import MegatronBackend
from mismatch_hooks.integrations.megatron.ranks import LeadingBackend, follow
from mismatch_hooks.model_meta.shapes import shape_from_folder
from mismatch_hooks.operator_checks.gemm import reduce_sites
from mismatch_hooks.references.reduction import tree_sum
from mismatch_hooks.schema.backend import ScoringBackend
from mismatch_hooks.schema.enums import Choice, PolicyRole
from mismatch_hooks.schema.freeze import thaw
from mismatch_hooks.schema.score import Binding, ScoringSequence

FACTOR = "gemm.forward_reduce"
VARIABLES = {"NCCL_ALGO": "Ring"}
TRAINING = PolicyRole.TRAINING
SEQUENCES = tuple(
    ScoringSequence(
        prompt_token_ids=tuple(range(3, 3 + prompt)),
        response_token_ids=tuple((7 * row + 11 * i) % 500 for i in range(response)),
        response_mask=(True,) * response,
    )
    for row, (prompt, response) in enumerate([(5, 12), (9, 3), (4, 20)])
)


def build(folder: Path) -> Any:
    """This rank's part of the checkpoint in a ``GPTModel``."""
    from safetensors.torch import load_file

    from tests.integrations.megatron.tiny_gpt import build_model, load

    shape = shape_from_folder(folder)
    model = build_model(shape, tensor_model_parallel_size=2)
    load(model, load_file(folder / "model.safetensors"), shape)
    return model


def reduced(model: Any) -> dict[str, Any]:
    """What both row-parallel linears of layer 0 give natively and on the tree, beside the sum of the parts."""
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    found = {}
    for name in ("self_attention.linear_proj", "mlp.linear_fc2"):
        linear = model.decoder.layers[0].get_submodule(name)
        torch.manual_seed(dist.get_rank())
        states = torch.randn(7, 1, linear.weight.shape[1]).bfloat16()
        (site,) = (one for one in reduce_sites.sites(FACTOR, TRAINING, model, {}) if one.owner is linear)
        part = torch.nn.functional.linear(states, linear.weight)
        with torch.no_grad():
            parts = gather_from_tensor_model_parallel_region(part, group=linear.tp_group).chunk(2, dim=-1)
            found[name] = {
                "tree": site.build(linear.forward)(states)[0].flatten().tolist(),
                "native": linear(states)[0].flatten().tolist(),
                "ascending": tree_sum(parts).flatten().tolist(),
                "descending": tree_sum(parts[::-1]).flatten().tolist(),
            }
    return found


def main(rank: int, store: str, folder: Path, both: bool) -> None:
    from megatron.core import parallel_state, tensor_parallel

    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    parallel_state.initialize_model_parallel(2)
    tensor_parallel.random.initialize_rng_tracker(inference_rng_tracker=True)
    model, shape = build(folder), shape_from_folder(folder)
    group = model.pg_collection.tp
    backend = MegatronBackend(model, shape=shape)
    found: dict[str, Any] = {
        "reduced": reduced(model),
        "implementation": backend.read_back().effective("parallel.tensor.backend"),
    }
    held = [dict(vars(site.owner)) for site in reduce_sites.sites(FACTOR, TRAINING, model, {})]
    if rank:
        follow(backend, group)
    else:
        leader = LeadingBackend(backend, group)
        native = leader.score(SEQUENCES)
        with leader.bind(Binding(role=TRAINING, choices={FACTOR: Choice.REFERENCE})):
            bound, inside = leader.score(SEQUENCES), thaw(leader.switch_states(native_of(FACTOR)))
        found |= {"native": thaw(native), "bound": thaw(bound), "inside": inside}
        found["again"] = thaw(leader.score(SEQUENCES))
        try:
            with leader.bind(Binding(role=TRAINING, choices={"no.such": Choice.REFERENCE})):
                pass
        except RuntimeError as refused:
            found["refused"] = str(refused)
        repeated = {FACTOR: {"repeated_under": VARIABLES}}
        choices = {FACTOR: Choice.REFERENCE}
        with leader.bind(Binding(role=TRAINING, choices=choices, parameters=repeated, environment=VARIABLES)):
            found["repeated"] = thaw(leader.score(SEQUENCES).shards)
        found["after_refusal"] = thaw(leader.score(SEQUENCES).shards)
        if both:
            llm, verdict = ablated(leader, folder)
            found |= verdict
        leader.end()
    # Counted on both ranks: one group for the pass above, and on the leader one for each repeat of the ablation.
    found["groups"] = [dict(variables) for _, variables in reduce_sites._REPEATED]
    found["variables_left"] = [name for name in VARIABLES if name in os.environ]
    after = [dict(vars(site.owner)) for site in reduce_sites.sites(FACTOR, TRAINING, model, {})]
    found["restored"] = all(
        before.keys() == now.keys() and all(before[name] is now[name] for name in before)
        for before, now in zip(held, after, strict=True)
    )
    if rank == 0 and both:
        llm.llm_engine.engine_core.shutdown()  # the last thing, because it takes this process's groups down too
    print(json.dumps(found))


def native_of(factor: str) -> Binding:
    """The binding under which a switch is read and not set."""
    return Binding(role=TRAINING, choices={factor: Choice.NATIVE})


def ablated(leader: LeadingBackend, folder: Path) -> tuple[Any, dict[str, Any]]:
    """A vLLM engine of two ranks, and the factor's verdict with both engines at two."""
    from vllm import LLM

    from mismatch_hooks.integrations.vllm import WORKER_EXTENSION, VllmBackend
    from mismatch_hooks.live.ablation import ablate
    from mismatch_hooks.live.execution import execution_of
    from mismatch_hooks.live.passes import CapturedBatch
    from mismatch_hooks.live.planning import make_plan
    from mismatch_hooks.live.registry import load_registry
    from mismatch_hooks.schema.enums import NoiseFloor, Origin

    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK"):
        os.environ.pop(name, None)
    llm = LLM(
        str(folder),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=256,
        max_num_batched_tokens=256,
        max_num_seqs=8,
        tensor_parallel_size=2,
        kv_cache_memory_bytes=32 * 2**20,
        generation_config="vllm",
        disable_log_stats=True,
        use_tqdm_on_load=False,
        worker_extension_cls=WORKER_EXTENSION,
    )
    engines: dict[PolicyRole, ScoringBackend] = {PolicyRole.ROLLOUT: VllmBackend(llm), TRAINING: leader}
    rows = {
        role: [piece.logprobs for piece in engine.score(SEQUENCES).shards[0].slices] for role, engine in engines.items()
    }
    shape = shape_from_folder(folder)
    weights = {role: engine.weights_digest() for role, engine in engines.items()}
    readbacks = {role: engine.read_back() for role, engine in engines.items()}
    result = ablate(
        make_plan([FACTOR], load_registry(), engines, shape, Origin.NATIVE),
        CapturedBatch(
            sequences=SEQUENCES,
            rollout_logprobs=rows[PolicyRole.ROLLOUT],
            training_logprobs=rows[TRAINING],
            epsilon_low=0.2,
            epsilon_high=0.2,
            weights=weights,
        ),
        engines=engines,
        registry=load_registry(),
        shape=shape,
        noise_floor=NoiseFloor.SHARDED_SINGLE_NODE,
        pitfalls=lambda rescored: (),
        execution=execution_of(SEQUENCES, readbacks, weights, shape=shape, origin=Origin.NATIVE),
        timeout_s=60.0,
    )
    (verdict,) = result.verdicts
    return llm, {
        "gates": [(gate.name.value, gate.ok, gate.reason) for gate in verdict.gates],
        "diagnosis": verdict.diagnosis.value,
        "reason": verdict.reason,
        "tokens": verdict.tokens,
        "passes": verdict.passes,
        "issues": thaw(verdict.issues),
        "effects": [(effect.arm, effect.bits_changed) for effect in verdict.effects],
        "rollout_implementation": engines[PolicyRole.ROLLOUT].read_back().effective("parallel.tensor.backend"),
    }


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), "both" in sys.argv[4:])
