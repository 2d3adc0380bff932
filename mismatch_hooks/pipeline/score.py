"""Combine the native pass and the bound passes of each role into a factor's arms."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mismatch_hooks.pipeline.metrics import from_lists, measure
from mismatch_hooks.schema.enums import PolicyRole, Value
from mismatch_hooks.schema.factor import MismatchFactor
from mismatch_hooks.schema.score import Score, ScoringSequence
from mismatch_hooks.schema.verdict import ArmReading

FloatArray = NDArray[np.float64]
PassKey = tuple[PolicyRole, Value]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ArmTokens:
    """The active tokens of one arm, in one order for all arms.

    Attributes:
        training: ``[tokens]`` fp64, nats; NaN where no shard covered the token.
        rollout: ``[tokens]`` fp64, nats; likewise.
        sequence: ``[tokens]`` index of the sequence that each token belongs to.
    """

    training: FloatArray
    rollout: FloatArray
    sequence: NDArray[np.int64]

    @property
    def dlogp(self) -> FloatArray:
        """Training − rollout, nats."""
        difference: FloatArray = self.training - self.rollout
        return difference


def response_logprobs(score: Score, sequences: Sequence[ScoringSequence]) -> list[list[float]]:
    """Return one list a sequence, one value a response token; NaN where no shard has it, which a gate judges."""
    rows = [[math.nan] * len(sequence.response_token_ids) for sequence in sequences]
    for shard in score.shards:
        for piece in shard.slices:
            if 0 <= piece.sequence < len(rows):
                row = rows[piece.sequence]
                stop = min(piece.start + len(piece.logprobs), len(row))
                row[piece.start : stop] = piece.logprobs[: stop - piece.start]
    return rows


def read_arms(
    factor: MismatchFactor,
    passes: Mapping[PassKey, Score],
    sequences: Sequence[ScoringSequence],
    *,
    epsilon_low: float,
    epsilon_high: float,
) -> tuple[dict[str, ArmTokens], tuple[ArmReading, ...]]:
    """Return each arm's active tokens and metrics; an arm is two passes, so four passes make four arms.

    Args:
        factor: whose arms.
        passes: role and value to its score; all that the arms are made of must be there.
        sequences: what was scored.
        epsilon_low: clip range, as read back from the loop.
        epsilon_high: likewise.
    """
    tokens: dict[str, ArmTokens] = {}
    readings = []
    for arm, bound in factor.arms.items():
        scores = {role: passes[role, value] for role, value in bound.items()}
        tokens[arm], reading = read_arm(arm, scores, sequences, epsilon_low=epsilon_low, epsilon_high=epsilon_high)
        readings.append(reading)
    return tokens, tuple(readings)


def read_arm(
    arm: str,
    scores: Mapping[PolicyRole, Score],
    sequences: Sequence[ScoringSequence],
    *,
    epsilon_low: float,
    epsilon_high: float,
) -> tuple[ArmTokens, ArmReading]:
    """Return the active tokens and the metrics of one arm, which is one score of each role."""
    masks = [sequence.response_mask for sequence in sequences]
    owner = np.repeat(np.arange(len(sequences)), [sum(mask) for mask in masks])
    training, rollout = (
        response_logprobs(scores[role], sequences) for role in (PolicyRole.TRAINING, PolicyRole.ROLLOUT)
    )
    tokens = ArmTokens(training=_active(training, masks), rollout=_active(rollout, masks), sequence=owner)
    state = measure(*from_lists(training, rollout, masks), epsilon_low=epsilon_low, epsilon_high=epsilon_high)
    return tokens, ArmReading(arm=arm, metrics=state.finalize())


def active_logprobs(score: Score, sequences: Sequence[ScoringSequence]) -> FloatArray:
    """Return ``[tokens]`` fp64, nats: the active tokens of one score, in the order of an arm's."""
    return _active(response_logprobs(score, sequences), [sequence.response_mask for sequence in sequences])


def _active(rows: Sequence[Sequence[float]], masks: Sequence[Sequence[bool]]) -> FloatArray:
    return np.array(
        [value for row, mask in zip(rows, masks, strict=True) for value, keep in zip(row, mask, strict=True) if keep],
        dtype=np.float64,
    )
