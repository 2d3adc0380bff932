"""C05: the trainer's fused QKV is laid out by kind where it should be by group, so another model is trained."""

import pytest
import torch

from mismatch_hooks.pipeline.guards import GuardInput, tripped
from mismatch_hooks.schema.enums import Diagnosis, PolicyRole
from mismatch_hooks.schema.verdict import Verdict
from tests.ablating import ablate_tiny, guard_input
from tests.tiny_engines import TinyEngines

pytestmark = pytest.mark.engine
QKV = [f"model.layers.{layer}.self_attn.{part}_proj.weight" for layer in (0, 1) for part in "qkv"]


def judged(tiny: TinyEngines) -> tuple[dict[str, Verdict], GuardInput]:
    found = guard_input(tiny)
    factors = ["weights.sync", "attention.kernel", "gemm.accumulation"]
    result = ablate_tiny(tiny, factors, guards=found)
    return {verdict.factor: verdict for verdict in result.verdicts}, found


def test_C05_the_six_tensors_are_named_and_no_kernel_is_judged(llama_engines: TinyEngines) -> None:
    tiny = llama_engines
    fused = [layer.self_attention.linear_qkv.weight for layer in tiny.models[PolicyRole.TRAINING].decoder.layers]
    right = [weight.detach().clone() for weight in fused]
    try:
        with torch.no_grad():
            for weight in fused:
                groups = weight.reshape(tiny.shape.kv_heads, -1, weight.shape[1])
                of_queries = tiny.shape.query_heads // tiny.shape.kv_heads * tiny.shape.head_dim
                parts = groups.split([of_queries, tiny.shape.head_dim, tiny.shape.head_dim], dim=1)
                weight.copy_(torch.cat([part.reshape(-1, weight.shape[1]) for part in parts]))
        verdicts, found = judged(tiny)
    finally:
        with torch.no_grad():
            for weight, before in zip(fused, right, strict=True):
                weight.copy_(before)
    sync = verdicts.pop("weights.sync")
    assert sync.diagnosis is Diagnosis.CAUSED_BY_ROLLOUT_SIDE
    assert "6 of 21 tensors" in sync.reason
    assert [name for name in QKV if name in sync.reason] == QKV
    assert {verdict.diagnosis for verdict in verdicts.values()} == {Diagnosis.INSUFFICIENT_EVIDENCE}
    assert all("6 of 21 tensors differ between rollout and training" in verdict.reason for verdict in verdicts.values())


def test_C05_control_the_right_layout_is_quiet(llama_engines: TinyEngines) -> None:
    verdicts, found = judged(llama_engines)
    assert tripped(found) == ()
    assert verdicts["weights.sync"].diagnosis is Diagnosis.NOT_THIS_FACTOR
    assert all(gate.ok for verdict in verdicts.values() for gate in verdict.gates)
