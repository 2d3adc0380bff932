"""An engine that misbehaves on request: failure modes that no real engine can be asked to show."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mismatch_hooks.schema.enums import Choice, ExecutionPath, PolicyRole, RebindCost, Source, SwitchStatus, Value
from mismatch_hooks.schema.environment import RequiredSetting
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

FACTOR = "attention.rope_fusion"
_SITES = {
    PolicyRole.ROLLOUT: "model.layers.*.self_attn.rotary_emb",
    PolicyRole.TRAINING: "decoder.layers.*.self_attention: apply_rotary_pos_emb",
}
_SETTINGS = {
    "library.fake": "1.0",
    "model.dtype": "bfloat16",
    "model.rope.theta": 1e4,
    "model.rope.inverse_frequency_last": 1e-4,
}


@dataclass(slots=True)
class FakeEngine:
    """Scores a token as a smooth function of its id, plus what this side's native operator adds.

    Attributes:
        side: the role it plays.
        native_error: standard deviation, nats, of what the native operator adds to every token; the reference adds 0.
        other_error: the same for operators that no factor of the test covers: added whatever is bound.
        fail: method name to what it raises.
        switch_does_nothing: the native operator runs whatever is bound, and the readback says so.
        silent_skip: the reference is installed and never called: the readback lies, the call count does not.
        leaks: what the other role's binding does here: reads REFERENCE although nobody bound this side.
        drifts: every pass adds a little: not deterministic, or not restored.
        mutates: every pass writes a weight, which no log-prob of the batch shows.
        shards: replaces the shards of every pass.
        settings: what is read back, plain values or ``Unobservable``.
        required: what it says has to be pinned.
        environment_error: what every token is off by while a binding holds environment variables.
    """

    side: PolicyRole
    native_error: float = 0.0
    other_error: float = 0.0
    fail: dict[str, BaseException] = field(default_factory=dict)
    switch_does_nothing: bool = False
    silent_skip: bool = False
    leaks: bool = False
    drifts: bool = False
    mutates: bool = False
    shards: Callable[[LogprobShard], tuple[LogprobShard, ...]] = lambda shard: (shard,)
    tensors: Mapping[str, str] = field(default_factory=lambda: {"model.layers.0.weight": "same"})
    settings: Mapping[str, Any] = field(default_factory=lambda: dict(_SETTINGS))
    required: tuple[RequiredSetting, ...] = ()
    environment_error: float = 0.0
    writes: int = 0
    passes: int = 0
    bound: Binding | None = None

    @property
    def role(self) -> PolicyRole:
        return self.side

    @property
    def capabilities(self) -> Mapping[str, RebindCost]:
        return {"operator.rope.implementation": RebindCost.PER_REQUEST}

    @property
    def paths(self) -> tuple[ExecutionPath, ...]:
        if self.side is PolicyRole.ROLLOUT:
            return (ExecutionPath.ROLLOUT_FULL_PREFILL, ExecutionPath.ROLLOUT_DECODE)
        return (ExecutionPath.TRAINING_FULL_PREFILL,)

    @contextmanager
    def bind(self, binding: Binding) -> Iterator[None]:
        self._maybe_fail("bind")
        before, self.bound = self.bound, binding
        try:
            yield
        finally:
            self.bound = before

    def logprobs(self, sequence: ScoringSequence, choice: Value) -> list[float]:
        """What this side computes for one sequence: fp32 values, in floats."""
        ids = np.array(sequence.response_token_ids, dtype=np.float64)
        exact = -1.0 - np.abs(np.sin(ids))
        stream = np.random.default_rng([*sequence.response_token_ids, len(self.side.value)])
        exact = exact + stream.standard_normal(len(ids)) * self.other_error
        if choice is Choice.NATIVE:
            exact = exact + stream.standard_normal(len(ids)) * self.native_error
        drift = self.passes * 1e-3 if self.drifts else 0.0
        held = self.environment_error if self.bound is not None and self.bound.environment else 0.0
        values: list[float] = (exact + drift + held).astype(np.float32).tolist()
        return values

    @contextmanager
    def hold(self, binding: Binding) -> Iterator[None]:
        self._maybe_fail("hold")
        with self.bind(binding):
            yield

    def score(
        self,
        sequences: Sequence[ScoringSequence],
        *,
        path: ExecutionPath | None = None,
        timeout_s: float | None = None,
    ) -> Score:
        self._maybe_fail("score")
        self.passes += 1
        self.writes += self.mutates
        binding = self.bound or Binding(role=self.side)
        asked = binding.choices.get(FACTOR, Choice.NATIVE)
        ran = Choice.NATIVE if self.switch_does_nothing or self.silent_skip else asked
        slices = tuple(
            ShardSlice(sequence=index, start=0, logprobs=tuple(self.logprobs(sequence, ran)))
            for index, sequence in enumerate(sequences)
        )
        calls: tuple[CallCount, ...] = ()
        if asked is Choice.REFERENCE:
            observed = 0 if ran is Choice.NATIVE else 2
            calls = (CallCount(factor=FACTOR, site=_SITES[self.side], rank=0, expected=2, observed=observed),)
        return Score(
            path=path or self.paths[0],
            binding=binding,
            shards=self.shards(LogprobShard(rank=0, world_size=1, slices=slices)),
            evidence=Evidence(forwards=(1,), calls=calls, switches=self.switch_states(binding)),
            seconds=0.0,
        )

    def switch_states(self, binding: Binding) -> tuple[SwitchState, ...]:
        requested = binding.choices.get(FACTOR, Choice.NATIVE)
        effective = requested
        if self.switch_does_nothing:
            effective = Choice.NATIVE
        if self.leaks and self.bound is None:
            effective = Choice.REFERENCE
        status = SwitchStatus.APPLIED if effective is requested else SwitchStatus.FELL_BACK
        return (SwitchState(factor=FACTOR, rank=0, requested=requested, effective=effective, status=status),)

    def required_settings(self, longest: int) -> tuple[RequiredSetting, ...]:
        return self.required

    def read_back(self) -> Readback:
        self._maybe_fail("read_back")
        return Readback(
            role=self.side,
            settings={
                key: found if isinstance(found, Unobservable) else Reading(effective=found, source=Source.LIVE_MODULE)
                for key, found in self.settings.items()
            },
        )

    def weights_digest(self, prefixes: Sequence[str] | None = None) -> WeightsDigest:
        self._maybe_fail("weights_digest")
        return WeightsDigest(role=self.side, version="1", tensors=self.tensors)

    def mutation_count(self) -> int:
        self._maybe_fail("mutation_count")
        return self.writes

    def _maybe_fail(self, method: str) -> None:
        if method in self.fail:
            raise self.fail[method]
