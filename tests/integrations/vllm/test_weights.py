"""What the live engine multiplies with, against the checkpoint that it was given."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from mismatch_hooks.integrations.vllm import VllmBackend
from mismatch_hooks.integrations.vllm.weights import digest
from tests.integrations.vllm.conftest import model_of

pytestmark = pytest.mark.engine


def reload(backend: VllmBackend, tensors: dict[str, Tensor]) -> None:
    backend._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(tensors.items())})


@pytest.fixture
def checkpoint(llama: VllmBackend, llama_folder: Path) -> Iterator[dict[str, Tensor]]:
    tensors = load_file(llama_folder / "model.safetensors")
    yield tensors
    reload(llama, tensors)


def test_llama_digests_are_the_checkpoints(llama: VllmBackend, checkpoint: dict[str, Tensor]) -> None:
    assert llama.weights_digest().tensors == {name: digest(tensor) for name, tensor in checkpoint.items()}


def test_qwen3_digests_are_the_checkpoints_with_query_and_key_norms(qwen3: VllmBackend, qwen3_folder: Path) -> None:
    checkpoint = load_file(qwen3_folder / "model.safetensors")
    assert "model.layers.1.self_attn.q_norm.weight" in checkpoint
    assert qwen3.weights_digest().tensors == {name: digest(tensor) for name, tensor in checkpoint.items()}


def test_the_rotary_table_is_digested_as_the_frequencies_it_implies(llama: VllmBackend, qwen3: VllmBackend) -> None:
    powers = torch.arange(0, 32, 2, dtype=torch.float32) / 32
    assert llama.weights_digest().derived == {"model.rotary_emb.inv_freq": digest(1.0 / 1e4**powers)}
    assert qwen3.weights_digest().derived == {"model.rotary_emb.inv_freq": digest(1.0 / 5e5**powers)}


def test_a_partial_reload_is_named_tensor_by_tensor(llama: VllmBackend, checkpoint: dict[str, Tensor]) -> None:
    before = llama.weights_digest()
    delivered = {name: tensor * 1.25 for name, tensor in checkpoint.items() if name.startswith("model.layers.0.")}
    reload(llama, delivered)
    after = llama.weights_digest()
    changed = {name for name, value in before.tensors.items() if after.tensors[name] != value}
    assert changed == set(delivered)
    assert len(changed) == 9
    assert {name: after.tensors[name] for name in delivered} == {n: digest(t) for n, t in delivered.items()}
    assert after.version == before.version == "7"


def test_prefixes_limit_the_work(llama: VllmBackend, checkpoint: dict[str, Tensor]) -> None:
    part = llama.weights_digest(["model.layers.1.mlp.", "lm_head"])
    assert set(part.tensors) == {
        "lm_head.weight",
        "model.layers.1.mlp.gate_proj.weight",
        "model.layers.1.mlp.up_proj.weight",
        "model.layers.1.mlp.down_proj.weight",
    }
    assert part.derived == {}


def test_a_reference_bound_on_a_linear_does_not_answer_for_its_weight(
    llama: VllmBackend, checkpoint: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    linear = model_of(llama).model.layers[0].self_attn.o_proj
    monkeypatch.setattr(linear.quant_method, "apply", lambda layer, x, bias: x * 0)
    monkeypatch.setattr(linear, "forward", lambda x: (x * 0, None))
    name = "model.layers.0.self_attn.o_proj.weight"
    assert llama.weights_digest([name]).tensors[name] == digest(checkpoint[name])


def test_negative_zeros_count_as_zeros(llama: VllmBackend, checkpoint: dict[str, Tensor]) -> None:
    name = "model.layers.0.self_attn.o_proj.weight"
    zeroed = checkpoint[name].clone()
    zeroed[0] = -0.0
    reload(llama, {name: zeroed})
    assert llama.weights_digest([name]).tensors[name] == digest(zeroed)


def test_the_mutation_count_grows_with_every_reload_and_not_between(
    llama: VllmBackend, checkpoint: dict[str, Tensor]
) -> None:
    start = llama.mutation_count()
    assert llama.mutation_count() == start
    reload(llama, checkpoint)
    assert llama.mutation_count() == start + 1
    reload(llama, {"model.norm.weight": checkpoint["model.norm.weight"]})
    assert llama.mutation_count() == start + 2
    model_of(llama).model.norm.weight.data.mul_(1.25)  # moves no version counter
    assert llama.mutation_count() == start + 3
    assert llama.mutation_count() == start + 3
