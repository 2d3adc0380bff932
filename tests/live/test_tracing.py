"""A trace goes over both engines once, and once more only where something differs and time is left."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from mismatch_hooks.live.tracing import TraceReport, TracingError, trace_batch
from mismatch_hooks.schema.activation import ActivationCapture
from mismatch_hooks.schema.enums import PolicyRole
from mismatch_hooks.schema.score import ScoringSequence
from tests.pipeline.test_activations import capture, module

BATCH = [ScoringSequence(prompt_token_ids=(1,), response_token_ids=(2,), response_mask=(True,))]


@dataclass
class Engine:
    """Gives the same rows in every pass, and values where they are asked for.

    Attributes:
        role: the side.
        rows: point to (digest, value).
        clock: moved on by ``seconds`` in every pass.
        left_out: what it does not record, and why.
        asked: ``values_of`` and ``timeout_s`` of every pass.
    """

    role: PolicyRole
    rows: dict[str, tuple[str, float]]
    clock: list[float]
    seconds: float = 1.0
    left_out: Mapping[str, str] = field(default_factory=dict)
    asked: list[tuple[tuple[str, ...], float | None]] = field(default_factory=list)

    def trace(
        self, sequences: Sequence[ScoringSequence], *, values_of: Sequence[str] = (), timeout_s: float | None = None
    ) -> ActivationCapture:
        self.asked.append((tuple(values_of), timeout_s))
        self.clock[0] += self.seconds
        modules = (
            module(name, digest, values=[value] if name in values_of else [])
            for name, (digest, value) in self.rows.items()
        )
        return capture(self.role, *modules, left_out=self.left_out)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


SAME = {"embedding": ("a", 1.0), "layers.0.input_norm": ("b", 2.0), "head": ("c", 3.0)}
PARTED = SAME | {"layers.0.input_norm": ("x", 2.5), "head": ("y", 4.0)}


def traced(rollout: Any, training: Any, timeout_s: float = 60.0) -> TraceReport:
    return trace_batch({PolicyRole.ROLLOUT: rollout, PolicyRole.TRAINING: training}, BATCH, timeout_s=timeout_s)


def test_engines_that_agree_are_traced_once_and_no_value_is_kept(clock: list[float]) -> None:
    rollout, training = (Engine(role, SAME, clock) for role in PolicyRole)
    report = traced(rollout, training)
    assert report.summary == "No difference in any layer: 3 points, 1 tokens."
    assert (report.passes, report.seconds) == (2, 2.0)
    assert rollout.asked == [((), 60.0)] and training.asked == [((), 59.0)]


def test_where_they_part_a_second_pass_measures_by_how_much(clock: list[float]) -> None:
    rollout, training = Engine(PolicyRole.ROLLOUT, SAME, clock), Engine(PolicyRole.TRAINING, PARTED, clock)
    report = traced(rollout, training)
    assert report.summary == (
        "Identical up to the embedding, first difference at layer 0 input norm (1 of 1 tokens, by up to 0.5)."
    )
    assert [one.max_abs for one in report.comparisons] == [0.0, 0.5, 1.0]
    assert report.passes == 4
    assert training.asked[1] == (("layers.0.input_norm", "head"), 57.0)


def test_without_time_for_a_second_pass_the_size_stays_unknown(clock: list[float]) -> None:
    rollout, training = Engine(PolicyRole.ROLLOUT, SAME, clock), Engine(PolicyRole.TRAINING, PARTED, clock)
    report = traced(rollout, training, timeout_s=3.5)
    assert report.passes == 2
    assert report.summary.endswith("first difference at layer 0 input norm (1 of 1 tokens).")


def test_what_a_side_left_out_is_reported_with_the_reason(clock: list[float]) -> None:
    reasons = {"final_norm": "its rows are cut over 2 tensor-parallel ranks"}
    rollout = Engine(PolicyRole.ROLLOUT, SAME, clock, left_out=reasons)
    report = traced(rollout, Engine(PolicyRole.TRAINING, SAME, clock))
    assert report.left_out == {PolicyRole.ROLLOUT: reasons, PolicyRole.TRAINING: {}}


def test_an_engine_that_cannot_be_traced_is_named() -> None:
    with pytest.raises(TracingError, match="the rollout engine is a object, which has no trace"):
        traced(object(), object())


def test_a_batch_without_a_response_is_refused(clock: list[float]) -> None:
    engines: dict[PolicyRole, Any] = {role: Engine(role, SAME, clock) for role in PolicyRole}
    empty = [ScoringSequence(prompt_token_ids=(1,), response_token_ids=(), response_mask=())]
    with pytest.raises(TracingError, match="got no response token"):
        trace_batch(engines, empty, timeout_s=60.0)
