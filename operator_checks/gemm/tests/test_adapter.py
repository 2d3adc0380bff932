"""What the linear factor declares, which linears it refuses, and which weight it multiplies with."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from mismatch_hooks.operator_checks.gemm import adapter
from mismatch_hooks.operator_checks.gemm.factors.accumulation import FACTOR
from mismatch_hooks.operator_checks.gemm.packed_weight import PackedWeight
from mismatch_hooks.pipeline.bind import BindingError
from mismatch_hooks.pipeline.guards import GUARDS
from mismatch_hooks.schema.enums import ExecutionPath, PolicyRole, RebindCost


def test_the_factor_declares_one_live_switch_and_one_site_a_side() -> None:
    assert (FACTOR.switch.rebind_cost, FACTOR.switch.roles) == (RebindCost.PER_REQUEST, tuple(PolicyRole))
    assert {site.role: site.name for site in FACTOR.call_sites} == {
        PolicyRole.ROLLOUT: adapter._ROLLOUT_SITE,
        PolicyRole.TRAINING: adapter._TRAINING_SITE,
    }
    assert FACTOR.references[0].covers_paths == tuple(ExecutionPath)
    assert [pitfall for pitfall in FACTOR.pitfalls if pitfall not in GUARDS] == []
    assert "on the rollout side" in FACTOR.recommendation.format(side="rollout")


# ---- refusals -----------------------------------------------------------------------------------------------------


def _training_model(**changes: Any) -> Any:
    """Two layers' worth of parallel linears without their constructors, the last of them changed."""
    layers = pytest.importorskip("megatron.core.tensor_parallel", reason="megatron-core is not installed")

    def made(kind: Any, **attributes: Any) -> Any:
        module = kind.__new__(kind)
        torch.nn.Module.__init__(module)
        for name, value in {"sequence_parallel": False, "explicit_expert_comm": False, **attributes}.items():
            setattr(module, name, value)
        return module

    def layer(last: Any) -> Any:
        return SimpleNamespace(
            self_attention=SimpleNamespace(
                linear_qkv=made(layers.ColumnParallelLinear), linear_proj=made(layers.RowParallelLinear)
            ),
            mlp=SimpleNamespace(linear_fc1=made(layers.ColumnParallelLinear), linear_fc2=last),
        )

    kind = changes.pop("kind", layers.RowParallelLinear)
    last = made(kind, **changes) if kind is not None else None
    return SimpleNamespace(decoder=SimpleNamespace(layers=[layer(made(layers.RowParallelLinear)), layer(last)]))


def test_a_layer_has_four_linears_each_called_once_a_forward() -> None:
    model = _training_model()
    sites = adapter.sites(FACTOR.id, PolicyRole.TRAINING, model, {})
    owners = [
        linear
        for layer in model.decoder.layers
        for linear in (
            layer.self_attention.linear_qkv,
            layer.self_attention.linear_proj,
            layer.mlp.linear_fc1,
            layer.mlp.linear_fc2,
        )
    ]
    assert [site.owner for site in sites] == owners
    assert {(site.name, site.calls_per_forward) for site in sites} == {("_forward_impl", 1)}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        pytest.param({"kind": torch.nn.Identity}, "linear_fc2 is a Identity; ", id="of another class"),
        pytest.param({"kind": None}, "linear_fc2 is a NoneType; ", id="not there, as in a layer of experts"),
        pytest.param({"sequence_parallel": True}, "linear_fc2 gathers its input over ranks", id="sequence parallel"),
    ],
)
def test_a_trainers_linear_of_another_kind_is_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(BindingError) as refused:
        adapter.sites(FACTOR.id, PolicyRole.TRAINING, _training_model(**changes), {})
    assert str(refused.value).startswith(f"the trainer's decoder.layers.1.mlp.{sentence}")


def test_a_rollouts_linear_of_another_kind_is_refused() -> None:
    pytest.importorskip("vllm.model_executor.layers.linear", reason="vLLM is not installed")
    layer = SimpleNamespace(self_attn=SimpleNamespace(qkv_proj=torch.nn.Linear(2, 2)))
    model = SimpleNamespace(model=SimpleNamespace(layers=[layer]))
    with pytest.raises(BindingError) as refused:
        adapter.sites(FACTOR.id, PolicyRole.ROLLOUT, model, {})
    assert str(refused.value) == (
        "the rollout's model.layers.0.self_attn.qkv_proj is a Linear with NoneType; the linear reference covers "
        "unquantised linears of dense layers."
    )


# ---- the weight ---------------------------------------------------------------------------------------------------


class _Layer:
    """A layer of vLLM's CPU build on a host whose kernels pack: the parameter is empty, a kernel owns the weight."""

    input_size_per_partition = 24
    params_dtype = torch.bfloat16

    def __init__(self, weight: Tensor) -> None:
        self.weight, self.reads = torch.empty(0), 0
        self.pack(weight)

    def pack(self, weight: Tensor) -> None:
        def kernel(rows: Tensor, empty: Tensor, bias: Tensor | None) -> Tensor:
            self.reads += 1
            return functional.linear(rows, weight)

        self.cpu_linear = kernel


def _weight(seed: int = 0) -> Tensor:
    return torch.randn(40, 24, generator=torch.Generator().manual_seed(seed)).bfloat16()


def test_a_packed_weight_is_read_exactly_and_once() -> None:
    layer = _Layer(_weight())
    packed = PackedWeight()
    assert torch.equal(packed.of(layer), _weight())
    assert torch.equal(packed.of(layer), _weight())
    assert (layer.reads, packed.of(layer).is_contiguous()) == (1, True)


def test_a_load_that_packs_another_weight_is_seen_and_the_old_kernel_is_let_go() -> None:
    layer = _Layer(_weight())
    packed = PackedWeight()
    packed.of(layer)
    old = packed._kernel
    layer.pack(_weight(seed=1))
    assert old() is None
    assert torch.equal(packed.of(layer), _weight(seed=1))


def test_a_weight_that_was_not_packed_is_taken_as_it_is_at_every_call() -> None:
    layer = SimpleNamespace(weight=_weight())
    packed = PackedWeight()
    assert packed.of(layer) is layer.weight
    layer.weight = _weight(seed=1)
    assert packed.of(layer) is layer.weight
