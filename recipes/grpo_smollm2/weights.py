"""Hugging Face names and layouts to megatron-core's and back; every value keeps its bits.

megatron-core fuses what Hugging Face keeps apart. Its fused tensors are all one pattern: ``groups`` blocks of rows,
each holding the group's rows of every part in order. Query, key and value are fused by KV head (a group is that
head's queries, then its key, then its value), gate and up in one group, and a tensor that stands alone is a fusion
of one part.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from recipes.grpo_smollm2.errors import RecipeError
from recipes.grpo_smollm2.model_file import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One tensor of megatron-core and the tensors of Hugging Face that it holds.

    Attributes:
        megatron: name in the megatron-core model.
        parts: names in the Hugging Face model, in the order of their rows inside a group.
        rows: rows that each part gives to a group; empty for a tensor that stands alone.
        groups: blocks of rows.
    """

    megatron: str
    parts: tuple[str, ...]
    rows: tuple[int, ...] = ()
    groups: int = 1


def table(shape: ModelShape) -> Iterator[Entry]:
    """Every tensor of a model of this shape, in the order of the forward."""
    yield Entry(megatron="embedding.word_embeddings.weight", parts=("model.embed_tokens.weight",))
    for layer in range(shape.layers):
        here, there = f"decoder.layers.{layer}", f"model.layers.{layer}"
        yield Entry(megatron=f"{here}.input_layernorm.weight", parts=(f"{there}.input_layernorm.weight",))
        yield Entry(
            megatron=f"{here}.self_attention.linear_qkv.weight",
            parts=tuple(f"{there}.self_attn.{part}_proj.weight" for part in "qkv"),
            rows=(shape.heads // shape.kv_heads * shape.head_dim, shape.head_dim, shape.head_dim),
            groups=shape.kv_heads,
        )
        if shape.qk_norm:
            for part in "qk":
                yield Entry(
                    megatron=f"{here}.self_attention.{part}_layernorm.weight",
                    parts=(f"{there}.self_attn.{part}_norm.weight",),
                )
        yield Entry(megatron=f"{here}.self_attention.linear_proj.weight", parts=(f"{there}.self_attn.o_proj.weight",))
        yield Entry(megatron=f"{here}.pre_mlp_layernorm.weight", parts=(f"{there}.post_attention_layernorm.weight",))
        yield Entry(
            megatron=f"{here}.mlp.linear_fc1.weight",
            parts=(f"{there}.mlp.gate_proj.weight", f"{there}.mlp.up_proj.weight"),
            rows=(shape.ffn, shape.ffn),
        )
        yield Entry(megatron=f"{here}.mlp.linear_fc2.weight", parts=(f"{there}.mlp.down_proj.weight",))
    yield Entry(megatron="decoder.final_layernorm.weight", parts=("model.norm.weight",))
    if not shape.tied:
        yield Entry(megatron="output_layer.weight", parts=("lm_head.weight",))


def to_megatron(tensors: Mapping[str, Tensor], shape: ModelShape) -> Iterator[tuple[str, Tensor]]:
    """megatron-core's tensors of a Hugging Face checkpoint; dtypes are kept.

    Raises:
        RecipeError: the checkpoint lacks a tensor of the shape, or holds one too many.
    """
    entries = list(table(shape))
    _require_names(tensors, (part for entry in entries for part in entry.parts), what="the checkpoint")
    for entry in entries:
        parts = [tensors[part] for part in entry.parts]
        if len(parts) == 1:
            yield entry.megatron, parts[0]
        else:
            blocks = [part.view(entry.groups, rows, -1) for part, rows in zip(parts, entry.rows, strict=True)]
            yield entry.megatron, torch.cat(blocks, dim=1).flatten(0, 1)


def to_hugging_face(tensors: Mapping[str, Tensor], shape: ModelShape) -> Iterator[tuple[str, Tensor]]:
    """Hugging Face's tensors of a megatron-core model, contiguous; a tied head is left out, as in its checkpoints.

    Raises:
        RecipeError: the model lacks a tensor of the shape, or holds one too many.
    """
    entries = list(table(shape))
    _require_names(tensors, (entry.megatron for entry in entries), what="the trained model")
    for entry in entries:
        fused = tensors[entry.megatron]
        if len(entry.parts) == 1:
            yield entry.parts[0], fused
        else:
            blocks = fused.view(entry.groups, sum(entry.rows), -1).split(entry.rows, dim=1)
            yield from zip(entry.parts, (block.flatten(0, 1).contiguous() for block in blocks), strict=True)


def _require_names(found: Iterable[str], expected: Iterable[str], *, what: str) -> None:
    found, expected = set(found), set(expected)
    if missing := sorted(expected - found):
        raise RecipeError(
            f"weights: {what} lacks {len(missing)} tensors, first {missing[0]}; use a model of this shape."
        )
    if extra := sorted(found - expected):
        raise RecipeError(f"weights: {what} holds {len(extra)} tensors too many, first {extra[0]}; drop them.")
