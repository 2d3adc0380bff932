"""Where the norm references go in each live engine.

Written against vllm 0.32 (``RMSNorm._forward_method``, stored at construction: a patched class never runs) and
megatron-core 0.16 (``forward`` of the ``torch.nn.RMSNorm`` that ``WrappedTorchNorm`` of the local layers returns).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mismatch_hooks.model_meta.correspondence import rollout_name
from mismatch_hooks.pipeline.bind import BindingError, PatchSite
from mismatch_hooks.pipeline.operator_call import Operands, OperatorCall
from mismatch_hooks.schema.enums import PolicyRole
from mismatch_hooks.schema.shape import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """The norms of one factor on one side.

    Attributes:
        site: the call site as the factor declares it.
        modules: last part of the modules' names; queries' and keys' norms have the class of all others.
    """

    site: str
    modules: tuple[str, ...]


_PLACES = {
    ("norm.rmsnorm", PolicyRole.ROLLOUT): _Place(
        site="model.layers.*.{input_layernorm,post_attention_layernorm} and model.norm",
        modules=("input_layernorm", "post_attention_layernorm", "norm"),
    ),
    ("norm.rmsnorm", PolicyRole.TRAINING): _Place(
        site="decoder.layers.*.{input_layernorm,pre_mlp_layernorm} and decoder.final_layernorm",
        modules=("input_layernorm", "pre_mlp_layernorm", "final_layernorm"),
    ),
    ("norm.qk_norm", PolicyRole.ROLLOUT): _Place(
        site="model.layers.*.self_attn.{q_norm,k_norm}", modules=("q_norm", "k_norm")
    ),
    ("norm.qk_norm", PolicyRole.TRAINING): _Place(
        site="decoder.layers.*.self_attention.{q_layernorm,k_layernorm}", modules=("q_layernorm", "k_layernorm")
    ),
}


def parameters(factor: str, shape: ModelShape) -> Mapping[str, object]:
    """Return epsilon as the model file has it: one truth for both roles, whatever their modules were built with."""
    return {"epsilon": shape.norm_epsilon}


def sites(factor: str, role: PolicyRole, model: Any, parameters: Mapping[str, object]) -> Sequence[PatchSite]:
    """Return the norms of a live model, each called once a forward.

    Args:
        factor: ``"norm.rmsnorm"`` or ``"norm.qk_norm"``.
        role: which engine ``model`` belongs to.
        model: vLLM's model module on this rank, or the ``GPTModel``.
        parameters: as ``parameters()`` gives them, plus ``implementation``.

    Raises:
        BindingError: a norm is of a kind that the reference does not cover.
    """
    place = _PLACES[factor, role]
    epsilon = float(parameters["epsilon"])  # type: ignore[arg-type]
    found = [(name, module) for name, module in model.named_modules() if name.rpartition(".")[2] in place.modules]
    if role is PolicyRole.ROLLOUT:
        norms, attribute, build, call = _rollout_norms(found), "_forward_method", _rollout_norm, _rollout_call
    else:
        norms, attribute, build, call = _training_norms(found), "forward", _training_norm, _training_call
    return [
        PatchSite(
            factor=factor,
            site=place.site,
            owner=norm,
            name=attribute,
            build=build(norm, epsilon),
            calls_per_forward=1,
            call=call(name),
        )
        for name, norm in norms
    ]


def _rollout_norms(found: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.model_executor.models.utils import PPMissingLayer

    norms = []
    for name, module in found:
        if isinstance(module, PPMissingLayer):  # another pipeline stage has it
            continue
        if not isinstance(module, RMSNorm):
            raise BindingError(f"the rollout's {name} is a {type(module).__name__}; the norm reference covers RMSNorm.")
        if not module.has_weight or module.variance_size_override is not None:
            raise BindingError(
                f"the rollout's {name} has no weight or takes its variance over a part of the row; the norm reference "
                "covers neither."
            )
        norms.append((name, module))
    return norms


def _training_norms(found: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    import torch

    norms = []
    for name, module in found:
        if not isinstance(module, torch.nn.RMSNorm) or module.weight is None:
            raise BindingError(
                f"the trainer's {name} is a {type(module).__name__}; the norm reference covers torch.nn.RMSNorm with a "
                "weight, which get_gpt_layer_local_spec(normalization='RMSNorm') builds."
            )
        norms.append((name, module))
    return norms


def _rollout_norm(norm: Any, epsilon: float) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    from mismatch_hooks.references.norm import add_rms_norm, rms_norm

    def build(original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(x: Any, residual: Any = None) -> Any:
            if residual is None:
                return rms_norm(x, norm.weight, epsilon=epsilon)
            return add_rms_norm(x, residual, norm.weight, epsilon=epsilon)

        return forward

    return build


def _training_norm(norm: Any, epsilon: float) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    from mismatch_hooks.references.norm import rms_norm

    def build(original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(x: Any) -> Any:
            # megatron-core adds the residual before it calls the norm, and stores the sum in the model's dtype.
            return rms_norm(x, norm.weight, epsilon=epsilon)

        return forward

    return build


def _rollout_call(name: str) -> OperatorCall:
    def take(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Operands:
        named = dict(zip(("x", "residual"), args, strict=False)) | dict(kwargs)
        return _rows(named["x"], named.get("residual"))

    def play(norm: Callable[..., Any], operands: Operands) -> Any:
        return norm(operands["states"], operands.get("residual"))

    return OperatorCall(places=(name,), take=take, play=play, result=_normed)


def _training_call(name: str) -> OperatorCall:
    def take(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Operands:
        return _rows(args[0] if args else kwargs["x"], None)

    def play(norm: Callable[..., Any], operands: Operands) -> Any:
        states, residual = operands["states"], operands.get("residual")
        return norm(states if residual is None else states + residual)

    return OperatorCall(places=(rollout_name(name),), take=take, play=play, result=_normed)


def _rows(states: Any, residual: Any) -> Operands:
    """One row for each norm taken: a token's, or a head's of a token."""
    found = {"states": states, "residual": residual}
    return {name: one.reshape(-1, one.shape[-1]) for name, one in found.items() if one is not None}


def _normed(returned: Any) -> Any:
    rows = returned[0] if isinstance(returned, tuple) else returned
    return rows.reshape(-1, rows.shape[-1])
