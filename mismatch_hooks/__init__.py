"""Find which operator, on which side, makes rollout and training log-probs disagree in a live GRPO run.

Importing this package imports neither torch nor an engine; every name below is loaded when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mismatch_hooks.live.alerts import Alert
    from mismatch_hooks.live.config import ConfigError, check_config
    from mismatch_hooks.live.hooks import MismatchHooks
    from mismatch_hooks.model_meta.shapes import shape_from_folder
    from mismatch_hooks.pipeline.metrics import measure, merge
    from mismatch_hooks.schema.capture import RolloutSequence, SamplingSettings

__all__ = [
    "Alert",
    "ConfigError",
    "MismatchHooks",
    "RolloutSequence",
    "SamplingSettings",
    "check_config",
    "measure",
    "merge",
    "shape_from_folder",
]

_HOMES = {
    "Alert": "live.alerts",
    "ConfigError": "live.config",
    "MismatchHooks": "live.hooks",
    "RolloutSequence": "schema.capture",
    "SamplingSettings": "schema.capture",
    "check_config": "live.config",
    "measure": "pipeline.metrics",
    "merge": "pipeline.metrics",
    "shape_from_folder": "model_meta.shapes",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
