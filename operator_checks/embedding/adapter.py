"""Where the embedding reference goes in each live engine.

Written against vllm 0.32 and megatron-core 0.16: ``forward`` of the live ``VocabParallelEmbedding`` of each.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mismatch_hooks.pipeline.bind import BindingError, PatchSite
from mismatch_hooks.pipeline.operator_call import Operands, OperatorCall
from mismatch_hooks.schema.enums import PolicyRole
from mismatch_hooks.schema.shape import ModelShape

_ROLLOUT_SITE = "model.embed_tokens"
_TRAINING_SITE = "embedding.word_embeddings"


def parameters(factor: str, shape: ModelShape) -> Mapping[str, object]:
    """Return nothing: the model files of the supported architectures give a lookup no scale and no other number."""
    return {}


def sites(factor: str, role: PolicyRole, model: Any, parameters: Mapping[str, object]) -> Sequence[PatchSite]:
    """Return the embedding of a live model, called once a forward; none on a pipeline stage that has none.

    Args:
        factor: ``"embedding.lookup"``.
        role: which engine ``model`` belongs to.
        model: vLLM's model module on this rank, or the ``GPTModel``.
        parameters: as ``parameters()`` gives them, plus ``implementation``.

    Raises:
        BindingError: the rollout's table is quantised, has rows added by LoRA, or is sharded over a group of its own.
    """
    if role is PolicyRole.ROLLOUT:
        return [
            _site(factor, _ROLLOUT_SITE, module, _rollout_lookup(module))
            for name, module in model.named_modules()
            if name == _ROLLOUT_SITE and _covered(module)
        ]
    if not model.pre_process:  # another pipeline stage has it
        return []
    table = model.embedding.word_embeddings
    return [_site(factor, _TRAINING_SITE, table, _training_lookup(table))]


def _site(factor: str, site: str, owner: Any, build: Callable[..., Any]) -> PatchSite:
    return PatchSite(
        factor=factor, site=site, owner=owner, name="forward", build=build, calls_per_forward=1, call=_CALLS[site]
    )


def _ids(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Operands:
    return {"ids": (args[0] if args else kwargs["input_"]).flatten()}


def _one_row(lookup: Callable[..., Any], operands: Operands) -> Any:
    return lookup(operands["ids"][None])


def _bare(lookup: Callable[..., Any], operands: Operands) -> Any:
    return lookup(operands["ids"])


def _flat(rows: Any) -> Any:
    return rows.reshape(-1, rows.shape[-1])


# The trainer's table takes [batch, sequence] and may give [sequence, batch, hidden]: alike, where the batch is one row.
_CALLS = {
    _ROLLOUT_SITE: OperatorCall(places=(_ROLLOUT_SITE,), take=_ids, play=_bare, result=_flat),
    _TRAINING_SITE: OperatorCall(places=(_ROLLOUT_SITE,), take=_ids, play=_one_row, result=_flat),
}


def _covered(table: Any) -> bool:
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding
    from vllm.model_executor.models.utils import PPMissingLayer

    if isinstance(table, PPMissingLayer):
        return False
    if (
        not isinstance(table, VocabParallelEmbedding)
        or not isinstance(table.quant_method, UnquantizedEmbeddingMethod)
        or table.num_added_embeddings
        or table.parallel_group is not None
        or not table.reduce_results
    ):
        raise BindingError(
            f"the rollout's {_ROLLOUT_SITE} is a {type(table).__name__} that is quantised, has added rows or a process "
            "group of its own; the embedding reference covers a plain VocabParallelEmbedding."
        )
    return True


def _rollout_lookup(table: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    from vllm.distributed import tensor_model_parallel_all_reduce

    from mismatch_hooks.references.embedding import lookup, lookup_in_shard

    def build(original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(input_: Any) -> Any:
            if table.tp_size == 1:
                return lookup(input_, table.weight)
            shard = table.shard_indices
            rows = table.weight[: shard.num_org_elements]
            return tensor_model_parallel_all_reduce(
                lookup_in_shard(input_, rows, first_row=shard.org_vocab_start_index)
            )

        return forward

    return build


def _training_lookup(table: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    from megatron.core.tensor_parallel import (
        reduce_from_tensor_model_parallel_region,
        reduce_scatter_to_sequence_parallel_region,
    )

    from mismatch_hooks.references.embedding import lookup, lookup_in_shard

    def build(original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(input_: Any) -> Any:
            if table.tp_group.size() == 1:
                rows = lookup(input_, table.weight)
            else:
                rows = lookup_in_shard(input_, table.weight, first_row=table.vocab_start_index)
            if table.reduce_scatter_embeddings:  # [batch, sequence, hidden] in, [sequence, batch, hidden] out
                return reduce_scatter_to_sequence_parallel_region(
                    rows.transpose(0, 1).contiguous(), group=table.tp_group
                )
            return reduce_from_tensor_model_parallel_region(rows, group=table.tp_group)

        return forward

    return build
