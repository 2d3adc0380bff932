"""The linears of both live engines run the reference while it is bound, and nothing of it is left afterwards.

The chain for one linear: what the live module returns is the pure function of what went into it, on either side; that
function gives a row the same bits in any batch (``tests/references/test_linear.py``); hence trainer prefill = rollout
decode for equal rows.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from mismatch_hooks.references.linear import linear
from mismatch_hooks.schema.enums import Choice, ExecutionPath, PolicyRole, SwitchStatus
from mismatch_hooks.schema.score import Score, ScoringSequence
from tests.tiny_engines import TinyEngines, recorded

pytestmark = pytest.mark.engine

GEMM = "gemm.accumulation"
ROLES = [pytest.param(role, id=role.value) for role in PolicyRole]
LINEARS = {
    PolicyRole.ROLLOUT: (".qkv_proj", ".o_proj", ".gate_up_proj", ".down_proj"),
    PolicyRole.TRAINING: (".linear_qkv", ".linear_proj", ".linear_fc1", ".linear_fc2"),
}
BATCH = [
    ScoringSequence(
        prompt_token_ids=tuple(range(3, 3 + prompt)), response_token_ids=tuple(range(40, 49)), response_mask=(True,) * 9
    )
    for prompt in (3, 11, 7)
]


@pytest.fixture(params=["llama", "qwen3"])
def engines(request: pytest.FixtureRequest) -> TinyEngines:
    found: TinyEngines = request.getfixturevalue(f"{request.param}_engines")
    return found


def _logprobs(score: Score) -> list[tuple[float, ...]]:
    return [piece.logprobs for piece in score.shards[0].slices]


def _weight(module: Any) -> Tensor:
    """What the module multiplies with; where the engine has packed it away, through its own product."""
    weight: Tensor = module.weight
    if weight.ndim == 2:
        return weight
    identity = torch.eye(module.input_size_per_partition, dtype=module.params_dtype)
    rows: Tensor = module.quant_method.apply(module, identity, None)
    return rows.T


@pytest.mark.parametrize("role", ROLES)
def test_every_linear_ran_the_reference_and_the_engine_is_as_before(engines: TinyEngines, role: PolicyRole) -> None:
    """Two layers of four linears, and nothing else: the head is not among them."""
    engine = engines.engines[role]
    native = engine.score(BATCH)
    with engine.bind(engines.reference(role, GEMM)):
        bound = engine.score(BATCH)
    (forwards,), (calls,), (switch,) = bound.evidence.forwards, bound.evidence.calls, bound.evidence.switches
    assert forwards > 0
    assert (calls.expected, calls.observed) == (8 * forwards, 8 * forwards)
    assert (switch.effective, switch.status) == (Choice.REFERENCE, SwitchStatus.APPLIED)
    assert _logprobs(engine.score(BATCH)) == _logprobs(native)
    for module in engines.models[role].modules():
        assert not {"_forward_impl", "apply"} & (set(vars(module)) | set(vars(getattr(module, "quant_method", module))))


@pytest.mark.parametrize("role", ROLES)
def test_a_live_linear_returns_the_pure_reference_of_what_went_in(engines: TinyEngines, role: PolicyRole) -> None:
    engine, model = engines.engines[role], engines.models[role]
    weights = {name: _weight(module).detach() for name, module in model.named_modules() if name.endswith(LINEARS[role])}
    with engine.bind(engines.reference(role, GEMM)), recorded(model, *LINEARS[role]) as calls:
        engine.score(BATCH)
    assert len(weights) == 8
    assert {name for name, _, _ in calls.seen} == set(weights)
    for name, (states, *_), (product, bias) in calls.seen:
        assert bias is None
        assert torch.equal(product, linear(states, weights[name], dtype=torch.bfloat16)), name


def test_decode_under_the_reference_repeats_the_products_of_prefill(llama_engines: TinyEngines) -> None:
    """Rows of a shrinking batch, the last of them alone: every product is the pure one of its own row."""
    engine, model = llama_engines.engines[PolicyRole.ROLLOUT], llama_engines.models[PolicyRole.ROLLOUT]
    batch = [
        ScoringSequence(
            prompt_token_ids=(5, 6, 7), response_token_ids=tuple(range(40, 40 + long)), response_mask=(True,) * long
        )
        for long in (9, 4, 2)
    ]
    weights = {name: _weight(module) for name, module in model.named_modules() if name.endswith(LINEARS[engine.role])}
    with (
        engine.bind(llama_engines.reference(engine.role, GEMM)),
        recorded(model, *LINEARS[engine.role]) as calls,
    ):
        engine.score(batch, path=ExecutionPath.ROLLOUT_DECODE)
    assert {3, 2, 1} <= {len(states) for _, (states,), _ in calls.seen}
    for name, (states,), (product, _) in calls.seen:
        alone = [linear(row, weights[name], dtype=torch.bfloat16) for row in states.split(1)]
        assert torch.equal(torch.cat(alone), product), name


def test_a_reload_between_two_passes_of_one_binding_takes_effect(llama_engines: TinyEngines) -> None:
    """A binding that outlasts a weight sync, as an aligned run's does, must not go on with the old weights."""
    engine = llama_engines.engines[PolicyRole.ROLLOUT]
    llm: Any = engine._llm  # type: ignore[attr-defined]
    folder = llm.llm_engine.vllm_config.model_config.model
    with engine.bind(llama_engines.reference(engine.role, GEMM)):
        before = _logprobs(engine.score(BATCH))
        llm.collective_rpc("reload_weights", kwargs={"weights_iterator": _halved(folder)})
        try:
            changed = _logprobs(engine.score(BATCH))
        finally:
            llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})
        after = _logprobs(engine.score(BATCH))
    assert changed != before
    assert after == before


def _halved(folder: str) -> Any:
    """The checkpoint with the down projection of the last layer halved, and nothing else."""
    from safetensors.torch import load_file

    for name, tensor in load_file(f"{folder}/model.safetensors").items():
        yield name, tensor / 2 if name == "model.layers.1.mlp.down_proj.weight" else tensor


@pytest.mark.parametrize("role", ROLES)
def test_the_native_linears_depart_from_the_reference_by_roundings_only(
    llama_engines: TinyEngines, role: PolicyRole
) -> None:
    """Both accumulate in fp32 and round once: what is left is the order of the sums.

    The bound: n u Σ |x w| for each of the two sums, u = 2⁻²⁴ and n the inputs; and half a spacing of bf16 (2⁻⁹
    relative) for the native rounding, doubled for what the sums move.
    """
    engine, model = llama_engines.engines[role], llama_engines.models[role]
    weights = {name: _weight(module) for name, module in model.named_modules() if name.endswith(LINEARS[role])}
    with recorded(model, *LINEARS[role]) as calls:
        engine.score(BATCH)
    for name, (states, *_), (product, _) in calls.seen:
        weight = weights[name].detach()
        accumulated = linear(states, weight, dtype=torch.float32)
        size = linear(states.abs(), weight.abs(), dtype=torch.float32)
        bound = accumulated.abs() * 2.0**-8 + 2 * weight.shape[1] * 2.0**-24 * size
        assert bool(((product.float() - accumulated).abs() <= bound).all()), name
