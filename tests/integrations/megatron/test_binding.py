"""A binding is in force inside its block only, its evidence comes from what ran, and restoration is proven."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch

from mismatch_hooks.integrations.megatron import MegatronBackend
from mismatch_hooks.pipeline.bind import BindingError, PatchSite, RestoreError
from mismatch_hooks.schema.enums import Choice, PolicyRole, RebindCost, SwitchStatus
from mismatch_hooks.schema.score import Binding, CallCount, Score
from tests.integrations.megatron.tiny_gpt import LLAMA, build_model, sequences
from tests.planted_registry import planted_registry

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("megatron")]

ROPE, BROKEN, NOWHERE = "test.rope", "test.broken", "test.nowhere"


class Adapter:
    """Scales what the rotary function returns, so that a bound score differs from a native one."""

    def sites(self, factor: str, role: PolicyRole, model: Any, parameters: Mapping[str, object]) -> list[PatchSite]:
        from megatron.core.transformer import attention

        def build(original: Callable[..., Any]) -> Callable[..., Any]:
            if factor == BROKEN:
                raise ZeroDivisionError
            return lambda *arguments, **keywords: original(*arguments, **keywords) * parameters.get("scale", 1.0)

        if factor == NOWHERE:
            return [
                PatchSite(
                    factor=factor, site="nowhere", owner=attention, name="absent", build=build, calls_per_forward=1
                )
            ]
        layers = len(model.decoder.layers)
        return [
            PatchSite(
                factor=factor,
                site="self_attention: apply_rotary_pos_emb",
                owner=attention,
                name="apply_rotary_pos_emb",
                build=build,
                calls_per_forward=2 * layers,
            )
        ]

    def parameters(self, factor: str, shape: Any) -> Mapping[str, object]:
        return {}


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    fake = planted_registry((ROPE, BROKEN, NOWHERE), Adapter())
    monkeypatch.setattr("mismatch_hooks.integrations.megatron.backend.load_registry", lambda: fake)
    yield


def binding(scale: float = 1.5, **choices: Choice) -> Binding:
    named = {f"test.{name}": choice for name, choice in choices.items()}
    return Binding(role=PolicyRole.TRAINING, choices=named, parameters={ROPE: {"scale": scale}})


def logprobs_of(score: Score) -> list[tuple[float, ...]]:
    return [part.logprobs for part in score.shards[0].slices]


def rotary_function() -> Any:
    from megatron.core.transformer import attention

    return attention.apply_rotary_pos_emb


def test_a_binding_is_in_effect_inside_its_block_only() -> None:
    backend, batch = MegatronBackend(build_model(LLAMA)), sequences((4, 6), (3, 3))
    native, original = backend.score(batch), rotary_function()
    with backend.bind(binding(rope=Choice.REFERENCE)):
        bound = backend.score(batch)
        assert backend.read_back().effective("operator.rope.implementation") == "reference of test.rope"
    assert logprobs_of(bound) != logprobs_of(native)
    assert rotary_function() is original
    assert logprobs_of(backend.score(batch)) == logprobs_of(native)


def test_evidence_counts_two_calls_a_layer_and_forward() -> None:
    backend = MegatronBackend(build_model(LLAMA), micro_batch=1)
    with backend.bind(binding(rope=Choice.REFERENCE)) as nothing:
        assert nothing is None
        for _ in range(2):  # each pass counts from zero
            score = backend.score(sequences((4, 6), (3, 3), (2, 2)))
    site = "self_attention: apply_rotary_pos_emb"
    assert score.evidence.forwards == (3,)
    assert score.evidence.calls == (CallCount(factor=ROPE, site=site, rank=0, expected=12, observed=12),)
    (state,) = score.evidence.switches
    assert (state.effective, state.status) == (Choice.REFERENCE, SwitchStatus.APPLIED)
    assert score.binding == binding(rope=Choice.REFERENCE)


def test_a_site_that_the_model_never_calls_counts_zero() -> None:
    backend = MegatronBackend(
        build_model(LLAMA), token_logprobs=lambda called, ids: torch.zeros(len(ids), ids.shape[1] - 1)
    )
    with backend.bind(binding(rope=Choice.REFERENCE)):
        score = backend.score(sequences((4, 6)))
    assert score.evidence.forwards == (0,)
    assert [(call.expected, call.observed) for call in score.evidence.calls] == [(0, 0)]


def test_a_factor_bound_to_native_is_read_back_and_not_patched() -> None:
    backend, batch = MegatronBackend(build_model(LLAMA)), sequences((4, 6))
    native, original = backend.score(batch), rotary_function()
    with backend.bind(binding(rope=Choice.NATIVE)):
        assert rotary_function() is original
        score = backend.score(batch)
    assert logprobs_of(score) == logprobs_of(native)
    (state,) = score.evidence.switches
    assert (score.evidence.calls, state.effective, state.status) == ((), Choice.NATIVE, SwitchStatus.APPLIED)


def test_a_binding_is_restored_after_an_exception() -> None:
    backend, original = MegatronBackend(build_model(LLAMA)), rotary_function()
    with pytest.raises(ZeroDivisionError), backend.bind(binding(rope=Choice.REFERENCE)):
        raise ZeroDivisionError
    assert rotary_function() is original
    with backend.bind(binding(rope=Choice.REFERENCE)):  # and the backend can be bound again
        assert rotary_function() is not original


def test_a_failing_second_site_undoes_the_first() -> None:
    backend, original = MegatronBackend(build_model(LLAMA)), rotary_function()
    both = Binding(role=PolicyRole.TRAINING, choices={BROKEN: Choice.REFERENCE, ROPE: Choice.REFERENCE})
    later = Binding(role=PolicyRole.TRAINING, choices={"test.broken": Choice.REFERENCE})
    for failing in (both, later):
        with pytest.raises(ZeroDivisionError), backend.bind(failing):
            pytest.fail("a half-installed binding was entered")
        assert rotary_function() is original


def test_a_foreign_patch_is_reported_and_left() -> None:
    from megatron.core.transformer import attention

    backend, original = MegatronBackend(build_model(LLAMA)), rotary_function()
    foreign = object()
    try:
        with pytest.raises(RestoreError), backend.bind(binding(rope=Choice.REFERENCE)):
            attention.apply_rotary_pos_emb = foreign
        assert rotary_function() is foreign
    finally:
        attention.apply_rotary_pos_emb = original


def test_restoration_is_checked_for_factors_left_native_too() -> None:
    from megatron.core.transformer import attention

    backend, original = MegatronBackend(build_model(LLAMA)), rotary_function()
    try:
        with (
            pytest.raises(
                RestoreError, match=r"apply_rotary_pos_emb is not what it was before the binding; restart the run"
            ),
            backend.bind(binding(rope=Choice.NATIVE)),
        ):
            attention.apply_rotary_pos_emb = object()
    finally:
        attention.apply_rotary_pos_emb = original


def test_a_second_binding_waits_for_the_first() -> None:
    backend = MegatronBackend(build_model(LLAMA))
    with (
        backend.bind(binding(rope=Choice.REFERENCE)),
        pytest.raises(BindingError, match=r"^a binding is in force on the training side; leave its block"),
        backend.bind(binding(rope=Choice.NATIVE)),
    ):
        pytest.fail("two bindings at once")


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        pytest.param(
            Binding(role=PolicyRole.ROLLOUT), "the binding is for rollout; this engine is training.", id="role"
        ),
        pytest.param(
            Binding(role=PolicyRole.TRAINING, choices={"test.nothing": Choice.NATIVE}),
            "no factor test.nothing is registered on the training side; registered: test.rope, test.broken, "
            "test.nowhere.",
            id="unknown factor",
        ),
        pytest.param(
            Binding(role=PolicyRole.TRAINING, choices={NOWHERE: Choice.REFERENCE}),
            "nowhere: this megatron-core has no absent there; the patch does not fit it.",
            id="an attribute that this version lacks",
        ),
    ],
)
def test_a_binding_that_does_not_fit_is_one_sentence(wrong: Binding, sentence: str) -> None:
    backend = MegatronBackend(build_model(LLAMA))
    with pytest.raises(BindingError) as error, backend.bind(wrong):
        pytest.fail("entered")
    assert str(error.value) == sentence


def test_operators_switch_live_and_layouts_do_not() -> None:
    capabilities = MegatronBackend(build_model(LLAMA)).capabilities
    assert capabilities["operator.test.rope.implementation"] is RebindCost.PER_REQUEST
    assert capabilities["training.attention_backend"] is RebindCost.ENGINE_REBUILD
    assert capabilities["parallel.tensor"] is RebindCost.PROCESS_GROUP_REBUILD


def test_captured_cuda_graphs_make_an_operator_cost_a_rebuild() -> None:
    model = build_model(LLAMA)
    backend = MegatronBackend(model)
    model.config.cuda_graph_impl = "local"
    assert backend.capabilities["operator.test.rope.implementation"] is RebindCost.ENGINE_REBUILD
    assert backend.capabilities["parallel.tensor"] is RebindCost.PROCESS_GROUP_REBUILD


def test_switch_states_read_the_live_model_whatever_they_are_asked_about() -> None:
    backend = MegatronBackend(build_model(LLAMA))
    asked = binding(rope=Choice.NATIVE)
    assert [state.effective for state in backend.switch_states(asked)] == [Choice.NATIVE]
    with backend.bind(binding(rope=Choice.REFERENCE)):
        (leaked,) = backend.switch_states(asked)
    assert (leaked.requested, leaked.effective, leaked.status) == (
        Choice.NATIVE,
        Choice.REFERENCE,
        SwitchStatus.FELL_BACK,
    )
    assert [state.effective for state in backend.switch_states(asked)] == [Choice.NATIVE]
