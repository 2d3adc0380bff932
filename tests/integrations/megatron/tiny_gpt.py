"""Two-layer megatron-core models of Llama and Qwen3 shape, loaded from Hugging Face tensors."""

import random
from typing import Any

import torch

from mismatch_hooks.schema.score import ScoringSequence
from mismatch_hooks.schema.shape import ModelShape

LLAMA = ModelShape(
    architecture="LlamaForCausalLM",
    layers=2,
    hidden_size=128,
    ffn_size=256,
    query_heads=4,
    kv_heads=2,
    head_dim=32,
    vocab_size=512,
    norm_epsilon=1e-5,
    rope_theta=1e4,
    tied_embeddings=False,
    qk_norm=False,
)
QWEN3 = ModelShape(
    architecture="Qwen3ForCausalLM",
    layers=2,
    hidden_size=128,
    ffn_size=256,
    query_heads=4,
    kv_heads=2,
    head_dim=32,
    vocab_size=512,
    norm_epsilon=1e-6,
    rope_theta=1e4,
    tied_embeddings=True,
    qk_norm=True,
)


def hugging_face_tensors(shape: ModelShape, *, seed: int = 0) -> dict[str, torch.Tensor]:
    """A random bf16 checkpoint; norm weights are away from 1, where faults in a norm cannot be seen."""
    generator = torch.Generator().manual_seed(seed)
    queries, keys = shape.query_heads * shape.head_dim, shape.kv_heads * shape.head_dim
    sizes = {
        "model.embed_tokens.weight": (shape.vocab_size, shape.hidden_size),
        "model.norm.weight": (shape.hidden_size,),
    }
    for layer in range(shape.layers):
        here = f"model.layers.{layer}."
        sizes |= {
            f"{here}input_layernorm.weight": (shape.hidden_size,),
            f"{here}self_attn.q_proj.weight": (queries, shape.hidden_size),
            f"{here}self_attn.k_proj.weight": (keys, shape.hidden_size),
            f"{here}self_attn.v_proj.weight": (keys, shape.hidden_size),
            f"{here}self_attn.o_proj.weight": (shape.hidden_size, queries),
            f"{here}post_attention_layernorm.weight": (shape.hidden_size,),
            f"{here}mlp.gate_proj.weight": (shape.ffn_size, shape.hidden_size),
            f"{here}mlp.up_proj.weight": (shape.ffn_size, shape.hidden_size),
            f"{here}mlp.down_proj.weight": (shape.hidden_size, shape.ffn_size),
        }
        if shape.attention_bias:
            sizes |= {
                f"{here}self_attn.{part}_proj.bias": (rows,)
                for part, rows in zip("qkv", (queries, keys, keys), strict=True)
            }
        if shape.qk_norm:
            sizes |= {f"{here}self_attn.{part}_norm.weight": (shape.head_dim,) for part in "qk"}
    if not shape.tied_embeddings:
        sizes["lm_head.weight"] = (shape.vocab_size, shape.hidden_size)
    tensors = {}
    for name, size in sizes.items():
        drawn = torch.randn(size, generator=generator)
        scaled = 1.0 + 0.3 * drawn if "norm" in name else drawn * (0.15 if name.startswith("lm_head") else 0.08)
        tensors[name] = scaled.to(torch.bfloat16)
    return tensors


def by_group(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, groups: int) -> torch.Tensor:
    """megatron-core's fused layout, written out: each KV head's queries, its key, its value."""
    blocks = []
    for query, key, value in zip(queries.chunk(groups), keys.chunk(groups), values.chunk(groups), strict=True):
        blocks += [query, key, value]
    return torch.cat(blocks)


def by_kind(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, groups: int) -> torch.Tensor:
    """The layout that a wrong exporter produces: all queries, all keys, all values."""
    return torch.cat([queries, keys, values])


def megatron_tensors(
    tensors: dict[str, torch.Tensor], shape: ModelShape, *, rows: int, fuse: Any = by_group
) -> dict[str, torch.Tensor]:
    """Whole tensors under megatron-core's names; the vocabulary is padded to ``rows`` with zeros."""
    plain = {
        "input_layernorm.weight": "input_layernorm.weight",
        "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
        "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
        "mlp.linear_fc2.weight": "mlp.down_proj.weight",
    }
    if shape.qk_norm:
        plain |= {f"self_attention.{part}_layernorm.weight": f"self_attn.{part}_norm.weight" for part in "qk"}
    padding = (0, 0, 0, rows - shape.vocab_size)
    found = {
        "embedding.word_embeddings.weight": torch.nn.functional.pad(tensors["model.embed_tokens.weight"], padding),
        "decoder.final_layernorm.weight": tensors["model.norm.weight"],
    }
    if not shape.tied_embeddings:
        found["output_layer.weight"] = torch.nn.functional.pad(tensors["lm_head.weight"], padding)
    for layer in range(shape.layers):
        here, there = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        found |= {here + name: tensors[there + other] for name, other in plain.items()}
        for kind in ("weight", "bias") if shape.attention_bias else ("weight",):
            parts = [tensors[f"{there}self_attn.{part}_proj.{kind}"] for part in "qkv"]
            found[f"{here}self_attention.linear_qkv.{kind}"] = fuse(*parts, shape.kv_heads)
        gate_up = [tensors[f"{there}mlp.{part}_proj.weight"] for part in ("gate", "up")]
        found[f"{here}mlp.linear_fc1.weight"] = torch.cat(gate_up)
    return found


def shard(name: str, tensor: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """The part of a whole tensor that one tensor-parallel rank holds."""
    if name.endswith("linear_fc1.weight"):
        return torch.cat([half.chunk(ranks)[rank] for half in tensor.chunk(2)])
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return tensor.chunk(ranks, dim=1)[rank]
    if name.endswith(("linear_qkv.weight", "word_embeddings.weight", "output_layer.weight")):
        return tensor.chunk(ranks)[rank]
    return tensor


def load(model: Any, tensors: dict[str, torch.Tensor], shape: ModelShape, *, fuse: Any = by_group) -> None:
    """Copy Hugging Face tensors into a live model, or this rank's part of them."""
    group = model.pg_collection.tp
    whole = megatron_tensors(tensors, shape, rows=model.vocab_size, fuse=fuse)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(shard(name, whole[name], group.rank(), group.size()))


def build_model(
    shape: ModelShape,
    *,
    seed: int = 0,
    padded_vocab: int | None = None,
    model: dict[str, Any] | None = None,
    **config: Any,
) -> Any:
    """A live model with the checkpoint of this seed; ``config`` overrides TransformerConfig, ``model`` GPTModel."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    settings: dict[str, Any] = {
        "num_layers": shape.layers,
        "hidden_size": shape.hidden_size,
        "ffn_hidden_size": shape.ffn_size,
        "num_attention_heads": shape.query_heads,
        "num_query_groups": shape.kv_heads,
        "kv_channels": shape.head_dim,
        "normalization": "RMSNorm",
        "layernorm_epsilon": shape.norm_epsilon,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "qk_layernorm": shape.qk_norm,
        "add_qkv_bias": shape.attention_bias,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "bf16": True,
        "params_dtype": torch.bfloat16,
        "use_cpu_initialization": True,
        "perform_initialization": False,
    }
    built = GPTModel(
        TransformerConfig(**(settings | config)),
        get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=shape.qk_norm),
        vocab_size=padded_vocab or shape.vocab_size,
        max_sequence_length=1024,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=shape.tied_embeddings,
        **({"rotary_base": shape.rope_theta} | (model or {})),
    ).to(torch.bfloat16)
    load(built, hugging_face_tensors(shape, seed=seed), shape)
    return built


def sequences(*lengths: tuple[int, int], seed: int = 0) -> list[ScoringSequence]:
    """Random sequences of (prompt, response) lengths over 512 tokens."""
    drawn = random.Random(seed)
    return [
        ScoringSequence(
            prompt_token_ids=tuple(drawn.randrange(512) for _ in range(prompt)),
            response_token_ids=tuple(drawn.randrange(512) for _ in range(response)),
            response_mask=(True,) * response,
        )
        for prompt, response in lengths
    ]
