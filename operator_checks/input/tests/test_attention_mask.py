"""One sequence a row against rows as they are: a neighbour that leaks in shows, and rounding is told from it."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from mismatch_hooks.integrations.megatron import MegatronBackend
from mismatch_hooks.schema.enums import PolicyRole
from mismatch_hooks.schema.verdict import Verdict
from tests.ablating import ablate_tiny
from tests.planted_faults import native_is_reference
from tests.tiny_engines import TinyEngines

pytestmark = pytest.mark.engine
TRAINING = PolicyRole.TRAINING


def leaking(model: Any, input_ids: torch.Tensor) -> torch.Tensor:
    """All rows packed into one, with nothing that keeps a sequence from seeing the one before it."""
    packed = input_ids.reshape(1, -1)
    positions = torch.arange(packed.shape[1])[None]
    mask = torch.ones(1, 1, packed.shape[1], packed.shape[1], dtype=torch.bool).triu(1)
    logits = model(packed, positions, mask).float().reshape(*input_ids.shape, -1)[:, :-1]
    found: torch.Tensor = logits.log_softmax(dim=-1).gather(2, input_ids[:, 1:, None])[..., 0]
    return found


def judged(tiny: TinyEngines, own: Any = None) -> Verdict:
    trainer = MegatronBackend(tiny.models[TRAINING], shape=tiny.shape, token_logprobs=own)
    engines = replace(tiny, engines={**tiny.engines, TRAINING: trainer})
    with native_is_reference(tiny):
        (verdict,) = ablate_tiny(engines, ["input.attention_mask"]).verdicts
    assert [(gate.name, gate.reason) for gate in verdict.gates if not gate.ok] == []
    return verdict


def test_a_trainer_whose_packed_rows_leak_is_shown_by_its_unpacked_arm(llama_engines: TinyEngines) -> None:
    verdict = judged(llama_engines, leaking)
    arms = {arm.arm: arm.metrics for arm in verdict.arms}
    assert list(arms) == ["native", "rollout=unpacked", "training=unpacked"]
    # Every other operator is the reference, so without the neighbours both sides are equal.
    assert arms["native"]["dlogp_mean"] > 0.1
    assert arms["training=unpacked"]["bitwise_fraction"] == 1.0
    assert arms["rollout=unpacked"] == arms["native"]
    assert verdict.effects[0].arm == "training=unpacked"


def test_where_no_row_leaks_unpacking_moves_no_bit(llama_engines: TinyEngines) -> None:
    verdict = judged(llama_engines)
    assert {effect.arm: effect.bits_changed for effect in verdict.effects} == {
        "rollout=unpacked": 0,
        "training=unpacked": 0,
    }
