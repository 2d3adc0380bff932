"""Traps of weights and time: other weights, stale samples, stale cache entries, a forward after the update."""

from mismatch_hooks.pipeline.guards.captured import GuardInput


def weights_differ(found: GuardInput) -> list[str]:
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


def stale_rollout(found: GuardInput) -> list[str]:
    trainer = found.training_weights.version if found.training_weights else ""
    versions = sorted({sequence.weight_version for sequence in found.sequences if sequence.weight_version})
    stale = [version for version in versions if trainer and version != trainer]
    if not stale:
        return []
    return [
        f"Samples come from weight version {', '.join(stale)} and the trainer is at {trainer}: staleness, not "
        "mismatch; score them with the weights that sampled them."
    ]


def captured_after_update(found: GuardInput) -> list[str]:
    if not found.weights_written:
        return []
    return [
        f"The trainer's weights were written {found.weights_written} times between sampling and capture; what differs "
        "is the update, so capture the forward before the first optimizer step."
    ]


def prefix_cache_outlived_weights(found: GuardInput) -> list[str]:
    """Cached tokens that may have been computed with other weights; scoring prompts again bypasses the cache."""
    sentences = []
    step = "" if found.rollout_updated_at is None else f" at step {found.rollout_updated_at}"
    for outlived, what in (
        (True, f"was not reset after the weight update{step}"),
        (None, f"may not have been reset after the weight update{step}, which this engine cannot be asked"),
    ):
        served = [one for one in found.sequences if one.cached_tokens and one.cache_outlived_weights is outlived]
        if served:
            tokens = sum(one.cached_tokens or 0 for one in served)
            versions = ", ".join(sorted({one.weight_version for one in served if one.weight_version}))
            sentences.append(
                f"Rollout's prefix cache {what}{f' to version {versions}' if versions else ''}: {tokens} cached tokens "
                f"served to {len(served)} sequences; call reset_prefix_cache after every sync."
            )
    return sentences
