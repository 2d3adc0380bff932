"""The output heads of both live engines run in fp32 while that is bound, and nothing of it is left afterwards.

The chain: what the live head returns is the pure function of what went into it, on either side and whether or not it is
tied; that function gives a row the same bits in any batch (``tests/references/test_linear.py``).
"""

import pytest
import torch
from torch import Tensor

from mismatch_hooks.references.linear import linear
from mismatch_hooks.schema.enums import Choice, PolicyRole, SwitchStatus
from mismatch_hooks.schema.score import Score, ScoringSequence
from tests.tiny_engines import TinyEngines, recorded

pytestmark = pytest.mark.engine

HEAD = "logprob.head_dtype"
ROLLOUT, TRAINING = PolicyRole.ROLLOUT, PolicyRole.TRAINING
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


def _head_of(engines: TinyEngines, role: PolicyRole) -> Tensor:
    model = engines.models[role]
    if role is ROLLOUT:
        weight: Tensor = model.lm_head.weight
    elif engines.shape.tied_embeddings:
        weight = model.shared_embedding_or_output_weight()
    else:
        weight = model.output_layer.weight
    return weight.detach()


@pytest.mark.parametrize("role", ROLES)
def test_every_call_of_the_head_ran_the_reference_and_the_engine_is_as_before(
    engines: TinyEngines, role: PolicyRole
) -> None:
    """vLLM calls its head once a forward for what it samples, and once for each of three prompts that it scores."""
    engine, model = engines.engines[role], engines.models[role]
    native = engine.score(BATCH)
    with engine.bind(engines.reference(role, HEAD)):
        bound = engine.score(BATCH)
    (forwards,), (calls,), (switch,) = bound.evidence.forwards, bound.evidence.calls, bound.evidence.switches
    wanted = forwards + (len(BATCH) if role is ROLLOUT else 0)
    assert (calls.expected, calls.observed) == (wanted, wanted)
    assert (switch.effective, switch.status) == (Choice.REFERENCE, SwitchStatus.APPLIED)
    assert _logprobs(bound) != _logprobs(native)
    assert _logprobs(engine.score(BATCH)) == _logprobs(native)
    assert not any({"_forward_impl", "_apply_head"} & set(vars(module)) for module in model.modules())
    if role is ROLLOUT:
        assert not model.logits_processor._forward_pre_hooks


def test_rollouts_live_head_returns_the_pure_reference_of_what_went_in(engines: TinyEngines) -> None:
    engine, model = engines.engines[ROLLOUT], engines.models[ROLLOUT]
    with engine.bind(engines.reference(ROLLOUT, HEAD)), recorded(model, "logits_processor") as calls:
        engine.score(BATCH)
    assert len(calls.seen) > len(BATCH)
    for _, (_, hidden), logits in calls.seen:
        pure = linear(hidden, _head_of(engines, ROLLOUT), dtype=torch.float32)
        assert torch.equal(logits, pure[:, : engines.shape.vocab_size])


def test_trainings_live_head_returns_the_pure_reference_of_what_went_in(engines: TinyEngines) -> None:
    engine, model = engines.engines[TRAINING], engines.models[TRAINING]
    with engine.bind(engines.reference(TRAINING, HEAD)), recorded(model, "output_layer") as calls:
        engine.score(BATCH)
    assert calls.seen
    for _, (hidden, *_), (logits, bias) in calls.seen:
        assert (logits.dtype, bias) == (torch.float32, None)
        assert torch.equal(logits, linear(hidden, _head_of(engines, TRAINING), dtype=torch.float32))


def test_gradients_flow_through_trainings_bound_head_to_the_weight_it_was_given(engines: TinyEngines) -> None:
    from mismatch_hooks.integrations.megatron import token_logprobs

    model = engines.models[TRAINING]
    weight = model.shared_embedding_or_output_weight() if engines.shape.tied_embeddings else model.output_layer.weight
    ids = torch.arange(3, 15).view(1, -1)
    slopes = []
    for choice in ((), (HEAD,)):
        with engines.engines[TRAINING].bind(engines.reference(TRAINING, *choice)):
            token_logprobs(model, ids).sum().backward()
        slopes.append(weight.grad.float())
        model.zero_grad()
        weight.grad = None
    native, bound = slopes
    # Two roundings of bf16 apart where a value is of the size of the largest, which is all that bf16 promises of a sum.
    assert bool((bound != 0).any())
    assert bool(((native - bound).abs() <= 2.0**-5 * native.abs().max()).all())


def test_C04_vllms_own_fp32_head_has_other_bits_below_four_rows(fp32_head_engines: TinyEngines) -> None:
    """Where a decoding batch shrinks below four sequences, native fp32 is not the reference: measured on a CPU."""
    model = fp32_head_engines.models[ROLLOUT]
    hidden = torch.randn(4, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    pure = linear(hidden, model.lm_head.weight, dtype=torch.float32)
    with torch.inference_mode():
        native = {rows: model.logits_processor(model.lm_head, hidden[:rows]) for rows in (1, 4)}
    assert torch.equal(native[4], pure)
    assert not torch.equal(native[1], pure[:1])
