"""The shape of a model, from the ``config.json`` that is published with its weights."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from mismatch_hooks.schema.shape import ModelShape


class ModelConfigError(ValueError):
    """A model's configuration cannot be read as the shape of a supported architecture."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Architecture:
    """What a supported architecture fixes, and what it takes where its file is silent."""

    model_type: str
    qk_norm: bool
    head_dim: int | None = None  # None: hidden size over query heads
    norm_epsilon: float = 1e-6
    rope_theta: float = 10000.0


_ARCHITECTURES = {
    "LlamaForCausalLM": _Architecture(model_type="llama", qk_norm=False),
    "Qwen3ForCausalLM": _Architecture(model_type="qwen3", qk_norm=True, head_dim=128),
}


def shape_from_folder(folder: str | Path) -> ModelShape:
    """Return the shape that ``config.json`` in a model's folder describes; see ``shape_from_config``.

    Raises:
        ModelConfigError: there is no such file, it is not JSON, or it is not of a supported architecture.
    """
    path = Path(folder) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelConfigError(f"{path}: {error.strerror}; pass the folder that holds the model's weights.") from None
    except ValueError as error:
        raise ModelConfigError(f"{path}: not JSON ({error}); write the file again from the model's source.") from None
    if not isinstance(config, dict):
        raise ModelConfigError(f"{path}: got a {type(config).__name__}; accepts a JSON object.")
    try:
        return shape_from_config(config)
    except ModelConfigError as error:
        raise ModelConfigError(f"{path}: {error}") from None


def shape_from_config(config: Mapping[str, Any]) -> ModelShape:
    """Return the shape that a Hugging Face ``config.json`` describes, with the architecture's defaults filled in.

    Args:
        config: the parsed file. Rope may be spelled the old way (``rope_theta`` and ``rope_scaling``) or the new way
            (``rope_parameters``); of ``rope_scaling`` and ``rope_parameters`` the former wins, as in transformers.

    Raises:
        ModelConfigError: another architecture, a missing key or a value of the wrong type; names the key.
    """
    name = _architecture_name(config)
    architecture = _ARCHITECTURES[name]
    hidden_size, query_heads = _count(config, "hidden_size"), _count(config, "num_attention_heads")
    theta, scaling = _rope(config, architecture)
    return ModelShape(
        architecture=name,
        layers=_count(config, "num_hidden_layers"),
        hidden_size=hidden_size,
        ffn_size=_count(config, "intermediate_size"),
        query_heads=query_heads,
        kv_heads=_count(config, "num_key_value_heads", default=query_heads),
        head_dim=_count(config, "head_dim", default=architecture.head_dim or hidden_size // query_heads),
        vocab_size=_count(config, "vocab_size"),
        norm_epsilon=_positive(config, "rms_norm_eps", default=architecture.norm_epsilon),
        rope_theta=theta,
        rope_scaling=scaling,
        tied_embeddings=_flag(config, "tie_word_embeddings"),
        qk_norm=architecture.qk_norm,
        attention_bias=_flag(config, "attention_bias"),
    )


def _architecture_name(config: Mapping[str, Any]) -> str:
    given = config.get("architectures")
    if not given:
        model_type = config.get("model_type")
        known = {architecture.model_type: name for name, architecture in _ARCHITECTURES.items()}
        if model_type not in known:
            raise ModelConfigError(f"model_type: got {model_type!r}; accepts {', '.join(known)}.")
        return known[model_type]
    name = str(given[0])
    if name not in _ARCHITECTURES:
        near = get_close_matches(name, _ARCHITECTURES, n=1, cutoff=0.85)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ModelConfigError(f"architectures: got {name!r}; accepts {', '.join(_ARCHITECTURES)}.{hint}")
    return name


def _rope(config: Mapping[str, Any], architecture: _Architecture) -> tuple[float, dict[str, object]]:
    written = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(written, Mapping):
        raise ModelConfigError(
            f"rope_parameters: got {written!r}; accepts a mapping such as {{'rope_type': 'default'}}."
        )
    # Inside the mapping wins over beside it: a stale rope_theta next to rope_parameters is not what the model uses.
    theta = _positive({**config, **written}, "rope_theta", default=architecture.rope_theta)
    kind = written.get("rope_type", written.get("type", "default"))
    if kind == "default":
        return theta, {}
    kept = {key: value for key, value in written.items() if key not in ("type", "rope_type", "rope_theta")}
    return theta, {"rope_type": kind, **kept}


def _count(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = _present(config, key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelConfigError(f"{key}: got {value!r} ({type(value).__name__}); accepts an integer of 1 or more.")
    return value


def _positive(config: Mapping[str, Any], key: str, default: float) -> float:
    value = _present(config, key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ModelConfigError(f"{key}: got {value!r} ({type(value).__name__}); accepts a number above 0.")
    return float(value)


def _flag(config: Mapping[str, Any], key: str) -> bool:
    value = _present(config, key, False)
    if not isinstance(value, bool):
        raise ModelConfigError(f"{key}: got {value!r} ({type(value).__name__}); accepts true or false.")
    return value


def _present(config: Mapping[str, Any], key: str, default: Any) -> Any:
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise ModelConfigError(f"{key}: missing; pass the complete config.json that lies beside the weights.")
    return value
