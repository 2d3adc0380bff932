"""Traps that would make a verdict a lie: the table of all of them, and the guards that run before a verdict.

Each guard is a function of one ``GuardInput`` that returns sentences, which name the value, the side and the remedy.
The modules of this folder hold them by theme, and nothing outside imports those.
"""

from collections.abc import Callable, Mapping

from mismatch_hooks.pipeline.guards import sampling, settings, tokens, weights
from mismatch_hooks.pipeline.guards.captured import GuardInput
from mismatch_hooks.schema.enums import NoiseFloor
from mismatch_hooks.schema.pitfall import FailureMode, GuardPlace, Pitfall

_POSITIVE, _NEGATIVE = FailureMode.STRUCTURAL_FALSE_POSITIVE, FailureMode.SILENT_FALSE_NEGATIVE
_MISSING, _DEFAULT = FailureMode.MISSING_INSTRUMENTATION, FailureMode.CONFIG_DEFAULT_TRAP
_CONVENTION = FailureMode.CONVENTION_MISMATCH

Guard = Callable[[GuardInput], list[str]]


def _pitfall(
    id: str, mode: FailureMode, symptom: str, cause: str, place: GuardPlace = GuardPlace.PITFALLS_CLEAR
) -> Pitfall:
    return Pitfall(id=id, failure_mode=mode, symptom=symptom, actual_cause=cause, guard=place)


_WITH_GUARD: tuple[tuple[Pitfall, Guard], ...] = (
    (
        _pitfall(
            "weights_differ", _POSITIVE, "every kernel looks guilty", "a sync delivered a part, or another layout"
        ),
        weights.weights_differ,
    ),
    (
        _pitfall("stale_rollout", _POSITIVE, "the mismatch grows with the step size", "samples of older weights"),
        weights.stale_rollout,
    ),
    (
        _pitfall("captured_after_update", _POSITIVE, "the ratio drifts in a step", "the forward followed an update"),
        weights.captured_after_update,
    ),
    (
        _pitfall(
            "prefix_cache_outlived_weights",
            _NEGATIVE,
            "live values differ and a re-score by prefill does not",
            "cached prefixes of older weights were served",
        ),
        weights.prefix_cache_outlived_weights,
    ),
    (
        _pitfall("placeholder_logprobs", _NEGATIVE, "a perfect zero", "nothing was compared, or zeros stand for it"),
        tokens.placeholder_logprobs,
    ),
    (
        _pitfall("positions_shifted", _CONVENTION, "a large mismatch everywhere", "one side is a position ahead"),
        tokens.positions_shifted,
    ),
    (
        _pitfall("retokenised", _CONVENTION, "single tokens differ by nats", "the text was tokenised again"),
        tokens.retokenised,
    ),
    (
        _pitfall(
            "masks_differ", _CONVENTION, "other token counts than the loss has", "a stop or tool token counted once"
        ),
        tokens.masks_differ,
    ),
    (
        _pitfall("stored_below_fp32", _POSITIVE, "differences come in steps", "log-probs were rounded to bf16"),
        tokens.stored_below_fp32,
    ),
    (
        _pitfall("nonfinite_logprobs", _NEGATIVE, "a mean over fewer tokens", "NaN or infinite values were dropped"),
        tokens.nonfinite,
    ),
    (
        _pitfall("one_sided_temperature", _CONVENTION, "a mismatch that training cannot lower", "two temperatures"),
        sampling.one_sided_temperature,
    ),
    (
        _pitfall("truncated_support", _CONVENTION, "differences of one sign", "renormalised over what survived"),
        sampling.truncated_support,
    ),
    (
        _pitfall("unasked_sampling", _DEFAULT, "as truncated support", "the checkpoint's generation config was used"),
        sampling.unasked_sampling,
    ),
    (
        _pitfall("dropout_active", _POSITIVE, "training differs from itself", "dropout acts while it scores"),
        settings.dropout,
    ),
    (
        _pitfall("padded_vocabulary", _CONVENTION, "differences of one sign", "padded columns inside the log-sum-exp"),
        settings.padded_vocabulary,
    ),
    (
        _pitfall(
            "packed_without_reset",
            _CONVENTION,
            "later sequences of a row differ",
            "positions run on across packed sequences",
        ),
        settings.packed_without_reset,
    ),
    (
        _pitfall(
            "routing_replay_without_effect", _DEFAULT, "no drop against a run without replay", "it is not in effect"
        ),
        settings.routing_replay_without_effect,
    ),
    (
        _pitfall("collective_unpinned", _MISSING, "bits that change from run to run", "the order of a sum is open"),
        settings.collective_unpinned,
    ),
)
_WITH_NOTE: tuple[tuple[Pitfall, Guard], ...] = (
    (
        _pitfall(
            "raw_of_truncated",
            _CONVENTION,
            "no mismatch at all",
            "neither side is the sampling distribution",
            GuardPlace.NOTE,
        ),
        sampling.raw_of_truncated,
    ),
    (
        # A note, because it is what the verdicts are about: blocking would keep the guilty operator from being named.
        _pitfall("not_in_effect", _DEFAULT, "a setting that changes nothing", "it never took effect", GuardPlace.NOTE),
        settings.not_in_effect,
    ),
)
_ELSEWHERE = (
    _pitfall(
        "patch_never_ran",
        _NEGATIVE,
        "a swap that changes nothing",
        "a compiled graph or a stored method skipped the patched function",
        GuardPlace.EVIDENCE_COMPLETE,
    ),
    _pitfall(
        "slices_counted_twice",
        _POSITIVE,
        "a mean over more tokens than there are",
        "context-parallel slices overlap, or a rank is missing or doubled",
        GuardPlace.SHARDS_COMPLETE,
    ),
    _pitfall(
        "lengths_disagree",
        _CONVENTION,
        "log-probs slide along the response",
        "a mask or log-probs shorter or longer than the response",
        GuardPlace.CAPTURE,
    ),
    _pitfall(
        "prefill_was_split",
        _POSITIVE,
        "a re-score differs from itself on another day",
        "the engine cut a prefill into pieces, and another cut gives other bits",
        GuardPlace.READBACK,
    ),
)

PITFALLS: Mapping[str, Pitfall] = {
    pitfall.id: pitfall for pitfall in (*(row[0] for row in _WITH_GUARD + _WITH_NOTE), *_ELSEWHERE)
}
GUARDS: Mapping[str, Guard] = {pitfall.id: guard for pitfall, guard in _WITH_GUARD}
NOTES: Mapping[str, Guard] = {pitfall.id: guard for pitfall, guard in _WITH_NOTE}


def tripped(found: GuardInput, floor: NoiseFloor = NoiseFloor.PRODUCTION) -> tuple[str, ...]:
    """Return the sentence of every guard that was tripped, in the order of the table; each blocks a verdict."""
    return _sentences(GUARDS, found, floor)


def notes(found: GuardInput, floor: NoiseFloor = NoiseFloor.PRODUCTION) -> tuple[str, ...]:
    """Return what a reader of a verdict should know and what does not block it."""
    return _sentences(NOTES, found, floor)


def _sentences(guards: Mapping[str, Guard], found: GuardInput, floor: NoiseFloor) -> tuple[str, ...]:
    return tuple(
        sentence for id, guard in guards.items() if floor >= PITFALLS[id].lowest_floor for sentence in guard(found)
    )


__all__ = ["GUARDS", "NOTES", "PITFALLS", "GuardInput", "notes", "tripped"]
