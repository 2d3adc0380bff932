"""One of two tensor-parallel ranks: a column-parallel linear forward and backward, native and bound, printed as JSON.

Run by ``test_two_ranks.py`` as ``python two_ranks.py RANK STORE``.
"""

import json
import sys
from types import SimpleNamespace

import torch
import torch.distributed as dist

from mismatch_hooks.operator_checks.gemm import adapter
from mismatch_hooks.pipeline.bind import CallCounter, patched
from mismatch_hooks.schema.enums import PolicyRole

INPUTS, OUTPUTS, ROWS = 96, 256, 11


def drawn(*shape: int, seed: int) -> torch.Tensor:
    """Whole tensors, equal on every rank and in the test."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def main(rank: int, store: str) -> None:
    from megatron.core import parallel_state
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    parallel_state.initialize_model_parallel(2)
    config = ModelParallelConfig(tensor_model_parallel_size=2, use_cpu_initialization=True, params_dtype=torch.bfloat16)
    column = ColumnParallelLinear(INPUTS, OUTPUTS, config=config, init_method=torch.nn.init.zeros_, bias=False)
    with torch.no_grad():
        column.weight.copy_(drawn(OUTPUTS, INPUTS, seed=1).chunk(2)[rank])
    row = RowParallelLinear(
        INPUTS,
        8,
        config=config,
        init_method=torch.nn.init.zeros_,
        bias=False,
        input_is_parallel=True,
        skip_bias_add=True,
    )
    layer = SimpleNamespace(
        self_attention=SimpleNamespace(linear_qkv=column, linear_proj=row),
        mlp=SimpleNamespace(linear_fc1=column, linear_fc2=row),
    )
    model = SimpleNamespace(decoder=SimpleNamespace(layers=[layer]))
    site = adapter.sites("gemm.accumulation", PolicyRole.TRAINING, model, {})[0]
    found = {}
    for name, sites in (("native", []), ("bound", [site])):
        states = drawn(ROWS, 1, INPUTS, seed=0).requires_grad_()
        with patched(sites, CallCounter()):
            product, _ = column(states)
            product.float().square().sum().backward()
        assert states.grad is not None and column.weight.grad is not None
        found[name] = {
            "product": product.flatten(0, 1).tolist(),
            "for_states": states.grad.flatten(0, 1).tolist(),
            "for_weight": column.weight.grad.tolist(),
        }
        column.weight.grad = None
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
