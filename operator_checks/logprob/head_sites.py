"""Where the fp32 head goes in each live engine.

Written against vllm 0.32 (``LogitsProcessor._apply_head``, looked up by name per call: once a model forward for the
tokens to sample, and once for each request whose prompt is scored) and megatron-core 0.16 (``_forward_impl`` of the
output layer, which is given the embedding's weight where the head is tied). The gather over ranks stays as it is.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mismatch_hooks.pipeline.bind import BindingError, PatchSite
from mismatch_hooks.pipeline.operator_call import Operands, OperatorCall
from mismatch_hooks.schema.enums import PolicyRole
from mismatch_hooks.schema.shape import ModelShape

_ROLLOUT_SITE = "logits_processor: lm_head"
_TRAINING_SITE = "output_layer"


def parameters(shape: ModelShape) -> Mapping[str, object]:
    """Return how many columns are words; what engines pad behind them is no logit of anything."""
    return {"words": shape.vocab_size}


def sites(factor: str, role: PolicyRole, model: Any, parameters: Mapping[str, object]) -> Sequence[PatchSite]:
    """Return the head of a live model; none on a pipeline stage that has none.

    Args:
        factor: ``"logprob.head_dtype"``.
        role: which engine ``model`` belongs to.
        model: vLLM's model module on this rank, or the ``GPTModel``.
        parameters: as ``parameters()`` gives them, plus ``implementation``.

    Raises:
        BindingError: the head is of a kind that the reference does not cover.
    """
    words: Any = parameters.get("words")
    find = _rollout if role is PolicyRole.ROLLOUT else _training
    return find(factor, model, words, parameters.get("implementation") == "padded_native")


def _rollout(factor: str, model: Any, words: int | None, padded: bool) -> list[PatchSite]:
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.logits_processor import LogitsProcessor
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
    from vllm.model_executor.models.utils import PPMissingLayer

    if isinstance(model.lm_head, PPMissingLayer):
        return []
    processor, method = model.logits_processor, model.lm_head.quant_method
    if type(processor) is not LogitsProcessor or processor.logits_as_input:
        raise BindingError(
            f"the rollout's logits_processor is a {type(processor).__name__} (logits_as_input="
            f"{getattr(processor, 'logits_as_input', None)}); the fp32 head covers vLLM's LogitsProcessor."
        )
    if type(method) not in (UnquantizedEmbeddingMethod, UnquantizedLinearMethod) or model.lm_head.weight.ndim != 2:
        raise BindingError(
            f"the rollout's lm_head holds its weight in {type(method).__name__}; the fp32 head needs it unquantised."
        )
    return [
        PatchSite(
            factor=factor,
            site=_ROLLOUT_SITE,
            owner=processor,
            name="_apply_head",
            build=_rollout_padded if padded else _rollout_head,
            calls_per_forward=1,
            caller=processor,
            call=_rollout_call(model.lm_head, words),
        )
    ]


def _training(factor: str, model: Any, words: int | None, padded: bool) -> list[PatchSite]:
    from megatron.core.tensor_parallel import ColumnParallelLinear

    if not model.post_process:  # another pipeline stage has it
        return []
    head = model.output_layer
    if type(head) is not ColumnParallelLinear:
        raise BindingError(
            f"the trainer's output_layer is a {type(head).__name__}; the fp32 head covers ColumnParallelLinear."
        )
    if head.sequence_parallel:
        raise BindingError(
            "the trainer's output_layer gathers its input over ranks inside the product (sequence_parallel); the fp32 "
            "head does not."
        )
    return [
        PatchSite(
            factor=factor,
            site=_TRAINING_SITE,
            owner=head,
            name="_forward_impl",
            build=_training_padded if padded else _training_head,
            calls_per_forward=1,
            call=_training_call(model, words),
        )
    ]


def _rollout_head(original: Callable[..., Any]) -> Callable[..., Any]:
    import torch

    from mismatch_hooks.references.linear import linear

    def apply_head(lm_head: Any, hidden_states: Any, embedding_bias: Any) -> Any:
        # The parameter, as vLLM's own fp32 head takes it, not the copy that a CPU build may have packed beside it.
        return linear(hidden_states, lm_head.weight, embedding_bias, dtype=torch.float32)

    return apply_head


def _training_head(original: Callable[..., Any]) -> Callable[..., Any]:
    import torch
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
        return linear(input, weight, bias, dtype=torch.float32)

    return product


def _rollout_padded(original: Callable[..., Any]) -> Callable[..., Any]:
    from mismatch_hooks.references.row_padding import with_enough_rows

    def apply_head(lm_head: Any, hidden_states: Any, embedding_bias: Any) -> Any:
        return with_enough_rows(lambda rows: original(lm_head, rows, embedding_bias), hidden_states)

    return apply_head


def _training_padded(original: Callable[..., Any]) -> Callable[..., Any]:
    from mismatch_hooks.references.row_padding import with_enough_rows

    def product(input: Any, weight: Any, bias: Any = None, **options: Any) -> Any:
        return with_enough_rows(lambda rows: original(input=rows, weight=weight, bias=bias, **options), input)

    return product


def _rollout_call(head: Any, words: int | None) -> OperatorCall:
    def take(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Operands | None:
        named = dict(zip(("lm_head", "hidden_states", "embedding_bias"), args, strict=False)) | dict(kwargs)
        return None if named.get("embedding_bias") is not None else {"states": named["hidden_states"]}

    def play(apply_head: Callable[..., Any], operands: Operands) -> Any:
        return apply_head(head, operands["states"], None)

    return OperatorCall(places=("lm_head",), take=take, play=play, result=lambda logits: logits[:, :words])


def _training_call(model: Any, words: int | None) -> OperatorCall:
    head = model.output_layer

    def take(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Operands | None:
        named = dict(zip(("input", "weight", "bias"), args, strict=False)) | dict(kwargs)
        return None if named.get("bias") is not None else {"states": named["input"].flatten(0, -2)}

    def play(product: Callable[..., Any], operands: Operands) -> Any:
        shared = model.shared_embedding_or_output_weight() if model.share_embeddings_and_output_weights else None
        return product(
            input=operands["states"][:, None],
            weight=head.weight if shared is None else shared,
            bias=None,
            gradient_accumulation_fusion=False,
            allreduce_dgrad=False,
            sequence_parallel=False,
            tp_group=head.tp_group,
        )

    return OperatorCall(
        places=("lm_head",), take=take, play=play, result=lambda logits: logits.flatten(0, -2)[:, :words]
    )
