"""Pair what the rollout engine returned with what the trainer computed, token by token; refuse what does not fit."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mismatch_hooks.schema.capture import RolloutSequence
from mismatch_hooks.schema.score import ScoringSequence

if TYPE_CHECKING:
    from torch import Tensor


class CaptureError(ValueError):
    """What the loop handed over does not belong together; names the sequence and the counts."""


@dataclass(slots=True)
class StepCapture:
    """One step's rollouts and the training log-probs that have arrived for them.

    Attributes:
        step: the loop's step.
        sequences: all rollouts of the step.
        weights_at_rollout: the trainer's mutation count when the rollouts were handed over.
        training: rollout index to ``[response tokens]`` fp32 or wider, nats, CPU; our own copy.
        masks: rollout index to ``[response tokens]`` bool, CPU; the mask that the trainer used.
        token_ids: rollout index to the response tokens that the trainer's forward saw, where the loop handed them over.

    Raises:
        CaptureError: a sequence's lists are not of one length; nothing is cut or padded.
    """

    step: int
    sequences: tuple[RolloutSequence, ...]
    weights_at_rollout: int
    training: "dict[int, Tensor]" = field(default_factory=dict)
    masks: "dict[int, Tensor]" = field(default_factory=dict)
    token_ids: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for index, sequence in enumerate(self.sequences):
            if sequence.misfit:
                raise CaptureError(f"sequence {index}: {sequence.misfit}")

    @property
    def covered(self) -> list[int]:
        """Indices of the rollouts whose training log-probs have arrived, in order."""
        return sorted(self.training)

    @property
    def longest(self) -> int:
        """Tokens of the longest rollout, prompt and response; 0 where there is none."""
        return max((len(one.prompt_token_ids) + len(one.response_token_ids) for one in self.sequences), default=0)

    def training_row(self, index: int) -> tuple[float, ...]:
        """Return the training log-probs of one rollout as plain floats."""
        return tuple(self.training[index].tolist())

    def token_ids_of(self, indices: Sequence[int]) -> list[tuple[int, ...]] | None:
        """Return what the trainer's forward saw of these rollouts; None where the loop did not say it of all."""
        return [self.token_ids[i] for i in indices] if all(i in self.token_ids for i in indices) else None

    def scoring_sequence(self, index: int) -> ScoringSequence:
        """Return what a pass scores of one covered rollout."""
        return ScoringSequence(
            prompt_token_ids=self.sequences[index].prompt_token_ids,
            response_token_ids=self.sequences[index].response_token_ids,
            response_mask=tuple(self.masks[index].tolist()),
            temperature=self.sequences[index].sampling.temperature,
        )

    def sample(self, most: int) -> tuple[list[int], tuple[ScoringSequence, ...]]:
        """Return up to ``most`` covered rollouts with active tokens, spread evenly: indices, and what arms score."""
        usable = [index for index in self.covered if bool(self.masks[index].any())]
        chosen = usable if len(usable) <= most else [usable[i * len(usable) // most] for i in range(most)]
        return chosen, tuple(self.scoring_sequence(index) for index in chosen)


def rollout_tensor(sequences: Sequence[RolloutSequence], width: int) -> "Tensor":
    """Return the rollout log-probs right-padded to ``[batch, width]`` fp32; a value that was not delivered is NaN."""
    import torch

    rows = [
        [float("nan") if value is None else value for value in sequence.rollout_logprobs]
        + [0.0] * (width - len(sequence.rollout_logprobs))
        for sequence in sequences
    ]
    return torch.tensor(rows, dtype=torch.float32).view(len(rows), width)


def add_training(
    capture: StepCapture,
    training_logprobs: "Tensor",
    response_mask: "Tensor",
    indices: Sequence[int] | None,
    token_ids: "Tensor | None" = None,
) -> "tuple[list[int], Tensor]":
    """Attach one forward's log-probs to their rollouts.

    Args:
        capture: the step.
        training_logprobs: ``[batch, response]`` fp32 or wider, nats, right-padded.
        response_mask: ``[batch, response]`` bool or 0/1.
        indices: the rollouts that the rows belong to, in order; None is all of them.
        token_ids: ``[batch, response]`` the tokens that the forward saw; None where the loop does not say.

    Returns:
        The indices, and the rollout log-probs of the same rows, ``[batch, response]`` fp32.

    Raises:
        CaptureError: rows, widths or masks do not fit the rollouts.
    """
    import torch

    chosen = list(range(len(capture.sequences))) if indices is None else [int(index) for index in indices]
    if training_logprobs.ndim != 2 or tuple(response_mask.shape) != tuple(training_logprobs.shape):
        raise CaptureError(
            f"training_logprobs is {list(training_logprobs.shape)} and response_mask {list(response_mask.shape)}; "
            "both are [batch, response]."
        )
    if token_ids is not None and tuple(token_ids.shape) != tuple(training_logprobs.shape):
        raise CaptureError(
            f"token_ids is {list(token_ids.shape)} and training_logprobs {list(training_logprobs.shape)}; both are "
            "[batch, response]."
        )
    if len(chosen) != training_logprobs.shape[0]:
        raise CaptureError(
            f"training_logprobs has {training_logprobs.shape[0]} rows for {len(chosen)} sequences; pass sequences=[…] "
            "when the forward saw only some of the rollouts."
        )
    unknown = [index for index in chosen if not 0 <= index < len(capture.sequences)]
    if unknown or len(set(chosen)) != len(chosen):
        raise CaptureError(f"sequences: got {chosen}; accepts distinct indices from 0 to {len(capture.sequences) - 1}.")
    width = training_logprobs.shape[1]
    lengths = torch.tensor([len(capture.sequences[index].response_token_ids) for index in chosen], dtype=torch.int64)
    _require_fit(chosen, lengths, response_mask, width)
    # Copies: the loop may overwrite its buffers before the step ends.
    training = training_logprobs.detach().to("cpu", copy=True)
    masks = response_mask.detach().to("cpu", torch.bool, copy=True)
    for row, (index, length) in enumerate(zip(chosen, lengths.tolist(), strict=True)):
        capture.training[index] = training[row, :length]
        capture.masks[index] = masks[row, :length]
        if token_ids is not None:
            capture.token_ids[index] = tuple(token_ids[row, :length].tolist())
    return chosen, rollout_tensor([capture.sequences[index] for index in chosen], width)


def _require_fit(chosen: Sequence[int], lengths: "Tensor", response_mask: "Tensor", width: int) -> None:
    import torch

    short = (lengths > width).nonzero()
    if short.numel():
        row = int(short[0, 0])
        raise CaptureError(
            f"sequence {chosen[row]}: {width} training_logprobs for {int(lengths[row])} response tokens; one "
            "belongs to each."
        )
    beyond = (response_mask.cpu().bool() & (torch.arange(width)[None] >= lengths[:, None])).nonzero()
    if beyond.numel():
        row, position = (int(value) for value in beyond[0])
        raise CaptureError(
            f"sequence {chosen[row]}: response_mask marks position {position} active and the response has "
            f"{int(lengths[row])} tokens; mask padding out."
        )
