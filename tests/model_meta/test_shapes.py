"""A published configuration gives the published shape; everything else is one clear sentence."""

import json
from pathlib import Path
from typing import Any

import pytest

from mismatch_hooks.model_meta.shapes import ModelConfigError, shape_from_config, shape_from_folder

QWEN3_0_6B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
}
SMOLLM2_135M: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "vocab_size": 49152,
}
LLAMA3_SCALING = {
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("config", "layers", "hidden_size", "ffn_size", "query_heads", "kv_heads", "head_dim", "vocab_size", "theta"),
    [
        pytest.param(QWEN3_0_6B, 28, 1024, 3072, 16, 8, 128, 151936, 1e6, id="Qwen3-0.6B"),
        pytest.param(SMOLLM2_135M, 30, 576, 1536, 9, 3, 64, 49152, 1e5, id="SmolLM2-135M"),
    ],
)
def test_a_published_configuration_gives_the_published_shape(
    config: dict[str, Any],
    layers: int,
    hidden_size: int,
    ffn_size: int,
    query_heads: int,
    kv_heads: int,
    head_dim: int,
    vocab_size: int,
    theta: float,
) -> None:
    shape = shape_from_config(config)
    assert shape.architecture == config["architectures"][0]
    assert (shape.layers, shape.hidden_size, shape.ffn_size) == (layers, hidden_size, ffn_size)
    assert (shape.query_heads, shape.kv_heads, shape.head_dim) == (query_heads, kv_heads, head_dim)
    assert (shape.vocab_size, shape.rope_theta, shape.rope_scaling) == (vocab_size, theta, {})
    assert shape.norm_epsilon == config["rms_norm_eps"]
    assert shape.tied_embeddings is True
    assert shape.attention_bias is False
    assert shape.qk_norm is (config is QWEN3_0_6B)


@pytest.mark.parametrize(
    "rope",
    [
        pytest.param({"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3_SCALING}}, id="old spelling"),
        pytest.param({"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3_SCALING}}, id="oldest spelling"),
        pytest.param(
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3_SCALING}}, id="new spelling"
        ),
        pytest.param(
            {"rope_theta": 1e4, "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3_SCALING}},
            id="a stale attribute beside the new spelling",
        ),
    ],
)
def test_rope_reads_the_same_in_every_spelling(rope: dict[str, Any]) -> None:
    config = {key: value for key, value in SMOLLM2_135M.items() if not key.startswith("rope")}
    shape = shape_from_config(config | rope)
    assert shape.rope_theta == 5e5
    assert shape.rope_scaling == {"rope_type": "llama3", **LLAMA3_SCALING}


def test_rope_of_type_default_is_no_scaling() -> None:
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 12345.0}}
    config = {key: value for key, value in SMOLLM2_135M.items() if not key.startswith("rope")}
    assert shape_from_config(config | rope).rope_scaling == {}
    assert shape_from_config(config | rope).rope_theta == 12345.0


def test_what_the_file_leaves_out_is_the_default_of_its_architecture() -> None:
    silent = ("head_dim", "num_key_value_heads", "rms_norm_eps", "rope_theta", "tie_word_embeddings", "attention_bias")
    llama = shape_from_config({key: value for key, value in SMOLLM2_135M.items() if key not in silent})
    assert (llama.head_dim, llama.kv_heads, llama.norm_epsilon, llama.rope_theta) == (64, 9, 1e-6, 1e4)
    assert llama.tied_embeddings is False
    # transformers' Qwen3 takes 128 whatever the hidden size.
    assert shape_from_config({key: value for key, value in QWEN3_0_6B.items() if key not in silent}).head_dim == 128


def test_the_model_type_stands_in_for_missing_architectures() -> None:
    config = {key: value for key, value in QWEN3_0_6B.items() if key != "architectures"}
    assert shape_from_config(config).architecture == "Qwen3ForCausalLM"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        pytest.param(
            {"architectures": ["MistralForCausalLM"]},
            "architectures: got 'MistralForCausalLM'; accepts LlamaForCausalLM, Qwen3ForCausalLM.",
            id="another architecture",
        ),
        pytest.param(
            {"architectures": ["Qwen2ForCausalLM"]},
            "architectures: got 'Qwen2ForCausalLM'; accepts LlamaForCausalLM, Qwen3ForCausalLM. "
            "Did you mean 'Qwen3ForCausalLM'?",
            id="a near miss",
        ),
        pytest.param(
            {"architectures": None, "model_type": "gpt2"},
            "model_type: got 'gpt2'; accepts llama, qwen3.",
            id="another model type",
        ),
        pytest.param(
            {"num_hidden_layers": True},
            "num_hidden_layers: got True (bool); accepts an integer of 1 or more.",
            id="a bool for a count",
        ),
        pytest.param(
            {"hidden_size": "576"},
            "hidden_size: got '576' (str); accepts an integer of 1 or more.",
            id="text for a count",
        ),
        pytest.param(
            {"rms_norm_eps": 0.0}, "rms_norm_eps: got 0.0 (float); accepts a number above 0.", id="an epsilon of zero"
        ),
        pytest.param(
            {"tie_word_embeddings": 1},
            "tie_word_embeddings: got 1 (int); accepts true or false.",
            id="a number for a flag",
        ),
        pytest.param(
            {"vocab_size": None},
            "vocab_size: missing; pass the complete config.json that lies beside the weights.",
            id="a missing key",
        ),
    ],
)
def test_a_bad_configuration_is_one_sentence(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelConfigError) as error:
        shape_from_config(SMOLLM2_135M | change)
    assert str(error.value) == sentence


def test_a_folder_is_read_through_its_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_0_6B))
    assert shape_from_folder(tmp_path) == shape_from_folder(str(tmp_path)) == shape_from_config(QWEN3_0_6B)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        pytest.param(None, "No such file or directory; pass the folder that holds the model's weights.", id="no file"),
        pytest.param("{", "not JSON (Expecting property name", id="a torn file"),
        pytest.param("[]", "got a list; accepts a JSON object.", id="another document"),
        pytest.param("{}", "model_type: got None; accepts llama, qwen3.", id="an empty document"),
    ],
)
def test_a_folder_without_a_usable_config_is_one_sentence(tmp_path: Path, text: str | None, sentence: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelConfigError) as error:
        shape_from_folder(tmp_path)
    assert str(error.value).startswith(f"{tmp_path / 'config.json'}: {sentence}")
