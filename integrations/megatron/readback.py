"""What is in effect on the training side, read from the live modules; what was asked for stands beside it.

Configuration objects repeat what was asked for. A value is taken from one only where megatron-core looks the field up
at every call or keeps it nowhere else, and ``where`` says so.
"""

import inspect
from typing import Any

from torch import Tensor

from mismatch_hooks.integrations.megatron.readings import (
    Settings,
    agreed,
    classes,
    dtype_name,
    implementations,
    live,
    name_of,
    submodules,
)
from mismatch_hooks.integrations.megatron.rope import read_rotary
from mismatch_hooks.integrations.megatron.training_readings import training_readings
from mismatch_hooks.integrations.megatron.weights import head_weight
from mismatch_hooks.live.host_readback import driver_readings, environment_readings, library_readings
from mismatch_hooks.references.rope import UnsupportedRopeError, inverse_frequencies
from mismatch_hooks.schema.enums import Source
from mismatch_hooks.schema.readback import NOTHING_REQUESTED, Reading, Unobservable
from mismatch_hooks.schema.shape import ModelShape

LIBRARIES = ("megatron-core", "torch", "transformer-engine", "flash-attn", "apex")
VARIABLES = (
    "NVTE_*",
    "NCCL_*",
    "CUBLAS_*",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_LAUNCH_BLOCKING",
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TORCH_COMPILE_DISABLE",
    "OMP_*",
    "MKL_*",
    "PYTHONHASHSEED",
)
_MODEL_FILE = "model file"
_LINEARS = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")


def model_readings(model: Any, shape: ModelShape | None, frequencies: Tensor | None) -> Settings:
    """Return the readings of an unwrapped ``GPTModel`` and of the process that it runs in.

    Args:
        model: the live model.
        shape: what the model file asks for; without it only what the trainer was built with is known.
        frequencies: fp32 inverse frequencies that the model rotates with, None when it has no rotary table.
    """
    return {
        **_weights(model, shape),
        **_vocabulary(model, shape),
        **_norms(model, shape),
        **_rope(model, shape, frequencies),
        **_operators(model),
        **training_readings(model),
        **library_readings(LIBRARIES),
        **driver_readings(),
        **environment_readings(VARIABLES),
    }


def _weights(model: Any, shape: ModelShape | None) -> Settings:
    dtypes = {name: dtype_name(parameter.dtype) for name, parameter in model.named_parameters()}
    asked = dtype_name(model.config.params_dtype), "TransformerConfig.params_dtype"
    head, embedding = head_weight(model), getattr(model, "embedding", None)
    settings: Settings = {
        "model.dtype": agreed(dtypes, "parameters", *asked),
        "model.layers": live(len(model.decoder.layers), "decoder.layers", *_wanted(shape, "layers")),
        "model.head.dtype": Unobservable(reason="this pipeline stage has no head"),
        "model.tied_embeddings": Unobservable(reason="embedding and head are not on one pipeline stage"),
    }
    if head is not None:
        settings["model.head.dtype"] = live(dtype_name(head.dtype), "weight that output_layer multiplies with")
    if head is not None and embedding is not None:
        tied = head.data_ptr() == embedding.word_embeddings.weight.data_ptr()
        settings["model.tied_embeddings"] = live(
            tied, "memory of head and embedding", *_wanted(shape, "tied_embeddings")
        )
    return settings


def _vocabulary(model: Any, shape: ModelShape | None) -> Settings:
    words: Reading | Unobservable = Unobservable(reason="no model shape was given; pass shape= to MegatronBackend")
    if shape is not None:
        words = Reading(effective=shape.vocab_size, source=Source.MODEL_FILE, where="vocab_size")
    rows: Reading | Unobservable = Unobservable(reason="this pipeline stage has no embedding")
    if hasattr(model, "embedding"):
        rows = live(model.embedding.word_embeddings.num_embeddings, "embedding.word_embeddings.num_embeddings")
    return {"model.vocab.size": words, "model.vocab.padded_size": rows}


def _norms(model: Any, shape: ModelShape | None) -> Settings:
    norms = _norm_modules(model)
    if not norms:
        return {"model.norm.epsilon": Unobservable(reason="no module of the model has an eps")}
    asked = _wanted(shape, "norm_epsilon")
    if shape is None:
        asked = model.config.layernorm_epsilon, "TransformerConfig.layernorm_epsilon"
    default = type(model.config).__dataclass_fields__["layernorm_epsilon"].default
    values = {name: module.eps for name, module in norms.items()}
    return {"model.norm.epsilon": agreed(values, classes(norms.values()), *asked, default=default)}


def _norm_modules(model: Any) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if isinstance(getattr(module, "eps", None), float)}


def _rope(model: Any, shape: ModelShape | None, frequencies: Tensor | None) -> Settings:
    names = ("theta", "scaling_type", "scaling_factor", "inverse_frequency_last")
    settings: Settings = {
        "model.rope.fused": live(
            bool(model.config.apply_rope_fusion), "config.apply_rope_fusion, looked up at every call"
        )
    }
    if frequencies is None:
        reason = f"position_embedding_type is {model.position_embedding_type!r}: no rotary frequencies"
        return settings | {f"model.rope.{name}": Unobservable(reason=reason) for name in names}
    built_with = float(model.rotary_base)
    found = read_rotary(frequencies, [built_with] if shape is None else [shape.rope_theta, built_with])
    effective = (found.theta, found.scaling_type, found.scaling_factor, found.last)
    signature = inspect.signature(type(model).__init__).parameters
    defaults = (signature["rotary_base"].default, None, signature["rope_scaling_factor"].default, None)
    where = f"inverse frequencies of {type(model.rotary_pos_emb).__name__}"
    for name, value, asked, default in zip(names, effective, _wanted_rope(shape), defaults, strict=True):
        by = "" if asked == NOTHING_REQUESTED else _MODEL_FILE
        settings[f"model.rope.{name}"] = live(value, where, asked, by, default=default)
    return settings


def _wanted_rope(shape: ModelShape | None) -> tuple[Any, ...]:
    """Theta, scaling type, scaling factor and the slowest inverse frequency that the model file asks for."""
    if shape is None:
        return (NOTHING_REQUESTED,) * 4
    scaling = shape.rope_scaling
    try:
        wanted = inverse_frequencies(theta=shape.rope_theta, rotary_dim=shape.head_dim, scaling=scaling)
        last: Any = float(wanted[-1])
    except UnsupportedRopeError:
        last = NOTHING_REQUESTED
    return shape.rope_theta, scaling.get("rope_type", "default"), scaling.get("factor", 1.0), last


def _operators(model: Any) -> Settings:
    linears = {path.rsplit(".", 1)[-1]: implementations(submodules(model, path)) for path in _LINEARS}
    return {
        "operator.attention.implementation": implementations(submodules(model, "self_attention.core_attention")),
        "operator.norm.implementation": implementations(_norm_modules(model)),
        "operator.linear.implementation": _linears(linears),
        "operator.rope.implementation": live(
            _rope_function(model), "megatron.core.transformer.attention.apply_rotary_pos_emb"
        ),
        "operator.activation.implementation": live(_activation(model), "what MLP.forward calls"),
        "operator.embedding.implementation": implementations(
            {"embedding.word_embeddings": model.embedding.word_embeddings} if hasattr(model, "embedding") else {}
        ),
        "operator.head.implementation": implementations(
            {"output_layer": model.output_layer} if model.post_process else {}
        ),
    }


def _linears(found: dict[str, Reading | Unobservable]) -> Reading:
    by_kind = {
        kind: each.effective if isinstance(each, Reading) else f"unobservable: {each.reason}"
        for kind, each in found.items()
    }
    return live(by_kind, "the four linears of each layer")


def _rope_function(model: Any) -> str:
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.transformer import attention

    if attention.apply_rotary_pos_emb is not rope_utils.apply_rotary_pos_emb:
        return name_of(attention.apply_rotary_pos_emb)
    if getattr(model.config, "fused_single_qkv_rope", False):
        return "TransformerEngine's fused rope over q, k and v"
    if model.config.apply_rope_fusion:
        return "TransformerEngine's fused rope"
    return name_of(rope_utils._apply_rotary_pos_emb_bshd)


def _activation(model: Any) -> str:
    config = model.config
    gated = "gated " if config.gated_linear_unit else ""
    fused = ", fused with its bias" if config.bias_activation_fusion else ""
    return f"{gated}{name_of(config.activation_func)}{fused}"


def _wanted(shape: ModelShape | None, field: str) -> tuple[Any, str]:
    return (NOTHING_REQUESTED, "") if shape is None else (getattr(shape, field), _MODEL_FILE)
