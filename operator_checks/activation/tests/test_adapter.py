"""What the activation factor declares, and which MLPs it refuses."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mismatch_hooks.operator_checks.activation import adapter
from mismatch_hooks.operator_checks.activation.factors.swiglu import FACTOR
from mismatch_hooks.pipeline.bind import BindingError, CallCounter, patched
from mismatch_hooks.pipeline.guards import GUARDS
from mismatch_hooks.references.activation import swiglu
from mismatch_hooks.schema.enums import ExecutionPath, PolicyRole, RebindCost


@pytest.fixture
def mlp() -> Any:
    """megatron-core's MLP around two linears that pass their input through, without its constructor."""
    kind = pytest.importorskip("megatron.core.transformer.mlp", reason="megatron-core is not installed").MLP
    made = kind.__new__(kind)
    torch.nn.Module.__init__(made)
    made.config = SimpleNamespace(
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        use_te_activation_func=False,
        activation_func_clamp_value=None,
        glu_linear_offset=0.0,
    )
    made.linear_fc1 = _Passing(bias=None)
    made.linear_fc2 = _Passing(bias=None)
    return made


class _Passing(torch.nn.Module):
    def __init__(self, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.bias = bias

    def forward(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return states, self.bias


def _sites(mlp: Any) -> Any:
    model = SimpleNamespace(decoder=SimpleNamespace(layers=[SimpleNamespace(mlp=mlp)]))
    return adapter.sites(FACTOR.id, PolicyRole.TRAINING, model, {})


def test_the_factor_declares_one_live_switch_and_one_site_a_side() -> None:
    assert (FACTOR.switch.rebind_cost, FACTOR.switch.roles) == (RebindCost.PER_REQUEST, tuple(PolicyRole))
    assert {site.role: site.name for site in FACTOR.call_sites} == {
        PolicyRole.ROLLOUT: adapter._ROLLOUT_SITE,
        PolicyRole.TRAINING: adapter._TRAINING_SITE,
    }
    assert FACTOR.references[0].covers_paths == tuple(ExecutionPath)
    assert [pitfall for pitfall in FACTOR.pitfalls if pitfall not in GUARDS] == []
    assert "{side}" in FACTOR.recommendation


def test_the_bias_of_the_first_product_is_added_and_that_of_the_second_handed_on(mlp: Any) -> None:
    states = torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(0))
    mlp.linear_fc1.bias, mlp.linear_fc2.bias = torch.arange(8.0), torch.ones(4)
    with patched(_sites(mlp), CallCounter()):
        output, bias = mlp(states, padding_mask=None)
    assert torch.equal(output, swiglu(states + torch.arange(8.0)))
    assert bias is mlp.linear_fc2.bias


def test_a_scale_per_token_is_refused_when_it_comes(mlp: Any) -> None:
    with (
        patched(_sites(mlp), CallCounter()),
        pytest.raises(BindingError, match=r"^the trainer scales its MLP per token;"),
    ):
        mlp(torch.zeros(1, 1, 8), per_token_scale=torch.ones(1, 1))


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        pytest.param(
            {"gated_linear_unit": False}, "has gated_linear_unit=False and activation_func=silu; ", id="no gate"
        ),
        pytest.param(
            {"activation_func": torch.nn.functional.gelu},
            "has gated_linear_unit=True and activation_func=gelu; ",
            id="another gate",
        ),
        pytest.param(
            {"activation_func_clamp_value": 7.0},
            "sets activation_func_clamp_value to 7.0; the SwiGLU reference covers None only.",
            id="clamped",
        ),
        pytest.param(
            {"glu_linear_offset": 1.0},
            "sets glu_linear_offset to 1.0; the SwiGLU reference covers 0.0 only.",
            id="offset",
        ),
        pytest.param(
            {"use_te_activation_func": True},
            "sets use_te_activation_func to True; the SwiGLU reference covers False only.",
            id="TransformerEngine's",
        ),
    ],
)
def test_an_mlp_with_another_gate_is_refused(mlp: Any, config: dict[str, Any], sentence: str) -> None:
    vars(mlp.config).update(config)
    with pytest.raises(BindingError) as refused:
        _sites(mlp)
    assert str(refused.value).startswith(f"the trainer's TransformerConfig {sentence}")


def test_an_mlp_of_another_class_is_refused(mlp: Any) -> None:
    with pytest.raises(BindingError, match=r"^the trainer's mlp is a Identity; the SwiGLU reference covers megatron-"):
        _sites(torch.nn.Identity())


def test_another_activation_of_the_rollout_is_refused() -> None:
    pytest.importorskip("vllm.model_executor.layers.activation", reason="vLLM is not installed")
    layer = torch.nn.ModuleDict({"mlp": torch.nn.ModuleDict({"act_fn": torch.nn.GELU()})})
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([layer])})
    with pytest.raises(BindingError) as refused:
        adapter.sites(FACTOR.id, PolicyRole.ROLLOUT, model, {})
    assert str(refused.value) == "the rollout's layers.0.mlp.act_fn is a GELU; the SwiGLU reference covers SiluAndMul."
