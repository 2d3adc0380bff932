"""Where the SwiGLU reference goes in each live engine.

Written against vllm 0.32 (``SiluAndMul._forward_method``, stored at construction: a patched class never runs) and
megatron-core 0.16 (``MLP.forward``: its unfused gate is a function inside it, which nothing else can reach).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mismatch_hooks.model_meta.correspondence import rollout_name
from mismatch_hooks.pipeline.bind import BindingError, PatchSite
from mismatch_hooks.pipeline.operator_call import Operands, OperatorCall
from mismatch_hooks.schema.enums import PolicyRole
from mismatch_hooks.schema.shape import ModelShape

_ROLLOUT_SITE = "model.layers.*.mlp.act_fn"
_TRAINING_SITE = "decoder.layers.*.mlp: silu(gate) * up"


def parameters(factor: str, shape: ModelShape) -> Mapping[str, object]:
    """Return nothing: the model file says that the MLP is gated by silu, and that has no number in it."""
    return {}


def sites(factor: str, role: PolicyRole, model: Any, parameters: Mapping[str, object]) -> Sequence[PatchSite]:
    """Return the gated activations of a live model, each called once a forward.

    Args:
        factor: ``"activation.swiglu"``.
        role: which engine ``model`` belongs to.
        model: vLLM's model module on this rank, or the ``GPTModel``.
        parameters: as ``parameters()`` gives them, plus ``implementation``.

    Raises:
        BindingError: an MLP is not gated by a plain silu.
    """
    if role is PolicyRole.ROLLOUT:
        return _rollout_sites(factor, model)
    return _training_sites(factor, model)


def _rollout_sites(factor: str, model: Any) -> list[PatchSite]:
    from vllm.model_executor.layers.activation import SiluAndMul

    found = [(name, module) for name, module in model.named_modules() if name.endswith(".mlp.act_fn")]
    for name, module in found:
        if not isinstance(module, SiluAndMul):
            raise BindingError(
                f"the rollout's {name} is a {type(module).__name__}; the SwiGLU reference covers SiluAndMul."
            )
    return [
        PatchSite(
            factor=factor,
            site=_ROLLOUT_SITE,
            owner=module,
            name="_forward_method",
            build=_rollout_swiglu,
            calls_per_forward=1,
            call=OperatorCall(places=(name,), take=_given, play=_gate),
        )
        for name, module in found
    ]


def _training_sites(factor: str, model: Any) -> list[PatchSite]:
    return [
        PatchSite(
            factor=factor,
            site=_TRAINING_SITE,
            owner=layer.mlp,
            name="forward",
            build=_training_swiglu(layer.mlp),
            calls_per_forward=1,
            call=_training_call(f"decoder.layers.{index}.mlp", layer.mlp),
        )
        for index, layer in enumerate(model.decoder.layers)
        if _covered(layer.mlp)
    ]


def _covered(mlp: Any) -> bool:
    from megatron.core.transformer.mlp import MLP
    from torch.nn.functional import silu

    if type(mlp) is not MLP:
        raise BindingError(
            f"the trainer's mlp is a {type(mlp).__name__}; the SwiGLU reference covers megatron-core's MLP."
        )
    config = mlp.config
    if not config.gated_linear_unit or config.activation_func is not silu:
        raise BindingError(
            f"the trainer's TransformerConfig has gated_linear_unit={config.gated_linear_unit} and activation_func="
            f"{getattr(config.activation_func, '__name__', config.activation_func)}; the SwiGLU reference covers True "
            "and silu."
        )
    plain = {"use_te_activation_func": False, "activation_func_clamp_value": None, "glu_linear_offset": 0.0}
    for name, value in plain.items():
        if getattr(config, name) != value:
            raise BindingError(
                f"the trainer's TransformerConfig sets {name} to {getattr(config, name)}; the SwiGLU reference covers "
                f"{value} only."
            )
    return True


def _rollout_swiglu(original: Callable[..., Any]) -> Callable[..., Any]:
    from mismatch_hooks.references.activation import swiglu

    return swiglu


def _training_swiglu(mlp: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    from mismatch_hooks.references.activation import swiglu

    def build(original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(hidden_states: Any, per_token_scale: Any = None, **ignored: Any) -> tuple[Any, Any]:
            if per_token_scale is not None:
                raise BindingError("the trainer scales its MLP per token; the SwiGLU reference does not.")
            gate_up, bias = mlp.linear_fc1(hidden_states)
            if bias is not None:
                gate_up = gate_up + bias
            output: tuple[Any, Any] = mlp.linear_fc2(swiglu(gate_up))
            return output

        return forward

    return build


def _given(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Operands:
    return {"gate_up": args[0]}


def _gate(swiglu: Callable[..., Any], operands: Operands) -> Any:
    return swiglu(operands["gate_up"])


def _training_call(name: str, mlp: Any) -> OperatorCall:
    """The gate is inside the MLP: its operand is what ``linear_fc1`` gives, its result what ``linear_fc2`` gets."""

    def take(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Operands | None:
        gate_up, bias = mlp.linear_fc1(args[0] if args else kwargs["hidden_states"])
        return None if bias is not None else {"gate_up": gate_up.flatten(0, -2)}

    def play(forward: Callable[..., Any], operands: Operands) -> Any:
        gated: list[Any] = []

        def down(states: Any) -> tuple[Any, None]:
            gated.append(states)
            return states, None

        # An attribute of the instance stands before the submodule of the name, and takes a plain function.
        vars(mlp).update(
            linear_fc1=lambda _: (operands["gate_up"][:, None], None),
            linear_fc2=down,
        )
        try:
            forward(operands["gate_up"][:, None])
        finally:
            del vars(mlp)["linear_fc1"], vars(mlp)["linear_fc2"]
        return gated[0].flatten(0, -2)

    return OperatorCall(places=(rollout_name(name),), take=take, play=play, result=None)
