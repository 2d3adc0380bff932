"""Compare the settings of the two sides, those that must match first."""

from collections.abc import Sequence

from mismatch_hooks.schema.environment import RequiredSetting
from mismatch_hooks.schema.readback import Readback, Unobservable

# Different values here are a mismatch by themselves, whatever the metrics say; in the order in which they are shown.
MUST_MATCH = (
    "weights.digest",
    "model.norm.epsilon",
    "model.rope.theta",
    "model.rope.scaling_type",
    "model.rope.inverse_frequency_last",
    "model.dtype",
    "model.head.dtype",
    "model.vocab.size",
    "model.vocab.logits_width",
    "model.layers",
    "model.tied_embeddings",
)


def differing_settings(rollout: Readback, training: Readback) -> list[str]:
    """Return the keys that differ between the sides, those that must match first.

    Outside ``MUST_MATCH`` only settings that both sides report are compared. A setting that must match and is
    unobservable on a side counts as different: unobservable is not equal.
    """
    must_match = [key for key in MUST_MATCH if _differs(rollout, training, key)]
    shared = sorted(set(rollout.settings) & set(training.settings) - set(MUST_MATCH))
    return must_match + [key for key in shared if _differs(rollout, training, key)]


def not_as_requested(readback: Readback) -> list[str]:
    """Return the keys whose effective value is not the one that somebody asked for."""
    return sorted(
        key
        for key, found in readback.settings.items()
        if not isinstance(found, Unobservable) and found.differs_from_request
    )


def suspect_settings(rollout: Readback, training: Readback) -> list[str]:
    """Return the keys that are enough by themselves to ask what they change.

    Those are the ones that must match and do not, and those in effect otherwise than requested. Names of
    implementations differ between any two engines and are not among them.
    """
    differing = [key for key in MUST_MATCH if _differs(rollout, training, key)]
    return list(dict.fromkeys((*differing, *not_as_requested(training), *not_as_requested(rollout))))


def unpinned(readback: Readback, required: Sequence[RequiredSetting]) -> list[tuple[RequiredSetting, str]]:
    """Return the settings that have to be pinned on this side and are not, each with one sentence."""
    return [(setting, why) for setting in required if (why := setting.broken(readback))]


def _differs(rollout: Readback, training: Readback, key: str) -> bool:
    if key not in rollout.settings and key not in training.settings:
        return False
    ours, theirs = rollout.effective(key), training.effective(key)
    return isinstance(ours, Unobservable) or isinstance(theirs, Unobservable) or ours != theirs
