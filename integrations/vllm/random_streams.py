"""Keep every random stream of this process where it is while something else runs."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy
import torch


def hold_random_streams() -> Callable[[], None]:
    """Remember the streams of torch (CPU and CUDA), numpy and ``random``; return what puts them back."""
    python, numbers, cpu = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    # An untouched CUDA context has no stream that anybody could have drawn from, and asking would create it.
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else None

    def put_back() -> None:
        random.setstate(python)
        numpy.random.set_state(numbers)
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)

    return put_back


@contextmanager
def random_streams_untouched() -> Iterator[None]:
    """Put every random stream back at the end of the block, whatever happens in it."""
    put_back = hold_random_streams()
    try:
        yield
    finally:
        put_back()
