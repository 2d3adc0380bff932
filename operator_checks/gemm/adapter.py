"""Where the linear reference goes in each live engine.

Written against vllm 0.32 (``apply`` of the linear method that each layer holds) and megatron-core 0.16
(``_forward_impl`` of the parallel linears). Both are the bare product: collectives around it stay as they are.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mismatch_hooks.model_meta.correspondence import rollout_name
from mismatch_hooks.operator_checks.gemm import reduce_sites
from mismatch_hooks.pipeline.bind import BindingError, PatchSite
from mismatch_hooks.pipeline.operator_call import Operands, OperatorCall
from mismatch_hooks.schema.enums import PolicyRole
from mismatch_hooks.schema.shape import ModelShape

_ROLLOUT_SITE = "model.layers.*.{self_attn.qkv_proj,self_attn.o_proj,mlp.gate_up_proj,mlp.down_proj}"
_TRAINING_SITE = "decoder.layers.*.{self_attention.linear_qkv,self_attention.linear_proj,mlp.linear_fc1,mlp.linear_fc2}"
_ROLLOUT_LINEARS = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
_TRAINING_LINEARS = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")


def parameters(factor: str, shape: ModelShape) -> Mapping[str, object]:
    """Return nothing: a product has no number of the model file in it."""
    return {}


def sites(factor: str, role: PolicyRole, model: Any, parameters: Mapping[str, object]) -> Sequence[PatchSite]:
    """Return the four linears of every layer of a live model, or the two that are reduced; each is called once.

    Args:
        factor: ``"gemm.accumulation"`` or ``"gemm.forward_reduce"``.
        role: which engine ``model`` belongs to.
        model: vLLM's model module on this rank, or the ``GPTModel``.
        parameters: as ``parameters()`` gives them, plus ``implementation``.

    Raises:
        BindingError: a layer has a linear that the reference does not cover.
    """
    if factor == "gemm.forward_reduce":
        return reduce_sites.sites(factor, role, model, parameters)
    padded = parameters.get("implementation") == "padded_native"
    found = _rollout(model, padded) if role is PolicyRole.ROLLOUT else _training(model, padded)
    return [
        PatchSite(
            factor=factor,
            site=_ROLLOUT_SITE if role is PolicyRole.ROLLOUT else _TRAINING_SITE,
            owner=owner,
            name=name,
            build=build,
            calls_per_forward=1,
            call=call,
        )
        for owner, name, build, call in found
    ]


_Found = list[tuple[Any, str, Callable[[Callable[..., Any]], Callable[..., Any]], OperatorCall]]


def _rollout(model: Any, padded: bool) -> _Found:
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
    from vllm.model_executor.models.utils import PPMissingLayer

    found: _Found = []
    for index, layer in enumerate(model.model.layers):
        if isinstance(layer, PPMissingLayer):  # another pipeline stage has it
            continue
        for path in _ROLLOUT_LINEARS:
            module = _at(layer, path)
            method = getattr(module, "quant_method", None)
            if not isinstance(module, LinearBase) or type(method) is not UnquantizedLinearMethod:
                raise BindingError(
                    f"the rollout's model.layers.{index}.{path} is a {type(module).__name__} with "
                    f"{type(method).__name__}; the linear reference covers unquantised linears of dense layers."
                )
            build = _rollout_padded if padded else _rollout_linear
            found.append((method, "apply", build, _rollout_call(f"model.layers.{index}.{path}", module)))
    return found


def _training(model: Any, padded: bool) -> _Found:
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    found: _Found = []
    for index, layer in enumerate(model.decoder.layers):
        for path in _TRAINING_LINEARS:
            module = _at(layer, path)
            if type(module) not in (ColumnParallelLinear, RowParallelLinear):
                raise BindingError(
                    f"the trainer's decoder.layers.{index}.{path} is a {type(module).__name__}; the linear "
                    "reference covers ColumnParallelLinear and RowParallelLinear, which the local spec builds "
                    "for dense layers."
                )
            if module.sequence_parallel or module.explicit_expert_comm:
                raise BindingError(
                    f"the trainer's decoder.layers.{index}.{path} gathers its input over ranks inside the product "
                    "(sequence_parallel); the linear reference does not."
                )
            call = _training_call(f"decoder.layers.{index}.{path}", module, model)
            found.append((module, "_forward_impl", _training_padded if padded else _training_linear, call))
    return found


def _at(layer: Any, path: str) -> Any:
    for name in path.split("."):
        layer = getattr(layer, name, None)
    return layer


def _rollout_linear(original: Callable[..., Any]) -> Callable[..., Any]:
    from mismatch_hooks.operator_checks.gemm.packed_weight import PackedWeight
    from mismatch_hooks.references.linear import linear

    packed = PackedWeight()

    def apply(layer: Any, x: Any, bias: Any = None) -> Any:
        return linear(x, packed.of(layer), bias, dtype=x.dtype)

    return apply


def _training_linear(original: Callable[..., Any]) -> Callable[..., Any]:
    from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region

    from mismatch_hooks.references.linear import linear

    def product(
        input: Any,
        weight: Any,
        bias: Any = None,
        *,
        allreduce_dgrad: bool = False,
        tp_group: Any = None,
        **ignored: Any,
    ) -> Any:
        if allreduce_dgrad:  # the native product adds the gradients of its input over the ranks by itself
            input = copy_to_tensor_model_parallel_region(input, group=tp_group)
        return linear(input, weight, bias, dtype=input.dtype)

    return product


def _rollout_padded(original: Callable[..., Any]) -> Callable[..., Any]:
    from mismatch_hooks.references.row_padding import FEWEST_ROWS, with_enough_rows

    def apply(layer: Any, x: Any, bias: Any = None) -> Any:
        if x.shape[0] >= FEWEST_ROWS:
            return original(layer, x, bias)
        return with_enough_rows(lambda rows: original(layer, rows, bias), x)

    return apply


def _training_padded(original: Callable[..., Any]) -> Callable[..., Any]:
    from mismatch_hooks.references.row_padding import with_enough_rows

    def product(input: Any, weight: Any, bias: Any = None, **options: Any) -> Any:
        return with_enough_rows(lambda rows: original(input=rows, weight=weight, bias=bias, **options), input)

    return product


def _rollout_call(name: str, module: Any) -> OperatorCall:
    def take(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Operands | None:
        named = dict(zip(("layer", "x", "bias"), args, strict=False)) | dict(kwargs)
        return None if named.get("bias") is not None else {"states": named["x"].flatten(0, -2)}

    def play(apply: Callable[..., Any], operands: Operands) -> Any:
        return apply(module, operands["states"], None)

    return OperatorCall(places=(name,), take=take, play=play, result=_flat)


def _training_call(name: str, module: Any, model: Any) -> OperatorCall:
    def take(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Operands | None:
        named = dict(zip(("input", "weight", "bias"), args, strict=False)) | dict(kwargs)
        return None if named.get("bias") is not None else {"states": named["input"].flatten(0, -2)}

    def play(product: Callable[..., Any], operands: Operands) -> Any:
        return product(
            input=operands["states"][:, None],
            weight=module.weight,
            bias=None,
            gradient_accumulation_fusion=False,
            allreduce_dgrad=False,
            sequence_parallel=False,
            tp_group=module.tp_group,
        )

    interleaved = name.endswith("linear_qkv")
    return OperatorCall(
        places=(rollout_name(name),),
        take=take,
        play=play,
        result=(lambda rows: _in_blocks(_flat(rows), model.config)) if interleaved else _flat,
    )


def _flat(rows: Any) -> Any:
    return rows.reshape(-1, rows.shape[-1])


def _in_blocks(rows: Any, config: Any) -> Any:
    """Columns as vLLM has them, all queries, then keys, then values; megatron-core has them group by group."""
    import torch

    groups, queries = config.num_query_groups, config.num_attention_heads // config.num_query_groups
    heads = rows.view(len(rows), groups, queries + 2, -1)
    parts = (heads[:, :, :queries], heads[:, :, queries:-1], heads[:, :, -1:])
    return torch.cat([part.flatten(1) for part in parts], dim=1)
