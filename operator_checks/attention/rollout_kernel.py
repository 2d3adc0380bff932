"""The tiled attention over vLLM's paged KV cache: one plan a model forward, one call of the reference a layer.

Written against vllm 0.32 (``CPUAttentionMetadata``: a new object for each forward, shared by its layers).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mismatch_hooks.operator_checks.attention.paged_cache import PageLayout, Runs, page_layout
from mismatch_hooks.pipeline.bind import BindingError
from mismatch_hooks.references.attention import BLOCK_KEYS, Slab, TilePlan, attend, plan_tiles


class RolloutKernel:
    """Builds the replacement of each layer's ``impl.forward``; the layers of one binding share it."""

    def __init__(self, scale: float) -> None:
        """Start with no layer.

        Args:
            scale: of the scores.
        """
        self._scale = scale
        self._layouts: dict[tuple[object, ...], PageLayout] = {}
        self._planned: tuple[object, TilePlan] | None = None
        self._runs: dict[tuple[int, int], tuple[Runs, Runs]] = {}

    def build(self, layer: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Return what makes the replacement for ``layer``, an ``Attention`` module whose cache is allocated.

        Raises:
            BindingError: its cache is laid out in a way that cannot be read.
        """
        layout = self._layout(layer)

        def forward(
            layer: Any,
            query: Any,
            key: Any,
            value: Any,
            kv_cache: Any,
            attn_metadata: Any,
            output: Any,
            output_scale: Any = None,
            output_block_scale: Any = None,
        ) -> Any:
            if attn_metadata is None:  # a warm-up, which has no tokens
                return output
            plan = self._plan(attn_metadata, kv_cache, query.shape[1])
            tokens = attn_metadata.num_actual_tokens

            def gather(slab: Slab) -> tuple[Tensor, Tensor]:
                key = id(layout), id(slab)  # both outlive the plan
                if key not in self._runs:
                    self._runs[key] = layout.runs(kv_cache, slab)
                return layout.gather(kv_cache, slab, self._runs[key])

            output[:tokens] = attend(query[:tokens], gather, plan, scale=self._scale)
            return output

        return lambda original: forward

    def _layout(self, layer: Any) -> PageLayout:
        cache, impl = layer.kv_cache, layer.impl
        key = (cache.shape[1:], cache.stride(), cache.dtype, layer.isa)
        if key not in self._layouts:

            def update(keys: Tensor, values: Tensor, page: Tensor, slots: Tensor) -> None:
                impl.do_kv_cache_update(layer, keys, values, page, slots)

            self._layouts[key] = page_layout(cache, update)
        return self._layouts[key]

    def _plan(self, metadata: Any, cache: Tensor, heads: int) -> TilePlan:
        if self._planned is None or self._planned[0] is not metadata:
            if metadata.causal is not True or metadata.dynamic_causal is not None:
                raise BindingError("the rollout attends beyond the causal mask; the attention reference does not.")
            starts = metadata.query_start_loc.long()
            per_page = cache.shape[2] // BLOCK_KEYS
            within = torch.arange(per_page, device=starts.device)
            pages = metadata.block_table.long()[: len(starts) - 1]
            blocks = torch.stack(
                (pages.repeat_interleave(per_page, 1), within.repeat(pages.shape[1]).expand(len(pages), -1)), dim=2
            )
            plan = plan_tiles(
                starts.diff(),
                metadata.seq_lens.long(),
                blocks,
                heads_per_kv=heads // cache.shape[1],
                kv_heads=cache.shape[1],
            )
            self._planned, self._runs = (metadata, plan), {}
        return self._planned[1]
