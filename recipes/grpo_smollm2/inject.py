"""A fault planted in the rollout engine, so that anyone can watch the alert and the verdict fire."""

from typing import Any

from mismatch_hooks.integrations.vllm.worker import WorkerExtension


class InjectingWorker(WorkerExtension):
    """The hooks' worker extension, with one more method that breaks something on request."""

    model_runner: Any

    def inject_rope_theta(self, factor: float) -> int:
        """Rebuild every rotary table with its base multiplied by ``factor``; returns how many tables there were.

        Only the table changes. The module's ``base`` and the configuration keep saying what was asked for, as they do
        when such a fault happens by accident. A weight reload puts the same table back, so the fault stays.
        """
        tables = [module for module in self.model_runner.model.modules() if hasattr(module, "cos_sin_cache")]
        # vLLM shares one rotary module among its layers; modules() yields it once.
        for module in tables:
            asked_for, module.base = module.base, module.base * factor
            try:
                module.cos_sin_cache.copy_(module._compute_cos_sin_cache())
            finally:
                module.base = asked_for
        return len(tables)
