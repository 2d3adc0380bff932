"""What the head factor declares, and which heads it refuses."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mismatch_hooks.operator_checks.logprob import adapter, head_sites
from mismatch_hooks.operator_checks.logprob.factors.head_dtype import FACTOR
from mismatch_hooks.pipeline.bind import BindingError, PatchSite
from mismatch_hooks.pipeline.guards import GUARDS
from mismatch_hooks.schema.enums import ExecutionPath, PolicyRole, RebindCost


def test_the_factor_declares_one_live_switch_and_one_site_a_side() -> None:
    assert (FACTOR.switch.rebind_cost, FACTOR.switch.roles) == (RebindCost.PER_REQUEST, tuple(PolicyRole))
    assert {site.role: site.name for site in FACTOR.call_sites} == {
        PolicyRole.ROLLOUT: head_sites._ROLLOUT_SITE,
        PolicyRole.TRAINING: head_sites._TRAINING_SITE,
    }
    assert FACTOR.references[0].covers_paths == tuple(ExecutionPath)
    assert [pitfall for pitfall in FACTOR.pitfalls if pitfall not in GUARDS] == []


def test_C04_the_advice_is_fp32_on_both_sides_or_on_neither() -> None:
    advice = FACTOR.recommendation.format(side="training")
    assert advice.startswith("Run the output head in fp32 on both sides or on neither: the training side departs")
    assert "hf_overrides={'head_dtype': 'float32'}" in advice


def _rollout_model(**changes: Any) -> Any:
    processors = pytest.importorskip("vllm.model_executor.layers.logits_processor", reason="vLLM is not installed")
    embedding = pytest.importorskip("vllm.model_executor.layers.vocab_parallel_embedding")
    processor = processors.LogitsProcessor.__new__(processors.LogitsProcessor)
    torch.nn.Module.__init__(processor)
    processor.logits_as_input = changes.get("logits_as_input", False)
    method = changes.get("method", embedding.UnquantizedEmbeddingMethod)()
    head = SimpleNamespace(quant_method=method, weight=torch.zeros(8, 2))
    return SimpleNamespace(logits_processor=changes.get("processor", processor), lm_head=head)


def test_rollouts_head_is_called_at_least_once_a_forward_and_once_for_each_call_of_its_processor() -> None:
    model = _rollout_model()
    (site,) = head_sites.sites(FACTOR.id, PolicyRole.ROLLOUT, model, {})
    assert (site.owner, site.name, site.calls_per_forward) == (model.logits_processor, "_apply_head", 1)
    assert site.caller is model.logits_processor


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        pytest.param(
            {"processor": torch.nn.Identity()},
            "logits_processor is a Identity (logits_as_input=None); the fp32 head covers vLLM's LogitsProcessor.",
            id="another processor",
        ),
        pytest.param(
            {"logits_as_input": True},
            "logits_processor is a LogitsProcessor (logits_as_input=True); the fp32 head covers vLLM's "
            "LogitsProcessor.",
            id="logits that come from elsewhere",
        ),
        pytest.param(
            {"method": object},
            "lm_head holds its weight in object; the fp32 head needs it unquantised.",
            id="quantised",
        ),
    ],
)
def test_a_rollout_head_of_another_kind_is_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(BindingError) as refused:
        adapter.sites(FACTOR.id, PolicyRole.ROLLOUT, _rollout_model(**changes), {})
    assert str(refused.value) == f"the rollout's {sentence}"


def _training_model(**attributes: Any) -> Any:
    layers = pytest.importorskip("megatron.core.tensor_parallel", reason="megatron-core is not installed")
    head = layers.ColumnParallelLinear.__new__(layers.ColumnParallelLinear)
    torch.nn.Module.__init__(head)
    for name, value in {"sequence_parallel": False, **attributes}.items():
        setattr(head, name, value)
    return SimpleNamespace(post_process=True, output_layer=head)


def test_trainings_head_is_called_once_a_forward() -> None:
    model = _training_model()
    (site,) = adapter.sites(FACTOR.id, PolicyRole.TRAINING, model, {})
    assert isinstance(site, PatchSite)
    assert (site.owner, site.name, site.calls_per_forward) == (model.output_layer, "_forward_impl", 1)


def test_a_pipeline_stage_without_a_head_has_no_site() -> None:
    assert adapter.sites(FACTOR.id, PolicyRole.TRAINING, SimpleNamespace(post_process=False), {}) == []


def test_a_training_head_of_another_kind_is_refused() -> None:
    other = SimpleNamespace(post_process=True, output_layer=torch.nn.Identity())
    with pytest.raises(BindingError, match=r"^the trainer's output_layer is a Identity; the fp32 head covers Column"):
        adapter.sites(FACTOR.id, PolicyRole.TRAINING, other, {})
    with pytest.raises(BindingError, match=r"^the trainer's output_layer gathers its input .* \(sequence_parallel\);"):
        adapter.sites(FACTOR.id, PolicyRole.TRAINING, _training_model(sequence_parallel=True), {})
