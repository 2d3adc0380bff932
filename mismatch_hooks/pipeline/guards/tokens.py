"""Traps of tokens: log-probs that are none, that belong to other tokens, or that were never compared."""

import math
import struct
from collections.abc import Sequence

from mismatch_hooks.pipeline.guards.captured import GuardInput, active, mean
from mismatch_hooks.schema.capture import SamplingSettings


def placeholder_logprobs(found: GuardInput) -> list[str]:
    copied = [] if found.aligned else _copied(found)
    if copied:
        return copied
    looks = [(look, side) for side in ("rollout", "training") for look in (_exact_zeros, _one_value)]
    return [sentence for look, side in looks for sentence in look(found, side)]


def _copied(found: GuardInput) -> list[str]:
    """Captured training values that are the rollout's, which the trainer's own forward does not give.

    Two independent forwards may be equal to the bit; then a third one, of the trainer, equals the rollout as well. A
    copy agrees with the rollout on tokens on which the trainer does not: here on at least half of all, and on twice as
    many as the trainer. Compared as fp32, which is what a copy has passed through.
    """
    tokens = [(index, position, training, rollout) for index, position, training, rollout in active(found)]
    equal = sum(rollout is not None and _same_fp32(training, rollout) for *_, training, rollout in tokens)
    if not tokens or 2 * equal < len(tokens):
        return []
    rescored = found.training_rescored
    if rescored is None:
        if equal < len(tokens):
            return []
        how = f"{equal} of {len(tokens)} tokens equal with no operator aligned"
    else:
        again = sum(
            rollout is not None and _same_fp32(rescored[index][position], rollout)
            for index, position, _, rollout in tokens
        )
        if 2 * again >= equal:
            return []
        how = f"{equal} of {len(tokens)} tokens equal, where the trainer's own forward gives {again}"
    return [
        f"Training log-probs are a copy of the rollout's ({how}); nothing was compared. Pass what the trainer computed."
    ]


def _same_fp32(left: float, right: float) -> bool:
    return math.isfinite(left) and math.isfinite(right) and struct.pack(">f", left) == struct.pack(">f", right)


def _exact_zeros(found: GuardInput, side: str) -> list[str]:
    places = [
        (index, position, other)
        for index, position, training, rollout in active(found)
        for value, other in [(rollout, training) if side == "rollout" else (training, rollout)]
        if value == 0.0 and other is not None and other < _SURELY_BELOW_ZERO
        if side == "training" or not _alone(found.sequences[index].sampling)
    ]
    return _placeholders(places, side, "exact 0")


def _one_value(found: GuardInput, side: str) -> list[str]:
    """Neighbours with one and the same fp32 value on one side that the other side does not confirm for either.

    Of two sampled tokens that happens by accident once in 10^7 (values near 1 nat are 10^-7 apart); a value of nearly 0
    is common to all tokens that nobody doubts, and is none of these.
    """
    tokens = {
        (index, position): (rollout, training) if side == "rollout" else (training, rollout)
        for index, position, training, rollout in active(found)
    }
    placed = {
        place: (own, other)
        for place, (own, other) in tokens.items()
        if own is not None and other is not None and own < _SURELY_BELOW_ZERO and abs(own - other) > _FAR
    }
    places = [
        (index, position, other)
        for (index, position), (own, other) in placed.items()
        if any(placed.get((index, position + step), (None, 0.0))[0] == own for step in (-1, 1))
    ]
    if not places:
        return []
    return _placeholders(places, side, f"one value, {placed[places[0][:2]][0]:.4f}")


def _placeholders(places: Sequence[tuple[int, int, float]], side: str, what: str) -> list[str]:
    if not places:
        return []
    index, first, other = places[0]
    last = first
    while (index, last + 1) in {place[:2] for place in places}:
        last += 1
    tokens = f"token {first}" if last == first else f"tokens {first}–{last}"
    return [
        f"{len(places)} active tokens carry placeholder log-probs ({what}) on {side}, first {tokens} of sequence "
        f"{index}, where the other side has {other:.4f}; mask tokens out that were not sampled."
    ]


def _alone(sampling: SamplingSettings) -> bool:
    """Whether a token may have been the only one that survived: its processed log-prob is 0, and no placeholder."""
    truncated = sampling.top_p < 1.0 or sampling.top_k > 0 or sampling.min_p > 0.0
    return sampling.logprobs_mode.startswith("processed") and truncated


# A side that gives a token the fp32 log-prob 0 gives all others below 6e-8 together; another side that gives them 1e-3
# is ten nats of logit away, which no rounding is. A confident token may be 0 on one side and -1e-7 on the other.
_SURELY_BELOW_ZERO = -1e-3
# Nats between a value and what the other side has: ten times the mean mismatch of a run that calls for help.
_FAR = 0.5


# Fewer pairs than the first number line up by accident too often, and fewer than the second do so nearly: for unrelated
# log-probs, exponential with one mean, a quarter of the mean |difference| over 16 pairs has a chance of 1e-4 (F test).
_FEWEST_EQUAL, _FEWEST_NEAR, _NEAR = 5, 16, 0.25


def positions_shifted(found: GuardInput) -> list[str]:
    here = mean(_lagged(found, 0))
    for lag, where in ((1, "ahead of"), (-1, "behind")):
        there = _lagged(found, lag)
        equal = len(there) >= _FEWEST_EQUAL and not any(there)
        near = len(there) >= _FEWEST_NEAR and mean(there) < _NEAR * here
        if here > 0.0 and (equal or near):
            seen = (
                f"all {len(there)} overlapping pairs are equal"
                if equal
                else f"mean |dlogp| of {len(there)} pairs is {mean(there):.4f}"
            )
            return [
                f"Training is one position {where} rollout: at lag {lag} {seen}; at lag 0 mean |dlogp| is {here:.4f}. "
                "Line both up so that each log-prob belongs to the token at its own position."
            ]
    return []


def _lagged(found: GuardInput, lag: int) -> list[float]:
    """|training[i] − rollout[i + lag]| where both tokens are active and finite."""
    rollouts = {(index, position): rollout for index, position, _, rollout in active(found)}
    pairs = [(one, rollouts.get((index, position + lag))) for index, position, one, _ in active(found)]
    gaps = [abs(training - rollout) for training, rollout in pairs if rollout is not None]
    return [gap for gap in gaps if math.isfinite(gap)]


def nonfinite(found: GuardInput) -> list[str]:
    sentences = []
    for side, which in (("rollout", 3), ("training", 2)):
        values = [token[which] for token in active(found)]
        bad = sum(value is None or not math.isfinite(value) for value in values)
        if bad:
            sentences.append(
                f"{bad} of {len(values)} {side} log-probs are NaN, infinite or missing; find their tokens first."
            )
    return sentences


# By accident the lower half of an fp32 is zero once in 2^16 values; few values, or one value many times, may be so.
_FEWEST_STORED, _FEWEST_DISTINCT = 16, 4


def stored_below_fp32(found: GuardInput) -> list[str]:
    """Log-probs of which every one fits into bf16: near -5 such values are 0.03 apart."""
    sentences = []
    for side, which in (("rollout", 3), ("training", 2)):
        values = [token[which] for token in active(found)]
        known = [value for value in values if value is not None and math.isfinite(value) and value != 0.0]
        enough = len(known) >= _FEWEST_STORED and len(set(known)) >= _FEWEST_DISTINCT
        if enough and all(_fits_bf16(value) for value in known):
            sentences.append(
                f"All {len(known)} {side} log-probs are bf16 values, {_spacing(known):.3g} apart near the largest; "
                "keep them in fp32 from the log-softmax on."
            )
    return sentences


def _fits_bf16(value: float) -> bool:
    return struct.pack(">f", value)[2:] == b"\0\0"


def _spacing(values: Sequence[float]) -> float:
    return float(2.0 ** (math.frexp(max(abs(value) for value in values))[1] - 8))


def retokenised(found: GuardInput) -> list[str]:
    """Training log-probs of tokens that were not the sampled ones."""
    sentences = []
    for index, (sequence, seen) in enumerate(zip(found.sequences, found.training_token_ids or (), strict=False)):
        sampled = sequence.response_token_ids
        if len(seen) != len(sampled):
            sentences.append(
                f"Training scored {len(seen)} tokens of sequence {index} and rollout sampled {len(sampled)}; pass the "
                "sampled ids on, and never the text."
            )
            continue
        places = [place for place, pair in enumerate(zip(seen, sampled, strict=True)) if pair[0] != pair[1]]
        if places:
            first = places[0]
            sentences.append(
                f"Training scored other tokens than rollout sampled, first at index {first} of sequence {index} (id "
                f"{seen[first]} for {sampled[first]}; {len(places)} in all): the text was tokenised again, so pass the "
                "sampled ids on."
            )
    return sentences


def masks_differ(found: GuardInput) -> list[str]:
    """Tokens that one side counts and the other does not; of a stop token it is said."""
    for index, (sequence, given) in enumerate(zip(found.sequences, found.rollout_masks or (), strict=False)):
        if given is None:
            continue
        places = [place for place, pair in enumerate(zip(sequence.mask, given, strict=True)) if pair[0] != pair[1]]
        if not places:
            continue
        first, last = places[0], len(given) - 1
        side = "training" if sequence.mask[first] else "rollout"
        what = "the stop token" if places == [last] and sequence.finish_reason == "stop" else f"token {first}"
        return [
            f"Only {side} counts {what} of sequence {index} ({len(places)} tokens of it differ); use one response_mask "
            "on both sides."
        ]
    return []
