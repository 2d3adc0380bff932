"""C20: a patch that the running engine never executes is no binding, whatever the output says."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from mismatch_hooks.operator_checks.norm import adapter
from mismatch_hooks.operator_checks.norm.factors.rmsnorm import FACTOR
from mismatch_hooks.pipeline.bind import PatchSite
from mismatch_hooks.references.norm import add_rms_norm, rms_norm
from mismatch_hooks.schema.enums import Diagnosis, GateName, Origin, PolicyRole
from mismatch_hooks.schema.verdict import Verdict
from tests.ablating import ablate_tiny
from tests.tiny_engines import TinyEngines

pytestmark = pytest.mark.engine
ROLLOUT = PolicyRole.ROLLOUT


def judged(tiny: TinyEngines, monkeypatch: pytest.MonkeyPatch, attribute: str) -> Verdict:
    """Judge the norm with the rollout's reference assigned to ``attribute`` of vLLM's class, too late."""
    from vllm.model_executor.layers.layernorm import RMSNorm

    def build(original: Any) -> Any:
        def norm(self: Any, x: Any, residual: Any = None) -> Any:
            if residual is None:
                return rms_norm(x, self.weight, epsilon=self.variance_epsilon)
            return add_rms_norm(x, residual, self.weight, epsilon=self.variance_epsilon)

        return norm

    original = adapter.sites
    (site,) = (site.name for site in FACTOR.call_sites if site.role is ROLLOUT)
    norms = 2 * tiny.shape.layers + 1

    def sites(factor: str, role: PolicyRole, model: Any, parameters: Mapping[str, object]) -> Sequence[PatchSite]:
        if role is not ROLLOUT:
            return original(factor, role, model, parameters)
        return [
            PatchSite(factor=factor, site=site, owner=RMSNorm, name=attribute, build=build, calls_per_forward=norms)
        ]

    monkeypatch.setattr(adapter, "sites", sites)
    (verdict,) = ablate_tiny(tiny, ["norm.rmsnorm"], Origin.NATIVE).verdicts
    return verdict


def test_C20_a_method_that_was_stored_before_the_patch_runs_zero_times_and_blocks(
    llama_engines: TinyEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdict = judged(llama_engines, monkeypatch, "forward_cpu")
    gates = {gate.name: gate for gate in verdict.gates}
    assert not gates[GateName.EVIDENCE_COMPLETE].ok
    assert "0 of 5 calls of the bound" in gates[GateName.EVIDENCE_COMPLETE].reason
    assert "ran on rollout" in gates[GateName.EVIDENCE_COMPLETE].reason
    assert verdict.diagnosis in (Diagnosis.INSUFFICIENT_EVIDENCE, Diagnosis.VARIANT_DID_NOT_APPLY)
    assert verdict.arms == ()


def test_C20_control_a_method_that_the_stored_one_calls_by_name_runs_every_time(
    llama_engines: TinyEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdict = judged(llama_engines, monkeypatch, "forward_native")
    assert {gate.name: gate.ok for gate in verdict.gates} == dict.fromkeys(GateName, True)
