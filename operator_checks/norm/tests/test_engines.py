"""The norms of both live engines run the reference while it is bound, and nothing of it is left afterwards.

The chain for one norm: what the live module returns is the pure function of what went into it, on either side; that
function gives a row the same bits in any batch (``tests/references/test_norm.py``); hence trainer prefill = rollout
decode for equal rows.
"""

from typing import Any

import pytest
import torch

from mismatch_hooks.operator_checks.norm import adapter
from mismatch_hooks.pipeline.bind import BindingError
from mismatch_hooks.references.norm import add_rms_norm, rms_norm
from mismatch_hooks.schema.enums import Choice, PolicyRole, SwitchStatus
from mismatch_hooks.schema.score import Score, ScoringSequence
from tests.tiny_engines import TinyEngines, recorded

pytestmark = pytest.mark.engine

ROLES = [pytest.param(role, id=role.value) for role in PolicyRole]
RMSNORM, QK_NORM = "norm.rmsnorm", "norm.qk_norm"
BATCH = [
    ScoringSequence(
        prompt_token_ids=tuple(range(3, 3 + prompt)), response_token_ids=tuple(range(40, 49)), response_mask=(True,) * 9
    )
    for prompt in (3, 11, 7)
]
# Modules of each factor, by the last part of their names.
NAMES = {
    (RMSNORM, PolicyRole.ROLLOUT): (".input_layernorm", ".post_attention_layernorm", "model.norm"),
    (RMSNORM, PolicyRole.TRAINING): (".input_layernorm", ".pre_mlp_layernorm", ".final_layernorm"),
    (QK_NORM, PolicyRole.ROLLOUT): (".q_norm", ".k_norm"),
    (QK_NORM, PolicyRole.TRAINING): (".q_layernorm", ".k_layernorm"),
}


@pytest.fixture(params=["llama", "qwen3"])
def engines(request: pytest.FixtureRequest) -> TinyEngines:
    found: TinyEngines = request.getfixturevalue(f"{request.param}_engines")
    return found


def _logprobs(score: Score) -> list[tuple[float, ...]]:
    return [piece.logprobs for piece in score.shards[0].slices]


def _bound(engines: TinyEngines, role: PolicyRole, *factors: str) -> Score:
    engine = engines.engines[role]
    with engine.bind(engines.reference(role, *factors)):
        return engine.score(BATCH)


@pytest.mark.parametrize("role", ROLES)
def test_every_norm_ran_the_reference_and_the_engine_is_as_before(engines: TinyEngines, role: PolicyRole) -> None:
    """Two layers: two norms each and the last one; four more of queries and keys, which the other factor covers."""
    wanted = {RMSNORM: 5, QK_NORM: 4} if engines.shape.qk_norm else {RMSNORM: 5}
    native = engines.engines[role].score(BATCH)
    bound = _bound(engines, role, *wanted)
    (forwards,) = bound.evidence.forwards
    assert forwards > 0
    assert {one.factor: (one.expected, one.observed) for one in bound.evidence.calls} == {
        factor: (calls * forwards, calls * forwards) for factor, calls in wanted.items()
    }
    assert {(one.effective, one.status) for one in bound.evidence.switches} == {
        (Choice.REFERENCE, SwitchStatus.APPLIED)
    }
    after = engines.engines[role].score(BATCH)
    assert _logprobs(after) == _logprobs(native)
    for module in engines.models[role].modules():
        assert not callable(vars(module).get("forward"))


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize(
    ("engines", "factor"), [("llama", RMSNORM), ("qwen3", RMSNORM), ("qwen3", QK_NORM)], indirect=["engines"]
)
def test_a_live_norm_returns_the_pure_reference_of_what_went_in(
    engines: TinyEngines, role: PolicyRole, factor: str
) -> None:
    model, epsilon = engines.models[role], engines.shape.norm_epsilon
    with recorded(model, *NAMES[factor, role]) as calls:
        _bound(engines, role, factor)
    weights = {name: module.weight for name, module in model.named_modules() if hasattr(module, "weight")}
    assert {name for name, _, _ in calls.seen} == {name for name in weights if name.endswith(NAMES[factor, role])}
    for name, inputs, output in calls.seen:
        pure: Any = rms_norm if len(inputs) == 1 or inputs[1] is None else add_rms_norm
        expected = pure(*(one for one in inputs if one is not None), weights[name], epsilon=epsilon)
        pairs = zip(expected, output, strict=True) if isinstance(expected, tuple) else [(expected, output)]
        assert all(torch.equal(one, other) for one, other in pairs), name


def test_trainings_native_norm_is_the_reference_and_rollouts_is_not(engines: TinyEngines) -> None:
    """vLLM's native norm rounds before its weight and normalises an unrounded sum; torch.nn.RMSNorm does neither."""
    factors = (RMSNORM, QK_NORM) if engines.shape.qk_norm else (RMSNORM,)
    changed = {
        role: _logprobs(_bound(engines, role, *factors)) != _logprobs(engines.engines[role].score(BATCH))
        for role in PolicyRole
    }
    assert changed == {PolicyRole.ROLLOUT: True, PolicyRole.TRAINING: False}


def test_each_factor_covers_its_own_norms_and_no_other(qwen3_engines: TinyEngines) -> None:
    for role in PolicyRole:
        model = qwen3_engines.models[role]
        owners = {
            factor: {id(site.owner) for site in adapter.sites(factor, role, model, {"epsilon": 1e-6})}
            for factor in (RMSNORM, QK_NORM)
        }
        assert {factor: len(found) for factor, found in owners.items()} == {RMSNORM: 5, QK_NORM: 4}
        assert owners[RMSNORM].isdisjoint(owners[QK_NORM])


@pytest.mark.parametrize("role", ROLES)
def test_the_reference_takes_epsilon_from_the_model_file_whatever_the_module_was_built_with(
    llama_engines: TinyEngines, role: PolicyRole
) -> None:
    """The fault that megatron-core's default plants: the module's epsilon is not the model file's."""
    attribute = "variance_epsilon" if role is PolicyRole.ROLLOUT else "eps"
    norms = [module for module in llama_engines.models[role].modules() if hasattr(module, attribute)]
    native, right = llama_engines.engines[role].score(BATCH), _bound(llama_engines, role, RMSNORM)
    with pytest.MonkeyPatch.context() as patch:
        for norm in norms:
            patch.setattr(norm, attribute, 1e-2)
        wrong, still_right = llama_engines.engines[role].score(BATCH), _bound(llama_engines, role, RMSNORM)
    assert _logprobs(wrong) != _logprobs(native)
    assert _logprobs(still_right) == _logprobs(right)


def test_a_norm_without_a_weight_is_refused(llama_engines: TinyEngines, monkeypatch: pytest.MonkeyPatch) -> None:
    norm = llama_engines.models[PolicyRole.ROLLOUT].model.layers[1].input_layernorm
    monkeypatch.setattr(norm, "has_weight", False)
    with pytest.raises(BindingError, match=r"^the rollout's model\.layers\.1\.input_layernorm has no weight or takes"):
        _bound(llama_engines, PolicyRole.ROLLOUT, RMSNORM)
