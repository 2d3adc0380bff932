"""Settings that no engine can read back by itself: what requests asked for, and what is loaded, as one digest."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from mismatch_hooks.live.weights import combined_digest
from mismatch_hooks.schema.capture import RolloutSequence, SamplingSettings
from mismatch_hooks.schema.enums import Source
from mismatch_hooks.schema.readback import Readback, Reading
from mismatch_hooks.schema.score import WeightsDigest

_SAMPLING = tuple(one.name for one in fields(SamplingSettings) if one.name not in ("sources", "logprobs_mode"))

_SOURCES = {"generation_config.json": Source.GENERATION_CONFIG, "class default": Source.CLASS_DEFAULT}


def with_digest(readback: Readback, weights: WeightsDigest) -> Readback:
    """Return the readback with ``weights.digest``."""
    where = f"{len(weights.tensors)} live tensors, by content"
    digest = Reading(effective=combined_digest(weights), source=Source.LIVE_MODULE, where=where)
    return Readback(role=readback.role, settings={**readback.settings, "weights.digest": digest})


def with_sampling(readback: Readback, sequences: Sequence[RolloutSequence]) -> Readback:
    """Return the readback with ``rollout.sampling.*`` as the captured requests really used them."""
    if not sequences:
        return readback
    return Readback(
        role=readback.role,
        settings={
            **readback.settings,
            **{f"rollout.sampling.{name}": _sampling(name, sequences) for name in _SAMPLING},
        },
    )


def _sampling(name: str, sequences: Sequence[RolloutSequence]) -> Reading:
    counts: dict[Any, int] = {}
    for sequence in sequences:
        value = getattr(sequence.sampling, name)
        counts[value] = counts.get(value, 0) + 1
    effective = next(iter(counts)) if len(counts) == 1 else {str(value): count for value, count in counts.items()}
    named = sequences[0].sampling.sources.get(name, "")
    source = _SOURCES.get(named, Source.REQUESTED)
    return Reading(effective=effective, source=source, where=named or f"{len(sequences)} requests of one step")
