"""vLLM, the rollout engine: ``VllmBackend`` to score and read back, ``sequences`` to capture, and what to build with.

Importing this package imports neither vLLM nor torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mismatch_hooks.integrations.vllm.backend import VllmBackend as VllmBackend
    from mismatch_hooks.integrations.vllm.capture import sequences as sequences

__all__ = ["FORCED_DECODE", "WORKER_EXTENSION", "VllmBackend", "sequences"]

# Names for LLM(logits_processors=[FORCED_DECODE], worker_extension_cls=WORKER_EXTENSION), each as vLLM spells it.
FORCED_DECODE = "mismatch_hooks.integrations.vllm.forced_decode:ForcedTokens"
WORKER_EXTENSION = "mismatch_hooks.integrations.vllm.worker.WorkerExtension"
_HOMES = {"VllmBackend": "backend", "sequences": "capture"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
