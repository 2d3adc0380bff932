"""Whether a temperature explains why captured log-probs are not those of the logits, and which one.

A temperature on one side leaves a mismatch that no operator causes. Settings name it where they can be read; a loop
that divides its logits by a number of its own has no setting, so here the number is searched for: the trainer scores
the same tokens with its logits divided by one temperature after another until they are what was captured.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mismatch_hooks.pipeline.metrics import from_lists, measure
from mismatch_hooks.schema.enums import PolicyRole

Rows = Sequence[Sequence[float | None]]

# Nats of mean |dlogp| between captured values and a re-score, above which a reason is looked for: twice what bf16
# rounding leaves between two frameworks on the models that were run (0.044 on SmolLM2-135M).
OPEN = 0.1
# A temperature explains a difference that it removes all but a fifth of.
_EXPLAINED = 0.2
_LOWEST, _HIGHEST, _PRECISION = 0.2, 4.0, 0.02
# A search is not held to the time budget, so it is held to this: verdicts beside a temperature would be worth nothing.
_MOST_PASSES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class TemperatureFit:
    """The temperature that comes closest.

    Attributes:
        temperature: to ``_PRECISION``.
        left: mean |dlogp| that remains at it, nats.
    """

    temperature: float
    left: float


def fit_temperature(
    score_at: Callable[[float], Rows], captured: Rows, masks: Sequence[Sequence[bool]]
) -> TemperatureFit:
    """Return the temperature at which the trainer's log-probs come closest to ``captured``.

    Args:
        score_at: log-probs of the same tokens with the logits divided by a temperature; one scoring pass a call.
        captured: one list a sequence, nats.
        masks: True on tokens that count.
    """
    from scipy.optimize import minimize_scalar

    def left(logarithm: float) -> float:
        return _distance(score_at(math.exp(logarithm)), captured, masks)

    bounds = (math.log(_LOWEST), math.log(_HIGHEST))
    options = {"xatol": _PRECISION / 4, "maxiter": _MOST_PASSES}
    found = minimize_scalar(left, bounds=bounds, method="bounded", options=options)
    return TemperatureFit(temperature=math.exp(float(found.x)), left=float(found.fun))


def _distance(scored: Rows, captured: Rows, masks: Sequence[Sequence[bool]]) -> float:
    state = measure(*from_lists(scored, captured, masks), epsilon_low=0.2, epsilon_high=0.2)
    return float(state.finalize()["dlogp_mean"])


def temperature_sentences(
    paths: Mapping[str, Mapping[str, float]],
    captured: Mapping[PolicyRole, Rows],
    masks: Sequence[Sequence[bool]],
    score_at: Callable[[float], Rows] | None,
) -> tuple[str, ...]:
    """Return a sentence for each side whose captured log-probs are explained by a temperature other than 1.

    Args:
        paths: comparisons of the captured values with a re-score (``training_rescore``, and for rollout
            ``live_against_prefill`` or ``decode_against_prefill``) and of both sides (``cross_framework``).
        captured: what each side gave in the live run.
        masks: True on tokens that count.
        score_at: see ``fit_temperature``; None where the trainer cannot be asked.
    """
    if score_at is None:
        return ()
    terms = {
        # A loop's own scoring function repeats the loop's division, and then only the other framework shows it.
        PolicyRole.TRAINING: ("training_rescore", "cross_framework"),
        PolicyRole.ROLLOUT: ("live_against_prefill", "live_against_decode", "decode_against_prefill"),
    }
    sentences = []
    for role, names in terms.items():
        size = max((paths[name]["dlogp_mean"] for name in names if name in paths), default=0.0)
        if size > OPEN and role is PolicyRole.TRAINING:  # against the logits as they are, whatever the loop scores with
            size = _distance(score_at(1.0), captured[role], masks)
        if not size > OPEN:
            continue
        fit = fit_temperature(score_at, captured[role], masks)
        if fit.left < _EXPLAINED * size and abs(fit.temperature - 1.0) > _PRECISION:
            sentences.append(
                f"The log-probs that {role.value} gave in the live run are not those of the logits as they are (mean "
                f"|dlogp| {size:.4f} against a re-score): a temperature of {fit.temperature:.2f} ± {_PRECISION} fits "
                f"best and leaves {fit.left:.4f}; use one temperature in both log-probs."
            )
    return tuple(sentences)
