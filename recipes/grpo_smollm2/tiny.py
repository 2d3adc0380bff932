"""A random two-layer model, small enough to run whole training steps in a test."""

import json
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from recipes.grpo_smollm2.model_file import read_shape
from recipes.grpo_smollm2.weights import table

_COMMON = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 1024,
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
}
_SHAPES = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5, "mlp_bias": False},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "rms_norm_eps": 1e-6},
}


def write_tiny(
    folder: Path, *, shape: Literal["llama", "qwen3"], seed: int = 0, tied: bool = False, kv_heads: int = 2
) -> None:
    """Write a random bf16 checkpoint: ``config.json`` and ``model.safetensors``, no tokenizer.

    Matrices are N(0, 0.08), the head N(0, 0.15). Norm weights are drawn around 1 with a spread of 0.3, because faults
    in a norm are invisible while its weights are exactly 1; heads differ in number from KV heads for the same reason.

    Args:
        folder: an existing folder.
        shape: which architecture's names and operators.
        seed: draws the weights.
        tied: the head is the embedding; the checkpoint then holds no head.
        kv_heads: key and value heads; divides 4.
    """
    file = _COMMON | _SHAPES[shape] | {"tie_word_embeddings": tied, "num_key_value_heads": kv_heads}
    file["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}
    (folder / "config.json").write_text(json.dumps(file, indent=2, sort_keys=True), encoding="utf-8")
    generator = torch.Generator().manual_seed(seed)
    model = read_shape(folder)
    sizes = {
        "embed_tokens": (model.vocabulary, model.hidden),
        "lm_head": (model.vocabulary, model.hidden),
        "q_proj": (model.heads * model.head_dim, model.hidden),
        "k_proj": (model.kv_heads * model.head_dim, model.hidden),
        "v_proj": (model.kv_heads * model.head_dim, model.hidden),
        "o_proj": (model.hidden, model.heads * model.head_dim),
        "gate_proj": (model.ffn, model.hidden),
        "up_proj": (model.ffn, model.hidden),
        "down_proj": (model.hidden, model.ffn),
        "q_norm": (model.head_dim,),
        "k_norm": (model.head_dim,),
    }
    tensors: dict[str, Tensor] = {}
    for name in (part for entry in table(model) for part in entry.parts):
        kind = name.split(".")[-2]
        drawn = torch.randn(sizes.get(kind, (model.hidden,)), generator=generator)
        if "norm" in kind:
            drawn = 1.0 + 0.3 * drawn
        else:
            drawn *= 0.15 if kind == "lm_head" else 0.08
        tensors[name] = drawn.to(torch.bfloat16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
