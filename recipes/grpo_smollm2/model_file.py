"""What a model's own ``config.json`` says about its shape."""

import json
from dataclasses import dataclass
from pathlib import Path

from recipes.grpo_smollm2.errors import RecipeError

_QK_NORM = {"LlamaForCausalLM": False, "Qwen3ForCausalLM": True}

# megatron-core fixes these three of Llama 3's rope scaling and takes only the factor as an argument.
_LLAMA3_SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The shape of a dense decoder, and the constants of its operators.

    Attributes:
        layers: transformer layers.
        hidden: width of the residual stream.
        ffn: width inside the MLP.
        heads: query heads.
        kv_heads: key and value heads.
        head_dim: width of one head.
        vocabulary: rows of the embedding.
        norm_eps: epsilon of every RMSNorm.
        rope_theta: base of the rotary frequencies.
        rope_scaling_factor: factor of Llama 3's rope scaling; None where the model has none.
        tied: the head is the embedding.
        qk_norm: queries and keys are normalised per head (Qwen3).
    """

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    norm_eps: float
    rope_theta: float
    rope_scaling_factor: float | None
    tied: bool
    qk_norm: bool


def read_shape(folder: Path) -> ModelShape:
    """The shape that ``folder/config.json`` declares.

    Raises:
        RecipeError: no such file, or an architecture or rope that the trainer does not build.
    """
    path = folder / "config.json"
    try:
        file = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RecipeError(f"{path}: no such file; delete the folder {folder} and start again to rebuild it.") from None
    architecture = (file.get("architectures") or [None])[0]
    if architecture not in _QK_NORM:
        raise RecipeError(f"{path}: architecture {architecture!r}; accepts {', '.join(_QK_NORM)}.")
    # Newer files hold theta and scaling in rope_parameters, older ones in two keys.
    rope = file.get("rope_parameters") or {"rope_theta": file.get("rope_theta"), **(file.get("rope_scaling") or {})}
    return ModelShape(
        layers=file["num_hidden_layers"],
        hidden=file["hidden_size"],
        ffn=file["intermediate_size"],
        heads=file["num_attention_heads"],
        kv_heads=file["num_key_value_heads"],
        head_dim=file.get("head_dim") or file["hidden_size"] // file["num_attention_heads"],
        vocabulary=file["vocab_size"],
        norm_eps=file["rms_norm_eps"],
        rope_theta=float(rope["rope_theta"]),
        rope_scaling_factor=_scaling_factor(path, rope),
        tied=file["tie_word_embeddings"],
        qk_norm=_QK_NORM[architecture],
    )


def _scaling_factor(path: Path, rope: dict[str, float | str]) -> float | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise RecipeError(f"{path}: rope_type {kind!r}; accepts default, llama3.")
    for key, fixed in _LLAMA3_SCALING.items():
        if rope[key] != fixed:
            raise RecipeError(f"{path}: {key} is {rope[key]}; accepts {fixed}, which megatron-core fixes.")
    return float(rope["factor"])
