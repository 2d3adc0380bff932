"""Whether cached prefixes may have been computed with other weights than those that are loaded now.

vLLM 0.32 keys cached blocks by their tokens alone and keeps them across a reload; only ``reset_prefix_cache`` forgets
them, and only when no request is running. It then makes a new map of cached blocks, which is what is looked at here: a
call that was refused leaves the old one.
"""

from typing import Any


class PrefixCacheWatch:
    """Looks once a rollout, at no cost; written against ``BlockPool.cached_block_hash_to_block``."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._map: Any = None
        self._weights = -1

    def outlived_weights(self, weights: int) -> bool | None:
        """Return whether the cache is older than the last change of the weights.

        Args:
            weights: how many changes of the loaded weights have been seen so far.

        Returns:
            None where the weights have changed and the engine core, in a process of its own, cannot be looked at.
        """
        found = self._cached_blocks()
        if self._weights < 0 or (found is not None and found is not self._map):
            # Held, so that no later map can be taken for this one.
            self._map, self._weights = found, weights
            return False
        if weights == self._weights:
            return False
        return True if found is not None else None

    def _cached_blocks(self) -> Any:
        core = getattr(self._llm.llm_engine.engine_core, "engine_core", None)
        manager = getattr(getattr(core, "scheduler", None), "kv_cache_manager", None)
        return getattr(getattr(manager, "block_pool", None), "cached_block_hash_to_block", None)
