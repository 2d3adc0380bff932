"""Traps of the sampling convention: log-probs of a distribution that the other side does not use."""

import math

from mismatch_hooks.pipeline.guards.captured import GuardInput, differences, mean
from mismatch_hooks.schema.capture import SamplingSettings
from mismatch_hooks.schema.readback import Reading, Unobservable

_REQUESTED = "requested"
_GREEDY_BELOW = 1e-5  # as vLLM 0.32 has it


def one_sided_temperature(found: GuardInput) -> list[str]:
    """A temperature, or none, in the log-probs of one side only."""
    sentences = []
    divisor = found.training.settings.get("training.logprobs.temperature")
    if isinstance(divisor, Unobservable):
        sentences.append(f"The temperature of the training log-probs cannot be read ({divisor.reason}); report it.")
    # A trainer that reports no such setting has none: its log-probs are those of the logits as they are.
    scale = float(divisor.effective) if isinstance(divisor, Reading) else 1.0
    settings = {(one.sampling.temperature, one.sampling.logprobs_mode) for one in found.sequences}
    for temperature, mode in sorted(settings):
        # Greedy sampling divides by nothing, and its processed log-probs are those of the logits as they are.
        applied = temperature if mode.startswith("processed") and temperature >= _GREEDY_BELOW else 1.0
        if applied != scale:
            sentences.append(
                f"Rollout sampled at temperature {temperature} and returned {mode}, those of temperature {applied}; "
                f"training divides logits by {scale}: two distributions, because {_whose(applied, scale)}; use one "
                "temperature in both log-probs."
            )
    return sentences


def _whose(rollout: float, training: float) -> str:
    if rollout == 1.0:
        return "training alone applies a temperature"
    return "rollout alone applies a temperature" if training == 1.0 else "each side applies its own temperature"


def truncated_support(found: GuardInput) -> list[str]:
    """Processed log-probs, which are renormalised over the tokens that survive or shifted by penalties."""
    return [
        f"Rollout log-probs are processed with {name}={value}, which training does not apply{_kept(found, name)}; "
        f"sample with {name} off or return raw log-probs."
        for name, value in _transforms(found, processed=True)
    ]


def raw_of_truncated(found: GuardInput) -> list[str]:
    """Both sides agree, and on neither side is it the distribution that was sampled from."""
    return [
        f"Rollout samples with {name}={value} and returns raw log-probs: both sides agree, and neither gives the "
        "probability that the token was sampled with, so importance ratios are those of another policy."
        for name, value in _transforms(found, processed=False)
    ]


def unasked_sampling(found: GuardInput) -> list[str]:
    """Settings that the loop did not ask for and that change what is sampled."""
    neutral = SamplingSettings()
    given = {
        (name, getattr(one.sampling, name), source)
        for one in found.sequences
        for name, source in one.sampling.sources.items()
        if source != _REQUESTED and getattr(one.sampling, name) not in _OFF.get(name, (getattr(neutral, name),))
    }
    if not given:
        return []
    said = ", ".join(f"{name}={value} ({source})" for name, value, source in sorted(given))
    return [
        f"Rollout samples with settings that nobody requested: {said}; pass every sampling parameter explicitly, or "
        "build the engine with generation_config='vllm'."
    ]


def _transforms(found: GuardInput, *, processed: bool) -> list[tuple[str, float]]:
    return sorted(
        {
            (name, getattr(one.sampling, name))
            for one in found.sequences
            if one.sampling.logprobs_mode.startswith("processed") is processed
            for name, off in _OFF.items()
            if getattr(one.sampling, name) not in off
        }
    )


def _kept(found: GuardInput, name: str) -> str:
    average = mean(differences(found))
    if name not in ("top_p", "top_k", "min_p") or not math.isfinite(average):
        return ""
    # Renormalised over the survivors, each rollout log-prob is larger by −log of the mass that survived.
    return f" (mean dlogp {average:+.4f}, a kept mass of about {math.exp(average):.3f})"


_OFF: dict[str, tuple[float, ...]] = {
    "top_p": (1.0,),
    "top_k": (0, -1),
    "min_p": (0.0,),
    "repetition_penalty": (1.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
}
