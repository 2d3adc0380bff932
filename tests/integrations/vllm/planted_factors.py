"""Factors of tests: small references that go where a real adapter would put them."""

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from mismatch_hooks.live.registry import Registry
from mismatch_hooks.pipeline.bind import PatchSite
from tests.planted_registry import planted_registry

SITE = "model.layers.*.self_attn.rotary_emb"


def _same(original: Callable[..., Any]) -> Callable[..., Any]:
    return original


def _unrotated(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda positions, query, key=None: (query, key)


def _raises(original: Callable[..., Any]) -> Callable[..., Any]:
    def rope(*_: object) -> None:
        raise RuntimeError("the reference fell over")

    return rope


def _cannot_be_built(original: Callable[..., Any]) -> Callable[..., Any]:
    raise ValueError("no reference for this shape")


_BUILDS = {"same": _same, "unrotated": _unrotated, "raises": _raises, "unbuildable": _cannot_be_built}


def _sites(factor: str, role: Any, model: Any, parameters: Mapping[str, object]) -> Sequence[PatchSite]:
    kind = factor.split(".")[1]
    rotary, layers = model.model.layers[0].self_attn.rotary_emb, len(model.model.layers)

    def site(name: str, build: Callable[..., Any]) -> PatchSite:
        return PatchSite(factor=factor, site=SITE, owner=rotary, name=name, build=build, calls_per_forward=layers)

    if kind == "skipped":  # an attribute that the engine never looks up again after construction
        return [site("forward_hip", _same)]
    if kind == "unbuildable":
        return [site("_forward_method", _same), site("forward", _cannot_be_built)]
    return [site("_forward_method", _BUILDS[kind])]


def registry() -> Registry:
    names = [f"planted.{kind}" for kind in ("same", "unrotated", "raises", "skipped", "unbuildable")]
    adapter: Any = SimpleNamespace(sites=_sites)
    return planted_registry(names, adapter)
