"""The gated activations of both live engines run the reference while it is bound, and nothing of it is left behind.

The chain: what the live MLP hands to its second product is the pure function of what its first one gave, on either
side; that function gives a row the same bits in any batch (``tests/references/test_activation.py``).
"""

import pytest
import torch

from mismatch_hooks.references.activation import swiglu
from mismatch_hooks.schema.enums import Choice, PolicyRole, SwitchStatus
from mismatch_hooks.schema.score import Score, ScoringSequence
from tests.tiny_engines import TinyEngines, recorded

pytestmark = pytest.mark.engine

SWIGLU = "activation.swiglu"
ROLES = [pytest.param(role, id=role.value) for role in PolicyRole]
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


@pytest.mark.parametrize("role", ROLES)
def test_every_activation_ran_the_reference_and_the_engine_is_as_before(engines: TinyEngines, role: PolicyRole) -> None:
    engine = engines.engines[role]
    native = engine.score(BATCH)
    with engine.bind(engines.reference(role, SWIGLU)):
        bound = engine.score(BATCH)
    (forwards,), (calls,), (switch,) = bound.evidence.forwards, bound.evidence.calls, bound.evidence.switches
    assert (calls.expected, calls.observed) == (2 * forwards, 2 * forwards)
    assert (switch.effective, switch.status) == (Choice.REFERENCE, SwitchStatus.APPLIED)
    assert _logprobs(bound) != _logprobs(native)  # both engines round silu(gate) first
    assert _logprobs(engine.score(BATCH)) == _logprobs(native)
    assert not any(callable(vars(module).get("forward")) for module in engines.models[role].modules())


def test_rollouts_live_activation_returns_the_pure_reference_of_what_went_in(engines: TinyEngines) -> None:
    engine = engines.engines[PolicyRole.ROLLOUT]
    with (
        engine.bind(engines.reference(PolicyRole.ROLLOUT, SWIGLU)),
        recorded(engines.models[PolicyRole.ROLLOUT], ".mlp.act_fn") as calls,
    ):
        engine.score(BATCH)
    assert {name for name, _, _ in calls.seen} == {f"model.layers.{layer}.mlp.act_fn" for layer in range(2)}
    assert all(torch.equal(output, swiglu(gate_up)) for _, (gate_up,), output in calls.seen)


def test_trainings_second_product_gets_the_pure_reference_of_what_its_first_gave(engines: TinyEngines) -> None:
    engine = engines.engines[PolicyRole.TRAINING]
    with (
        engine.bind(engines.reference(PolicyRole.TRAINING, SWIGLU)),
        recorded(engines.models[PolicyRole.TRAINING], ".linear_fc1", ".linear_fc2") as calls,
    ):
        engine.score(BATCH)
    assert [name.rpartition(".")[2] for name, _, _ in calls.seen] == ["linear_fc1", "linear_fc2"] * 2
    for (_, _, (gate_up, bias)), (_, (activated, *_), _) in zip(calls.seen[::2], calls.seen[1::2], strict=True):
        assert bias is None
        assert torch.equal(activated, swiglu(gate_up))


def test_both_native_activations_round_alike(engines: TinyEngines) -> None:
    """Measured on SmolLM2 too: neither side departs from the other here, only both from the reference."""
    from torch.nn.functional import silu

    with recorded(engines.models[PolicyRole.ROLLOUT], ".mlp.act_fn") as rollout:
        engines.engines[PolicyRole.ROLLOUT].score(BATCH)
    with recorded(engines.models[PolicyRole.TRAINING], ".linear_fc1", ".linear_fc2") as training:
        engines.engines[PolicyRole.TRAINING].score(BATCH)
    pairs = [(gate_up, output) for _, (gate_up,), output in rollout.seen]
    pairs += [
        (gate_up, activated)
        for (_, _, (gate_up, _)), (_, (activated, *_), _) in zip(training.seen[::2], training.seen[1::2], strict=True)
    ]
    for gate_up, activated in pairs:
        gate, up = gate_up.chunk(2, dim=-1)
        assert torch.equal(activated, silu(gate) * up)
