"""The live weights under Hugging Face names: equal to the checkpoint, and any fault is named by tensor."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from blake3 import blake3

from mismatch_hooks.integrations.megatron import MegatronBackend
from mismatch_hooks.integrations.megatron.weights import digest, layer_tensors, live_tensors
from mismatch_hooks.model_meta.correspondence import correspondences
from mismatch_hooks.schema.readback import Unobservable
from mismatch_hooks.schema.shape import ModelShape
from tests.integrations.megatron.tiny_gpt import (
    LLAMA,
    QWEN3,
    build_model,
    by_group,
    by_kind,
    hugging_face_tensors,
    load,
)

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("megatron")]

SHAPES = [
    pytest.param(LLAMA, id="Llama"),
    pytest.param(replace(LLAMA, kv_heads=4), id="Llama with as many KV heads as heads"),
    pytest.param(replace(LLAMA, attention_bias=True), id="Llama with q, k, v biases"),
    pytest.param(QWEN3, id="Qwen3, tied"),
    pytest.param(replace(QWEN3, tied_embeddings=False, kv_heads=1), id="Qwen3, untied, one KV head"),
]


@pytest.mark.parametrize("shape", SHAPES)
def test_digests_are_those_of_the_checkpoint(shape: ModelShape) -> None:
    found = MegatronBackend(build_model(shape), shape=shape, weight_version=lambda: "7").weights_digest()
    assert found.tensors == {name: digest(tensor) for name, tensor in hugging_face_tensors(shape).items()}
    assert found.version == "7"


@pytest.mark.parametrize("shape", SHAPES)
def test_tensors_are_those_of_the_checkpoint_to_the_bit(shape: ModelShape) -> None:
    checkpoint = hugging_face_tensors(shape)
    for name, source in live_tensors(build_model(shape)).items():
        assert not isinstance(source, Unobservable)
        assert torch.equal(source().view(torch.int16), checkpoint[name].view(torch.int16)), name


@pytest.mark.parametrize("kv_heads", [2, 4])
def test_C05_a_wrong_fused_layout_is_named_by_exactly_the_q_k_v_tensors(kv_heads: int) -> None:
    shape = replace(LLAMA, kv_heads=kv_heads)
    model, checkpoint = build_model(shape), hugging_face_tensors(shape)
    right = MegatronBackend(model, shape=shape).weights_digest().tensors
    load(model, checkpoint, shape, fuse=by_kind)
    wrong = MegatronBackend(model, shape=shape).weights_digest().tensors
    assert sorted(name for name in right if right[name] != wrong[name]) == [
        f"model.layers.{layer}.self_attn.{part}_proj.weight" for layer in (0, 1) for part in "kqv"
    ]
    load(model, checkpoint, shape, fuse=by_group)
    assert MegatronBackend(model, shape=shape).weights_digest().tensors == right


def test_one_changed_value_names_one_tensor() -> None:
    model = build_model(QWEN3)
    backend = MegatronBackend(model, shape=QWEN3)
    before = backend.weights_digest().tensors
    with torch.no_grad():
        model.decoder.layers[1].mlp.linear_fc1.weight[QWEN3.ffn_size, 5] += 1
    after = backend.weights_digest().tensors
    assert [name for name in before if before[name] != after[name]] == ["model.layers.1.mlp.up_proj.weight"]


def test_prefixes_limit_what_is_digested() -> None:
    backend = MegatronBackend(build_model(LLAMA), shape=LLAMA)
    everything = backend.weights_digest()
    some = backend.weights_digest(["model.layers.1.mlp.", "lm_head"])
    assert sorted(some.tensors) == [
        "lm_head.weight",
        "model.layers.1.mlp.down_proj.weight",
        "model.layers.1.mlp.gate_proj.weight",
        "model.layers.1.mlp.up_proj.weight",
    ]
    assert all(everything.tensors[name] == value for name, value in some.tensors.items())
    assert (list(everything.derived), list(some.derived)) == (["model.rotary_emb.inv_freq"], [])


def test_rows_behind_the_vocabulary_are_left_out() -> None:
    padded = MegatronBackend(build_model(LLAMA, padded_vocab=640), shape=LLAMA).weights_digest()
    assert padded.tensors == {name: digest(tensor) for name, tensor in hugging_face_tensors(LLAMA).items()}


def test_a_tied_head_that_came_loose_gets_its_own_name() -> None:
    model = build_model(QWEN3)
    loose = torch.nn.Parameter(model.embedding.word_embeddings.weight.detach().clone())
    model.shared_embedding_or_output_weight = lambda: loose
    tensors = MegatronBackend(model, shape=QWEN3).weights_digest().tensors
    assert tensors["lm_head.weight"] == tensors["model.embed_tokens.weight"]


def test_the_rotary_table_is_digested_as_its_inverse_frequencies() -> None:
    derived = MegatronBackend(build_model(LLAMA), shape=LLAMA).weights_digest().derived
    frequencies = 1.0 / 1e4 ** (torch.arange(0, 32, 2, dtype=torch.float32) / 32)
    assert derived == {"model.rotary_emb.inv_freq": blake3(frequencies.numpy().tobytes()).hexdigest()}


def test_a_digest_is_the_hash_of_the_bytes_with_one_zero() -> None:
    values = torch.tensor([[1.0, -0.0], [2.0, -3.0]], dtype=torch.bfloat16)
    plain = torch.tensor([1.0, 2.0, 0.0, -3.0], dtype=torch.bfloat16)
    assert digest(values.t()) == blake3(plain.view(torch.int16).numpy().tobytes()).hexdigest()


def test_transformer_engines_names_read_like_the_local_ones() -> None:
    # Names only: TransformerEngine's modules need CUDA to be built.
    config = SimpleNamespace(
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=2,
        gated_linear_unit=True,
        layernorm_zero_centered_gamma=False,
    )
    local: dict[str, torch.Tensor] = {
        "input_layernorm.weight": torch.rand(8),
        "self_attention.linear_qkv.weight": torch.rand(16, 8),
        "self_attention.linear_proj.weight": torch.rand(8, 8),
        "pre_mlp_layernorm.weight": torch.rand(8),
        "mlp.linear_fc1.weight": torch.rand(12, 8),
        "mlp.linear_fc2.weight": torch.rand(8, 6),
    }
    fused = {
        "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
        "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
    }
    read: list[dict[str, torch.Tensor]] = []
    for parameters in (local, {fused.get(name, name): tensor for name, tensor in local.items()}):
        sources: Any = layer_tensors(parameters, config)
        read.append({name: source() for name, source in sources.items()})
    assert sorted(read[0]) == sorted(read[1])
    assert all(torch.equal(tensor, read[1][name]) for name, tensor in read[0].items())
    assert torch.equal(read[1]["input_layernorm.weight"], local["input_layernorm.weight"])


@pytest.mark.parametrize(
    ("change", "name", "reason"),
    [
        pytest.param(
            {"kv_channels": 3},
            "self_attn.q_proj.weight",
            "linear_qkv has 16 rows where queries, keys and values make 24",
            id="a gated attention output",
        ),
        pytest.param(
            {"layernorm_zero_centered_gamma": True},
            "input_layernorm.weight",
            "the norm stores its weight minus 1; no bits to compare",
            id="zero-centred norm weights",
        ),
        pytest.param(
            {},
            "mlp.router.weight",
            "no Hugging Face name is known for megatron-core's mlp.router.weight",
            id="a router",
        ),
    ],
)
def test_what_cannot_be_read_says_why(change: dict[str, Any], name: str, reason: str) -> None:
    settings = {
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "kv_channels": 2,
        "gated_linear_unit": True,
        "layernorm_zero_centered_gamma": False,
    }
    parameters = {
        "input_layernorm.weight": torch.rand(8),
        "self_attention.linear_qkv.weight": torch.rand(16, 8),
        "mlp.router.weight": torch.rand(2, 8),
    }
    assert layer_tensors(parameters, SimpleNamespace(**(settings | change)))[name] == Unobservable(reason=reason)


@pytest.mark.parametrize("shape", [pytest.param(LLAMA, id="Llama"), pytest.param(QWEN3, id="Qwen3")])
def test_every_training_module_of_the_correspondence_exists(shape: ModelShape) -> None:
    modules = dict(build_model(shape).named_modules())
    assert [row.training_module for row in correspondences(shape) if row.training_module not in modules] == []


@pytest.mark.parametrize(
    "write",
    [
        pytest.param(lambda parameter: parameter.add_(0.1), id="in place"),
        pytest.param(lambda parameter: parameter.data.add_(0.1), id="through .data, unseen by version counters"),
    ],
)
def test_the_mutation_count_grows_when_a_weight_is_written(write: Any) -> None:
    model = build_model(LLAMA)
    backend = MegatronBackend(model)
    first = backend.mutation_count()
    assert backend.mutation_count() == first
    with torch.no_grad():
        write(model.decoder.layers[1].mlp.linear_fc2.weight)
    assert backend.mutation_count() > first


def test_the_mutation_count_grows_on_an_optimizer_step_and_not_on_a_score() -> None:
    from tests.integrations.megatron.tiny_gpt import sequences

    model = build_model(LLAMA)
    backend = MegatronBackend(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    first = backend.mutation_count()
    backend.score(sequences((3, 4)))
    assert backend.mutation_count() == first
    mask = torch.ones(1, 1, 4, 4, dtype=torch.bool).triu(1)
    model(torch.tensor([[1, 2, 3, 4]]), torch.arange(4)[None], mask).float().sum().backward()
    optimizer.step()
    assert backend.mutation_count() > first
