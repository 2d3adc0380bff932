"""The weights that a live ``GPTModel`` computes with, under Hugging Face names and layouts.

This is the library's own reading: layouts come from the live model's own sizes, and no code is shared with the exporter
that syncs weights, so a fault in the exporter cannot hide itself.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from blake3 import blake3
from torch import Tensor

from mismatch_hooks.integrations.megatron.live_model import parallel_sizes
from mismatch_hooks.schema.readback import Unobservable

# Parameters of a layer that are one tensor on both sides; ``layer_norm_weight`` is TransformerEngine's layer spec,
# where a linear holds the norm before it.
_ALONE = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.linear_proj.bias": "self_attn.o_proj.bias",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
    "mlp.linear_fc2.bias": "mlp.down_proj.bias",
}
_QKV = tuple(f"self_attn.{part}_proj" for part in "qkv")
_GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
_NORMS = ("norm.weight", "norm_weight")
_REPLICATED = (*_NORMS, "linear_proj.bias", "linear_fc2.bias")  # whole on every tensor-parallel rank

Source = Callable[[], Tensor] | Unobservable


def live_tensors(model: Any, *, vocab_size: int | None = None) -> Mapping[str, Source]:
    """Return every tensor of this rank's part of the model, by Hugging Face name, read when called.

    Args:
        model: an unwrapped ``GPTModel``.
        vocab_size: rows of embedding and head that are words; the padding behind them is left out. None: all rows.

    A tensor that cannot be read whole (sharded over tensor-parallel ranks, an unknown layout, no Hugging Face name) is
    ``Unobservable``; none is dropped. A tied head is the embedding and has no name of its own; where it is not the same
    memory any more it appears as ``lm_head.weight``.
    """
    found: dict[str, Source] = {}
    ranks = parallel_sizes(model).tensor
    for layer in model.decoder.layers:
        prefix = f"model.layers.{layer.layer_number - 1}."  # counted over all pipeline stages, from 1
        for name, source in _layer(dict(layer.named_parameters()), model.config, ranks):
            found[prefix + name] = source
    for name, parameter in _outside_layers(model):
        words = None if name == "model.norm.weight" else vocab_size
        found[name] = _source(name, parameter, model.config, ranks, partial(_rows, parameter, words))
    return found


def layer_tensors(parameters: Mapping[str, Tensor], config: Any) -> Mapping[str, Source]:
    """Return one unsharded layer's tensors by Hugging Face name without the layer's prefix.

    Args:
        parameters: megatron-core's names inside the layer to tensors, of the local or TransformerEngine's layer spec.
        config: the layer's ``TransformerConfig``, for the numbers of heads.
    """
    return dict(_layer(parameters, config, 1))


def digests(tensors: Mapping[str, Source], prefixes: Sequence[str] | None = None) -> dict[str, str]:
    """Return name to BLAKE3 of the tensor's bytes in its live dtype, or ``"unobservable: reason"``.

    Args:
        tensors: as ``live_tensors`` gives them.
        prefixes: only names that start with one of these; None is all of them.
    """
    return {
        name: f"unobservable: {source.reason}" if isinstance(source, Unobservable) else digest(source())
        for name, source in tensors.items()
        if prefixes is None or name.startswith(tuple(prefixes))
    }


def digest(tensor: Tensor) -> str:
    """Return the hexadecimal BLAKE3 of a tensor's bytes in its own dtype, row-major, −0.0 taken as +0.0.

    The rollout side reads packed weights back by multiplying, which cannot tell the two zeros apart.
    """
    plain = (tensor.detach() + 0).cpu().contiguous().flatten()
    return str(blake3(plain.view(torch.uint8).numpy().data).hexdigest())


def _layer(parameters: Mapping[str, Tensor], config: Any, ranks: int) -> Iterator[tuple[str, Source]]:
    for name, parameter in parameters.items():
        source = partial(_source, name, parameter, config, ranks)
        module, kind = name.rsplit(".", 1)
        if name in _ALONE:
            yield _ALONE[name], source(partial(_rows, parameter, None))
        elif module == "self_attention.linear_qkv":
            for part, target in enumerate(_QKV):
                yield f"{target}.{kind}", source(partial(_qkv, parameter, config, part))
        elif module == "mlp.linear_fc1" and config.gated_linear_unit:
            for part, target in enumerate(_GATE_UP):
                # gate rows first, then up rows: the MLP's forward chunks its output in that order
                yield f"{target}.{kind}", source(partial(_half, parameter, part))
        else:
            yield name, Unobservable(reason=f"no Hugging Face name is known for megatron-core's {name}")


def _source(name: str, parameter: Tensor, config: Any, ranks: int, read: Callable[[], Tensor]) -> Source:
    """``read``, or why a tensor of this name cannot be read whole."""
    # By name: the attribute tensor_model_parallel is missing where a model was built without initialisation.
    if ranks > 1 and not name.endswith(_REPLICATED):
        return Unobservable(reason=f"sharded over {ranks} ranks")
    if config.layernorm_zero_centered_gamma and name.endswith(_NORMS):
        return Unobservable(reason="the norm stores its weight minus 1; no bits to compare")
    rows = (config.num_attention_heads + 2 * config.num_query_groups) * config.kv_channels
    if "linear_qkv." in name and not name.endswith(_NORMS) and parameter.shape[0] != rows:
        reason = f"linear_qkv has {parameter.shape[0]} rows where queries, keys and values make {rows}"
        return Unobservable(reason=reason)
    return read


def _qkv(parameter: Tensor, config: Any, part: int) -> Tensor:
    # The attention's forward views its rows as [group, queries of the group + key + value, head dim].
    groups, queries = config.num_query_groups, config.num_attention_heads // config.num_query_groups
    rows = parameter.view(groups, queries + 2, config.kv_channels, *parameter.shape[1:])
    chosen = (slice(0, queries), slice(queries, queries + 1), slice(queries + 1, queries + 2))[part]
    return rows[:, chosen].flatten(0, 2)


def _half(parameter: Tensor, part: int) -> Tensor:
    return parameter.chunk(2)[part]


def _rows(parameter: Tensor, vocab_size: int | None) -> Tensor:
    return parameter[:vocab_size]


def _outside_layers(model: Any) -> Iterator[tuple[str, Tensor]]:
    embedding = model.embedding.word_embeddings.weight if hasattr(model, "embedding") else None
    if embedding is not None:
        yield "model.embed_tokens.weight", embedding
    norm = getattr(model.decoder, "final_layernorm", None)
    if norm is not None:
        yield "model.norm.weight", norm.weight
    head = head_weight(model)
    if head is None:
        return
    if embedding is None and model.share_embeddings_and_output_weights:
        yield "model.embed_tokens.weight", head  # the last pipeline stage's copy
    elif embedding is None or head.data_ptr() != embedding.data_ptr():
        yield "lm_head.weight", head


def head_weight(model: Any) -> Tensor | None:
    """Return the matrix that the output layer multiplies with, or None on a pipeline stage without one."""
    if not model.post_process:
        return None
    own: Tensor | None = model.output_layer.weight
    shared: Tensor | None = (
        model.shared_embedding_or_output_weight() if model.share_embeddings_and_output_weights else None
    )
    return shared if shared is not None else own
