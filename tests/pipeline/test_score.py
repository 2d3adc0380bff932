"""Two passes a role make four arms, on one set of tokens in one order."""

import math
from dataclasses import replace

import numpy as np

from mismatch_hooks.pipeline.score import read_arms, response_logprobs
from mismatch_hooks.schema.enums import Arm
from tests.pipeline.samples import (
    EPSILONS,
    NATIVE,
    REFERENCE,
    ROLLOUT,
    ROPE,
    SEQUENCES,
    TRAINING,
    passes,
    score,
    shard,
)


def test_shards_of_several_ranks_are_laid_out_by_sequence_and_position() -> None:
    pieces = (shard(1, 2, ((1, 1, (-4.0, -5.0)), (0, 0, (-1.0, -2.0)))), shard(0, 2, ((1, 0, (-3.0,)),)))
    whole = replace(score(ROLLOUT, NATIVE), shards=pieces)
    assert response_logprobs(whole, SEQUENCES) == [[-1.0, -2.0], [-3.0, -4.0, -5.0]]


def test_a_token_that_no_shard_covers_is_nan_and_never_zero() -> None:
    partial = replace(score(ROLLOUT, NATIVE), shards=(shard(slices=((0, 0, (-1.0,)),)),))
    rows = response_logprobs(partial, SEQUENCES)
    assert rows[0][0] == -1.0
    assert [math.isnan(value) for value in (rows[0][1], *rows[1])] == [True] * 4


def test_an_arm_pairs_the_pass_that_each_role_was_bound_to() -> None:
    found = passes()
    levels = {
        (TRAINING, NATIVE): -1.0,
        (TRAINING, REFERENCE): -2.0,
        (ROLLOUT, NATIVE): -4.0,
        (ROLLOUT, REFERENCE): -8.0,
    }
    for key, level in levels.items():
        slices = ((0, 0, (level, level)), (1, 0, (level, -99.0, level)))
        found[key] = replace(found[key], shards=(shard(slices=slices),))
    tokens, readings = read_arms(ROPE, found, SEQUENCES, **EPSILONS)
    assert {arm: set(values.dlogp.tolist()) for arm, values in tokens.items()} == {
        Arm.BOTH_NATIVE: {3.0},
        Arm.ROLLOUT_REFERENCE_ONLY: {7.0},
        Arm.TRAINING_REFERENCE_ONLY: {2.0},
        Arm.BOTH_REFERENCE: {6.0},
    }
    assert [reading.arm for reading in readings] == list(Arm)
    assert [(reading.metrics["tokens"], reading.metrics["dlogp_mean"]) for reading in readings] == [
        (4, 3.0),
        (4, 7.0),
        (4, 2.0),
        (4, 6.0),
    ]


def test_masked_tokens_are_in_no_arm_and_tokens_know_their_sequence() -> None:
    tokens, _ = read_arms(ROPE, passes(), SEQUENCES, **EPSILONS)
    native = tokens[Arm.BOTH_NATIVE]
    assert native.training.tolist() == [-1.0, -2.0, -3.0, -5.0]
    assert native.sequence.tolist() == [0, 0, 1, 1]
    assert np.array_equal(native.dlogp, np.zeros(4))
