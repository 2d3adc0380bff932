"""Traps that would make a verdict a lie; each returns sentences that name the value, the side and the remedy."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mismatch_hooks.schema.capture import RolloutSequence
from mismatch_hooks.schema.readback import Readback, Unobservable
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
    pairs = [
        (training, rollout)
        for sequence, row in zip(found.sequences, found.training_logprobs, strict=True)
        for training, rollout, active in zip(row, sequence.rollout_logprobs, sequence.mask, strict=True)
        if active
    ]
    if pairs and not found.aligned and all(training == rollout for training, rollout in pairs):
        return [
            f"Training log-probs are a copy of the rollout's ({len(pairs)} of {len(pairs)} tokens equal with no "
            "operator aligned); nothing was compared. Pass what the trainer computed."
        ]
    zeros = [(training, rollout) for training, rollout in pairs if (rollout == 0.0) != (training == 0.0)]
    if zeros:
        return [f"{len(zeros)} active tokens carry a placeholder log-prob (exactly 0 on one side); mask them out."]
    return []


def _nonfinite(found: GuardInput) -> list[str]:
    sentences = []
    rollout = [
        value
        for sequence in found.sequences
        for value, active in zip(sequence.rollout_logprobs, sequence.mask, strict=True)
        if active
    ]
    training = [
        value
        for sequence, row in zip(found.sequences, found.training_logprobs, strict=True)
        for value, active in zip(row, sequence.mask, strict=True)
        if active
    ]
    for side, values in (("rollout", rollout), ("training", training)):
        bad = sum(value is None or not math.isfinite(value) for value in values)
        if bad:
            sentences.append(
                f"{bad} of {len(values)} {side} log-probs are NaN, infinite or missing; find their tokens first."
            )
    return sentences


def _sampling(found: GuardInput) -> list[str]:
    sentences = []
    training_temperature = found.training.effective("training.logprob.temperature")
    scale = 1.0 if isinstance(training_temperature, Unobservable) else float(training_temperature)
    settings = {(s.sampling.temperature, s.sampling.logprobs_mode) for s in found.sequences}
    for temperature, mode in sorted(settings):
        applied = temperature if mode.startswith("processed") else 1.0
        if applied != scale:
            sentences.append(
                f"Rollout log-probs are {mode} at temperature {temperature} and training divides logits by {scale}: "
                "two distributions; use one temperature in both log-probs."
            )
    transforms = {
        (name, getattr(sequence.sampling, name))
        for sequence in found.sequences
        if sequence.sampling.logprobs_mode.startswith("processed")
        for name, off in _OFF.items()
        if getattr(sequence.sampling, name) not in off
    }
    sentences += [
        f"Rollout log-probs are processed with {name}={value}, which training does not apply; sample with {name} off "
        "or return raw log-probs."
        for name, value in sorted(transforms)
    ]
    return sentences


_OFF: dict[str, tuple[float, ...]] = {
    "top_p": (1.0,),
    "top_k": (0, -1),
    "min_p": (0.0,),
    "repetition_penalty": (1.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
}


def _dropout(found: GuardInput) -> list[str]:
    if found.training.effective("training.mode") != "train":
        return []
    rates = {kind: found.training.effective(f"training.dropout.{kind}") for kind in ("attention", "hidden")}
    active = {kind: rate for kind, rate in rates.items() if isinstance(rate, float) and rate > 0}
    return [
        f"{kind} dropout of {rate} is active while training scores; set it to 0 or score in eval mode."
        for kind, rate in active.items()
    ]


def _padded_vocabulary(found: GuardInput) -> list[str]:
    width, real = found.training.effective("model.vocab.logits_width"), found.rollout.effective("model.vocab.size")
    if not isinstance(width, int) or not isinstance(real, int) or width <= real:
        return []
    return [
        f"Training normalises over {width} logits and rollout over {real}: {width - real} padded columns are inside "
        "the log-sum-exp; mask them."
    ]


GUARDS: dict[str, Callable[[GuardInput], list[str]]] = {
    "weights_differ": _weights_differ,
    "stale_rollout": _stale_rollout,
    "captured_after_update": _captured_after_update,
    "placeholder_logprobs": _placeholder_logprobs,
    "nonfinite_logprobs": _nonfinite,
    "sampling_convention": _sampling,
    "dropout_active": _dropout,
    "padded_vocabulary": _padded_vocabulary,
}
