"""The lookups of both live engines run the reference while it is bound, and nothing of it is left afterwards."""

from typing import Any

import pytest
import torch

from mismatch_hooks.schema.enums import Choice, PolicyRole, SwitchStatus
from mismatch_hooks.schema.score import Score, ScoringSequence
from tests.tiny_engines import TinyEngines, recorded

pytestmark = pytest.mark.engine

LOOKUP = "embedding.lookup"
ROLES = [pytest.param(role, id=role.value) for role in PolicyRole]
NAMES = {PolicyRole.ROLLOUT: "model.embed_tokens", PolicyRole.TRAINING: "embedding.word_embeddings"}
BATCH = [
    ScoringSequence(
        prompt_token_ids=tuple(range(3, 3 + prompt)),
        response_token_ids=tuple(range(503, 512)),
        response_mask=(True,) * 9,
    )
    for prompt in (3, 11, 7)
]


@pytest.fixture(params=["llama", "qwen3"])
def engines(request: pytest.FixtureRequest) -> TinyEngines:
    """Llama's head is a tensor of its own; Qwen3's is the embedding."""
    found: TinyEngines = request.getfixturevalue(f"{request.param}_engines")
    return found


def _logprobs(score: Score) -> list[tuple[float, ...]]:
    return [piece.logprobs for piece in score.shards[0].slices]


def _table(engines: TinyEngines, role: PolicyRole) -> Any:
    return engines.models[role].get_submodule(NAMES[role])


@pytest.mark.parametrize("role", ROLES)
def test_the_lookup_ran_the_reference_and_the_native_one_had_its_bits(engines: TinyEngines, role: PolicyRole) -> None:
    engine = engines.engines[role]
    native = engine.score(BATCH)
    with engine.bind(engines.reference(role, LOOKUP)), recorded(engines.models[role], NAMES[role]) as calls:
        bound = engine.score(BATCH)
    (forwards,), (count,), (switch,) = bound.evidence.forwards, bound.evidence.calls, bound.evidence.switches
    assert (count.expected, count.observed, len(calls.seen)) == (forwards, forwards, forwards)
    assert (switch.effective, switch.status) == (Choice.REFERENCE, SwitchStatus.APPLIED)
    for _, (ids,), rows in calls.seen:
        assert torch.equal(rows, _table(engines, role).weight[ids.long()])
    assert _logprobs(bound) == _logprobs(native) == _logprobs(engine.score(BATCH))
    assert not callable(vars(_table(engines, role)).get("forward"))


@pytest.mark.parametrize("role", ROLES)
def test_a_scale_that_one_side_puts_on_its_embedding_is_gone_while_the_reference_is_bound(
    llama_engines: TinyEngines, role: PolicyRole, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the row: the first norm hides it from a model without a residual stream, and from no other."""
    engine, table = llama_engines.engines[role], _table(llama_engines, role)
    native, forward = _logprobs(engine.score(BATCH)), table.forward
    monkeypatch.setattr(table, "forward", lambda ids: forward(ids) * 0.5)
    assert _logprobs(engine.score(BATCH)) != native
    with engine.bind(llama_engines.reference(role, LOOKUP)):
        assert _logprobs(engine.score(BATCH)) == native
