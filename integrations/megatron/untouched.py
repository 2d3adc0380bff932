"""Leave no trace in the run that is being scored: random streams, train and eval modes, gradients."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch


@contextmanager
def untouched(model: Any) -> Iterator[None]:
    """Hold gradients off and put every random stream and every module's mode back, whatever the block did.

    Covers python's, numpy's and torch's CPU and CUDA generators and megatron-core's named CUDA states. The block runs
    in the mode that the model is in: nothing here turns dropout off, because then it would not score what trains.
    """
    from megatron.core.tensor_parallel import random as megatron_random

    modes = [(module, module.training) for module in model.modules()]
    python, np, cpu = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
    # Not get_cuda_rng_tracker(): it makes the tracker where the run has none yet, of a kind the run may not want.
    tracker = megatron_random._CUDA_RNG_STATE_TRACKER
    named = tracker.get_states() if tracker is not None and tracker.is_initialized() else None
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training
        random.setstate(python)
        numpy.random.set_state(np)
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)
        if named is not None:
            tracker.set_states(named)
