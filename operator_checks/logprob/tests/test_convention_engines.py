"""The sweep over conventions on the live trainer: the arm that equals native says which one the trainer has."""

from dataclasses import replace
from typing import Any

import pytest

from mismatch_hooks.integrations.megatron import MegatronBackend
from mismatch_hooks.schema.enums import Diagnosis, PolicyRole
from mismatch_hooks.schema.verdict import Verdict
from tests.ablating import SEQUENCES, ablate_tiny
from tests.planted_faults import training_logprobs_at
from tests.tiny_engines import TinyEngines

pytestmark = pytest.mark.engine
TRAINING = PolicyRole.TRAINING
SAMPLED = tuple(replace(sequence, temperature=0.7) for sequence in SEQUENCES)


def judged(tiny: TinyEngines, own: Any = None) -> Verdict:
    trainer = MegatronBackend(tiny.models[TRAINING], shape=tiny.shape, token_logprobs=own)
    engines = replace(tiny, engines={**tiny.engines, TRAINING: trainer})
    (verdict,) = ablate_tiny(engines, ["logprob.convention"], sequences=SAMPLED).verdicts
    assert all(gate.ok for gate in verdict.gates)
    return verdict


def bits_changed(verdict: Verdict) -> dict[str, int]:
    return {effect.arm: effect.bits_changed for effect in verdict.effects}


def test_a_trainer_that_divides_nothing_equals_the_raw_arm_to_the_bit(llama_engines: TinyEngines) -> None:
    changed = bits_changed(judged(llama_engines))
    assert changed["training=raw"] == 0
    assert changed["training=processed"] > 0


def test_a_trainer_hard_wired_to_a_temperature_equals_the_processed_arm_and_raw_lowers_the_mismatch(
    llama_engines: TinyEngines,
) -> None:
    verdict = judged(llama_engines, training_logprobs_at(0.7))
    assert bits_changed(verdict)["training=processed"] == 0
    means = {arm.arm: arm.metrics["dlogp_mean"] for arm in verdict.arms}
    assert means["training=raw"] < 0.2 * means["native"]
    assert verdict.diagnosis is Diagnosis.INSUFFICIENT_EVIDENCE  # a sweep ranks and accuses nobody
    assert verdict.effects[0].arm == "training=raw"


def test_greedy_sampling_divides_by_nothing(llama_engines: TinyEngines) -> None:
    greedy = tuple(replace(sequence, temperature=0.0) for sequence in SEQUENCES)
    (verdict,) = ablate_tiny(llama_engines, ["logprob.convention"], sequences=greedy).verdicts
    assert bits_changed(verdict) == {"training=raw": 0, "training=processed": 0}
