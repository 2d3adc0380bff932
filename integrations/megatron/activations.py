"""Watch a live ``GPTModel`` during one pass of ours and digest, row by row, what each module gives.

Written against megatron-core 0.16.1, local layer spec: hidden states are ``[sequence, batch, …]``, right-padded; fused
query, key and value rows are stored by group; the residual is added between modules, so the stream is taken where the
next module takes it in. TransformerEngine's spec, which fuses norms into linears, is not run on a GPU yet.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from mismatch_hooks.live.activation_recorder import ActivationRecorder
from mismatch_hooks.schema.activation import ModuleActivations

# From a module's arguments and its output to [sequence, batch, …]; None where those are of an unknown form.
_Take = Callable[[Any, Any], Any]


def _output(arguments: Any, output: Any) -> Any:
    return output[0] if isinstance(output, tuple) else output


def _input(arguments: Any, output: Any) -> Any:
    return arguments[0] if arguments else None


def _batch_first(arguments: Any, output: Any) -> Any:
    return output.transpose(0, 1) if isinstance(output, Tensor) else None


def _query_and_key(arguments: Any, output: Any) -> Any:
    parts = arguments[:2]
    if len(parts) == 2 and all(isinstance(part, Tensor) and part.dim() > 2 for part in parts):
        return torch.cat([part.flatten(2) for part in parts], dim=-1)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Point:
    """Where one traced point is found.

    Attributes:
        semantic: last part of its name.
        module: name of the module below its layer, or below the model.
        take: what it is, from the module's arguments and its output.
        sharded: True when a tensor-parallel rank holds a part of each row.
    """

    semantic: str
    module: str
    take: _Take = _output
    sharded: bool = False


_IN_LAYER = (
    _Point(semantic="input_norm", module="input_layernorm"),
    _Point(semantic="query_key_value", module="self_attention.linear_qkv", sharded=True),
    _Point(semantic="query_norm", module="self_attention.q_layernorm", sharded=True),
    _Point(semantic="key_norm", module="self_attention.k_layernorm", sharded=True),
    _Point(semantic="rope", module="self_attention.core_attention", take=_query_and_key, sharded=True),
    _Point(semantic="attention_core", module="self_attention.core_attention", sharded=True),
    _Point(semantic="attention_output", module="self_attention.linear_proj"),
    _Point(semantic="attention_residual", module="pre_mlp_layernorm", take=_input),
    _Point(semantic="post_attention_norm", module="pre_mlp_layernorm"),
    _Point(semantic="gate_up", module="mlp.linear_fc1", sharded=True),
    _Point(semantic="activation", module="mlp.linear_fc2", take=_input, sharded=True),
    _Point(semantic="down", module="mlp.linear_fc2"),
    _Point(semantic="output", module=""),
)
_OUTSIDE_LAYERS = (
    _Point(semantic="embedding", module="embedding.word_embeddings", take=_batch_first),
    _Point(semantic="final_norm", module="decoder.final_layernorm"),
    _Point(semantic="head", module="output_layer", sharded=True),
)

_QK_NORMS = ("q_layernorm", "k_layernorm")


class TracedPass:
    """Hooks on the live model for the length of a block; they read, and a forward of other tokens leaves nothing."""

    def __init__(
        self, model: Any, sequences: Sequence[Sequence[int]], values_of: Sequence[str], *, vocab_size: int | None
    ) -> None:
        """Remember what to watch; nothing is hooked yet.

        Args:
            model: the unwrapped ``GPTModel``.
            sequences: token ids of each sequence, by index; empty ones take no part.
            values_of: points whose values are kept too.
            vocab_size: columns of the logits that are words; the padding behind them is left out. None: all columns.
        """
        self._model = model
        self._vocab_size = vocab_size
        self._recorder = ActivationRecorder(sequences, values_of)
        self._expected: range = range(0)
        self._rows: range = range(0)
        self._handles: list[Any] = []

    def __enter__(self) -> Self:
        self._handles = [
            self._model.register_forward_pre_hook(self._begin_forward, with_kwargs=True),
            self._model.register_forward_hook(self._end_forward),
        ]
        ranks, cut = self._model.pg_collection.tp.size(), self._model.config.sequence_parallel
        for semantic, point, module in _points(self._model):
            self._recorder.expect(semantic)
            if ranks > 1 and (point.sharded or cut):
                what = "its rows are" if point.sharded else "the sequence is"
                self._recorder.leave_out(semantic, f"{what} cut over {ranks} tensor-parallel ranks")
            elif _does_nothing(module) and point.take is _output:
                self._recorder.leave_out(semantic, f"{point.module} does nothing: another module does its work")
            else:
                self._handles.append(module.register_forward_hook(self._keeps(semantic, point)))
        return self

    def __exit__(self, *exception: object) -> None:
        for handle in self._handles:
            handle.remove()

    def next_forward(self, first: int, rows: int) -> None:
        """Say which sequences the next forward is for, in the order of its batch rows."""
        self._expected = range(first, first + rows)

    def finish(self) -> tuple[tuple[ModuleActivations, ...], dict[str, str]]:
        """Return what was recorded, and why each other point is left out; the same on every tensor-parallel rank."""
        modules, left_out = self._recorder.finish()
        group = self._model.pg_collection.tp
        if group.size() > 1:
            every: list[Any] = [None] * group.size()
            dist.all_gather_object(every, {module.semantic: module.sequences for module in modules}, group=group)
            for module in list(modules):
                if any(found.get(module.semantic) != every[0].get(module.semantic) for found in every):
                    modules.remove(module)
                    left_out[module.semantic] = "its copies differ between ranks"
        return tuple(modules), left_out

    def _begin_forward(self, module: Any, arguments: Any, named: Mapping[str, Any]) -> None:
        input_ids = arguments[0] if arguments else named.get("input_ids")
        wanted = [self._recorder.tokens[index] for index in self._expected]
        rows = input_ids.tolist() if isinstance(input_ids, Tensor) and input_ids.dim() == 2 else []
        same = len(rows) == len(wanted) and all(
            tuple(row[: len(tokens)]) == tokens for row, tokens in zip(rows, wanted, strict=True)
        )
        self._rows = self._expected if same else range(0)

    def _end_forward(self, module: Any, arguments: Any, output: Any) -> None:
        self._rows = range(0)

    def _keeps(self, semantic: str, point: _Point) -> Callable[[Any, Any, Any], None]:
        def keep(module: Any, arguments: Any, output: Any) -> None:
            if not self._rows:
                return
            found = point.take(arguments, output)
            longest = max(len(self._recorder.tokens[index]) for index in self._rows)
            if (
                not isinstance(found, Tensor)
                or found.dim() < 3
                or not (len(found) >= longest and found.shape[1] == len(self._rows))
            ):
                self._recorder.leave_out(semantic, f"{type(module).__name__} returned something of an unknown form")
                return
            for row, index in enumerate(self._rows):
                # The logits of the last token predict what nobody sampled, and the rollout engine has none of it.
                count = len(self._recorder.tokens[index]) - (semantic == "head")
                if count > 0:
                    here = self._in_common_layout(semantic, found[:count, row])
                    self._recorder.add(semantic, here, sequence=index, start=0)

        return keep

    def _in_common_layout(self, semantic: str, rows: Tensor) -> Tensor:
        if semantic == "head":
            return rows[:, : self._vocab_size]
        if not semantic.endswith(".query_key_value"):
            return rows
        # [positions, group, queries of the group + key + value, head dim], as the attention's forward views it
        config = self._model.config
        groups = config.num_query_groups
        queries = config.num_attention_heads // groups
        by_group = rows.view(len(rows), groups, queries + 2, config.kv_channels)
        parts = by_group[:, :, :queries], by_group[:, :, queries], by_group[:, :, queries + 1]
        return torch.cat([part.flatten(1) for part in parts], dim=-1)


def _does_nothing(module: Any) -> bool:
    return type(module).__name__ == "IdentityOp"


def _points(model: Any) -> list[tuple[str, _Point, Any]]:
    """Every traced point that this rank's model has: its full name, how to take it, the module to hook."""
    modules = dict(model.named_modules())
    found = [(point.semantic, point, modules[point.module]) for point in _OUTSIDE_LAYERS if point.module in modules]
    for index, layer in enumerate(model.decoder.layers):
        for point in _IN_LAYER:
            path = f"decoder.layers.{index}.{point.module}".rstrip(".")
            module = modules.get(path)
            # Without norms of queries and keys their place is empty on both sides, and no point.
            if module is not None and not (point.module.endswith(_QK_NORMS) and _does_nothing(module)):
                found.append((f"layers.{layer.layer_number - 1}.{point.semantic}", point, module))
    return found
