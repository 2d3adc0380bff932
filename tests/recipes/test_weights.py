from pathlib import Path
from typing import Literal

import pytest
import torch
from safetensors.torch import load_file

from recipes.grpo_smollm2.errors import RecipeError
from recipes.grpo_smollm2.model_file import ModelShape, read_shape
from recipes.grpo_smollm2.weights import to_hugging_face, to_megatron
from tests.tiny_models import SHAPES, tiny_checkpoint


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_checkpoint_keeps_every_bit_there_and_back(
    tmp_path: Path, shape: Literal["llama", "qwen3"], tied: bool, kv_heads: int
) -> None:
    folder = tiny_checkpoint(tmp_path, shape=shape, tied=tied, kv_heads=kv_heads)
    checkpoint, model = load_file(folder / "model.safetensors"), read_shape(folder)

    there = dict(to_megatron(checkpoint, model))
    back = dict(to_hugging_face(there, model))

    assert back.keys() == checkpoint.keys()
    assert ("lm_head.weight" in back) is not tied
    for name, tensor in checkpoint.items():
        assert torch.equal(back[name].view(torch.int16), tensor.view(torch.int16)), name
        assert back[name].is_contiguous(), name
    again = dict(to_megatron(back, model))
    for name, tensor in there.items():
        assert torch.equal(again[name].view(torch.int16), tensor.view(torch.int16)), name


def test_queries_keys_and_values_are_fused_head_group_by_head_group() -> None:
    # Two KV heads with two query heads each, head dim 1: a row is one head.
    model = one_layer(heads=4, kv_heads=2, head_dim=1, hidden=1, ffn=1)
    rows = {"q": [10, 11, 12, 13], "k": [20, 21], "v": [30, 31]}
    tensors = {name: torch.zeros(1, 1) for name in names_of(model)}
    for part, values in rows.items():
        tensors[f"model.layers.0.self_attn.{part}_proj.weight"] = torch.tensor(values)[:, None]

    fused = dict(to_megatron(tensors, model))["decoder.layers.0.self_attention.linear_qkv.weight"]

    assert fused[:, 0].tolist() == [10, 11, 20, 30, 12, 13, 21, 31]


def test_gate_comes_before_up() -> None:
    model = one_layer(heads=1, kv_heads=1, head_dim=1, hidden=1, ffn=2)
    tensors = {name: torch.zeros(1, 1) for name in names_of(model)}
    tensors["model.layers.0.mlp.gate_proj.weight"] = torch.tensor([[1], [2]])
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.tensor([[3], [4]])

    fused = dict(to_megatron(tensors, model))["decoder.layers.0.mlp.linear_fc1.weight"]

    assert fused[:, 0].tolist() == [1, 2, 3, 4]


def test_a_missing_or_an_extra_tensor_is_refused_by_name(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, shape="llama")
    checkpoint, model = load_file(folder / "model.safetensors"), read_shape(folder)
    del checkpoint["model.layers.1.self_attn.k_proj.weight"]
    with pytest.raises(RecipeError) as refused:
        dict(to_megatron(checkpoint, model))
    assert str(refused.value) == (
        "weights: the checkpoint lacks 1 tensors, first model.layers.1.self_attn.k_proj.weight; "
        "use a model of this shape."
    )

    whole = dict(to_megatron(load_file(folder / "model.safetensors"), model)) | {"extra": torch.zeros(1)}
    with pytest.raises(RecipeError) as refused:
        dict(to_hugging_face(whole, model))
    assert str(refused.value) == "weights: the trained model holds 1 tensors too many, first extra; drop them."


def one_layer(*, heads: int, kv_heads: int, head_dim: int, hidden: int, ffn: int) -> ModelShape:
    return ModelShape(
        layers=1,
        hidden=hidden,
        ffn=ffn,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocabulary=1,
        norm_eps=1e-5,
        rope_theta=1e4,
        rope_scaling_factor=None,
        tied=True,
        qk_norm=False,
    )


def names_of(model: ModelShape) -> list[str]:
    from recipes.grpo_smollm2.weights import table

    return [part for entry in table(model) for part in entry.parts]
