"""Traps that would make a verdict a lie; each returns sentences that name the value, the side and the remedy."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from mismatch_hooks.schema.capture import RolloutSequence
from mismatch_hooks.schema.readback import Readback, Reading, Unobservable
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
    """

    sequences: Sequence[RolloutSequence]
    training_logprobs: Sequence[Sequence[float]]
    aligned: bool
    rollout: Readback
    training: Readback
    rollout_weights: WeightsDigest | None
    training_weights: WeightsDigest | None
    weights_written: int


def tripped(found: GuardInput) -> tuple[str, ...]:
    """Return the sentence of every guard that was tripped, in the order of ``GUARDS``."""
    return tuple(sentence for guard in GUARDS.values() for sentence in guard(found))


def _weights_differ(found: GuardInput) -> list[str]:
    if found.rollout_weights is None or found.training_weights is None:
        return ["The weights of the two sides were not compared; give both engines a weights digest."]
    ours, theirs = found.training_weights.tensors, found.rollout_weights.tensors
    unreadable = [
        name
        for name in ours
        if ours[name].startswith("unobservable") or theirs.get(name, "").startswith("unobservable")
    ]
    if unreadable:
        return [
            f"{len(unreadable)} of {len(ours)} tensors cannot be compared ({unreadable[0]}: {ours[unreadable[0]]})."
        ]
    differing = [name for name in ours if ours[name] != theirs.get(name)] + [
        name for name in theirs if name not in ours
    ]
    if not differing:
        return []
    names = ", ".join(differing[:6]) + (", …" if len(differing) > 6 else "")
    return [
        f"{len(differing)} of {len(set(ours) | set(theirs))} tensors differ between rollout and training ({names}); "
        "kernels cannot be judged on different weights, so sync every tensor and look at the export."
    ]


def _stale_rollout(found: GuardInput) -> list[str]:
    trainer = found.training_weights.version if found.training_weights else ""
    versions = sorted({sequence.weight_version for sequence in found.sequences if sequence.weight_version})
    stale = [version for version in versions if trainer and version != trainer]
    if not stale:
        return []
    return [
        f"Samples come from weight version {', '.join(stale)} and the trainer is at {trainer}: staleness, not "
        "mismatch; score them with the weights that sampled them."
    ]


def _captured_after_update(found: GuardInput) -> list[str]:
    if not found.weights_written:
        return []
    return [
        f"The trainer's weights were written {found.weights_written} times between sampling and capture; what differs "
        "is the update, so capture the forward before the first optimizer step."
    ]


def _placeholder_logprobs(found: GuardInput) -> list[str]:
    pairs = [(training, rollout) for _, _, training, rollout in _active(found)]
    if pairs and not found.aligned and all(training == rollout for training, rollout in pairs):
        return [
            f"Training log-probs are a copy of the rollout's ({len(pairs)} of {len(pairs)} tokens equal with no "
            "operator aligned); nothing was compared. Pass what the trainer computed."
        ]
    return [*_exact_zeros(found, "rollout"), *_exact_zeros(found, "training")]


def _exact_zeros(found: GuardInput, side: str) -> list[str]:
    places = [
        (index, position, other)
        for index, position, training, rollout in _active(found)
        for value, other in [(rollout, training) if side == "rollout" else (training, rollout)]
        if value == 0.0 and other is not None and other < _SURELY_BELOW_ZERO
    ]
    if not places:
        return []
    index, first, other = places[0]
    last = first
    while (index, last + 1) in {place[:2] for place in places}:
        last += 1
    tokens = f"token {first}" if last == first else f"tokens {first}–{last}"
    return [
        f"{len(places)} active tokens carry placeholder log-probs (exact 0) on {side}, first {tokens} of sequence "
        f"{index}, where the other side has {other:.4f}; mask tokens out that were not sampled."
    ]


# A side that gives a token the fp32 log-prob 0 gives all others below 6e-8 together; another side that gives them 1e-3
# is ten nats of logit away, which no rounding is. A confident token may be 0 on one side and -1e-7 on the other.
_SURELY_BELOW_ZERO = -1e-3


def _active(found: GuardInput) -> Iterator[tuple[int, int, float, float | None]]:
    """Every active token: sequence, position, training log-prob, rollout log-prob."""
    for index, (sequence, row) in enumerate(zip(found.sequences, found.training_logprobs, strict=True)):
        for position, (training, rollout, active) in enumerate(
            zip(row, sequence.rollout_logprobs, sequence.mask, strict=True)
        ):
            if active:
                yield index, position, training, rollout


def _differences(found: GuardInput) -> list[float]:
    """training − rollout of every active token that is finite on both sides."""
    return [
        training - rollout
        for _, _, training, rollout in _active(found)
        if rollout is not None and math.isfinite(training) and math.isfinite(rollout)
    ]


# Fewer pairs than the first number line up by accident too often, and fewer than the second do so nearly: for unrelated
# log-probs, exponential with one mean, a quarter of the mean |difference| over 16 pairs has a chance of 1e-4 (F test).
_FEWEST_EQUAL, _FEWEST_NEAR, _NEAR = 5, 16, 0.25


def _positions_shifted(found: GuardInput) -> list[str]:
    here = _mean(_lagged(found, 0))
    for lag, where in ((1, "ahead of"), (-1, "behind")):
        there = _lagged(found, lag)
        equal = len(there) >= _FEWEST_EQUAL and not any(there)
        near = len(there) >= _FEWEST_NEAR and _mean(there) < _NEAR * here
        if here > 0.0 and (equal or near):
            seen = (
                f"all {len(there)} overlapping pairs are equal"
                if equal
                else f"mean |dlogp| of {len(there)} pairs is {_mean(there):.4f}"
            )
            return [
                f"Training is one position {where} rollout: at lag {lag} {seen}; at lag 0 mean |dlogp| is {here:.4f}. "
                "Line both up so that each log-prob belongs to the token at its own position."
            ]
    return []


def _lagged(found: GuardInput, lag: int) -> list[float]:
    """|training[i] − rollout[i + lag]| where both tokens are active and finite."""
    rollouts = {(index, position): rollout for index, position, _, rollout in _active(found)}
    pairs = [(one, rollouts.get((index, position + lag))) for index, position, one, _ in _active(found)]
    gaps = [abs(training - rollout) for training, rollout in pairs if rollout is not None]
    return [gap for gap in gaps if math.isfinite(gap)]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def _nonfinite(found: GuardInput) -> list[str]:
    sentences = []
    for side, which in (("rollout", 3), ("training", 2)):
        values = [token[which] for token in _active(found)]
        bad = sum(value is None or not math.isfinite(value) for value in values)
        if bad:
            sentences.append(
                f"{bad} of {len(values)} {side} log-probs are NaN, infinite or missing; find their tokens first."
            )
    return sentences


def _sampling(found: GuardInput) -> list[str]:
    sentences = []
    divisor = found.training.settings.get("training.logprobs.temperature")
    if isinstance(divisor, Unobservable):
        sentences.append(f"The temperature of the training log-probs cannot be read ({divisor.reason}); report it.")
    # A trainer that reports no such setting has none: its log-probs are those of the logits as they are.
    scale = float(divisor.effective) if isinstance(divisor, Reading) else 1.0
    settings = {(s.sampling.temperature, s.sampling.logprobs_mode) for s in found.sequences}
    for temperature, mode in sorted(settings):
        applied = temperature if mode.startswith("processed") else 1.0
        if applied != scale:
            sentences.append(
                f"Rollout sampled at temperature {temperature} and returned {mode}, those of temperature {applied}; "
                f"training divides logits by {scale}: two distributions, so use one temperature in both log-probs."
            )
    transforms = {
        (name, getattr(sequence.sampling, name))
        for sequence in found.sequences
        if sequence.sampling.logprobs_mode.startswith("processed")
        for name, off in _OFF.items()
        if getattr(sequence.sampling, name) not in off
    }
    sentences += [
        f"Rollout log-probs are processed with {name}={value}, which training does not apply{_kept(found, name)}; "
        f"sample with {name} off or return raw log-probs."
        for name, value in sorted(transforms)
    ]
    return sentences


def _kept(found: GuardInput, name: str) -> str:
    mean = _mean(_differences(found))
    if name not in ("top_p", "top_k", "min_p") or not math.isfinite(mean):
        return ""
    # Renormalised over the survivors, each rollout log-prob is larger by −log of the mass that survived.
    return f" (mean dlogp {mean:+.4f}, a kept mass of about {math.exp(mean):.3f})"


_OFF: dict[str, tuple[float, ...]] = {
    "top_p": (1.0,),
    "top_k": (0, -1),
    "min_p": (0.0,),
    "repetition_penalty": (1.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
}


def _dropout(found: GuardInput) -> list[str]:
    if found.training.effective("training.mode") == "eval":
        return []
    sentences = []
    for kind in ("attention", "hidden"):
        rate = max(_numbers(found.training.effective(f"training.dropout.{kind}")), default=0.0)
        if rate > 0:
            sentences.append(
                f"{kind} dropout of {rate} is active while training scores; set it to 0 or score in eval mode."
            )
    return sentences


def _numbers(effective: object) -> list[float]:
    # Where modules differ, a readback lists the value of each.
    values = list(effective.values()) if isinstance(effective, Mapping) else [effective]
    return [float(value) for value in values if isinstance(value, int | float)]


def _padded_vocabulary(found: GuardInput) -> list[str]:
    width, real = found.training.effective("model.vocab.logits_width"), found.rollout.effective("model.vocab.size")
    if not isinstance(width, int) or not isinstance(real, int) or width <= real:
        return []
    differences = _differences(found)
    one_sign = bool(differences) and all(difference < 0 for difference in differences)
    return [
        f"Training normalises over {width} logits and rollout over {real}: {width - real} padded columns are inside "
        f"the log-sum-exp{', and all differences have one sign' if one_sign else ''}; mask them."
    ]


GUARDS: dict[str, Callable[[GuardInput], list[str]]] = {
    "weights_differ": _weights_differ,
    "stale_rollout": _stale_rollout,
    "captured_after_update": _captured_after_update,
    "placeholder_logprobs": _placeholder_logprobs,
    "positions_shifted": _positions_shifted,
    "nonfinite_logprobs": _nonfinite,
    "sampling_convention": _sampling,
    "dropout_active": _dropout,
    "padded_vocabulary": _padded_vocabulary,
}
