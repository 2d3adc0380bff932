"""C07: the rollout engine decodes to other log-probs than it prefills; a tool that rescores by prefill sees nothing."""

from collections.abc import Mapping

import pytest

from mismatch_hooks.live.ablation import AblationResult
from mismatch_hooks.schema.enums import Diagnosis, ExecutionPath, Origin, PolicyRole
from mismatch_hooks.schema.score import ScoringSequence
from mismatch_hooks.schema.verdict import Verdict
from tests.ablating import ablate_tiny, live_values
from tests.planted_faults import Fault, native_is_reference, operators, rollout_norm_epsilon, scaled_output
from tests.tiny_engines import TinyEngines

pytestmark = pytest.mark.engine
ROLLOUT = PolicyRole.ROLLOUT
PREFILL, DECODE = ExecutionPath.ROLLOUT_FULL_PREFILL, ExecutionPath.ROLLOUT_DECODE
# One sequence, so that every decoding step gives the norms one row.
ALONE = (
    ScoringSequence(
        prompt_token_ids=tuple(range(3, 12)),
        response_token_ids=tuple((7 + 11 * i) % 500 for i in range(24)),
        response_mask=(True,) * 24,
    ),
)
FAULT: Mapping[tuple[str, PolicyRole], Fault] = {("norm.rmsnorm", ROLLOUT): rollout_norm_epsilon(1e-3, rows=1)}


def examined(tiny: TinyEngines, origin: Origin, faults: Mapping[tuple[str, PolicyRole], Fault]) -> AblationResult:
    with native_is_reference(tiny, faults):
        live = live_values(tiny, ALONE)
        factors = [*operators(tiny.shape), "rollout.execution_path"]
        return ablate_tiny(tiny, factors, origin, sequences=ALONE, live=live)


def by_path(result: AblationResult, path: ExecutionPath) -> dict[str, Verdict]:
    assert all(gate.ok for verdict in result.verdicts for gate in verdict.gates)
    return {verdict.factor: verdict for verdict in result.verdicts if verdict.path is path}


def blamed(verdicts: Mapping[str, Verdict]) -> dict[str, Diagnosis]:
    clean = Diagnosis.NOT_THIS_FACTOR
    return {factor: verdict.diagnosis for factor, verdict in verdicts.items() if verdict.diagnosis is not clean}


def test_C07_the_decode_term_is_above_its_floor_and_the_cross_framework_term_is_on_it(
    llama_engines: TinyEngines,
) -> None:
    paths = examined(llama_engines, Origin.NATIVE, FAULT).paths
    assert paths["cross_framework"]["bitwise_fraction"] == 1.0
    # The first response token comes from the prefill of nine rows; the 23 after it from one row each.
    assert paths["decode_against_prefill"]["bitwise_fraction"] == pytest.approx(1 / 24)
    assert paths["decode_against_prefill"]["clip_fraction"] > 0.1
    assert paths["live_against_decode"]["bitwise_fraction"] == 1.0


@pytest.mark.parametrize("origin", Origin)
def test_C07_the_norm_is_named_on_the_path_that_decodes_and_on_no_other(
    origin: Origin, llama_engines: TinyEngines
) -> None:
    result = examined(llama_engines, origin, FAULT)
    assert blamed(by_path(result, PREFILL)) == {"rollout.execution_path": Diagnosis.CAUSED_BY_ROLLOUT_SIDE}
    assert "23 of 24 tokens" in by_path(result, PREFILL)["rollout.execution_path"].reason
    assert blamed(by_path(result, DECODE)) == {"norm.rmsnorm": Diagnosis.CAUSED_BY_ROLLOUT_SIDE}


def test_C07_another_operator_that_is_wrong_while_decoding_is_named_too(llama_engines: TinyEngines) -> None:
    def one_row_only(reference: object, owner: object, shape: object) -> object:
        faulty = scaled_output(reference, owner, shape)  # type: ignore[arg-type]
        return lambda x, *rest: (faulty if x.shape[0] == 1 else reference)(x, *rest)  # type: ignore[operator]

    result = examined(llama_engines, Origin.ALIGNED, {("activation.swiglu", ROLLOUT): one_row_only})  # type: ignore[dict-item]
    assert blamed(by_path(result, PREFILL)) == {"rollout.execution_path": Diagnosis.CAUSED_BY_ROLLOUT_SIDE}
    assert blamed(by_path(result, DECODE)) == {"activation.swiglu": Diagnosis.CAUSED_BY_ROLLOUT_SIDE}


@pytest.mark.parametrize("origin", Origin)
def test_C07_control_a_healthy_engine_decodes_what_it_prefills_and_no_pass_is_spent_on_more(
    origin: Origin, llama_engines: TinyEngines
) -> None:
    result = examined(llama_engines, origin, {})
    assert all(term["bitwise_fraction"] == 1.0 for term in result.paths.values())
    assert (blamed(by_path(result, PREFILL)), by_path(result, DECODE)) == ({}, {})
