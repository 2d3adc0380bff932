"""Where the exact scale goes in an engine that has a ``scale``."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mismatch_hooks.pipeline.bind import PatchSite
from mismatch_hooks.schema.enums import PolicyRole
from mismatch_hooks.schema.shape import ModelShape


def parameters(factor: str, shape: ModelShape) -> Mapping[str, object]:
    """Return the one parameter of the reference."""
    return {"by": shape.head_dim}


def sites(factor: str, role: PolicyRole, model: Any, parameters: Mapping[str, object]) -> Sequence[PatchSite]:
    """Return the model's ``scale``."""

    def build(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda number: number * parameters["by"]

    return [PatchSite(factor=factor, site="scale", owner=model, name="scale", build=build, calls_per_forward=1)]
