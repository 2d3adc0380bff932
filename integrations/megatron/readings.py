"""How a reading of a live model is put together: one value where all modules agree, else one by module."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from mismatch_hooks.pipeline.bind import PatchSite
from mismatch_hooks.schema.enums import Source
from mismatch_hooks.schema.readback import NOTHING_REQUESTED, Reading, Unobservable

Settings = dict[str, Reading | Unobservable]


def live(
    effective: Any, where: str, requested: Any = NOTHING_REQUESTED, requested_by: str = "", *, default: Any = None
) -> Reading:
    """Return what a live object holds, beside what was asked for; ``default`` is what its class takes unasked."""
    # A wrong value that is the class default was never set; it is read from the live object all the same.
    unset = default is not None and effective == default and requested not in (NOTHING_REQUESTED, effective)
    return Reading(
        effective=effective,
        source=Source.CLASS_DEFAULT if unset else Source.LIVE_MODULE,
        where=where,
        requested=requested,
        requested_by=requested_by,
    )


def agreed(
    values: Mapping[str, Any],
    kind: str,
    requested: Any = NOTHING_REQUESTED,
    requested_by: str = "",
    *,
    default: Any = None,
) -> Reading:
    """Return the one value that all of ``values`` have, else the mapping; ``kind`` names them in the plural."""
    distinct = list(dict.fromkeys(values.values()))
    effective = distinct[0] if len(distinct) == 1 else dict(values)
    where = next(iter(values)) if len(values) == 1 else f"{len(values)} {kind}"
    return live(effective, where, requested, requested_by, default=default)


def implementations(modules: Mapping[str, Any]) -> Reading | Unobservable:
    """Return the class that computes, by module name where they differ; a replaced forward is named too."""
    if not modules:
        return Unobservable(reason="this part of the model has no such module")
    return agreed({name: _implementation(module) for name, module in modules.items()}, classes(modules.values()))


def classes(modules: Collection[Any]) -> str:
    """Return ``"modules of class A, B"``."""
    return f"modules of class {', '.join(sorted({type(module).__name__ for module in modules}))}"


def name_of(function: Callable[..., Any]) -> str:
    """Return the dotted name of a function or of a callable object's class; a bound reference names its factor."""
    site = getattr(function, "site", None)
    if isinstance(site, PatchSite):
        return f"reference of {site.factor}"
    owner = function if hasattr(function, "__qualname__") else type(function)
    return f"{owner.__module__}.{owner.__qualname__}"


def submodules(model: Any, path: str) -> dict[str, Any]:
    """Return the module at ``path`` of each decoder layer that has one, by full name."""
    found: dict[str, Any] = {}
    for index, layer in enumerate(model.decoder.layers):
        module = layer
        for name in path.split("."):
            module = getattr(module, name, None)
        if module is not None:
            found[f"decoder.layers.{index}.{path}"] = module
    return found


def dtype_name(dtype: torch.dtype) -> str:
    """Return ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def _implementation(module: Any) -> str:
    own = vars(module).get("forward")
    name = name_of(type(module))
    return name if own is None else f"{name} with forward replaced by {name_of(own)}"
