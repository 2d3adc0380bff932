"""What the norm factors declare, and which norms they refuse."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mismatch_hooks.operator_checks.norm import adapter
from mismatch_hooks.operator_checks.norm.factors import qk_norm, rmsnorm
from mismatch_hooks.pipeline.bind import BindingError, CallCounter, patched
from mismatch_hooks.pipeline.guards import GUARDS
from mismatch_hooks.references.norm import rms_norm
from mismatch_hooks.schema.enums import ExecutionPath, PolicyRole, RebindCost
from mismatch_hooks.schema.factor import MismatchFactor

FACTORS = [pytest.param(module.FACTOR, id=module.FACTOR.id) for module in (rmsnorm, qk_norm)]


def _gpt(layers: int = 2, norm: Any = torch.nn.RMSNorm) -> torch.nn.Module:
    """Modules as megatron-core's local layers name them."""

    def attention() -> torch.nn.Module:
        return torch.nn.ModuleDict({"q_layernorm": norm(4), "k_layernorm": norm(4)})

    def layer() -> torch.nn.Module:
        parts = {"input_layernorm": norm(8), "self_attention": attention(), "pre_mlp_layernorm": norm(8)}
        return torch.nn.ModuleDict(parts)

    decoder = {"layers": torch.nn.ModuleList([layer() for _ in range(layers)]), "final_layernorm": norm(8)}
    return torch.nn.ModuleDict({"decoder": torch.nn.ModuleDict(decoder)})


@pytest.mark.parametrize("factor", FACTORS)
def test_a_factor_declares_one_live_switch_and_one_site_a_side(factor: MismatchFactor) -> None:
    assert (factor.switch.rebind_cost, factor.switch.roles) == (RebindCost.PER_REQUEST, tuple(PolicyRole))
    assert {site.role: site.name for site in factor.call_sites} == {
        role: place.site for (owner, role), place in adapter._PLACES.items() if owner == factor.id
    }
    assert factor.references[0].covers_paths == tuple(ExecutionPath)
    assert [pitfall for pitfall in factor.pitfalls if pitfall not in GUARDS] == []
    assert "{side}" in factor.recommendation


def test_the_two_norms_have_a_switch_each() -> None:
    assert rmsnorm.FACTOR.switch.path != qk_norm.FACTOR.switch.path
    assert qk_norm.FACTOR.prerequisites.required_model_traits == ("rmsnorm", "qk_norm")


def test_epsilon_is_that_of_the_model_file() -> None:
    shape: Any = SimpleNamespace(norm_epsilon=1e-6)
    assert adapter.parameters("norm.rmsnorm", shape) == {"epsilon": 1e-6}


@pytest.mark.parametrize(
    ("factor", "calls"), [("norm.rmsnorm", 7), ("norm.qk_norm", 6)], ids=["residual stream", "queries and keys"]
)
def test_three_layers_have_two_norms_each_and_the_last_one(factor: str, calls: int) -> None:
    sites = adapter.sites(factor, PolicyRole.TRAINING, _gpt(layers=3), {"epsilon": 1e-5})
    assert {site.calls_per_forward for site in sites} == {1}
    assert len({id(site.owner) for site in sites}) == len(sites) == calls


def test_a_weight_that_changes_while_bound_is_used_as_it_is_now() -> None:
    """Weights are read at each call: an update between two passes of one binding must not be missed."""
    model = _gpt(layers=0)
    norm: Any = model.get_submodule("decoder.final_layernorm")
    states = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    with patched(adapter.sites("norm.rmsnorm", PolicyRole.TRAINING, model, {"epsilon": 1e-5}), CallCounter()):
        norm.weight.data = torch.arange(8.0)
        assert torch.equal(norm(states), rms_norm(states, torch.arange(8.0), epsilon=1e-5))
        norm(states).sum().backward()
    assert norm.weight.grad is not None


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        pytest.param(lambda width: torch.nn.Identity(), "Identity", id="fused into the linear after it"),
        pytest.param(torch.nn.LayerNorm, "LayerNorm", id="another norm"),
        pytest.param(lambda width: torch.nn.RMSNorm(width, elementwise_affine=False), "RMSNorm", id="no weight"),
    ],
)
def test_a_norm_of_another_kind_is_refused_by_name(kind: Any, found: str) -> None:
    with pytest.raises(BindingError) as refused:
        adapter.sites("norm.rmsnorm", PolicyRole.TRAINING, _gpt(norm=kind), {"epsilon": 1e-5})
    assert str(refused.value) == (
        f"the trainer's decoder.layers.0.input_layernorm is a {found}; the norm reference covers torch.nn.RMSNorm with "
        "a weight, which get_gpt_layer_local_spec(normalization='RMSNorm') builds."
    )
