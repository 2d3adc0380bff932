"""Traps of settings: read back from the live engines, not taken from what was asked for."""

from collections.abc import Mapping

from mismatch_hooks.pipeline.compare import not_as_requested
from mismatch_hooks.pipeline.guards.captured import GuardInput, differences
from mismatch_hooks.schema.readback import Reading, Unobservable


def dropout(found: GuardInput) -> list[str]:
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


def padded_vocabulary(found: GuardInput) -> list[str]:
    width, real = found.training.effective("model.vocab.logits_width"), found.rollout.effective("model.vocab.size")
    if not isinstance(width, int) or not isinstance(real, int) or width <= real:
        return []
    signed = differences(found)
    one_sign = bool(signed) and all(difference < 0 for difference in signed)
    return [
        f"Training normalises over {width} logits and rollout over {real}: {width - real} padded columns are inside "
        f"the log-sum-exp{', and all differences have one sign' if one_sign else ''}; mask them."
    ]


def packed_without_reset(found: GuardInput) -> list[str]:
    """Several sequences share a row of the trainer's forward, and nothing says where one begins."""
    packing = found.training.effective("training.logprobs.packing")
    if not isinstance(packing, str) or not packing.endswith("positions run on"):
        return []
    return [
        "Training packs several sequences into one row without packed_seq_params: positions run on from one to the "
        "next, and each may see the one before; hand megatron-core the boundaries (cu_seqlens), or score one sequence "
        "a row."
    ]


def not_in_effect(found: GuardInput) -> list[str]:
    """Settings whose effective value is another one than somebody asked for."""
    return [
        f"{key} on {side.role.value}: requested {reading.requested!r} ({reading.requested_by}), in effect "
        f"{reading.effective!r}."
        for side in (found.rollout, found.training)
        for key in not_as_requested(side)
        if isinstance(reading := side.settings[key], Reading)
    ]


def routing_replay_without_effect(found: GuardInput) -> list[str]:
    """The rollout's choice of experts was to be replayed and is not: the threshold table would be the wrong row."""
    return [
        f"Routing replay is asked for on {side.role.value} and not in effect ({key} is {reading.effective!r}); turn it "
        "on in the live router, or take it out of the request."
        for side in (found.rollout, found.training)
        for key, reading in side.settings.items()
        if key.endswith("routing_replay") and isinstance(reading, Reading) and reading.differs_from_request
    ]


_PINS = ("NCCL_ALGO", "NCCL_PROTO")


def collective_unpinned(found: GuardInput) -> list[str]:
    """Bits are expected of a sum over ranks whose algorithm may change from call to call."""
    if not (found.aligned or found.bits_expected):
        return []
    sentences = []
    for side in (found.rollout, found.training):
        ranks = side.effective("parallel.tensor")
        backend = str(side.effective("parallel.tensor.backend"))
        loose = [name for name in _PINS if isinstance(side.effective(f"environment.{name}"), Unobservable)]
        if isinstance(ranks, int) and ranks > 1 and "nccl" in backend and loose:
            sentences.append(
                f"{side.role.value} adds up over {ranks} ranks with NCCL and {' and '.join(loose)} unset, so the order "
                "of the sum is open while bits are expected; set them before the process starts."
            )
    return sentences
