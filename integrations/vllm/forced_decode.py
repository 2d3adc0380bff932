"""Make a live vLLM engine decode given tokens one by one: ``ForcedTokens`` in its sampler, and the request for it.

vLLM loads the class by its name (``LLM(logits_processors=[FORCED_DECODE])``). Written against vLLM 0.32, whose two
model runners have one interface for such a class each; ``ForcedTokens`` has both, because an engine that is handed a
class without its own refuses to start.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

_ARGUMENT = "mismatch_hooks.forced_token_ids"


def forced_params(token_ids: Sequence[int]) -> Any:
    """The ``SamplingParams`` of a request that decodes exactly ``token_ids``, stop tokens among them or not."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        logprobs=0,
        max_tokens=len(token_ids),
        temperature=0.0,  # draws from no random stream
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        extra_args={_ARGUMENT: list(token_ids)},
    )


def forced_logprobs(token_ids: Sequence[int], completion: Any) -> tuple[float, ...]:
    """The raw log-probs of ``token_ids`` out of vLLM's ``CompletionOutput``, fp32 nats.

    They end before the first token that is not the given one: what follows has another context.
    """
    found: list[float] = []
    for token, decoded, position in zip(token_ids, completion.token_ids, completion.logprobs or (), strict=False):
        if token != decoded:
            break
        found.append(float(position[token].logprob))
    return tuple(found)


def is_installed(model_runner: Any) -> bool:
    """True when the live sampler of a worker's model runner holds ``ForcedTokens`` and takes a token a step."""
    # Where the first model runner keeps them, and the second; a stage of a pipeline that samples nothing has none.
    batch, sampler = getattr(model_runner, "input_batch", None), getattr(model_runner, "sampler", None)
    first, second = getattr(batch, "logitsprocs", None), getattr(sampler, "logits_processors", ())
    held = first.all if first is not None else second
    return model_runner.speculative_config is None and any(isinstance(processor, _ForcedTokens) for processor in held)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Forced:
    """What one request must decode.

    Attributes:
        token_ids: all of it.
        decoded: the engine's own growing list of what it has decoded; empty under the second model runner, which tells
            the length of a sequence at every step instead.
    """

    token_ids: Sequence[int]
    decoded: Sequence[int] = ()


class _ForcedTokens:
    """Leaves one token to choose in the rows of requests made by ``forced_params``; touches no other row.

    It comes after the raw log-probs were taken, so those of the forced tokens are the model's own.
    """

    def __init__(self, vllm_config: Any, *owner: Any) -> None:
        """Take what either model runner passes: ``(device, is_pin_memory)``, or the second one's request states."""
        self._forced: dict[int, _Forced] = {}
        self._prompt_lengths: Any = owner[0].prompt_len if len(owner) == 1 else None

    def is_argmax_invariant(self) -> bool:
        """False: it decides the argmax."""
        return False

    def update_state(self, batch_update: Any) -> None:
        """Follow requests to their rows; first model runner."""
        from vllm.v1.sample.logits_processor import process_dict_updates

        process_dict_updates(
            self._forced, batch_update, lambda params, prompt, decoded: _forced(params, decoded=decoded)
        )

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """Take a request into the slot ``req_idx``, whatever was there before; second model runner."""
        forced = _forced(sampling_params)
        self._forced.pop(req_idx, None)
        if forced is not None:
            self._forced[req_idx] = forced
        return forced is not None

    def apply(self, logits: Tensor, ctx: Any = None) -> Tensor:
        """Write over the rows of forced requests, in place.

        Args:
            logits: ``[rows, vocab]`` fp32.
            ctx: which request each row belongs to and how long it is; None from the first model runner.
        """
        tokens = {
            row: forced.token_ids[position]
            for row, forced, position in (self._rows() if ctx is None else self._rows_of(ctx))
            # Not so while a prompt is prefilled in pieces, nor in a step scheduled past the end; both are dropped.
            if 0 <= position < len(forced.token_ids)
        }
        if tokens:
            rows = torch.tensor(list(tokens), device=logits.device)
            logits[rows] = float("-inf")
            logits[rows, torch.tensor(list(tokens.values()), device=logits.device)] = 0.0
        return logits

    def _rows(self) -> Iterator[tuple[int, _Forced, int]]:
        return ((row, forced, len(forced.decoded)) for row, forced in self._forced.items())

    def _rows_of(self, ctx: Any) -> Iterator[tuple[int, _Forced, int]]:
        lengths = zip(ctx.idx_mapping_np.tolist(), ctx.seq_lens_upper_bound_np.tolist(), strict=False)
        for row, (slot, length) in enumerate(lengths):
            if slot in self._forced:
                yield row, self._forced[slot], length - int(self._prompt_lengths.np[slot])


def _forced(params: Any, *, decoded: Sequence[int] = ()) -> _Forced | None:
    token_ids = (params.extra_args or {}).get(_ARGUMENT)
    return None if token_ids is None else _Forced(token_ids=token_ids, decoded=decoded)


@cache
def _as_logits_processor() -> type[_ForcedTokens]:
    from vllm.v1.sample.logits_processor import LogitsProcessor
    from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as V2LogitsProcessor

    class ForcedTokens(_ForcedTokens, LogitsProcessor, V2LogitsProcessor):  # type: ignore[misc]
        """What vLLM accepts as a logits processor; see its first base."""

    return ForcedTokens


def __getattr__(name: str) -> Any:
    # Made when vLLM asks for it: its bases are vLLM's, and this module can be imported without an engine.
    if name == "ForcedTokens":
        return _as_logits_processor()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
