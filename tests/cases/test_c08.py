"""C08: a temperature in the log-probs of one side; named from the settings where they can be read, and by a fit."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from mismatch_hooks.integrations.megatron import MegatronBackend
from mismatch_hooks.live.ablation import AblationResult
from mismatch_hooks.schema.enums import Diagnosis, GateName, Origin, PolicyRole
from tests.ablating import SEQUENCES, ablate_tiny
from tests.planted_faults import native_is_reference, rollout_norm_epsilon, training_logprobs_at
from tests.tiny_engines import TinyEngines

pytestmark = pytest.mark.engine
ROLLOUT, TRAINING = PolicyRole.ROLLOUT, PolicyRole.TRAINING
Rows = list[list[float]]


def divided(tiny: TinyEngines, temperature: float) -> Rows:
    """What the trainer's logits give at a temperature, one sequence at a time and not by the library."""
    own = training_logprobs_at(temperature)
    rows: Rows = []
    for one in SEQUENCES:
        with torch.no_grad():
            scores = own(tiny.models[TRAINING], torch.tensor([[*one.prompt_token_ids, *one.response_token_ids]]))
        rows.append(scores[0, len(one.prompt_token_ids) - 1 :].tolist())
    return rows


def judged(tiny: TinyEngines, rollout: float, training: float, origin: Origin = Origin.NATIVE) -> AblationResult:
    live = {ROLLOUT: divided(tiny, rollout), TRAINING: divided(tiny, training)}
    return ablate_tiny(tiny, ["norm.rmsnorm"], origin, live=live)


def blocked(result: AblationResult) -> str:
    reasons = set()
    for verdict in result.verdicts:
        (gate,) = (gate for gate in verdict.gates if gate.name is GateName.PITFALLS_CLEAR)
        reasons.add("" if gate.ok else gate.reason)
        assert gate.ok or (verdict.diagnosis, verdict.arms) == (Diagnosis.INSUFFICIENT_EVIDENCE, ())
    (reason,) = reasons
    return reason


@pytest.mark.parametrize("origin", Origin)
@pytest.mark.parametrize(
    ("rollout", "training", "side"),
    [
        pytest.param(1.0, 0.7, "training", id="C08a and C08c: training divides, rollout is raw"),
        pytest.param(0.7, 1.0, "rollout", id="C08b: processed on rollout, training does not divide"),
        pytest.param(1.0, 1.5, "training", id="a temperature above 1"),
    ],
)
def test_C08_the_side_and_the_temperature_that_fits_are_named(
    rollout: float, training: float, side: str, origin: Origin, llama_engines: TinyEngines
) -> None:
    reason = blocked(judged(llama_engines, rollout, training, origin))
    assert reason.startswith(f"The log-probs that {side} gave in the live run are not those of the logits as they are")
    found = float(reason.partition("a temperature of ")[2].split(" ")[0])
    assert found == pytest.approx(rollout if side == "rollout" else training, abs=0.02)
    assert "± 0.02 fits best" in reason and reason.count("fits best") == 1


def test_C08_control_without_a_temperature_nothing_is_fitted(llama_engines: TinyEngines) -> None:
    result = judged(llama_engines, 1.0, 1.0)
    assert blocked(result) == ""
    assert result.passes == 2 + 2 + 1 + 2


@pytest.mark.parametrize("origin", Origin)
def test_C08c_a_loop_that_divides_in_its_own_scoring_function_is_named_too(
    origin: Origin, llama_engines: TinyEngines
) -> None:
    own = training_logprobs_at(0.7)
    trainer = MegatronBackend(llama_engines.models[TRAINING], shape=llama_engines.shape, token_logprobs=own)
    engines = replace(llama_engines, engines={**llama_engines.engines, TRAINING: trainer})
    live: dict[PolicyRole, Sequence[Sequence[float]]] = {
        ROLLOUT: divided(llama_engines, 1.0),
        TRAINING: divided(llama_engines, 0.7),
    }
    result = ablate_tiny(engines, ["norm.rmsnorm"], origin, live=live)
    # The scoring forward divides as the loop does, so a re-score shows nothing.
    assert result.paths["training_rescore"]["dlogp_mean"] < 0.1
    reason = blocked(result)
    assert reason.startswith("The log-probs that training gave in the live run are not those of the logits as they are")
    assert "a temperature of 0.70 ± 0.02 fits best" in reason


def test_C08_control_a_wrong_operator_on_rollout_is_no_temperature(llama_engines: TinyEngines) -> None:
    faults = {("norm.rmsnorm", ROLLOUT): rollout_norm_epsilon(1.0)}
    with native_is_reference(llama_engines, faults):
        result = ablate_tiny(llama_engines, ["norm.rmsnorm"])
    assert result.paths["cross_framework"]["dlogp_mean"] > 0.1
    assert blocked(result) == ""
    assert result.verdicts[0].diagnosis is Diagnosis.CAUSED_BY_ROLLOUT_SIDE
