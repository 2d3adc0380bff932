"""megatron-core on this host, for the length of a test module."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="module")
def megatron() -> Iterator[None]:
    """megatron-core set up for one rank, with the two host shims that a machine without CUDA needs."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random as megatron_random

    before = torch.cuda.current_device
    tracker = megatron_random._CUDA_RNG_STATE_TRACKER, megatron_random._CUDA_RNG_STATE_TRACKER_INITIALIZED
    # The rotary table asks where to live, and attention forks the CUDA stream for its dropout, on any host.
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    megatron_random._CUDA_RNG_STATE_TRACKER_INITIALIZED = False
    megatron_random.initialize_rng_tracker(inference_rng_tracker=True)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    megatron_random._CUDA_RNG_STATE_TRACKER, megatron_random._CUDA_RNG_STATE_TRACKER_INITIALIZED = tracker
    torch.cuda.current_device = before


@pytest.fixture(autouse=True)
def attention_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every model that is built sets these process-wide, and the next one with another backend asserts on them."""
    for variable in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
        monkeypatch.setenv(variable, "")  # so that it is removed again afterwards
        monkeypatch.delenv(variable)
