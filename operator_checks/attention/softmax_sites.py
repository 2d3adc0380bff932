"""Where the precision of the trainer's softmax is held.

Written against megatron-core 0.16: ``FusedScaleMaskSoftmax.softmax_in_fp32``, which each layer copies from the
``TransformerConfig`` when it is built, so that the field of a live config changes nothing.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from mismatch_hooks.pipeline.bind import BindingError, StateSite
from mismatch_hooks.schema.enums import PolicyRole
from mismatch_hooks.schema.shape import ModelShape

_SITE = "DotProductAttention.scale_mask_softmax: softmax_in_fp32"


def parameters(shape: ModelShape) -> Mapping[str, object]:
    """Return nothing: a flag depends on no model."""
    return {}


def sites(factor: str, role: PolicyRole, model: Any, parameters: Mapping[str, object]) -> Sequence[StateSite]:
    """Return the flags of all layers as one state.

    Args:
        factor: ``"attention.softmax_precision"``.
        role: training.
        model: the ``GPTModel``.
        parameters: ``value``: a value of the factor's switch.

    Raises:
        BindingError: the flag does not decide in which precision a layer takes its softmax.
    """
    softmaxes = [_softmax(index, layer) for index, layer in enumerate(model.decoder.layers)]

    def read() -> tuple[bool, ...]:
        return tuple(softmax.softmax_in_fp32 for softmax in softmaxes)

    def write(flags: tuple[bool, ...]) -> None:
        for softmax, flag in zip(softmaxes, flags, strict=True):
            softmax.softmax_in_fp32 = flag

    value = parameters["value"]
    held = read() if value == "native" else (value == "fp32",) * len(softmaxes)
    return [StateSite(factor=factor, site=_SITE, read=read, write=write, held=held)]


def _softmax(index: int, layer: Any) -> Any:
    core = getattr(getattr(layer, "self_attention", None), "core_attention", None)
    softmax = getattr(core, "scale_mask_softmax", None)
    name = f"the trainer's decoder.layers.{index}.self_attention.core_attention"
    if softmax is None:
        raise BindingError(
            f"{name} is a {type(core).__name__}, whose softmax has no precision to set; DotProductAttention, which "
            "get_gpt_layer_local_spec builds, has."
        )
    if softmax.scaled_masked_softmax_fusion:
        raise BindingError(
            f"{name} may run the fused softmax, which is fp32 whatever the flag says; set masked_softmax_fusion=False."
        )
    if softmax.scale is not None:
        raise BindingError(
            f"{name} scales its scores by layer, which forces the softmax to fp32; set "
            "apply_query_key_layer_scaling=False."
        )
    return softmax
