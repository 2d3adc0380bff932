"""Small hand-made passes, factors and captures that the tests of the pipeline change one thing of."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mismatch_hooks.pipeline.guards import GuardInput
from mismatch_hooks.pipeline.score import ArmTokens, PassKey
from mismatch_hooks.schema.capture import RolloutSequence, SamplingSettings
from mismatch_hooks.schema.enums import (
    Arm,
    Choice,
    ExecutionPath,
    FactorCategory,
    PolicyRole,
    ReferenceAuthority,
    Source,
    SwitchStatus,
    Value,
)
from mismatch_hooks.schema.factor import CallSite, MismatchFactor, Prerequisites, ReferenceImplementation, Switch
from mismatch_hooks.schema.readback import Readback, Reading, Unobservable
from mismatch_hooks.schema.score import (
    Binding,
    CallCount,
    Evidence,
    LogprobShard,
    Score,
    ScoringSequence,
    ShardSlice,
    SwitchState,
    WeightsDigest,
)

ROLLOUT, TRAINING = PolicyRole.ROLLOUT, PolicyRole.TRAINING
NATIVE, REFERENCE = Choice.NATIVE, Choice.REFERENCE
EPSILONS: dict[str, Any] = {"epsilon_low": 0.2, "epsilon_high": 0.2}

FP32 = ReferenceImplementation(
    name="fp32", authority=ReferenceAuthority.SELF_WRITTEN, covers_paths=(), verified_on="CPU"
)
ROPE = MismatchFactor(
    id="attention.rope_fusion",
    category=FactorCategory.KERNEL_IMPLEMENTATION,
    question="?",
    switch=Switch(path="operator.rope.implementation", allowed=("native", "reference")),
    references=(FP32,),
    call_sites=(CallSite(role=ROLLOUT, name="rotary_emb"), CallSite(role=TRAINING, name="apply_rotary")),
    prerequisites=Prerequisites(required_model_traits=("rope",)),
    recommendation="put rope in fp32 on the {side} side.",
)

# Three tokens, of which the middle one of the second sequence does not count.
SEQUENCES = (
    ScoringSequence(prompt_token_ids=(1,), response_token_ids=(2, 3), response_mask=(True, True)),
    ScoringSequence(prompt_token_ids=(1,), response_token_ids=(4, 5, 6), response_mask=(True, False, True)),
)


def switch_state(requested: Value, **changes: Any) -> SwitchState:
    """A switch that was read back as asked for, but for ``changes``."""
    plain = SwitchState(factor=ROPE.id, rank=0, requested=requested, effective=requested, status=SwitchStatus.APPLIED)
    return replace(plain, **changes)


def calls(role: PolicyRole, **changes: Any) -> CallCount:
    """Two forwards of a model with two layers, all counted, but for ``changes``."""
    site = next(site.name for site in ROPE.call_sites if site.role is role)
    return replace(CallCount(factor=ROPE.id, site=site, rank=0, expected=4, observed=4), **changes)


def shard(
    rank: int = 0, world_size: int = 1, slices: Sequence[tuple[int, int, tuple[float, ...]]] = ()
) -> LogprobShard:
    """A shard of ``(sequence, start, log-probs)``."""
    return LogprobShard(
        rank=rank,
        world_size=world_size,
        slices=tuple(ShardSlice(sequence=sequence, start=start, logprobs=row) for sequence, start, row in slices),
    )


WHOLE = ((0, 0, (-1.0, -2.0)), (1, 0, (-3.0, -4.0, -5.0)))


def score(role: PolicyRole, choice: Value, **evidence: Any) -> Score:
    """A healthy pass, but for the named fields of its evidence."""
    return Score(
        path=ExecutionPath.TRAINING_FULL_PREFILL if role is TRAINING else ExecutionPath.ROLLOUT_FULL_PREFILL,
        binding=Binding(role=role, choices={ROPE.id: choice}),
        shards=(shard(slices=WHOLE),),
        evidence=Evidence(
            **{
                "forwards": (2,),
                "calls": (calls(role),) if choice is REFERENCE else (),
                "switches": (switch_state(choice),),
                **evidence,
            }
        ),
        seconds=0.1,
    )


def passes() -> dict[PassKey, Score]:
    """All four healthy passes."""
    return {(role, choice): score(role, choice) for role in PolicyRole for choice in Choice}


def other_side() -> dict[PolicyRole, tuple[SwitchState, ...]]:
    """While one role was on the reference, the other one read native."""
    return {role: (switch_state(NATIVE),) for role in PolicyRole}


def arms(
    both_native: np.ndarray,
    rollout_reference_only: np.ndarray,
    training_reference_only: np.ndarray,
    both_reference: np.ndarray,
) -> dict[str, ArmTokens]:
    """Four arms from ``[sequences, tokens]`` differences training − rollout; the rollout's log-probs are −2."""
    named = zip(Arm, (both_native, rollout_reference_only, training_reference_only, both_reference), strict=True)
    return {arm: arm_tokens(dlogp) for arm, dlogp in named}


def arm_tokens(dlogp: np.ndarray) -> ArmTokens:
    """One arm from ``[sequences, tokens]`` differences."""
    flat = dlogp.astype(np.float64).reshape(-1)
    rollout = np.full_like(flat, -2.0)
    return ArmTokens(
        training=rollout + flat, rollout=rollout, sequence=np.repeat(np.arange(dlogp.shape[0]), dlogp.shape[1])
    )


def readback(role: PolicyRole, settings: Mapping[str, Any] | None = None) -> Readback:
    """Plain values as read from live modules; an ``Unobservable`` stays one."""
    return Readback(
        role=role,
        settings={
            key: given if isinstance(given, Unobservable) else Reading(effective=given, source=Source.LIVE_MODULE)
            for key, given in (settings or {}).items()
        },
    )


def digest(role: PolicyRole, tensors: Mapping[str, str], version: str = "7") -> WeightsDigest:
    """A digest of named tensors."""
    return WeightsDigest(role=role, version=version, tensors=tensors)


def sequence(
    rollout_logprobs: Sequence[float | None],
    *,
    mask: Sequence[bool] | None = None,
    weight_version: str = "7",
    **sampling: Any,
) -> RolloutSequence:
    """One rollout with the given log-probs, sampled as ``sampling`` says."""
    return RolloutSequence(
        prompt_token_ids=(1,),
        response_token_ids=tuple(range(len(rollout_logprobs))),
        rollout_logprobs=tuple(rollout_logprobs),
        response_mask=None if mask is None else tuple(mask),
        sampling=SamplingSettings(**sampling),
        weight_version=weight_version,
    )


def guard_input(
    sequences: Sequence[RolloutSequence] | None = None,
    training_logprobs: Sequence[Sequence[float]] | None = None,
    **changes: Any,
) -> GuardInput:
    """A healthy capture, but for what is given."""
    tensors = {"model.norm.weight": "aa", "lm_head.weight": "bb"}
    healthy = GuardInput(
        sequences=[sequence([-1.0, -2.0, -0.5])] if sequences is None else sequences,
        training_logprobs=[[-1.01, -1.98, -0.52]] if training_logprobs is None else training_logprobs,
        aligned=False,
        rollout=readback(ROLLOUT, {"model.vocab.size": 512}),
        training=readback(
            TRAINING,
            {
                "model.vocab.logits_width": 512,
                "training.mode": "train",
                "training.dropout.attention": 0.0,
                "training.dropout.hidden": 0.0,
            },
        ),
        rollout_weights=digest(ROLLOUT, tensors),
        training_weights=digest(TRAINING, tensors),
        weights_written=0,
    )
    return replace(healthy, **changes)
