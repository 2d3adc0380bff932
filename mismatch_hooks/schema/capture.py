"""What the loop hands over: sampled sequences with the log-probs that the rollout engine returned while sampling."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from mismatch_hooks.schema.freeze import FrozenMapping


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSettings:
    """The sampling parameters of one request, as the engine really used them.

    Attributes:
        temperature: 1.0 samples from the model's own distribution; 0.0 is greedy.
        top_p: nucleus mass; 1.0 is off.
        top_k: 0 or −1 is off.
        min_p: 0.0 is off.
        repetition_penalty: 1.0 is off.
        presence_penalty: 0.0 is off.
        frequency_penalty: 0.0 is off.
        logprobs_mode: ``"raw_logprobs"`` or ``"processed_logprobs"``; what the returned log-probs are.
        sources: setting name to where its value came from (``"requested"``, ``"generation_config.json"``).
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logprobs_mode: str = "raw_logprobs"
    sources: Mapping[str, str] = field(default_factory=FrozenMapping)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sources", FrozenMapping(self.sources))


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSequence:
    """One sampled sequence with the log-probs that came with it.

    Attributes:
        prompt_token_ids: the prompt that was sampled from.
        response_token_ids: the sampled tokens.
        rollout_logprobs: nats, one per response token, fp32 or wider; None is a value that was not delivered.
        response_mask: True on tokens that count; all True when None.
        sampling: the parameters in force for this request.
        weight_version: the loop's label of the weights that sampled it; ``""`` when the loop has none.
        cached_tokens: prompt tokens served from the prefix cache, or None when the engine does not say.
        cache_outlived_weights: True where the cache holds entries from before the last change of the weights; None
            where the weights have changed and the engine cannot be asked.
        finish_reason: ``"stop"``, ``"length"`` or what the engine says.
    """

    prompt_token_ids: tuple[int, ...]
    response_token_ids: tuple[int, ...]
    rollout_logprobs: tuple[float | None, ...]
    response_mask: tuple[bool, ...] | None = None
    sampling: SamplingSettings = SamplingSettings()
    weight_version: str = ""
    cached_tokens: int | None = None
    cache_outlived_weights: bool | None = False
    finish_reason: str = ""

    def __post_init__(self) -> None:
        for name in ("prompt_token_ids", "response_token_ids", "rollout_logprobs"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if self.response_mask is not None:
            object.__setattr__(self, "response_mask", tuple(bool(active) for active in self.response_mask))

    @property
    def misfit(self) -> str:
        """What does not belong together here, in words; "" where everything does.

        Asked by the capture, which knows the place of the sequence and whose refusal cannot stop a training loop.
        """
        tokens = len(self.response_token_ids)
        if len(self.rollout_logprobs) != tokens:
            return (
                f"{len(self.rollout_logprobs)} rollout_logprobs for {tokens} response tokens; one belongs to each, "
                "so pass the engine's lists uncut and unpadded."
            )
        if self.response_mask is not None and len(self.response_mask) != tokens:
            return f"response_mask has {len(self.response_mask)} entries for {tokens} response tokens."
        return ""

    @property
    def mask(self) -> tuple[bool, ...]:
        """The response mask, written out."""
        return self.response_mask if self.response_mask is not None else (True,) * len(self.response_token_ids)
