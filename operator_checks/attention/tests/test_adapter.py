"""Where the fp32 rope goes in the real engines' own modules, and which forms of rope it refuses.

The chain for one rotary embedding: the trainer's reference row = the rollout's reference row, and a rollout row in a
batch = the same row alone; hence trainer prefill = rollout decode.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mismatch_hooks.operator_checks.attention import adapter
from mismatch_hooks.operator_checks.attention.factors.rope_fusion import FACTOR
from mismatch_hooks.pipeline.bind import BindingError, CallCounter, PatchSite, patched
from mismatch_hooks.schema.enums import PolicyRole
from mismatch_hooks.schema.shape import ModelShape

SHAPE = ModelShape(
    architecture="LlamaForCausalLM",
    layers=3,
    hidden_size=128,
    ffn_size=256,
    query_heads=4,
    kv_heads=2,
    head_dim=32,
    vocab_size=512,
    norm_epsilon=1e-5,
    rope_theta=1e4,
    tied_embeddings=False,
    qk_norm=False,
)
PARAMETERS = {**adapter.parameters(FACTOR.id, SHAPE), "implementation": "fp32"}


def _trainer(**config: Any) -> Any:
    settings = {
        "multi_latent_attention": False,
        "rotary_interleaved": False,
        "fused_single_qkv_rope": False,
        "context_parallel_size": 1,
        "apply_rope_fusion": False,
        **config,
    }
    return SimpleNamespace(config=SimpleNamespace(**settings), decoder=SimpleNamespace(layers=[None] * SHAPE.layers))


def _training_sites(**config: Any) -> Any:
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    return adapter.sites(FACTOR.id, PolicyRole.TRAINING, _trainer(**config), PARAMETERS)


def _states(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_the_parameters_are_those_of_the_model_file() -> None:
    assert adapter.parameters(FACTOR.id, SHAPE) == {"theta": 1e4, "rotary_dim": 32, "scaling": {}}


def test_the_sites_are_those_that_the_factor_declares() -> None:
    (site,) = _training_sites()
    assert (site.factor, site.name, site.calls_per_forward) == (FACTOR.id, "apply_rotary_pos_emb", 2 * SHAPE.layers)
    assert site.site in {one.name for one in FACTOR.call_sites if one.role is PolicyRole.TRAINING}


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        pytest.param(
            {"rotary_interleaved": True}, "the trainer's TransformerConfig sets rotary_interleaved;", id="pairs"
        ),
        pytest.param({"multi_latent_attention": True}, "the trainer's TransformerConfig sets multi_latent_", id="MLA"),
        pytest.param(
            {"fused_single_qkv_rope": True}, "the trainer's TransformerConfig sets fused_single_qkv", id="fused"
        ),
        pytest.param({"context_parallel_size": 2}, "context_parallel_size is 2; the rope references see one", id="CP"),
    ],
)
def test_a_trainer_with_another_form_of_rope_is_refused(config: dict[str, Any], sentence: str) -> None:
    with pytest.raises(BindingError, match=f"^{sentence}"):
        _training_sites(**config)


def test_a_scaling_without_a_reference_is_refused() -> None:
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    yarn = {**PARAMETERS, "scaling": {"rope_type": "yarn"}}
    with pytest.raises(BindingError, match=r"^rope_type: got 'yarn'; the fp32 reference knows default, linear, llama3"):
        adapter.sites(FACTOR.id, PolicyRole.TRAINING, _trainer(), yarn)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        pytest.param({"cu_seqlens": torch.tensor([0, 4])}, "the trainer packs sequences", id="packed"),
        pytest.param({"mscale": 0.5}, "the trainer's rope asks for mscale 0.5", id="mscale"),
    ],
)
def test_a_call_that_the_reference_does_not_cover_is_refused(arguments: dict[str, Any], sentence: str) -> None:
    (site,) = _training_sites()
    with patched([site], CallCounter()), pytest.raises(BindingError, match=f"^{sentence}"):
        site.owner.apply_rotary_pos_emb(_states(0, 4, 1, 2, 32), None, None, **arguments)


def test_in_fp32_megatrons_own_unfused_rope_has_the_bits_of_the_reference() -> None:
    """The native path differs from the reference by its arithmetic in the input's dtype, and by nothing else."""
    (site,) = _training_sites()
    native = site.owner.apply_rotary_pos_emb
    inverse = 1.0 / (1e4 ** (torch.arange(0, 32, 2, dtype=torch.float32) / 32))
    angles = torch.arange(9, dtype=torch.float32)[:, None] * inverse
    phases = torch.cat((angles, angles), dim=-1)[:, None, None]
    config = _trainer().config
    for dtype, equal in ((torch.float32, True), (torch.bfloat16, False)):
        states = _states(0, 9, 2, 4, 32, dtype=dtype)
        with patched([site], CallCounter()):
            ours = site.owner.apply_rotary_pos_emb(states, phases, config)
        theirs = native(states, phases, config, cp_group=SimpleNamespace(size=lambda: 1, rank=lambda: 0))
        assert torch.equal(ours, theirs) is equal


# ---- rollout ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rotary_class() -> Any:
    return pytest.importorskip(
        "vllm.model_executor.layers.rotary_embedding.base", reason="vLLM is not installed"
    ).RotaryEmbedding


def _rotary(kind: Any, *, is_neox_style: bool = True) -> Any:
    from vllm.config import VllmConfig, set_current_vllm_config

    with set_current_vllm_config(VllmConfig()):
        return kind(32, 32, 64, 10000.0, is_neox_style, torch.float32)


def _rollout(rotary: list[Any]) -> torch.nn.Module:
    """Layers as vLLM's models have them: each attention holds the rotary module, which may be one for all."""
    model = torch.nn.Module()
    layers = [torch.nn.Module() for _ in rotary]
    for layer, module in zip(layers, rotary, strict=True):
        layer.rotary_emb = module
    model.layers = torch.nn.ModuleList(layers)
    return model


def test_a_rotary_module_that_layers_share_is_patched_once_and_counted_for_each(rotary_class: Any) -> None:
    shared, own = _rotary(rotary_class), _rotary(rotary_class)
    sites = adapter.sites(FACTOR.id, PolicyRole.ROLLOUT, _rollout([shared, shared, own]), PARAMETERS)
    patches = [site for site in sites if isinstance(site, PatchSite)]
    assert [(site.owner is shared, site.calls_per_forward) for site in patches] == [(True, 2), (False, 1)]
    assert {site.site for site in sites} <= {one.name for one in FACTOR.call_sites if one.role is PolicyRole.ROLLOUT}


def test_the_live_module_runs_the_reference_through_its_stored_forward(rotary_class: Any) -> None:
    rotary = _rotary(rotary_class)
    sites, counter = adapter.sites(FACTOR.id, PolicyRole.ROLLOUT, _rollout([rotary, rotary]), PARAMETERS), CallCounter()
    query, key, positions = _states(1, 5, 128), _states(2, 5, 64), torch.tensor([3, 0, 4, 1, 2])
    before = [part.clone() for part in rotary(positions, query.clone(), key.clone())]
    with patched(sites, counter):
        ours = rotary(positions, query, key)
        assert rotary(positions, query)[1] is None
    assert [count.observed for count in counter.counts(sites, forwards=1, rank=0)] == [2]
    # Both in fp32: the native kernel may contract a product and a sum, which moves the last bits.
    for reference, native in zip(ours, before, strict=True):
        assert reference.shape == native.shape
        assert float((reference - native).abs().max()) <= 4 * 2.0**-24 * 2 * float(query.abs().max())
    again = rotary(positions, query.clone(), key.clone())
    assert all(torch.equal(one, other) for one, other in zip(before, again, strict=True))


def test_a_rollout_row_has_the_bits_of_the_trainers_row_and_of_itself_alone(rotary_class: Any) -> None:
    (training,) = _training_sites()
    rotary = _rotary(rotary_class)
    (rollout,) = adapter.sites(FACTOR.id, PolicyRole.ROLLOUT, _rollout([rotary]), PARAMETERS)
    states = _states(3, 9, 1, 4, 32, dtype=torch.bfloat16)
    flat, positions = states.reshape(9, 128), torch.arange(9)
    with patched([training, rollout], CallCounter()):
        trainer = training.owner.apply_rotary_pos_emb(states, None, None).reshape(9, 128)
        prefill, _ = rotary(positions, flat, flat)
        decode = torch.cat([rotary(positions[row : row + 1], flat[row : row + 1], None)[0] for row in range(9)])
    assert torch.equal(trainer, prefill)
    assert torch.equal(prefill, decode)


def test_a_rotary_embedding_of_interleaved_pairs_is_refused(rotary_class: Any) -> None:
    with pytest.raises(BindingError, match=r"^the rollout's rotary embedding interleaves pairs; the rope references"):
        adapter.sites(FACTOR.id, PolicyRole.ROLLOUT, _rollout([_rotary(rotary_class, is_neox_style=False)]), PARAMETERS)
