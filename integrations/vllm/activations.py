"""Watch the live model during one pass of ours and digest, row by row, what each module gives.

Written against vLLM 0.32: a forward takes the tokens of several requests end to end in one row dimension, behind which
there may be padding; layers return ``(hidden, residual)``, which only together are the residual stream; one rotary
module serves all layers, so what it gives is taken where each layer's attention takes it in.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mismatch_hooks.live.activation_recorder import ActivationRecorder
from mismatch_hooks.schema.activation import ModuleActivations, SequenceActivations
from mismatch_hooks.schema.freeze import thaw

Plain = dict[str, Any]
_Take = Callable[[Any, Any], Any]

_OUR_REQUEST = re.compile(r"mismatch_hooks-\d+-(\d+)(-|$)")


def _output(arguments: Any, output: Any) -> Any:
    return output[0] if isinstance(output, tuple) else output


def _stream_after_norm(arguments: Any, output: Any) -> Any:
    return output[1] if isinstance(output, tuple) and len(output) == 2 else None


def _stream_after_layer(arguments: Any, output: Any) -> Any:
    # The next norm adds the two in the model's dtype, so the sum has its bits.
    if isinstance(output, tuple) and len(output) == 2 and all(isinstance(part, Tensor) for part in output):
        return output[0] + output[1]
    return None


def _query_and_key(arguments: Any, output: Any) -> Any:
    parts = arguments[:2]
    if len(parts) == 2 and all(isinstance(part, Tensor) and part.dim() > 1 for part in parts):
        return torch.cat([part.flatten(1) for part in parts], dim=-1)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Point:
    """Where one traced point is found.

    Attributes:
        semantic: last part of its name.
        module: name of the module below its layer, or below the model.
        take: what it is, from the module's arguments and its output; None where those are of an unknown form.
        sharded: True when a tensor-parallel rank holds a part of each row.
    """

    semantic: str
    module: str
    take: _Take = _output
    sharded: bool = False


_IN_LAYER = (
    _Point(semantic="input_norm", module="input_layernorm"),
    _Point(semantic="query_key_value", module="self_attn.qkv_proj", sharded=True),
    _Point(semantic="query_norm", module="self_attn.q_norm", sharded=True),
    _Point(semantic="key_norm", module="self_attn.k_norm", sharded=True),
    _Point(semantic="rope", module="self_attn.attn", take=_query_and_key, sharded=True),
    _Point(semantic="attention_core", module="self_attn.attn", sharded=True),
    _Point(semantic="attention_output", module="self_attn.o_proj"),
    _Point(semantic="attention_residual", module="post_attention_layernorm", take=_stream_after_norm),
    _Point(semantic="post_attention_norm", module="post_attention_layernorm"),
    _Point(semantic="gate_up", module="mlp.gate_up_proj", sharded=True),
    _Point(semantic="activation", module="mlp.act_fn", sharded=True),
    _Point(semantic="down", module="mlp.down_proj"),
    _Point(semantic="output", module="", take=_stream_after_layer),
)
_OUTSIDE_LAYERS = (
    _Point(semantic="embedding", module="model.embed_tokens"),
    _Point(semantic="final_norm", module="model.norm"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """Consecutive rows of one forward that are consecutive tokens of one sequence.

    Attributes:
        first: the first row.
        rows: how many.
        sequence: index of the sequence.
        start: position of the first row's token.
    """

    first: int
    rows: int
    sequence: int
    start: int


class TracedPass:
    """Hooks on the live model of one worker, from construction to ``finish``; they read and never raise.

    A forward counts only when the scheduler runs our requests in it and its own tokens and positions say the same, so a
    dummy, profiling or warm-up forward and a row of padding leave nothing.
    """

    def __init__(self, model: Any, runner: Any, sequences: Sequence[Sequence[int]], values_of: Sequence[str]) -> None:
        """Hook every point that the model has.

        Args:
            model: vLLM's model module.
            runner: the worker's model runner, whose batch names the requests in row order.
            sequences: token ids of each sequence, by the index that our requests carry; empty ones take no part.
            values_of: points whose values are kept too.
        """
        self._runner = runner
        # Finished requests stay in the batch until the next step; a pass of ours before this one may have left some.
        self._earlier = frozenset(self._names())
        self._recorder = ActivationRecorder(sequences, values_of)
        self._runs: tuple[_Run, ...] = ()
        self._finished: tuple[Tensor, tuple[_Run, ...]] | None = None
        self._handles = [
            model.register_forward_pre_hook(self._begin_forward, with_kwargs=True),
            model.register_forward_hook(self._end_forward),
        ]
        ranks = int(runner.parallel_config.tensor_parallel_size)
        for semantic, point, module in _points(model):
            self._recorder.expect(semantic)
            if point.sharded and ranks > 1:
                self._recorder.leave_out(semantic, f"its rows are cut over {ranks} tensor-parallel ranks")
                continue
            self._handles.append(module.register_forward_hook(self._keeps(semantic, point.take)))
        logits = getattr(model, "logits_processor", None)
        if logits is not None:
            self._recorder.expect("head")
            self._handles.append(logits.register_forward_hook(self._keep_logits))

    def finish(self) -> Plain:
        """Take the hooks off and return ``modules`` and ``left_out`` as plain data."""
        for handle in self._handles:
            handle.remove()
        self._finished = None
        modules, left_out = self._recorder.finish()
        return {"modules": thaw(modules), "left_out": left_out}

    def _begin_forward(self, module: Any, arguments: Any, named: Mapping[str, Any]) -> None:
        self._finished = None
        self._runs = tuple(self._find_runs(named.get("input_ids"), named.get("positions")))

    def _end_forward(self, module: Any, arguments: Any, output: Any) -> None:
        if self._runs and isinstance(output, Tensor):
            self._finished = output, self._runs  # held, so that no other tensor can get its memory meanwhile
        self._runs = ()

    def _names(self) -> list[str]:
        """The requests of the live batch, in the order of their rows."""
        return list(getattr(getattr(self._runner, "input_batch", None), "req_ids", ()))

    def _find_runs(self, input_ids: Any, positions: Any) -> list[_Run]:
        bounds, names = _query_starts(), self._names()
        if not isinstance(input_ids, Tensor) or not isinstance(positions, Tensor) or positions.dim() != 1:
            return []
        tokens, places = input_ids.tolist(), positions.tolist()
        found = []
        for name, first, last in zip(names, bounds, bounds[1:], strict=False):  # a padded batch has more bounds
            ours = _OUR_REQUEST.match(name)
            if ours is None or name in self._earlier or last <= first:
                continue
            sequence, start, rows = int(ours[1]), places[first], last - first
            if sequence >= len(self._recorder.tokens):
                continue
            expected = list(self._recorder.tokens[sequence][start : start + rows])
            if tokens[first:last] == expected and places[first:last] == list(range(start, start + rows)):
                found.append(_Run(first=first, rows=rows, sequence=sequence, start=start))
        return found

    def _keeps(self, semantic: str, take: _Take) -> Callable[[Any, Any, Any], None]:
        def keep(module: Any, arguments: Any, output: Any) -> None:
            if not self._runs:
                return
            rows = take(arguments, output)
            if (
                not isinstance(rows, Tensor)
                or rows.dim() < 2
                or len(rows) < max(run.first + run.rows for run in self._runs)
            ):
                self._recorder.leave_out(semantic, f"{type(module).__name__} returned something of an unknown form")
                return
            for run in self._runs:
                here = rows[run.first : run.first + run.rows]
                self._recorder.add(semantic, here, sequence=run.sequence, start=run.start)

        return keep

    def _keep_logits(self, module: Any, arguments: Any, logits: Any) -> None:
        # The logits of a prompt come request by request after the forward, from a view of its output; those of the
        # next sampled token come from a copy, and are of no use: nobody sampled that token.
        hidden = arguments[1] if len(arguments) > 1 else None
        if self._finished is None or not isinstance(logits, Tensor) or not isinstance(hidden, Tensor):
            return
        output, runs = self._finished
        if hidden.untyped_storage().data_ptr() != output.untyped_storage().data_ptr() or not len(hidden):
            return
        first = (hidden.storage_offset() - output.storage_offset()) // output.stride(0)
        for run in runs:
            if first == run.first and len(hidden) <= run.rows:
                self._recorder.add("head", logits, sequence=run.sequence, start=run.start)


def merged(replies: Sequence[Mapping[str, Any]]) -> tuple[tuple[ModuleActivations, ...], dict[str, str]]:
    """Return what the ranks' traced passes recorded together; a point whose copies differ over ranks is left out.

    Args:
        replies: each rank's ``finish``.
    """
    found: dict[str, Plain] = {}
    left_out: dict[str, str] = {}
    for reply in replies:
        for module in reply["modules"]:
            if found.setdefault(module["semantic"], module) != module:
                left_out[module["semantic"]] = "its copies differ between ranks"
    for reply in replies:  # another stage of a pipeline has what this rank has not
        for semantic, reason in reply["left_out"].items():
            if semantic not in found:
                left_out.setdefault(semantic, reason)
    modules = tuple(_module(plain) for semantic, plain in found.items() if semantic not in left_out)
    return modules, left_out


def _module(plain: Mapping[str, Any]) -> ModuleActivations:
    sequences = tuple(SequenceActivations(**sequence) for sequence in plain["sequences"])
    return ModuleActivations(**{**plain, "sequences": sequences})


def _points(model: Any) -> list[tuple[str, _Point, Any]]:
    """Every traced point that this rank's model has: its full name, how to take it, the module to hook."""
    from vllm.model_executor.models.utils import PPMissingLayer

    modules = {name: module for name, module in model.named_modules() if not isinstance(module, PPMissingLayer)}
    found = [(point.semantic, point, modules[point.module]) for point in _OUTSIDE_LAYERS if point.module in modules]
    for layer in (name for name in modules if re.fullmatch(r"model\.layers\.\d+", name)):
        for point in _IN_LAYER:
            name = f"{layer}.{point.module}" if point.module else layer
            if name in modules:
                found.append((f"{layer.removeprefix('model.')}.{point.semantic}", point, modules[name]))
    return found


def _query_starts() -> list[int]:
    """Where each request's rows begin in the forward that runs, and the end; empty where it is no scheduled one."""
    from vllm.forward_context import get_forward_context, is_forward_context_available

    if not is_forward_context_available():
        return []
    metadata = get_forward_context().attn_metadata
    if not isinstance(metadata, dict) or not metadata:
        return []
    starts = getattr(next(iter(metadata.values())), "query_start_loc", None)
    return list(map(int, starts.tolist())) if isinstance(starts, Tensor) else []
