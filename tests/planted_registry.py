"""A registry of factors that a test plants, all behind one adapter."""

from collections.abc import Iterable
from dataclasses import replace

from mismatch_hooks.live.registry import Adapter, Registry
from tests.pipeline.samples import ROPE


def planted_registry(names: Iterable[str], adapter: Adapter) -> Registry:
    """Four-arm factors of the given ids, each with a switch of its own, whose places ``adapter`` finds."""

    class Planted(Registry):
        def adapter(self, factor: str) -> Adapter:
            return adapter

    factors = {
        name: replace(ROPE, id=name, switch=replace(ROPE.switch, path=f"operator.{name}.implementation"))
        for name in names
    }
    return Planted(factors=factors, adapters={})
