"""Operators' live calls of both tiny engines, played through both sides' implementations."""

from typing import Any

import pytest
import torch

from mismatch_hooks.live.registry import load_registry
from mismatch_hooks.live.replay import disagreement, replay_operator
from mismatch_hooks.pipeline.bind import PatchSite, RestoreError
from mismatch_hooks.schema.enums import Choice, Diagnosis, Origin, PolicyRole
from mismatch_hooks.schema.replay import OperatorReplay
from mismatch_hooks.schema.score import ScoringSequence
from tests.ablating import SEQUENCES, ablate_tiny
from tests.tiny_engines import TinyEngines

ROLLOUT, TRAINING = PolicyRole.ROLLOUT, PolicyRole.TRAINING
# Calls a forward of two layers, on rollout and on training.
PLAYED = {
    "activation.swiglu": (2, 2),
    "attention.kernel": (2, 2),
    "attention.rope_fusion": (2, 4),
    "embedding.lookup": (1, 1),
    "gemm.accumulation": (8, 8),
    "logprob.head_dtype": (2, 1),
    "norm.rmsnorm": (5, 5),
}


def _replays(tiny: TinyEngines, factor: str) -> tuple[OperatorReplay, OperatorReplay]:
    roles = load_registry().factors[factor].switch.roles
    bindings = {role: tiny.reference(role, factor) for role in roles}
    by_role = {one.captured_on: one for one in replay_operator(tiny.engines, bindings, SEQUENCES)}
    return by_role[ROLLOUT], by_role[TRAINING]


@pytest.mark.parametrize("engines", ["llama_engines", "qwen3_engines"])
@pytest.mark.parametrize("factor", PLAYED)
def test_two_references_are_one_on_the_same_operands(factor: str, engines: str, request: pytest.FixtureRequest) -> None:
    tiny: TinyEngines = request.getfixturevalue(engines)
    rollout, training = _replays(tiny, factor)
    assert (rollout.calls, training.calls) == PLAYED[factor]
    for one in (rollout, training):
        if factor == "attention.kernel" and one is training:
            assert "rollout: it cannot be called outside a forward" in one.reason
            continue
        assert one.reason == ""
        assert one.references is not None
        assert (one.references.differing, one.references.max_ulp) == (0, 0)
        assert one.references.elements > 0
    assert disagreement((rollout, training)) == ""


@pytest.mark.parametrize("factor", [name for name in PLAYED if name != "attention.kernel"])
def test_a_call_that_is_played_gives_its_own_bits_again(factor: str, llama_engines: TinyEngines) -> None:
    rollout, training = _replays(llama_engines, factor)
    assert rollout.reproduced == rollout.calls
    # The trainer's gate is inside its MLP, which returns something else.
    assert training.reproduced == (None if factor == "activation.swiglu" else training.calls)


def test_norms_of_queries_and_keys_are_played_head_by_head(qwen3_engines: TinyEngines) -> None:
    rollout, training = _replays(qwen3_engines, "norm.qk_norm")
    for one in (rollout, training):
        assert (one.calls, one.reproduced, one.reason) == (4, 4, "")
        assert one.references is not None
        assert one.references.differing == 0
        # vLLM's kernel rounds elsewhere than torch's norm, which the reference repeats.
        assert (one.departs[ROLLOUT].differing > 0, one.departs[TRAINING].differing) == (True, 0)


def test_a_forward_that_is_recorded_scores_as_one_that_is_not(llama_engines: TinyEngines) -> None:
    for role, engine in llama_engines.engines.items():
        live: Any = engine
        before, written = engine.score(SEQUENCES), engine.mutation_count()
        names = [name for name in PLAYED if role in load_registry().factors[name].switch.roles]
        for name in names:
            sequence = ScoringSequence(prompt_token_ids=(3, 4, 5), response_token_ids=(6,), response_mask=(True,))
            live.record_calls(llama_engines.reference(role, name), sequence)
            states = engine.switch_states(llama_engines.reference(role, name))
            assert states
            assert all(state.effective is Choice.NATIVE for state in states), name
        after = engine.score(SEQUENCES)
        assert [one.logprobs for one in before.shards[0].slices] == [one.logprobs for one in after.shards[0].slices]
        assert engine.mutation_count() == written


@pytest.mark.parametrize("origin", list(Origin)[:2])
def test_a_verdict_carries_what_the_operator_does_alone(llama_engines: TinyEngines, origin: Origin) -> None:
    (verdict,) = ablate_tiny(llama_engines, "norm.rmsnorm", origin).verdicts
    assert [one.captured_on for one in verdict.replays] == list(load_registry().factors["norm.rmsnorm"].switch.roles)
    assert {role for one in verdict.replays for role in one.departs} == set(PolicyRole)
    assert verdict.diagnosis is not Diagnosis.REFERENCE_ITSELF_IS_BROKEN


def test_other_weights_on_one_side_are_no_broken_reference(llama_engines: TinyEngines) -> None:
    weight = llama_engines.models[TRAINING].decoder.layers[0].input_layernorm.weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.mul_(1.5)
    try:
        (verdict,) = ablate_tiny(llama_engines, "norm.rmsnorm").verdicts
    finally:
        with torch.no_grad():
            weight.copy_(kept)
    assert "differ" in disagreement(verdict.replays)
    assert verdict.diagnosis is not Diagnosis.REFERENCE_ITSELF_IS_BROKEN


def test_a_failure_to_play_is_a_sentence_and_the_arms_are_read(
    llama_engines: TinyEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no room")

    monkeypatch.setattr("mismatch_hooks.live.passes.replay_operator", fails)
    (verdict,) = ablate_tiny(llama_engines, "norm.rmsnorm").verdicts
    assert [one.reason for one in verdict.replays] == ["not played: RuntimeError: no room"] * 2
    assert verdict.arms


@pytest.mark.parametrize("role", list(PolicyRole))
def test_a_site_that_something_else_wrote_while_it_was_recorded_ends_ablation(
    llama_engines: TinyEngines, role: PolicyRole, monkeypatch: pytest.MonkeyPatch
) -> None:
    live: Any = llama_engines.engines[role]
    binding = llama_engines.reference(role, "norm.rmsnorm")
    sequence = ScoringSequence(prompt_token_ids=(3, 4, 5), response_token_ids=(6,), response_mask=(True,))
    model = llama_engines.models[role]
    site: PatchSite = load_registry().sites(binding.choices, binding.parameters, role, model)["norm.rmsnorm"][0]  # type: ignore[assignment]
    before, score = vars(site.owner).get(site.name), live.score

    def meddles(*args: Any, **kwargs: Any) -> Any:
        found = score(*args, **kwargs)
        setattr(site.owner, site.name, lambda *_: None)
        return found

    monkeypatch.setattr(type(live), "score", lambda self, *args, **kwargs: meddles(*args, **kwargs))
    try:
        with pytest.raises(RestoreError):
            live.record_calls(binding, sequence)
    finally:
        vars(site.owner).pop(site.name, None)
        if before is not None:
            setattr(site.owner, site.name, before)
    assert live.switch_states(binding)[0].effective is Choice.NATIVE
