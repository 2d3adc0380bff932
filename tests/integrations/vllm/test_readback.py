"""Requested is not effective: what a live engine is really set to."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mismatch_hooks.integrations.vllm import VllmBackend, readback
from mismatch_hooks.integrations.vllm.rotary import implied_inverse_frequencies
from mismatch_hooks.schema.enums import Source
from mismatch_hooks.schema.readback import Reading, Unobservable
from tests.integrations.vllm.conftest import model_of

pytestmark = pytest.mark.engine


def reading(backend: VllmBackend, key: str) -> Reading:
    found = backend.read_back().settings[key]
    assert isinstance(found, Reading)
    return found


def test_C17_the_attention_backend_is_the_live_layers_class_whatever_was_asked(llama: VllmBackend) -> None:
    found = reading(llama, "operator.attention.implementation")
    assert llama._llm.llm_engine.vllm_config.attention_config.backend.name == "FLASH_ATTN"  # repeats the request
    assert (found.requested, found.requested_by) == ("FLASH_ATTN", "engine argument attention_backend")
    assert (found.effective, found.source) == ("CPUAttentionBackendImpl", Source.LIVE_MODULE)
    assert found.differs_from_request


def test_C17_control_no_request_for_an_attention_backend_is_no_difference(qwen3: VllmBackend) -> None:
    found = reading(qwen3, "operator.attention.implementation")
    assert found.effective == "CPUAttentionBackendImpl"
    assert not found.differs_from_request


def test_C17_an_environment_request_that_this_version_does_not_read_is_said(
    qwen3: VllmBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "TRITON_ATTN")
    found = reading(qwen3, "operator.attention.implementation")
    assert (found.requested, found.effective) == ("TRITON_ATTN", "CPUAttentionBackendImpl")
    assert found.requested_by == "environment variable VLLM_ATTENTION_BACKEND, which vLLM 0.32.0 does not read"
    assert qwen3.read_back().settings["environment.VLLM_ATTENTION_BACKEND"] == Unobservable(
        reason="no such variable is read by vLLM 0.32.0", requested="TRITON_ATTN"
    )


def test_C18_a_rope_override_of_the_attribute_alone_leaves_the_table(llama: VllmBackend) -> None:
    assert llama._llm.llm_engine.vllm_config.model_config.hf_config.rope_theta == 500000
    found = reading(llama, "model.rope.theta")
    assert (found.requested, found.requested_by) == (500000.0, "engine argument hf_overrides")
    assert (found.effective, found.source) == (10000.0, Source.LIVE_MODULE)
    assert "cos_sin_cache" in found.where
    assert found.differs_from_request


def test_C18_control_a_rope_override_that_takes_effect_is_not_marked(qwen3: VllmBackend) -> None:
    found = reading(qwen3, "model.rope.theta")
    assert (found.requested, found.effective) == (500000.0, 500000.0)
    assert not found.differs_from_request


def test_a_table_overwritten_behind_the_modules_back_is_read_from_the_table(llama: VllmBackend) -> None:
    rotary = model_of(llama).model.layers[0].self_attn.rotary_emb
    kept = rotary.cos_sin_cache.clone()
    try:
        rotary.base, asked = 10500.0, rotary.base
        rotary.cos_sin_cache.copy_(rotary._compute_cos_sin_cache())
        rotary.base = asked
        assert reading(llama, "model.rope.theta").effective == 10500.0
        rotary.cos_sin_cache.copy_(torch.roll(kept, 1, 0))  # every position is one behind: no base explains it
        assert llama.weights_digest(["model.rotary"]).derived["model.rotary_emb.inv_freq"].startswith("unobservable")
    finally:
        rotary.base = asked
        rotary.cos_sin_cache.copy_(kept)
    assert reading(llama, "model.rope.theta").effective == 10000.0


@pytest.mark.parametrize("theta", [10000.0, 10500.0, 100000.0, 123456.0, 1000000.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16 table", "fp32 table"])
@pytest.mark.parametrize("rotary_dim", [32, 64, 128])
def test_the_base_of_any_plain_table_is_found_exactly(theta: float, dtype: torch.dtype, rotary_dim: int) -> None:
    inverse = 1.0 / theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.float) / rotary_dim)
    angles = torch.arange(2048, dtype=torch.float)[:, None] * inverse
    table = torch.cat((angles.cos(), angles.sin()), dim=-1).to(dtype)
    other = SimpleNamespace(
        cos_sin_cache=table, rotary_dim=rotary_dim, base=10.0, _compute_cos_sin_cache=lambda: torch.zeros_like(table)
    )
    found = implied_inverse_frequencies(other)
    assert (found.exact, found.theta) == (True, theta)
    assert torch.equal(found.frequencies, inverse)


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("model.dtype", "bfloat16"),
        ("model.head.dtype", "bfloat16"),
        ("model.layers", 2),
        ("model.norm.epsilon", 1e-5),
        ("model.rope.scaling_type", "default"),
        ("model.tied_embeddings", False),
        ("model.vocab.size", 512),
        ("model.vocab.logits_width", 512),
        ("operator.norm.implementation", "RMSNorm.forward_cpu"),
        ("operator.activation.implementation", "SiluAndMul.forward_cpu"),
        ("parallel.tensor", 1),
        ("engine.compiled", False),
        ("engine.device", "cpu"),
        ("rollout.prefix_caching", True),
        ("rollout.block_size", 128),
        ("rollout.kv_cache_dtype", "bfloat16"),
        ("rollout.logprobs_mode", "raw_logprobs"),
        ("rollout.max_model_len", 512),
        ("rollout.max_sequences", 16),
        ("rollout.generation_config.repetition_penalty", 1.1),
        ("weights.version", "7"),
        ("library.vllm", "0.32.0"),
    ],
)
def test_effective_values(llama: VllmBackend, key: str, expected: object) -> None:
    assert llama.read_back().effective(key) == expected


def test_nothing_else_of_a_healthy_engine_differs_from_what_was_asked(llama: VllmBackend, qwen3: VllmBackend) -> None:
    def marked(backend: VllmBackend) -> set[str]:
        settings = backend.read_back().settings
        return {key for key, found in settings.items() if isinstance(found, Reading) and found.differs_from_request}

    assert marked(llama) == {"operator.attention.implementation", "model.rope.theta"}
    assert marked(qwen3) == set()


def test_values_that_differ_by_layer_are_listed_by_module(llama: VllmBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_of(llama).model.norm, "variance_epsilon", 1e-3)
    found = reading(llama, "model.norm.epsilon")
    assert found.effective["model.norm"] == 1e-3
    assert found.effective["model.layers.0.input_layernorm"] == 1e-5
    assert found.differs_from_request


def test_ranks_that_disagree_are_listed_by_rank() -> None:
    def rank(threads: int) -> dict[str, Any]:
        return {"engine.threads": Reading(effective=threads, source=Source.LIVE_MODULE)}

    assert readback.merged({0: rank(2), 1: rank(2)})["engine.threads"] == rank(2)["engine.threads"]
    differing = readback.merged({0: rank(2), 1: rank(3)})["engine.threads"]
    assert isinstance(differing, Reading)
    assert differing.effective == {"rank 0": 2, "rank 1": 3}


def test_settings_survive_the_way_out_of_the_worker(llama: VllmBackend) -> None:
    import json

    settings = dict(llama.read_back().settings)
    assert readback.from_plain(json.loads(json.dumps(readback.as_plain(settings)))) == settings
