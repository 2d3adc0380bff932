"""Watch a pass from inside the model: how many forwards ran, which rotary table, which columns were normalised."""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor

from mismatch_hooks.schema.enums import Source
from mismatch_hooks.schema.readback import Reading, Unobservable

# Nats. Below, two normalisers cannot be told apart; above, a log-prob follows neither of them.
_RESOLVABLE, _EXPLAINED = 1e-6, 1e-3
_TOKENS = 16


class ObservedPass:
    """Counts forwards of a ``GPTModel`` for the length of a block, and calls ``on_forward`` as each begins.

    Attributes:
        forwards: model forwards begun.
        frequencies: ``[rotary_dim / 2]`` fp32, row 1 of the rotary table that the last forward rotated with, or None.
            megatron-core caches tables by length, so a table may be older than ``inv_freq``.
    """

    def __init__(self, model: Any, on_forward: Callable[[], None] = lambda: None) -> None:
        self.forwards = 0
        self._on_forward = on_forward
        self.frequencies: Tensor | None = None
        self._model = model
        self._handles: list[Any] = []

    def __enter__(self) -> Self:
        self._handles = [self._model.register_forward_pre_hook(self._count)]
        rotary = getattr(self._model, "rotary_pos_emb", None)
        if rotary is not None:
            self._handles.append(rotary.register_forward_hook(self._keep_row))
        return self

    def __exit__(self, *exception: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _count(self, module: Any, arguments: Any) -> None:
        self.forwards += 1
        self._on_forward()

    def _keep_row(self, module: Any, arguments: Any, table: Any) -> None:
        # Context-parallel ranks hold a slice of the table, and Yarn returns a pair.
        if not isinstance(table, Tensor) or table.shape[0] < 2 or self._model.pg_collection.cp.size() > 1:
            return
        row = table[1].flatten().detach()
        self.frequencies = (row[::2] if module.rotary_interleaved else row[: row.numel() // 2]).clone()


def normalised_columns(
    model: Any, called: Any, token_logprobs: Callable[[Any, Tensor], Tensor], vocab_size: int
) -> Reading | Unobservable:
    """Return over how many columns the log-prob function normalises, found by one forward of a few tokens.

    Args:
        model: the unwrapped ``GPTModel``, not sharded, with more columns than words.
        called: what ``token_logprobs`` takes as its model.
        token_logprobs: the function that scores.
        vocab_size: columns that are words.
    """
    seen: list[Tensor] = []
    handle = model.output_layer.register_forward_hook(lambda module, arguments, output: seen.append(output[0]))
    try:
        tokens = torch.linspace(0, vocab_size - 1, _TOKENS, device=next(model.parameters()).device).long()[None]
        scored = token_logprobs(called, tokens)[0].float()
    finally:
        handle.remove()
    logits, padded = seen[0][:-1, 0].float(), seen[0].shape[-1]  # [sequence, batch, columns]
    over = {
        width: logits[:, :width].log_softmax(dim=-1).gather(-1, tokens[0, 1:, None])[:, 0]
        for width in (vocab_size, padded)
    }
    missed = {width: float((values - scored).abs().max()) for width, values in over.items()}
    where = f"columns in the log-sum-exp, found by a forward of {_TOKENS} tokens"
    if missed[vocab_size] > _EXPLAINED and missed[padded] > _EXPLAINED:
        return Unobservable(
            reason=f"the log-probs follow log_softmax over neither {vocab_size} nor {padded} columns: the log-prob "
            "function transforms logits"
        )
    # Equal where the padding weighs nothing (masked inside the model): then only the words count.
    width = padded if missed[padded] < missed[vocab_size] - _RESOLVABLE else vocab_size
    return Reading(effective=width, source=Source.LIVE_MODULE, where=where)


PACKED_WITHOUT_RESET = "several sequences a row, positions run on"
_PROBE_TOKENS = 8


def rows_given(
    model: Any, called: Any, token_logprobs: Callable[[Any, Tensor], Tensor], vocab_size: int
) -> Reading | Unobservable:
    """Return whether a log-prob function packs sequences into a row, found by one forward of two short ones.

    megatron-core's rope looks at no position ids: within a row positions start anew only where ``packed_seq_params``
    say where a sequence begins.

    Args:
        model: the unwrapped ``GPTModel``.
        called: what ``token_logprobs`` takes as its model.
        token_logprobs: the loop's own function.
        vocab_size: columns that are words.
    """
    seen: list[tuple[tuple[int, ...], bool]] = []

    def keep(module: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        given = dict(zip(("input_ids", "position_ids", "attention_mask"), arguments, strict=False)) | named
        ids = given.get("input_ids")
        if isinstance(ids, Tensor):
            seen.append((tuple(ids.shape), given.get("packed_seq_params") is not None))

    handle = model.register_forward_pre_hook(keep, with_kwargs=True)
    try:
        tokens = torch.linspace(0, vocab_size - 1, 2 * _PROBE_TOKENS, device=next(model.parameters()).device).long()
        token_logprobs(called, tokens.view(2, _PROBE_TOKENS))
    except (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError) as error:
        return Unobservable(reason=f"the loop's token_logprobs does not take two rows of {_PROBE_TOKENS} ({error})")
    finally:
        handle.remove()
    if not seen:
        return Unobservable(reason="the loop's token_logprobs calls the model past its forward")
    packed = [marked for shape, marked in seen if shape[-1] > _PROBE_TOKENS]
    found = "one sequence a row"
    if packed:
        found = "several sequences a row, positions start anew" if all(packed) else PACKED_WITHOUT_RESET
    where = f"what the model got in a forward of two rows of {_PROBE_TOKENS} tokens"
    return Reading(effective=found, source=Source.LIVE_MODULE, where=where)
