"""The precision of the trainer's softmax is held in every layer, and is as before afterwards."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mismatch_hooks.operator_checks.attention import adapter
from mismatch_hooks.operator_checks.attention.factors.softmax_precision import FACTOR
from mismatch_hooks.pipeline.bind import BindingError, CallCounter, patched
from mismatch_hooks.pipeline.guards import GUARDS
from mismatch_hooks.schema.enums import PolicyRole, SwitchStatus
from mismatch_hooks.schema.score import Binding, Score, ScoringSequence
from tests.tiny_engines import TinyEngines


def _model(flags: tuple[bool, ...] = (True, False), **softmax: Any) -> Any:
    """Layers as megatron-core's local spec builds them, with flags that may differ among themselves."""
    given = {"scaled_masked_softmax_fusion": False, "scale": None, **softmax}
    cores = [
        SimpleNamespace(scale_mask_softmax=SimpleNamespace(softmax_in_fp32=flag, input_in_float16=True, **given))
        for flag in flags
    ]
    layers = [SimpleNamespace(self_attention=SimpleNamespace(core_attention=core)) for core in cores]
    return SimpleNamespace(decoder=SimpleNamespace(layers=layers))


def _flags(model: Any) -> list[bool]:
    return [layer.self_attention.core_attention.scale_mask_softmax.softmax_in_fp32 for layer in model.decoder.layers]


def test_the_factor_is_a_sweep_of_the_trainer_alone() -> None:
    assert (FACTOR.switch.roles, FACTOR.references) == ((PolicyRole.TRAINING,), ())
    assert list(FACTOR.arms) == ["native", "training=fp32", "training=model_dtype"]
    assert [pitfall for pitfall in FACTOR.pitfalls if pitfall not in GUARDS] == []


@pytest.mark.parametrize(
    ("value", "inside"),
    [("native", [True, False]), ("fp32", [True, True]), ("model_dtype", [False, False])],
)
def test_every_layer_holds_the_value_inside_the_binding_only(value: str, inside: list[bool]) -> None:
    model = _model()
    (site,) = adapter.sites(FACTOR.id, PolicyRole.TRAINING, model, {"value": value})
    assert site.site in {one.name for one in FACTOR.call_sites}
    with patched([site], CallCounter()):
        assert _flags(model) == inside
    assert _flags(model) == [True, False]


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        pytest.param(_model(scaled_masked_softmax_fusion=True), "set masked_softmax_fusion=False.", id="fused"),
        pytest.param(_model(scale=1), "set apply_query_key_layer_scaling=False.", id="scaled by layer"),
        pytest.param(
            SimpleNamespace(decoder=SimpleNamespace(layers=[SimpleNamespace()])),
            "core_attention is a NoneType, whose softmax has no precision to set;",
            id="no local attention",
        ),
    ],
)
def test_a_trainer_whose_flag_decides_nothing_is_refused(model: Any, sentence: str) -> None:
    with pytest.raises(BindingError) as refused:
        adapter.sites(FACTOR.id, PolicyRole.TRAINING, model, {"value": "fp32"})
    assert sentence in str(refused.value)


@pytest.mark.engine
def test_on_a_cpu_the_flag_changes_no_bit_of_a_live_trainer(llama_engines: TinyEngines) -> None:
    """A sweep whose values all agree, and rightly so: torch's softmax of bf16 is computed in fp32 on a CPU."""
    trainer, ids = llama_engines.engines[PolicyRole.TRAINING], tuple(range(3, 23))
    batch = [ScoringSequence(prompt_token_ids=ids, response_token_ids=ids, response_mask=(True,) * 20)]

    def score(value: str) -> Score:
        with trainer.bind(Binding(role=PolicyRole.TRAINING, choices={FACTOR.id: value})):
            return trainer.score(batch)

    scores = {value: score(value) for value in FACTOR.switch.values if isinstance(value, str)}
    for value, found in scores.items():
        (switch,), (count,) = found.evidence.switches, found.evidence.calls
        assert (switch.effective, switch.status) == (value, SwitchStatus.APPLIED)
        assert (count.expected, count.observed) == (1, 1)
    assert scores["fp32"].shards[0].slices == scores["model_dtype"].shards[0].slices
    assert torch.equal(
        torch.arange(8.0).bfloat16().softmax(0), torch.arange(8.0).bfloat16().float().softmax(0).bfloat16()
    )
