"""One of two tensor-parallel ranks: scores bound and unbound, reads back, digests, and prints what it got as JSON.

Run by ``test_two_ranks.py`` as ``python -m tests.integrations.megatron.two_ranks RANK STORE``.
"""

import json
import sys

import pytest
import torch
import torch.distributed as dist

from mismatch_hooks.integrations.megatron import MegatronBackend, ScoringTimeout, backend
from mismatch_hooks.schema.enums import Choice, PolicyRole
from mismatch_hooks.schema.freeze import thaw
from mismatch_hooks.schema.score import Binding
from tests.integrations.megatron.test_binding import ROPE, Adapter
from tests.integrations.megatron.tiny_gpt import LLAMA, build_model, sequences
from tests.planted_registry import planted_registry


def main(rank: int, store: str) -> None:
    from megatron.core import parallel_state, tensor_parallel

    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    parallel_state.initialize_model_parallel(2)
    tensor_parallel.random.initialize_rng_tracker(inference_rng_tracker=True)
    registry = planted_registry((ROPE,), Adapter())
    pytest.MonkeyPatch().setattr(backend, "load_registry", lambda: registry)

    model = build_model(LLAMA, padded_vocab=640, tensor_model_parallel_size=2)
    engine = MegatronBackend(model, shape=LLAMA, micro_batch=2)
    batch = sequences((5, 7), (3, 12), (9, 1))
    native = engine.score(batch)
    with engine.bind(
        Binding(role=PolicyRole.TRAINING, choices={ROPE: Choice.REFERENCE}, parameters={ROPE: {"scale": 1.5}})
    ):
        bound = engine.score(batch)
    try:  # rank 1 alone is out of time; both must stop
        engine.score(batch, timeout_s=0.0 if rank else 1000.0)
        stopped = False
    except ScoringTimeout:
        stopped = True
    settings = engine.read_back()
    print(
        json.dumps(
            {
                "native": thaw(native),
                "bound": thaw(bound),
                "traced": thaw(engine.trace(batch)),
                "again": thaw(engine.score(batch)),
                "stopped": stopped,
                "parallel.tensor": settings.effective("parallel.tensor"),
                "model.vocab.logits_width": thaw(settings.settings["model.vocab.logits_width"]),
                "digests": thaw(engine.weights_digest().tensors),
            }
        )
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
