"""Where the tiled attention goes in each live engine.

Written against vllm 0.32 (``Attention.impl.forward``, looked up by name per call; the cache update beside it stays
native) and megatron-core 0.16 (``forward`` of the ``DotProductAttention`` of the local layers).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mismatch_hooks.model_meta.correspondence import rollout_name
from mismatch_hooks.pipeline.bind import BindingError, PatchSite
from mismatch_hooks.pipeline.operator_call import Operands, OperatorCall
from mismatch_hooks.schema.enums import PolicyRole
from mismatch_hooks.schema.shape import ModelShape

_ROLLOUT_SITE = "model.layers.*.self_attn.attn.impl"
_TRAINING_SITE = "decoder.layers.*.self_attention.core_attention"


def parameters(shape: ModelShape) -> Mapping[str, object]:
    """Return the scale of the scores that the model's head dim gives, whatever the engines were built with."""
    return {"scale": shape.head_dim**-0.5}


def sites(factor: str, role: PolicyRole, model: Any, parameters: Mapping[str, object]) -> Sequence[PatchSite]:
    """Return the attention of every layer of a live model, each called once a forward.

    Args:
        factor: ``"attention.kernel"``.
        role: which engine ``model`` belongs to.
        model: vLLM's model module on this rank, or the ``GPTModel``.
        parameters: as ``parameters()`` gives them, plus ``implementation``.

    Raises:
        BindingError: a layer's attention has a form that the reference does not cover.
    """
    scale = float(parameters["scale"])  # type: ignore[arg-type]
    found = _rollout(model, scale) if role is PolicyRole.ROLLOUT else _training(model, scale)
    return [
        PatchSite(
            factor=factor,
            site=_ROLLOUT_SITE if role is PolicyRole.ROLLOUT else _TRAINING_SITE,
            owner=owner,
            name="forward",
            build=build,
            calls_per_forward=1,
            call=call,
        )
        for owner, build, call in found
    ]


_Found = list[tuple[Any, Callable[[Callable[..., Any]], Callable[..., Any]], OperatorCall]]


def _rollout(model: Any, scale: float) -> _Found:
    from vllm.model_executor.layers.attention.attention import Attention
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    from mismatch_hooks.operator_checks.attention.rollout_kernel import RolloutKernel

    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, AttentionLayerBase)]
    for name, module in layers:
        if type(module) is not Attention:
            raise BindingError(
                f"the rollout's {name} is a {type(module).__name__}; the attention reference covers plain causal "
                "self-attention (vLLM's Attention), not latent, cross, chunked or recurrent layers."
            )
        _refuse_rollout(name, module)
    kernel = RolloutKernel(scale)
    return [(module.impl, kernel.build(module), _rollout_call(name)) for name, module in layers]


def _refuse_rollout(name: str, layer: Any) -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    impl = layer.impl
    if type(impl) is not CPUAttentionBackendImpl:
        raise BindingError(
            f"the rollout's {name} runs {type(impl).__name__}; the attention reference reads the KV cache of "
            "CPUAttentionBackendImpl (not run on a GPU yet)."
        )
    for is_there, what in (
        (impl.attn_type != "decoder", f"attends as {impl.attn_type}, not as a decoder"),
        (impl.sliding_window != -1, f"has a sliding window of {impl.sliding_window} tokens"),
        (impl.alibi_slopes is not None, "has ALiBi slopes"),
        (impl.logits_soft_cap != 0, f"caps its scores at {impl.logits_soft_cap}"),
        (impl.sinks is not None, "has attention sinks"),
        (impl.is_fp8_kv_cache, f"has a KV cache of {impl.kv_cache_dtype}"),
        (impl.kv_sharing_target_layer_name is not None, f"reads the KV cache of {impl.kv_sharing_target_layer_name}"),
    ):
        if is_there:
            raise BindingError(
                f"the rollout's {name} {what}; the attention reference covers plain causal attention over an unscaled "
                "cache of the layer's own."
            )
    if layer.kv_cache.dim() != 4:
        raise BindingError(f"the rollout's {name} has no KV cache yet; bind after the engine has started.")


def _training(model: Any, scale: float) -> _Found:
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    found: _Found = []
    for index, layer in enumerate(model.decoder.layers):
        name = f"decoder.layers.{index}.self_attention.core_attention"
        core = getattr(getattr(layer, "self_attention", None), "core_attention", None)
        if type(core) is not DotProductAttention:
            raise BindingError(
                f"the trainer's {name} is a {type(core).__name__}; the attention reference covers DotProductAttention, "
                "which get_gpt_layer_local_spec builds (not latent attention, and not run on a GPU yet)."
            )
        _refuse_training(name, core)
        found.append((core, _training_kernel(name, core, scale), _training_call(name)))
    return found


def _refuse_training(name: str, core: Any) -> None:
    for is_there, what in (
        (core.attn_mask_type.name != "causal", f"masks by {core.attn_mask_type.name}"),
        (core.attention_type != "self", f"is {core.attention_type} attention"),
        (core.scale_mask_softmax.window_size is not None, f"has a window of {core.scale_mask_softmax.window_size}"),
        (core.softmax_offset is not None, f"has a softmax of type {core.config.softmax_type}"),
        (core.config.context_parallel_size > 1, f"sees a slice (context parallel {core.config.context_parallel_size})"),
    ):
        if is_there:
            raise BindingError(
                f"the trainer's {name} {what}; the attention reference covers plain causal self-attention over whole "
                "sequences."
            )


def _training_kernel(name: str, core: Any, scale: float) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    from mismatch_hooks.references.attention import causal_attention

    def build(original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(
            query: Any,
            key: Any,
            value: Any,
            attention_mask: Any,
            attn_mask_type: Any = None,
            attention_bias: Any = None,
            packed_seq_params: Any = None,
        ) -> Any:
            _refuse_call(name, core, query, key, attention_mask, attention_bias, packed_seq_params)
            # [sequence, batch, heads, head dim] on this rank
            attended = causal_attention(*(part.transpose(0, 1) for part in (query, key, value)), scale=scale)
            return attended.transpose(0, 1).flatten(2)

        return forward

    return build


def _refuse_call(name: str, core: Any, query: Any, key: Any, mask: Any, bias: Any, packed: Any) -> None:
    for is_there, what in (
        (packed is not None, "packed sequences"),
        (bias is not None, "an attention bias"),
        (len(query) != len(key), f"{len(query)} queries and {len(key)} keys (a KV cache)"),
        (mask is not None and not _is_causal(mask, len(query)), "a mask that is not the causal one"),
        (core.training and core.attention_dropout.p > 0, f"attention dropout of {core.attention_dropout.p}"),
    ):
        if is_there:
            raise BindingError(
                f"the trainer's {name} is called with {what}; the attention reference covers unpacked, right-padded "
                "sequences without dropout."
            )


def _is_causal(mask: Any, length: int) -> bool:
    import torch

    # True hides a key; what padding on the right hides besides is seen by padding alone.
    return mask.dtype is torch.bool and bool((mask == torch.ones_like(mask).triu(1)).all())


def _rollout_call(name: str) -> OperatorCall:
    """Reads what it attends to from its engine's paged cache, so that it can be repeated and not played elsewhere."""
    import torch

    names = ("layer", "query", "key", "value", "kv_cache", "attn_metadata", "output", "output_scale")

    def named(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        return dict(zip(names, args, strict=False)) | dict(kwargs)

    def take(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Operands | None:
        given = named(args, kwargs)
        metadata = given["attn_metadata"]
        if metadata is None or metadata.query_start_loc.tolist() != [0, *metadata.seq_lens.tolist()]:
            return None  # a warm-up; several requests; or keys that are in the cache already
        return {part: given[part][: metadata.num_actual_tokens] for part in ("query", "key", "value")}

    def repeat(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        given = named(args, kwargs)
        return forward(**{**given, "output": torch.empty_like(given["output"])})

    return OperatorCall(places=(name,), take=take, repeat=repeat, result=lambda output: output.flatten(1))


def _training_call(name: str) -> OperatorCall:
    import torch

    def take(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Operands | None:
        given = dict(zip(("query", "key", "value"), args, strict=False)) | dict(kwargs)
        if given["query"].shape[1] != 1:
            return None
        return {part: given[part][:, 0] for part in ("query", "key", "value")}

    def play(forward: Callable[..., Any], operands: Operands) -> Any:
        parts = [operands[part][:, None] for part in ("query", "key", "value")]
        length = len(parts[0])
        hidden = torch.ones(1, 1, length, length, dtype=torch.bool, device=parts[0].device).triu(1)
        return forward(*parts, hidden)

    return OperatorCall(places=(rollout_name(name),), take=take, play=play, result=lambda attended: attended[:, 0])
