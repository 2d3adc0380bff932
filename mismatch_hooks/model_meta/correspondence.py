"""The same module by its name on either side, for every module that computes something."""

from dataclasses import dataclass

from mismatch_hooks.schema.shape import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleCorrespondence:
    """One computation and the module that does it on each side.

    Attributes:
        semantic: what is computed, the same word for both (``"layers.3.attention_core"``).
        training_module: name in the megatron-core ``GPTModel`` of the local layer spec; what has no module of its own
            (the activation, a rotation) names the module whose forward computes it.
        rollout_module: name in vLLM's model; fused projections name the fused module.
    """

    semantic: str
    training_module: str
    rollout_module: str


_BEFORE_LAYERS = (("embedding", "embedding.word_embeddings", "model.embed_tokens"),)
_ATTENTION_INPUT = (
    ("input_norm", "input_layernorm", "input_layernorm"),
    ("query_key_value", "self_attention.linear_qkv", "self_attn.qkv_proj"),
)
_QK_NORM = (
    ("query_norm", "self_attention.q_layernorm", "self_attn.q_norm"),
    ("key_norm", "self_attention.k_layernorm", "self_attn.k_norm"),
)
_REST_OF_LAYER = (
    ("rope", "self_attention", "self_attn.rotary_emb"),
    ("attention_core", "self_attention.core_attention", "self_attn.attn"),
    ("attention_output", "self_attention.linear_proj", "self_attn.o_proj"),
    ("post_attention_norm", "pre_mlp_layernorm", "post_attention_layernorm"),
    ("gate_up", "mlp.linear_fc1", "mlp.gate_up_proj"),
    ("activation", "mlp", "mlp.act_fn"),
    ("down", "mlp.linear_fc2", "mlp.down_proj"),
)
_AFTER_LAYERS = (("final_norm", "decoder.final_layernorm", "model.norm"), ("head", "output_layer", "lm_head"))


def correspondences(shape: ModelShape) -> tuple[ModuleCorrespondence, ...]:
    """Return every pair of modules of a Llama or Qwen3 model, in the order of the forward."""
    layer = _ATTENTION_INPUT + (_QK_NORM if shape.qk_norm else ()) + _REST_OF_LAYER
    rows = list(_BEFORE_LAYERS)
    for index in range(shape.layers):
        rows += [
            (f"layers.{index}.{semantic}", f"decoder.layers.{index}.{training}", f"model.layers.{index}.{rollout}")
            for semantic, training, rollout in layer
        ]
    rows += _AFTER_LAYERS
    return tuple(
        ModuleCorrespondence(semantic=semantic, training_module=training, rollout_module=rollout)
        for semantic, training, rollout in rows
    )
