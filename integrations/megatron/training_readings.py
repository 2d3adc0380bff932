"""How the training side runs: ranks, compilation, modes, dropout, fusions, recompute, settings of the process."""

from typing import Any

import torch

from mismatch_hooks.integrations.megatron.live_model import parallel_sizes
from mismatch_hooks.integrations.megatron.readings import Settings, agreed, classes, live, submodules
from mismatch_hooks.schema.readback import NOTHING_REQUESTED, Reading, Unobservable

_CONFIG = "TransformerConfig"
_CORE = "self_attention.core_attention"


def training_readings(model: Any) -> Settings:
    """Return how an unwrapped ``GPTModel`` runs, and what in its process bears on numbers."""
    return {**_parallel(model), **_engine(model), **_modes(model), **_attention(model), **_process(model)}


def _parallel(model: Any) -> Settings:
    sizes, config = parallel_sizes(model), model.config
    where = "live process groups"
    return {
        "parallel.tensor": live(sizes.tensor, where, config.tensor_model_parallel_size, _CONFIG),
        "parallel.tensor.backend": live(torch.distributed.get_backend(model.pg_collection.tp), where),
        "parallel.pipeline": live(sizes.pipeline, where, config.pipeline_model_parallel_size, _CONFIG),
        "parallel.context": live(sizes.context, where, config.context_parallel_size, _CONFIG),
        "parallel.data": live(sizes.data, where),
        "parallel.sequence": live(bool(config.sequence_parallel), "config.sequence_parallel, read as layers are built"),
    }


def _engine(model: Any) -> Settings:
    compiled = [name or "the model" for name, module in model.named_modules() if _is_compiled(module)]
    graphs = getattr(model.config, "cuda_graph_impl", "none")
    where = f"{len(compiled)} of the modules, first {compiled[0]}" if compiled else f"no module; CUDA graphs: {graphs}"
    devices = {name: str(parameter.device) for name, parameter in model.named_parameters()}
    return {
        "engine.compiled": live(bool(compiled) or graphs != "none", where),
        "engine.cuda_graphs": live(graphs, "config.cuda_graph_impl"),
        "engine.device": agreed(devices, "parameters"),
        "engine.threads": live(torch.get_num_threads(), "torch.get_num_threads()"),
    }


def _is_compiled(module: Any) -> bool:
    return getattr(module, "_compiled_call_impl", None) is not None or type(module).__name__ == "OptimizedModule"


def _modes(model: Any) -> Settings:
    config = model.config
    modes = {name or "model": "train" if module.training else "eval" for name, module in model.named_modules()}
    hidden = {f"decoder.layers.{index}": layer.hidden_dropout for index, layer in enumerate(model.decoder.layers)}
    looked_up, built = "looked up at every call", "read as layers are built"
    fusions = {
        "bias_activation": ("bias_activation_fusion", looked_up),
        "bias_dropout": ("bias_dropout_fusion", looked_up),
        "rope": ("apply_rope_fusion", looked_up),
        "gradient_accumulation": ("gradient_accumulation_fusion", built),
        "persist_layer_norm": ("persist_layer_norm", built),
    }
    return {
        "training.mode": agreed(modes, "modules"),
        "training.dropout.hidden": agreed(hidden, "layers", config.hidden_dropout, _CONFIG),
        "training.recompute": live(_recompute(config), f"config.recompute_*, {built}"),
        **{
            f"training.fusion.{key}": live(bool(getattr(config, field)), f"config.{field}, {when}")
            for key, (field, when) in fusions.items()
        },
    }


def _recompute(config: Any) -> str:
    if config.recompute_granularity == "full":
        return f"full, {config.recompute_method} {config.recompute_num_layers}"
    if config.recompute_granularity == "selective":
        return f"selective, {', '.join(config.recompute_modules)}"
    return "none"


def _attention(model: Any) -> Settings:
    config = model.config
    return {
        "training.attention_backend": _attention_backend(model),
        "training.dropout.attention": _attention_dropout(model),
        "training.softmax_in_fp32": _softmax(model, "softmax_in_fp32", config.attention_softmax_in_fp32),
        "training.fusion.masked_softmax": _softmax(model, "scaled_masked_softmax_fusion", config.masked_softmax_fusion),
    }


def _attention_backend(model: Any) -> Reading | Unobservable:
    asked = model.config.attention_backend.name
    cores = {name: type(core).__name__ for name, core in submodules(model, _CORE).items()}
    requested: Any = NOTHING_REQUESTED if asked == "auto" else asked
    if any(name.startswith("TE") for name in cores.values()):
        reason = "TransformerEngine chooses a kernel at each call; the variables that steer it are environment.NVTE_*"
        return Unobservable(reason=reason, requested=requested)
    if asked == "local" and set(cores.values()) == {"DotProductAttention"}:
        requested = "DotProductAttention"  # what "local" asks for
    by = "" if requested == NOTHING_REQUESTED else f"{_CONFIG}.attention_backend={asked}"
    return agreed(cores, "core attention modules", requested, by)


def _attention_dropout(model: Any) -> Reading | Unobservable:
    requested = model.config.attention_dropout
    found = submodules(model, f"{_CORE}.attention_dropout")
    if not found or not all(isinstance(module, torch.nn.Dropout) for module in found.values()):
        return Unobservable(reason="the attention has no nn.Dropout of its own to read", requested=requested)
    return agreed({name: module.p for name, module in found.items()}, classes(found.values()), requested, _CONFIG)


def _softmax(model: Any, attribute: str, requested: bool) -> Reading | Unobservable:
    found = submodules(model, f"{_CORE}.scale_mask_softmax")
    if not found:
        return Unobservable(reason="the softmax is inside the attention kernel", requested=requested)
    values = {name: bool(getattr(module, attribute)) for name, module in found.items()}
    return agreed(values, classes(found.values()), requested, _CONFIG)


def _process(model: Any) -> Settings:
    asked = (True, f"{_CONFIG}.deterministic_mode") if model.config.deterministic_mode else ()
    where = "torch.are_deterministic_algorithms_enabled()"
    deterministic = live(torch.are_deterministic_algorithms_enabled(), where, *asked)
    if next(model.parameters()).device.type != "cuda":
        absent = Unobservable(reason="the model is on the CPU; the setting concerns CUDA products only")
        tf32: Reading | Unobservable = absent
        reduced: Reading | Unobservable = absent
    else:
        matmul = torch.backends.cuda.matmul
        # fp32_precision, not allow_tf32: reading the old flag raises once anything used the new one.
        tf32 = live(matmul.fp32_precision == "tf32", "torch.backends.cuda.matmul.fp32_precision")
        where = "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction"
        reduced = live(bool(matmul.allow_bf16_reduced_precision_reduction), where)
    return {
        "training.deterministic_algorithms": deterministic,
        "training.matmul.tf32": tf32,
        "training.matmul.reduced_precision_reduction": reduced,
    }
