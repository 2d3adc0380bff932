import json
from pathlib import Path
from typing import Any

import pytest

from recipes.grpo_smollm2.errors import RecipeError
from recipes.grpo_smollm2.model_file import read_shape
from tests.tiny_models import tiny_checkpoint


def rewritten(folder: Path, **changes: Any) -> Path:
    path = folder / "config.json"
    file = json.loads(path.read_text(encoding="utf-8")) | changes
    path.write_text(json.dumps({key: value for key, value in file.items() if value is not None}), encoding="utf-8")
    return folder


def test_the_constants_of_a_model_come_from_its_file(tmp_path: Path) -> None:
    llama = read_shape(tiny_checkpoint(tmp_path, shape="llama"))
    qwen3 = read_shape(tiny_checkpoint(tmp_path, shape="qwen3", tied=True))
    assert (llama.norm_eps, llama.qk_norm, llama.tied) == (1e-5, False, False)
    assert (qwen3.norm_eps, qwen3.qk_norm, qwen3.tied) == (1e-6, True, True)
    assert (llama.heads, llama.kv_heads, llama.head_dim, llama.rope_theta) == (4, 2, 32, 10000.0)


def test_theta_and_scaling_are_read_from_older_files_too(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    folder = tiny_checkpoint(tmp_path, shape="llama")
    model = read_shape(rewritten(folder, rope_parameters=None, rope_theta=500000.0, rope_scaling=scaling))
    assert (model.rope_theta, model.rope_scaling_factor) == (500000.0, 32.0)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        pytest.param(
            {"architectures": ["MistralForCausalLM"]},
            "architecture 'MistralForCausalLM'; accepts LlamaForCausalLM, Qwen3ForCausalLM.",
            id="another architecture",
        ),
        pytest.param(
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}},
            "rope_type 'yarn'; accepts default, llama3.",
            id="a rope that is not built",
        ),
        pytest.param(
            {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "rope_theta": 1e4,
                    "factor": 8.0,
                    "low_freq_factor": 2.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 8192,
                }
            },
            "low_freq_factor is 2.0; accepts 1.0, which megatron-core fixes.",
            id="a constant that megatron-core fixes",
        ),
    ],
)
def test_a_model_that_the_trainer_cannot_build_is_refused(
    tmp_path: Path, changes: dict[str, Any], sentence: str
) -> None:
    folder = rewritten(tiny_checkpoint(tmp_path, shape="llama"), **changes)
    with pytest.raises(RecipeError) as refused:
        read_shape(folder)
    assert str(refused.value) == f"{folder / 'config.json'}: {sentence}"


def test_an_absent_model_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"config\.json: no such file"):
        read_shape(tmp_path)
