"""What is in effect on the training side, read from the live modules; what was asked for stands beside it.

Configuration objects repeat what was asked for. A value is taken from one only where megatron-core looks the field up
at every call or keeps it nowhere else, and ``where`` says so.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from mismatch_hooks.integrations.megatron.live_model import parallel_sizes
from mismatch_hooks.integrations.megatron.rope import read_rotary
from mismatch_hooks.integrations.megatron.weights import head_weight
from mismatch_hooks.live.host_readback import environment_readings, library_readings
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
_SOFTMAX = "self_attention.core_attention.scale_mask_softmax"

Settings = dict[str, Reading | Unobservable]


def model_readings(model: Any, shape: ModelShape | None, frequencies: torch.Tensor | None) -> Settings:
    """Return the readings of an unwrapped ``GPTModel`` and of the process that it runs in.

    Args:
        model: the live model.
        shape: what the model file asks for; without it only what the trainer was built with is known.
        frequencies: fp32 inverse frequencies that the model rotates with, None when it has no rotary table.
    """
    return {
        **_weights(model, shape),
        **_norms(model, shape),
        **_rope(model, shape, frequencies),
        **_operators(model),
        **_parallel(model),
        **_engine(model),
        **_training(model),
        **_process(model),
        **library_readings(LIBRARIES),
        **environment_readings(VARIABLES),
    }


def _weights(model: Any, shape: ModelShape | None) -> Settings:
    dtypes = {name: _dtype(parameter) for name, parameter in model.named_parameters()}
    head = head_weight(model)
    embedding = getattr(getattr(model, "embedding", None), "word_embeddings", None)
    settings: Settings = {
        "model.dtype": _agreed(
            dtypes,
            "parameters",
            requested=_dtype_name(model.config.params_dtype),
            requested_by="TransformerConfig.params_dtype",
        ),
        "model.layers": _live(len(model.decoder.layers), "decoder.layers", *_wanted(shape, "layers")),
        "model.vocab.size": Unobservable(reason="no model shape was given; pass shape= to MegatronBackend")
        if shape is None
        else Reading(effective=shape.vocab_size, source=Source.MODEL_FILE, where="vocab_size"),
        "model.vocab.padded_size": Unobservable(reason="this pipeline stage has no embedding")
        if embedding is None
        else _live(embedding.num_embeddings, "embedding.word_embeddings.num_embeddings"),
    }
    if head is None:
        absent = Unobservable(reason="this pipeline stage has no head")
        return settings | {"model.head.dtype": absent, "model.tied_embeddings": absent}
    tied: Reading | Unobservable = Unobservable(reason="embedding and head are on different pipeline stages")
    if embedding is not None:
        same = head.data_ptr() == embedding.weight.data_ptr()
        tied = _live(same, "memory of the embedding and of the head", *_wanted(shape, "tied_embeddings"))
    return settings | {
        "model.head.dtype": _live(_dtype(head), "weight that output_layer multiplies with"),
        "model.tied_embeddings": tied,
    }


def _norms(model: Any, shape: ModelShape | None) -> Settings:
    norms = {name: module for name, module in model.named_modules() if isinstance(getattr(module, "eps", None), float)}
    if not norms:
        return {"model.norm.epsilon": Unobservable(reason="no module of the model has an eps")}
    requested, requested_by = _wanted(shape, "norm_epsilon")
    if shape is None:
        requested, requested_by = model.config.layernorm_epsilon, "TransformerConfig.layernorm_epsilon"
    values = {name: module.eps for name, module in norms.items()}
    default = type(model.config).__dataclass_fields__["layernorm_epsilon"].default
    return {  # one value, or by module where the norms differ
        "model.norm.epsilon": _agreed(
            values, _classes(norms.values()), requested=requested, requested_by=requested_by, default=default
        )
    }


def _rope(model: Any, shape: ModelShape | None, frequencies: torch.Tensor | None) -> Settings:
    fused = _live(
        model.config.apply_rope_fusion,
        "config.apply_rope_fusion, looked up at every rotation",
    )
    keys = [f"model.rope.{key}" for key in ("theta", "scaling_type", "scaling_factor", "inverse_frequency_last")]
    if frequencies is None:
        reason = f"position_embedding_type is {model.position_embedding_type!r}; no rotary frequencies to read"
        return {"model.rope.fused": fused} | {key: Unobservable(reason=reason) for key in keys}
    where = f"inverse frequencies of {type(model.rotary_pos_emb).__name__}"
    built_with = float(model.rotary_base)
    candidates = [built_with] if shape is None else [shape.rope_theta, built_with]
    live = read_rotary(frequencies, candidates)
    wanted: list[Any] = [NOTHING_REQUESTED] * 4
    if shape is not None:
        factor = shape.rope_scaling.get("factor", 1.0)
        kind = shape.rope_scaling.get("rope_type", "default")
        wanted = [shape.rope_theta, kind, float(str(factor)), _last_frequency(shape)]
    parameters = inspect.signature(type(model).__init__).parameters
    effective = [live.theta, live.scaling_type, live.scaling_factor, live.last]
    defaults = [parameters["rotary_base"].default, None, parameters["rope_scaling_factor"].default, None]
    by = _MODEL_FILE if shape is not None else ""
    readings: Settings = {
        key: _live(value, where, asked, by if asked != NOTHING_REQUESTED else "", default=default)
        for key, value, asked, default in zip(keys, effective, wanted, defaults, strict=True)
    }
    return {"model.rope.fused": fused} | readings


def _last_frequency(shape: ModelShape) -> Any:
    try:
        wanted = inverse_frequencies(theta=shape.rope_theta, rotary_dim=shape.head_dim, scaling=shape.rope_scaling)
    except UnsupportedRopeError:
        return NOTHING_REQUESTED
    return float(wanted[-1])


def _operators(model: Any) -> Settings:
    layers = _named_layers(model)
    linears = {
        f"{name}.{path}": layer.get_submodule(path)
        for name, layer in layers.items()
        for path in ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
        if _has(layer, path)
    }
    norms = {name: module for name, module in model.named_modules() if isinstance(getattr(module, "eps", None), float)}
    cores = {
        f"{name}.self_attention.core_attention": layer.self_attention.core_attention for name, layer in layers.items()
    }
    embedding, head = getattr(model, "embedding", None), getattr(model, "output_layer", None)
    settings: Settings = {
        "operator.attention.implementation": _by_module(cores),
        "operator.norm.implementation": _by_module(norms),
        "operator.linear.implementation": _by_module(linears, by_role=True),
        "operator.rope.implementation": _live(
            _rope_function(model), "megatron.core.transformer.attention.apply_rotary_pos_emb"
        ),
        "operator.activation.implementation": _live(_activation(model), "the functions that MLP.forward calls"),
    }
    for key, module in (("embedding", getattr(embedding, "word_embeddings", None)), ("head", head)):
        absent = Unobservable(reason=f"this pipeline stage has no {key}")
        settings[f"operator.{key}.implementation"] = absent if module is None else _by_module({key: module})
    return settings


def _rope_function(model: Any) -> str:
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.transformer import attention

    found = attention.apply_rotary_pos_emb
    if found is not rope_utils.apply_rotary_pos_emb:
        return _name_of(found)
    config = model.config
    if getattr(config, "fused_single_qkv_rope", False):
        return "transformer_engine fused_qkv_rotary_pos_emb"
    return (
        "transformer_engine fused_apply_rotary_pos_emb"
        if config.apply_rope_fusion
        else "rope_utils._apply_rotary_pos_emb_bshd"
    )


def _activation(model: Any) -> str:
    config = model.config
    gate = "gated " if config.gated_linear_unit else ""
    fused = " fused with its bias" if config.bias_activation_fusion else ""
    return f"{gate}{_name_of(config.activation_func)}{fused}"


def _parallel(model: Any) -> Settings:
    sizes, config = parallel_sizes(model), model.config
    where = "live process groups"
    return {
        "parallel.tensor": _live(sizes.tensor, where, config.tensor_model_parallel_size, "TransformerConfig"),
        "parallel.pipeline": _live(sizes.pipeline, where, config.pipeline_model_parallel_size, "TransformerConfig"),
        "parallel.context": _live(sizes.context, where, config.context_parallel_size, "TransformerConfig"),
        "parallel.data": _live(sizes.data, where),
        "parallel.sequence": _live(
            bool(config.sequence_parallel), "config.sequence_parallel, used when the layers were built"
        ),
    }


def _engine(model: Any) -> Settings:
    compiled = [name or "the model" for name, module in model.named_modules() if _is_compiled(module)]
    graphs = getattr(model.config, "cuda_graph_impl", "none")
    where = (
        f"{len(compiled)} compiled modules, first {compiled[0]}"
        if compiled
        else f"no compiled module, CUDA graphs: {graphs}"
    )
    device = {name: str(parameter.device) for name, parameter in model.named_parameters()}
    return {
        "engine.compiled": _live(bool(compiled) or graphs != "none", where),
        "engine.cuda_graphs": _live(graphs, "config.cuda_graph_impl"),
        "engine.device": _agreed(device, "parameters"),
        "engine.threads": _live(torch.get_num_threads(), "torch.get_num_threads()"),
    }


def _is_compiled(module: Any) -> bool:
    return getattr(module, "_compiled_call_impl", None) is not None or type(module).__name__ == "OptimizedModule"


def _training(model: Any) -> Settings:
    config, layers = model.config, _named_layers(model)
    modes = {name or "model": "train" if module.training else "eval" for name, module in model.named_modules()}
    hidden = {name: layer.hidden_dropout for name, layer in layers.items()}
    by = "TransformerConfig"
    settings: Settings = {
        "training.mode": _agreed(modes, "modules"),
        "training.dropout.hidden": _agreed(hidden, "layers", requested=config.hidden_dropout, requested_by=by),
        "training.dropout.attention": _attention_dropout(layers, config),
        "training.recompute": _live(
            _recompute(config), "config.recompute_granularity, used when the layers were built"
        ),
        "training.attention_backend": _attention_backend(layers, config),
        "training.softmax_in_fp32": _softmax(layers, "softmax_in_fp32", config.attention_softmax_in_fp32),
        "training.fusion.masked_softmax": _softmax(
            layers, "scaled_masked_softmax_fusion", config.masked_softmax_fusion
        ),
    }
    for key, field in (
        ("bias_activation", "bias_activation_fusion"),
        ("bias_dropout", "bias_dropout_fusion"),
        ("gradient_accumulation", "gradient_accumulation_fusion"),
        ("persist_layer_norm", "persist_layer_norm"),
        ("rope", "apply_rope_fusion"),
    ):
        settings[f"training.fusion.{key}"] = _live(
            bool(getattr(config, field)), f"config.{field}, looked up at every call"
        )
    return settings


def _attention_dropout(layers: Mapping[str, Any], config: Any) -> Reading | Unobservable:
    dropouts = {
        name: getattr(layer.self_attention.core_attention, "attention_dropout", None) for name, layer in layers.items()
    }
    found = {name: module.p for name, module in dropouts.items() if isinstance(module, torch.nn.Dropout)}
    if len(found) != len(layers):
        reason = "the attention keeps its dropout to itself (no nn.Dropout inside)"
        return Unobservable(reason=reason, requested=config.attention_dropout)
    return _agreed(found, "layers", requested=config.attention_dropout, requested_by="TransformerConfig")


def _softmax(layers: Mapping[str, Any], attribute: str, requested: bool) -> Reading | Unobservable:
    softmaxes = {
        f"{name}.{_SOFTMAX}": layer.get_submodule(_SOFTMAX) for name, layer in layers.items() if _has(layer, _SOFTMAX)
    }
    if not softmaxes:
        return Unobservable(reason="the softmax is inside the attention kernel", requested=requested)
    values = {name: bool(getattr(module, attribute)) for name, module in softmaxes.items()}
    return _agreed(values, _classes(softmaxes.values()), requested=requested, requested_by="TransformerConfig")


def _attention_backend(layers: Mapping[str, Any], config: Any) -> Reading | Unobservable:
    asked = config.attention_backend.name
    cores = {name: type(layer.self_attention.core_attention).__name__ for name, layer in layers.items()}
    requested: Any = NOTHING_REQUESTED if asked == "auto" else asked
    if any(name.startswith("TE") for name in cores.values()):
        reason = (
            "TransformerEngine chooses the kernel at each call; the NVTE_* variables that steer it are in environment.*"
        )
        return Unobservable(reason=reason, requested=requested)
    if asked == "local" and set(cores.values()) == {"DotProductAttention"}:
        requested = "DotProductAttention"  # what "local" asks for
    by = "" if requested == NOTHING_REQUESTED else f"TransformerConfig.attention_backend={asked}"
    return _agreed(cores, "core attention modules", requested=requested, requested_by=by)


def _recompute(config: Any) -> str:
    if config.recompute_granularity == "full":
        return f"full, {config.recompute_method} {config.recompute_num_layers}"
    if config.recompute_granularity == "selective":
        return f"selective, {', '.join(config.recompute_modules)}"
    return "none"


def _process(model: Any) -> Settings:
    matmul = torch.backends.cuda.matmul
    deterministic = torch.are_deterministic_algorithms_enabled()
    settings: Settings = {
        "training.deterministic_algorithms": _live(
            deterministic,
            "torch.are_deterministic_algorithms_enabled()",
            *((True, "TransformerConfig.deterministic_mode") if model.config.deterministic_mode else ()),
        )
    }
    if next(model.parameters()).device.type != "cuda":
        absent = Unobservable(reason="the model is on the CPU; the setting concerns CUDA products only")
        return settings | {f"training.matmul.{key}": absent for key in ("tf32", "reduced_precision_reduction")}
    # fp32_precision, not allow_tf32: reading the old flag raises once anything used the new one.
    return settings | {
        "training.matmul.tf32": _live(matmul.fp32_precision == "tf32", "torch.backends.cuda.matmul.fp32_precision"),
        "training.matmul.reduced_precision_reduction": _live(
            bool(matmul.allow_bf16_reduced_precision_reduction),
            "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
        ),
    }


def _live(
    effective: Any, where: str, requested: Any = NOTHING_REQUESTED, requested_by: str = "", *, default: Any = None
) -> Reading:
    # A wrong value that is the class default was most likely never set: say so where the value is read.
    if default is not None and effective == default and requested not in (NOTHING_REQUESTED, effective):
        where += "; equal to the class default"
    return Reading(
        effective=effective, source=Source.LIVE_MODULE, where=where, requested=requested, requested_by=requested_by
    )


def _agreed(
    values: Mapping[str, Any],
    of: str,
    *,
    requested: Any = NOTHING_REQUESTED,
    requested_by: str = "",
    default: Any = None,
) -> Reading:
    """One value where all agree, else a mapping from module to value."""
    distinct = list(dict.fromkeys(values.values()))
    effective = distinct[0] if len(distinct) == 1 else dict(values)
    return _live(effective, f"{len(values)} {of}", requested, requested_by, default=default)


def _by_module(modules: Mapping[str, Any], *, by_role: bool = False) -> Reading | Unobservable:
    if not modules:
        return Unobservable(reason="the model has no such module")
    names = {name: _implementation(module) for name, module in modules.items()}
    if by_role:  # one value per kind of module where layers agree
        roles: dict[str, set[str]] = {}
        for name, value in names.items():
            roles.setdefault(name.rsplit(".", 1)[-1], set()).add(value)
        if all(len(values) == 1 for values in roles.values()):
            collapsed = {role: values.pop() for role, values in roles.items()}
            distinct = set(collapsed.values())
            return _live(distinct.pop() if len(distinct) == 1 else collapsed, f"{len(names)} modules")
    return _agreed(names, _classes(modules.values()))


def _implementation(module: Any) -> str:
    name = f"{type(module).__module__}.{type(module).__qualname__}"
    own = vars(module).get("forward")
    return name if own is None else f"{name} with forward replaced by {_name_of(own)}"


def _name_of(function: Callable[..., Any]) -> str:
    owner = function if hasattr(function, "__qualname__") else type(function)
    return f"{owner.__module__}.{owner.__qualname__}"


def _classes(modules: Any) -> str:
    return f"modules of class {', '.join(sorted({type(module).__name__ for module in modules}))}"


def _named_layers(model: Any) -> dict[str, Any]:
    return {f"decoder.layers.{index}": layer for index, layer in enumerate(model.decoder.layers)}


def _has(module: Any, path: str) -> bool:
    for name in path.split("."):
        module = getattr(module, name, None)
        if module is None:
            return False
    return True


def _wanted(shape: ModelShape | None, field: str) -> tuple[Any, str]:
    return (NOTHING_REQUESTED, "") if shape is None else (getattr(shape, field), _MODEL_FILE)


def _dtype(tensor: Any) -> str:
    return _dtype_name(tensor.dtype)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
