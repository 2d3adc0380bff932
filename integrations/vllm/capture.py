"""Sampled sequences with the log-probs that came with them, out of vLLM's own outputs; no second pass."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mismatch_hooks.schema.capture import RolloutSequence, SamplingSettings

SETTINGS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
_LOGPROB_MODES = ("raw_logprobs", "processed_logprobs")


class CaptureError(ValueError):
    """The outputs of a rollout do not carry what the capture needs."""


def sequences(
    outputs: Sequence[Any],
    sampling_params: Any,
    *,
    weight_version: str = "",
    response_masks: Sequence[Sequence[bool]] | None = None,
    logprobs_mode: str = "raw_logprobs",
    sources: Mapping[str, str] | None = None,
    cache_outlived_weights: Sequence[bool | None] = (),
) -> tuple[RolloutSequence, ...]:
    """Return one sequence for each completion, in the order of the outputs and of their completions.

    Args:
        outputs: the finished ``RequestOutput`` objects of ``LLM.generate``.
        sampling_params: the ``SamplingParams`` of all of them, or one for each.
        weight_version: the loop's label of the weights that sampled.
        response_masks: one for each completion, True on tokens that count; all count when None.
        logprobs_mode: the engine's; ``VllmBackend.sequences`` reads it from the live sampler.
        sources: setting name to where its value came from; ``"requested"`` for every one when None.
        cache_outlived_weights: see ``RolloutSequence``; one for each output, none for False everywhere.

    Raises:
        CaptureError: a completion carries no log-probs, values that are not log-probs, or the lists do not pair up.
    """
    if logprobs_mode not in _LOGPROB_MODES:
        raise CaptureError(
            f"logprobs_mode is {logprobs_mode!r}, so the engine returns logits; accepts {' or '.join(_LOGPROB_MODES)}: "
            "build the LLM with logprobs_mode='raw_logprobs'."
        )
    params = _one_each(sampling_params, len(outputs))
    completions = sum(len(output.outputs) for output in outputs)
    if response_masks is not None and len(response_masks) != completions:
        raise CaptureError(f"{len(response_masks)} response_masks for {completions} completions; give one for each.")
    masks = iter(response_masks) if response_masks is not None else None
    kept: dict[int, SamplingSettings] = {}
    return tuple(
        RolloutSequence(
            prompt_token_ids=tuple(output.prompt_token_ids),
            response_token_ids=tuple(completion.token_ids),
            rollout_logprobs=tuple(_logprobs(output.request_id, completion)),
            response_mask=None if masks is None else tuple(next(masks)),
            sampling=kept.setdefault(id(own), _settings(own, logprobs_mode, sources)),
            weight_version=weight_version,
            cached_tokens=output.num_cached_tokens,
            cache_outlived_weights=outlived,
            finish_reason=str(completion.finish_reason or ""),
        )
        for output, own, outlived in zip(outputs, params, cache_outlived_weights or [False] * len(outputs), strict=True)
        for completion in output.outputs
    )


def _one_each(sampling_params: Any, outputs: int) -> Sequence[Any]:
    if not isinstance(sampling_params, Sequence):
        return [sampling_params] * outputs
    if len(sampling_params) != outputs:
        raise CaptureError(f"{len(sampling_params)} sampling_params for {outputs} outputs; give one, or one for each.")
    return sampling_params


def _logprobs(request: str, completion: Any) -> Iterator[float | None]:
    if completion.logprobs is None:
        raise CaptureError(
            f"request {request}: completion {completion.index} carries no log-probs; sample with "
            "SamplingParams(logprobs=0), which returns that of the sampled token."
        )
    if len(completion.logprobs) != len(completion.token_ids):
        raise CaptureError(
            f"request {request}: completion {completion.index} has {len(completion.logprobs)} log-probs for "
            f"{len(completion.token_ids)} tokens; one belongs to each."
        )
    for token, position in zip(completion.token_ids, completion.logprobs, strict=True):
        entry = position.get(token)
        yield None if entry is None else entry.logprob


def _settings(params: Any, logprobs_mode: str, sources: Mapping[str, str] | None) -> SamplingSettings:
    where = sources if sources is not None else dict.fromkeys(SETTINGS, "requested")
    return SamplingSettings(
        **{name: getattr(params, name) for name in SETTINGS}, logprobs_mode=logprobs_mode, sources=where
    )
