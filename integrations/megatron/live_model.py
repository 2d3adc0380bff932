"""Reach the ``GPTModel`` inside whatever the loop wraps it in, and refuse what was never run."""

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from packaging.specifiers import SpecifierSet

from mismatch_hooks.live.supported import MEGATRON

TESTED = SpecifierSet(MEGATRON.versions)


class UnsupportedTrainerError(RuntimeError):
    """The training side is of a version, a kind or a layout that this integration does not cover."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelSizes:
    """Ranks per kind of parallelism, from the live process groups.

    Attributes:
        tensor: tensor-model-parallel ranks.
        pipeline: pipeline stages.
        data: data-parallel replicas.
        context: context-parallel ranks.
    """

    tensor: int
    pipeline: int
    data: int
    context: int


def require_tested_version() -> None:
    """Raise ``UnsupportedTrainerError`` unless the installed megatron-core is of the line that was run."""
    try:
        installed = version("megatron-core")
    except PackageNotFoundError:
        raise UnsupportedTrainerError(
            f"megatron-core is not installed; install a version in {TESTED}, for example by mismatch-hooks[megatron]."
        ) from None
    if not TESTED.contains(installed, prereleases=True):
        raise UnsupportedTrainerError(
            f"megatron-core {installed} is installed; this integration was run with megatron-core{TESTED}: install a "
            "version in that range, or pass another training backend."
        )


def gpt_model(model: Any) -> Any:
    """Return the ``GPTModel`` inside lists of one chunk, ``DistributedDataParallel``, ``Float16Module`` and compile.

    Raises:
        UnsupportedTrainerError: several model chunks (virtual pipeline stages), or no ``GPTModel`` inside.
    """
    from megatron.core.models.gpt.gpt_model import GPTModel

    found = outermost(model)
    while not isinstance(found, GPTModel):
        inner = getattr(found, "_orig_mod", None) or getattr(found, "module", None)
        if inner is None:
            raise UnsupportedTrainerError(
                f"model: got {type(model).__name__}; accepts a megatron-core GPTModel, wrapped or not."
            )
        found = inner
    return found


def outermost(model: Any) -> Any:
    """Return what the loop calls for a forward: the only element of a list, else ``model`` itself."""
    if not isinstance(model, list | tuple):
        return model
    if len(model) != 1:
        raise UnsupportedTrainerError(
            f"model: got {len(model)} model chunks; accepts one: a virtual pipeline cannot be re-scored in place."
        )
    return model[0]


def parallel_sizes(model: Any) -> ParallelSizes:
    """Return the sizes of the groups that an unwrapped ``GPTModel`` really communicates in."""
    from megatron.core import parallel_state

    groups = model.pg_collection
    return ParallelSizes(
        tensor=groups.tp.size(),
        pipeline=groups.pp.size(),
        data=parallel_state.get_data_parallel_world_size(),
        context=groups.cp.size(),
    )
