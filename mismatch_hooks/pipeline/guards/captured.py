"""What the guards look at, and the active tokens in it."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mismatch_hooks.schema.capture import RolloutSequence
from mismatch_hooks.schema.readback import Readback
from mismatch_hooks.schema.score import WeightsDigest


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardInput:
    """What the guards look at.

    Attributes:
        sequences: the captured rollouts, as sampled.
        training_logprobs: the loop's own training log-probs of the same tokens, one list a sequence, nats.
        aligned: True when the run keeps operators on their reference, so that equality is expected.
        rollout: readback of the rollout side.
        training: readback of the training side.
        rollout_weights: what the rollout side has loaded; None when it was not taken.
        training_weights: what the training side has loaded; None when it was not taken.
        weights_written: in-place writes to the trainer's weights between sampling and capture.
        rollout_masks: the response masks that came with the samples; an entry is None where none came, and all of it
            where nothing is known.
        training_token_ids: the response tokens that the trainer's forward saw, one list a sequence; None where the
            loop did not hand them over.
        training_rescored: log-probs of the same tokens by a forward of the trainer that nobody but the hooks made, with
            nothing bound, one list a sequence; None where none was made.
        rollout_updated_at: the step before whose samples the rollout's weights were last seen written; None where that
            was not seen.
        bits_expected: True when arms are compared at a bitwise floor.
    """

    sequences: Sequence[RolloutSequence]
    training_logprobs: Sequence[Sequence[float]]
    aligned: bool
    rollout: Readback
    training: Readback
    rollout_weights: WeightsDigest | None
    training_weights: WeightsDigest | None
    weights_written: int
    rollout_masks: Sequence[Sequence[bool] | None] | None = None
    training_token_ids: Sequence[Sequence[int]] | None = None
    training_rescored: Sequence[Sequence[float]] | None = None
    rollout_updated_at: int | None = None
    bits_expected: bool = False


def active(found: GuardInput) -> Iterator[tuple[int, int, float, float | None]]:
    """Every active token: sequence, position, training log-prob, rollout log-prob."""
    for index, (sequence, row) in enumerate(zip(found.sequences, found.training_logprobs, strict=True)):
        for position, (training, rollout, active) in enumerate(
            zip(row, sequence.rollout_logprobs, sequence.mask, strict=True)
        ):
            if active:
                yield index, position, training, rollout


def differences(found: GuardInput) -> list[float]:
    """training − rollout of every active token that is finite on both sides."""
    return [
        training - rollout
        for _, _, training, rollout in active(found)
        if rollout is not None and math.isfinite(training) and math.isfinite(rollout)
    ]


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan
