"""Both sides' names of every module, in the order of the forward; the engines' tests find them in live models."""

from dataclasses import replace

from mismatch_hooks.model_meta.correspondence import correspondences
from mismatch_hooks.schema.shape import ModelShape

LLAMA = ModelShape(
    architecture="LlamaForCausalLM",
    layers=2,
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


def test_a_layer_lists_its_modules_in_the_order_of_the_forward() -> None:
    semantics = [row.semantic for row in correspondences(LLAMA)]
    assert semantics[:1] + semantics[-2:] == ["embedding", "final_norm", "head"]
    assert semantics[1:10] == [
        "layers.0.input_norm",
        "layers.0.query_key_value",
        "layers.0.rope",
        "layers.0.attention_core",
        "layers.0.attention_output",
        "layers.0.post_attention_norm",
        "layers.0.gate_up",
        "layers.0.activation",
        "layers.0.down",
    ]


def test_every_layer_has_the_same_modules_under_its_own_number() -> None:
    rows = correspondences(LLAMA)
    assert len(rows) == 1 + 2 * 9 + 2
    for first, second in zip(rows[1:10], rows[10:19], strict=True):
        assert second.semantic == first.semantic.replace("layers.0.", "layers.1.")
        assert second.training_module == first.training_module.replace("layers.0.", "layers.1.")
        assert second.rollout_module == first.rollout_module.replace("layers.0.", "layers.1.")


def test_only_a_model_with_query_and_key_norms_lists_them() -> None:
    added = set(correspondences(replace(LLAMA, qk_norm=True))) - set(correspondences(LLAMA))
    assert sorted(row.semantic for row in added) == [
        "layers.0.key_norm",
        "layers.0.query_norm",
        "layers.1.key_norm",
        "layers.1.query_norm",
    ]


def test_a_row_names_both_modules() -> None:
    (row,) = (row for row in correspondences(LLAMA) if row.semantic == "layers.1.attention_output")
    assert row.training_module == "decoder.layers.1.self_attention.linear_proj"
    assert row.rollout_module == "model.layers.1.self_attn.o_proj"
