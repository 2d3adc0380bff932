"""The effective settings of a live vLLM engine, read in the worker that runs the model.

Configuration objects repeat what was asked for, so an effective value comes from the module, tensor, process group or
scheduler that uses it; only where no such object can be reached does the engine's resolved configuration stand in, and
the reading then says so.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from mismatch_hooks.integrations.vllm.rotary import implied_inverse_frequencies
from mismatch_hooks.live.host_readback import driver_readings, environment_readings, library_readings
from mismatch_hooks.schema.enums import Source
from mismatch_hooks.schema.freeze import thaw
from mismatch_hooks.schema.readback import NOTHING_REQUESTED, Reading, Unobservable

Settings = dict[str, Reading | Unobservable]
_LIBRARIES = ("torch", "transformers", "numpy", "safetensors")
_VARIABLES = (
    "VLLM_*",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "CUBLAS_WORKSPACE_CONFIG",
    "NCCL_ALGO",
    "NCCL_PROTO",
    "PYTHONHASHSEED",
    "TORCH_COMPILE_DISABLE",
    "ONEDNN_MAX_CPU_ISA",
)
_ENGINE_ARGUMENT = "engine argument"
_MODEL_FILE = "model file"
_ROPE_CLASSES = {
    "RotaryEmbedding": "default",
    "Llama3RotaryEmbedding": "llama3",
    "LinearScalingRotaryEmbedding": "linear",
    "DynamicNTKScalingRotaryEmbedding": "dynamic",
    "YaRNScalingRotaryEmbedding": "yarn",
}


def live_settings(worker: Any) -> Settings:
    """Return every setting that one worker can read, by dotted key."""
    model, runner, config = worker.get_model(), worker.model_runner, worker.vllm_config
    settings: Settings = {}
    for read in (_model, _rope, _operators, _parallel, _engine, _rollout):
        settings.update(read(model, runner, config))
    settings.update(_host())
    return settings


def as_plain(settings: Settings) -> dict[str, dict[str, Any]]:
    """Return the settings as JSON-able data, for the way out of the worker."""
    return {key: thaw(setting) for key, setting in settings.items()}


def from_plain(settings: Mapping[str, Mapping[str, Any]]) -> Settings:
    """Return what ``as_plain`` was given."""
    return {
        key: Unobservable(**plain) if "reason" in plain else Reading(**{**plain, "source": Source(plain["source"])})
        for key, plain in settings.items()
    }


def merged(ranks: Mapping[int, Settings]) -> Settings:
    """Return one setting a key: the value itself where all ranks agree, else a mapping from rank to value."""
    keys = {key for settings in ranks.values() for key in settings}
    return {key: _merged(key, ranks) for key in sorted(keys)}


def _merged(key: str, ranks: Mapping[int, Settings]) -> Reading | Unobservable:
    found = {rank: settings.get(key) for rank, settings in sorted(ranks.items())}
    first = next(setting for setting in found.values() if setting is not None)
    if all(setting == first for setting in found.values()) or isinstance(first, Unobservable):
        return first
    values = {
        f"rank {rank}": setting.effective if isinstance(setting, Reading) else "unobservable"
        for rank, setting in found.items()
    }
    return Reading(
        effective=values,
        source=first.source,
        where=first.where,
        requested=first.requested,
        requested_by=first.requested_by,
    )


def _live(effective: Any, where: str, requested: Any = None, requested_by: str = "") -> Reading:
    if requested is None:
        return Reading(effective=effective, source=Source.LIVE_MODULE, where=where)
    return Reading(
        effective=effective, source=Source.LIVE_MODULE, where=where, requested=requested, requested_by=requested_by
    )


def _each(
    modules: Mapping[str, Any], read: Callable[[Any], Any], requested: Any = None, requested_by: str = ""
) -> Reading | Unobservable:
    """Read one value from every module: itself where all agree, else a mapping from module name to value."""
    if not modules:
        return Unobservable(
            reason="the live model has no such module",
            requested=NOTHING_REQUESTED if requested is None else requested,
        )
    values = {name: read(module) for name, module in modules.items()}
    first = next(iter(values.values()))
    kinds = sorted({type(module).__name__ for module in modules.values()})
    where = f"{len(modules)} module{'s' * (len(modules) > 1)} of class {', '.join(kinds)}"
    same = all(value == first for value in values.values())
    return _live(first if same else values, where, requested, requested_by)


def _named(model: Any, belongs: Callable[[Any], bool]) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if belongs(module)}


def _dtype(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _asked(config: Any, name: str) -> tuple[Any, str]:
    """What was asked for a setting of the model's file: an override of it, else the file."""
    overrides = config.model_config.hf_overrides
    if isinstance(overrides, Mapping) and name in overrides:
        return overrides[name], f"{_ENGINE_ARGUMENT} hf_overrides"
    return getattr(config.model_config.hf_text_config, name, None), _MODEL_FILE


def _model(model: Any, runner: Any, config: Any) -> Settings:
    head, logits = getattr(model, "lm_head", None), getattr(model, "logits_processor", None)
    norms = _named(model, lambda module: hasattr(module, "variance_epsilon"))
    weighted = _named(model, lambda module: hasattr(module, "params_dtype"))
    attention = _attention(model)
    settings: Settings = {
        "model.dtype": _each(weighted, lambda module: _dtype(module.params_dtype), *_asked_dtype(config)),
        "model.norm.epsilon": _each(norms, lambda norm: norm.variance_epsilon, *_asked(config, "rms_norm_eps")),
        "model.layers": _live(
            len(attention), "modules of class Attention on this rank", *_asked(config, "num_hidden_layers")
        ),
    }
    if logits is None or head is None or not hasattr(head, "num_embeddings_padded"):
        gone = Unobservable(reason=f"{type(model).__name__} has no output head on this rank")
        names = ("head.dtype", "vocab.size", "vocab.padded_size", "vocab.logits_width", "tied_embeddings")
        return settings | dict.fromkeys((f"model.{name}" for name in names), gone)
    head_overridden = isinstance(config.model_config.hf_overrides, Mapping) and "head_dtype" in (
        config.model_config.hf_overrides
    )
    embedding = model.model.embed_tokens
    settings |= {
        "model.head.dtype": _live(
            _dtype(logits.head_dtype or head.params_dtype),
            "logits_processor.head_dtype",
            *(_asked(config, "head_dtype") if head_overridden else ()),
        ),
        "model.vocab.size": _live(head.org_vocab_size, "lm_head.org_vocab_size", *_asked(config, "vocab_size")),
        "model.vocab.padded_size": _live(head.num_embeddings_padded, "lm_head.num_embeddings_padded"),
        "model.vocab.logits_width": _live(logits.org_vocab_size, "logits_processor.org_vocab_size"),
        "model.tied_embeddings": _live(
            head.weight.data_ptr() == embedding.weight.data_ptr(),
            "storage of lm_head.weight and model.embed_tokens.weight",
            *_asked(config, "tie_word_embeddings"),
        ),
    }
    return settings


def _asked_dtype(config: Any) -> tuple[str, str]:
    return _dtype(config.model_config.dtype), _ENGINE_ARGUMENT


def _rope(model: Any, runner: Any, config: Any) -> Settings:
    rotaries = {
        id(module): (name, module) for name, module in model.named_modules() if hasattr(module, "cos_sin_cache")
    }
    parameters, by = _asked(config, "rope_parameters")
    parameters = parameters if isinstance(parameters, Mapping) else {}
    theta, theta_by = parameters.get("rope_theta"), by
    overrides = config.model_config.hf_overrides
    if isinstance(overrides, Mapping) and "rope_theta" in overrides:
        theta, theta_by = float(overrides["rope_theta"]), f"{_ENGINE_ARGUMENT} hf_overrides"
    if len(rotaries) != 1:
        several = Unobservable(reason=f"{len(rotaries)} rotary tables in the live model; one can be read")
        names = ("theta", "scaling_type", "scaling_factor", "inverse_frequency_last", "fused")
        return {f"model.rope.{name}": several for name in names}
    name, rotary = next(iter(rotaries.values()))
    implied = implied_inverse_frequencies(rotary)
    where = f"{name}.cos_sin_cache: {implied.why}"
    kind = type(rotary).__name__
    return {
        "model.rope.theta": _live(implied.theta, where, theta, theta_by),
        "model.rope.scaling_type": _live(
            _ROPE_CLASSES.get(kind, kind), f"class of {name}", parameters.get("rope_type"), by
        ),
        "model.rope.scaling_factor": _live(
            float(getattr(rotary, "scaling_factor", 1.0)), f"{name}.scaling_factor", parameters.get("factor"), by
        ),
        "model.rope.inverse_frequency_last": _live(float(implied.frequencies[-1]), where),
        "model.rope.fused": _live(not implementation(rotary).endswith("forward_native"), f"{name}._forward_method"),
    }


def implementation(module: Any) -> str:
    """Name what a live module runs: its dispatched method, its kernel, or the factor whose reference is bound there."""
    for held in vars(module).values():
        site = getattr(held, "site", None)
        if site is not None and hasattr(site, "factor"):
            return f"reference of {site.factor}"
    method = getattr(module, "_forward_method", None)
    if method is not None:
        return f"{type(module).__name__}.{method.__name__}"
    quantization = getattr(module, "quant_method", None)
    if quantization is None:
        return type(module).__name__
    # The CPU build leaves its choice in a lambda; the one operator that it calls is the kernel.
    code = getattr(getattr(module, "cpu_linear", None), "__code__", None)
    called = [] if code is None else [name for name in code.co_names if name not in ("ops", "torch", "nn")]
    return f"{type(quantization).__name__}{': ' + called[-1] if called else ''}"


def _attention(model: Any) -> dict[str, Any]:
    return _named(model, lambda module: hasattr(module, "impl") and hasattr(module, "attn_backend"))


def _attention_implementation(module: Any) -> str:
    bound = implementation(module.impl)
    return bound if bound.startswith("reference of") else type(module.impl).__name__


def _attention_request(config: Any, attention: Mapping[str, Any]) -> tuple[Any, str]:
    import vllm
    from vllm import envs

    backend = getattr(getattr(config, "attention_config", None), "backend", None)
    asked, by = (backend.name, f"{_ENGINE_ARGUMENT} attention_backend") if backend is not None else (None, "")
    variable = "VLLM_ATTENTION_BACKEND"
    if asked is None and variable in os.environ and variable not in envs.environment_variables:
        return os.environ[variable], f"environment variable {variable}, which vLLM {vllm.__version__} does not read"
    if asked is None or not attention:
        return None, ""
    live = next(iter(attention.values()))
    # A request that was honoured is spelled as the class that answers it, so that it compares equal.
    honoured = live.attn_backend.get_name() == asked
    return (_attention_implementation(live), f"{by}={asked}") if honoured else (asked, by)


def _operators(model: Any, runner: Any, config: Any) -> Settings:
    attention = _attention(model)
    head = getattr(model, "lm_head", None)
    embeddings = _named(model, lambda module: hasattr(module, "org_vocab_size") and module is not head)
    embeddings = {name: module for name, module in embeddings.items() if hasattr(module, "num_embeddings_padded")}
    kinds = {
        "rope": _named(model, lambda module: hasattr(module, "cos_sin_cache")),
        "norm": _named(model, lambda module: hasattr(module, "variance_epsilon")),
        "activation": _named(model, lambda module: type(module).__name__.endswith("AndMul")),
        "linear": _named(
            model,
            lambda module: (
                hasattr(module, "quant_method")
                and hasattr(module, "output_partition_sizes")
                and not hasattr(module, "org_vocab_size")
            ),
        ),
        "head": {} if head is None else {"lm_head": head},
    }
    settings: Settings = {
        f"operator.{kind}.implementation": _each(modules, implementation) for kind, modules in kinds.items()
    }
    settings["operator.embedding.implementation"] = _each(
        embeddings, lambda module: f"{type(module).__name__}, {type(module.quant_method).__name__}.embedding"
    )
    settings["operator.attention.implementation"] = _each(
        attention, _attention_implementation, *_attention_request(config, attention)
    )
    return settings


def _parallel(model: Any, runner: Any, config: Any) -> Settings:
    import torch
    from vllm.distributed import parallel_state

    asked = config.parallel_config
    groups = {
        "tensor": ("get_tp_group", asked.tensor_parallel_size),
        "pipeline": ("get_pp_group", asked.pipeline_parallel_size),
        "data": ("get_dp_group", asked.data_parallel_size),
        "context": ("get_dcp_group", asked.decode_context_parallel_size),
    }
    settings: Settings = {
        f"parallel.{kind}": _live(
            getattr(parallel_state, name)().world_size, f"{name}().world_size", requested, _ENGINE_ARGUMENT
        )
        for kind, (name, requested) in groups.items()
    }
    tensor = parallel_state.get_tp_group()
    backends = [torch.distributed.get_backend(tensor.device_group), *_own_transport(tensor.device_communicator)]
    settings["parallel.tensor.backend"] = _live(", ".join(backends), "get_tp_group()")
    passes = config.compilation_config.pass_config
    settings["parallel.sequence"] = Reading(
        effective=bool(getattr(passes, "enable_sp", False)),
        source=Source.REQUESTED,
        where="compilation_config.pass_config.enable_sp: a graph pass leaves nothing to read in the modules",
    )
    return settings


def _own_transport(communicator: Any) -> list[str]:
    """The part of vLLM that adds up before torch's process group is asked, if there is one: shared memory, kernels.

    Which algorithm NCCL then takes is decided per message and cannot be read.
    """
    import torch.distributed as dist

    for name in ("ca_comm", "qr_comm", "symm_mem_comm", "pynccl_comm"):  # as CudaCommunicator keeps them, in order
        transport = getattr(communicator, name, None)
        if transport is not None and not getattr(transport, "disabled", False):
            return [type(transport).__name__]
    transport = getattr(communicator, "dist_module", dist)  # CpuCommunicator
    return [] if transport is dist else [type(transport).__name__]


def _engine(model: Any, runner: Any, config: Any) -> Settings:
    import torch

    compilation = config.compilation_config
    # The decorated body of the model knows whether it calls its graph; every other module is eager by construction.
    bodies = _named(model, lambda module: hasattr(module, "do_not_compile"))
    compiled = any(not body.do_not_compile for body in bodies.values())
    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    threads = os.environ.get("OMP_NUM_THREADS", "")
    return {
        "engine.compiled": _live(
            compiled or compilation.cudagraph_mode.name != "NONE",
            f"{next(iter(bodies))}.do_not_compile, mode {compilation.mode.name}" if bodies else type(model).__name__,
            *((False, f"{_ENGINE_ARGUMENT} enforce_eager") if config.model_config.enforce_eager else ()),
        ),
        "engine.cuda_graphs": Reading(
            effective=compilation.cudagraph_mode.name.lower(),
            source=Source.REQUESTED,
            where="resolved engine configuration (compilation_config.cudagraph_mode)",
        ),
        "engine.threads": _live(
            torch.get_num_threads(),
            "torch.get_num_threads() in the worker",
            *((int(threads), "environment variable OMP_NUM_THREADS") if threads.isdigit() else ()),
        ),
        "engine.device": _live(devices[0] if len(devices) == 1 else devices, "devices of all parameters"),
    }


def _rollout(model: Any, runner: Any, config: Any) -> Settings:
    cache, scheduler = config.cache_config, config.scheduler_config
    caches = [kv_cache for kv_cache in runner.kv_caches if hasattr(kv_cache, "dtype")]
    kv_asked = () if cache.cache_dtype == "auto" else (cache.cache_dtype, f"{_ENGINE_ARGUMENT} kv_cache_dtype")
    by = _ENGINE_ARGUMENT
    resolved = "resolved engine configuration; the scheduler that uses it runs outside the worker"
    sampler = getattr(runner, "sampler", None)
    quantization = config.quant_config
    methods = _named(model, lambda module: hasattr(module, "quant_method") and hasattr(module, "params_dtype"))
    return {
        "rollout.prefix_caching": Reading(
            effective=bool(cache.enable_prefix_caching), source=Source.REQUESTED, where=resolved
        ),
        "rollout.chunked_prefill": Reading(
            effective=bool(scheduler.enable_chunked_prefill), source=Source.REQUESTED, where=resolved
        ),
        "rollout.long_prefill_threshold": Reading(
            effective=int(scheduler.long_prefill_token_threshold), source=Source.REQUESTED, where=resolved
        ),
        "rollout.max_batched_tokens": _live(
            runner.max_num_tokens, "model runner", scheduler.max_num_batched_tokens, by
        ),
        "rollout.max_model_len": _live(runner.max_model_len, "model runner", config.model_config.max_model_len, by),
        "rollout.max_sequences": _live(runner.max_num_reqs, "model runner", scheduler.max_num_seqs, by),
        "rollout.block_size": Reading(effective=cache.block_size, source=Source.REQUESTED, where=resolved),
        "rollout.kv_cache_dtype": _live(_dtype(caches[0].dtype), f"{len(caches)} KV-cache tensors", *kv_asked)
        if caches
        else Unobservable(reason="the model runner holds no KV-cache tensor"),
        "rollout.logprobs_mode": _live(str(sampler.logprobs_mode), "sampler", config.model_config.logprobs_mode, by)
        if sampler is not None
        else Unobservable(reason="no sampler on this rank", requested=config.model_config.logprobs_mode),
        "rollout.quantization": _each(
            {name: module for name, module in methods.items() if not hasattr(module, "org_vocab_size")},
            lambda module: type(module.quant_method).__name__,
            *((quantization.get_name(), by) if quantization is not None else ()),
        ),
    }


def _host() -> Settings:
    import vllm
    from vllm import envs

    settings = library_readings(_LIBRARIES) | driver_readings()
    settings["library.vllm"] = Reading(
        effective=vllm.__version__, source=Source.LIVE_MODULE, where="vllm.__version__ in the worker"
    )
    for key, reading in environment_readings(_VARIABLES).items():
        name = key.removeprefix("environment.")
        known = not name.startswith("VLLM_") or name in envs.environment_variables or name.startswith("VLLM_DIST_")
        settings[key] = (
            reading
            if known or isinstance(reading, Unobservable)
            else Unobservable(
                reason=f"no such variable is read by vLLM {vllm.__version__}", requested=reading.effective
            )
        )
    return settings


def generation_defaults(model_config: Any) -> Iterator[tuple[str, Reading]]:
    """Yield every sampling default that the checkpoint or an override supplies when a request names none."""
    for name, value in sorted(model_config.get_diff_sampling_param().items()):
        yield (
            f"rollout.generation_config.{name}",
            Reading(
                effective=value,
                source=Source.GENERATION_CONFIG,
                where="default of requests that pass no SamplingParams",
            ),
        )
