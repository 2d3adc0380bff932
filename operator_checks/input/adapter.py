"""Where positions, counted anew within each sequence, go in each live engine.

Written against vllm 0.32 (``forward`` of the model's body, which every layer gets its positions from) and megatron-core
0.16 (``forward`` of ``RotaryEmbedding``: attention reads the table by row and looks at no position ids).

What is rebuilt starts at the first position that the engine gave the sequence, because rope depends on distances alone:
a shift of all of them by one number is no difference and changes no bit here. While ``attention.rope_fusion`` is on its
reference on training, as from aligned, that reference counts by itself, and a wrong table shows there and not here.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mismatch_hooks.pipeline.bind import BindingError, PatchSite
from mismatch_hooks.schema.enums import PolicyRole
from mismatch_hooks.schema.shape import ModelShape


def parameters(factor: str, shape: ModelShape) -> Mapping[str, object]:
    """Return nothing: positions are counted, and frequencies stay the engine's own."""
    return {}


def sites(factor: str, role: PolicyRole, model: Any, parameters: Mapping[str, object]) -> Sequence[PatchSite]:
    """Return the one place of a live model that all positions come from, called once a forward.

    Args:
        factor: ``"input.positions"``.
        role: which engine ``model`` belongs to.
        model: vLLM's model module on this rank, or the ``GPTModel``.
        parameters: nothing of them is needed.

    Raises:
        BindingError: the positions of the model have a form that is not covered.
    """
    if role is PolicyRole.ROLLOUT:
        return [_site(factor, "model: positions", model.model, _rollout)]
    table = model.rotary_pos_emb
    if getattr(table, "rotary_interleaved", False) or model.config.context_parallel_size > 1:
        raise BindingError(
            "the trainer's rotary table is interleaved or cut over context-parallel ranks; positions are rebuilt for "
            "whole tables of rotated halves."
        )
    return [_site(factor, "rotary_pos_emb", table, _training(table))]


def _site(factor: str, site: str, owner: Any, build: Callable[..., Any]) -> PatchSite:
    return PatchSite(factor=factor, site=site, owner=owner, name="forward", build=build, calls_per_forward=1)


def _rollout(original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(input_ids: Any, positions: Any, *rest: Any, **options: Any) -> Any:
        return original(input_ids, _counted(positions), *rest, **options)

    return forward


def _counted(positions: Any) -> Any:
    """``[tokens]`` positions that rise by one from the first of each scheduled sequence; padding behind them stays."""
    import torch
    from vllm.forward_context import get_forward_context

    found = get_forward_context().attn_metadata
    if not found:  # a dummy forward schedules nothing
        return positions
    starts = next(iter(found.values())).query_start_loc.long()
    lengths = starts.diff()
    tokens = torch.arange(int(starts[-1]), device=positions.device)
    first = starts[:-1].repeat_interleave(lengths)
    counted = positions.clone()
    counted[: len(tokens)] = (positions[first] + (tokens - first)).to(positions.dtype)
    return counted


def _training(table: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    import torch

    def build(original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **options: Any) -> Any:
            phases = original(*args, **options)
            inverse = table.inv_freq.to(phases.device)
            # The first frequency is 1, so the first row's first phase is its position.
            first = phases[0, ..., 0].flatten()[0] / inverse[0]
            seq = torch.arange(phases.shape[0], device=phases.device, dtype=inverse.dtype) + first.round()
            half = torch.outer(seq, inverse)
            return torch.cat((half, half), dim=-1).reshape(phases.shape).to(phases.dtype)

        return forward

    return build
