"""Whether cached prefixes were computed with other weights than those that are loaded now.

vLLM 0.32 keys cached blocks by their tokens, and by the cache salt where the loop gives one, and keeps them across a
reload; only ``reset_prefix_cache`` forgets them, and only when no request is running. It then makes a new map of cached
blocks, which is what is looked at here: a call that was refused leaves the old one.

A cache that was not reset may serve all the same: the samples of one prompt share its blocks, and with a salt for each
weight version nothing older is found. So a block counts as old only where no request since the change has computed it.
"""

from collections.abc import Iterator, Sequence
from typing import Any

# All tokens of one request, and how many of them were served from the cache.
Request = tuple[Sequence[int], int]


class PrefixCacheWatch:
    """Looks once a rollout; written against ``BlockPool.cached_block_hash_to_block``."""

    def __init__(self, llm: Any, *, weights: int) -> None:
        """Look at the cache as it is.

        Args:
            llm: the ``LLM``.
            weights: how many changes of the loaded weights have been seen so far.
        """
        self._llm = llm
        self._block = max(1, int(llm.llm_engine.vllm_config.cache_config.block_size or 1))
        self._map = self._cached_blocks()
        self._map_weights = self._computed_weights = weights
        self._computed: set[int] = set()

    def outlived_weights(self, weights: int, requests: Sequence[Request]) -> list[bool | None]:
        """Return of each finished request whether it was served blocks from before the last change of the weights.

        Args:
            weights: how many changes of the loaded weights have been seen so far.
            requests: those of one rollout.

        Returns:
            None where it was served blocks that no request seen here has computed since the weights changed, and the
            engine core, in a process of its own, cannot be asked whether the cache was reset.
        """
        found = self._cached_blocks()
        if found is not None and found is not self._map:
            # Held, so that no later map can be taken for this one.
            self._map, self._map_weights = found, weights
        if weights != self._computed_weights:
            self._computed_weights = weights
            self._computed.clear()
        kept = weights != self._map_weights
        outlived: dict[int, bool | None] = {}
        # What a request has computed is known before one is judged that was served more of the same tokens.
        for index, (tokens, cached) in sorted(enumerate(requests), key=lambda one: one[1][1]):
            keys = list(self._keys(tokens))
            served = cached // self._block
            old = kept and served > 0 and (len(keys) < served or keys[served - 1] not in self._computed)
            outlived[index] = old and (True if found is not None else None)
            if not old:
                self._computed.update(keys[served:])
        return [outlived[index] for index in range(len(requests))]

    def _keys(self, tokens: Sequence[int]) -> Iterator[int]:
        """One key for each whole block, of all tokens up to its end."""
        key = 0
        for end in range(self._block, len(tokens) + 1, self._block):
            key = hash((key, tuple(tokens[end - self._block : end])))
            yield key

    def _cached_blocks(self) -> Any:
        core = getattr(self._llm.llm_engine.engine_core, "engine_core", None)
        manager = getattr(getattr(core, "scheduler", None), "kv_cache_manager", None)
        return getattr(getattr(manager, "block_pool", None), "cached_block_hash_to_block", None)
