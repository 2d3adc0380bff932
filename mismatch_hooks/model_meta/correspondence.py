"""The same module by its name on either side, for every module that computes something."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from mismatch_hooks.schema.freeze import SchemaError
from mismatch_hooks.schema.shape import ModelShape
from mismatch_hooks.schema.trace import PropagationEdge

_SAME_ROWS = "the same rows to the bit with every operator on its reference"
_TRACED = "tests/cases/test_c31.py::test_C31_an_aligned_run_has_no_difference_in_any_layer"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleCorrespondence:
    """One computation and the module that does it on each side.

    Attributes:
        semantic: what is computed, the same word for both (``"layers.3.attention_core"``).
        training_module: name in the megatron-core ``GPTModel`` of the local layer spec; what has no module of its own
            (the activation, a rotation) names the module whose forward computes it.
        rollout_module: name in vLLM's model; fused projections name the fused module.
        equivalence: in what sense the two are the same, in words.
        verified_by: node id of the test that proves it; a claim without one is refused.
    """

    semantic: str
    training_module: str
    rollout_module: str
    equivalence: str
    verified_by: str

    def __post_init__(self) -> None:
        if not self.equivalence or "::test_" not in self.verified_by:
            raise SchemaError(
                f"ModuleCorrespondence {self.semantic}: verified_by is {self.verified_by!r}; accepts the node id of "
                "the test that proves the equivalence."
            )


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
        ModuleCorrespondence(
            semantic=semantic,
            training_module=training,
            rollout_module=rollout,
            equivalence=_SAME_ROWS,
            verified_by=_TRACED,
        )
        for semantic, training, rollout in rows
    )


def rollout_name(training_module: str) -> str:
    """Return the rollout's name of a trainer's module (``"decoder.layers.3.mlp"`` → ``"model.layers.3.mlp.act_fn"``).

    Raises:
        KeyError: the module computes nothing that has a counterpart.
    """
    layer = _LAYER.fullmatch(training_module)
    if layer is None:
        return {training: rollout for _, training, rollout in _BEFORE_LAYERS + _AFTER_LAYERS}[training_module]
    inside = {training: rollout for _, training, rollout in _ATTENTION_INPUT + _QK_NORM + _REST_OF_LAYER}
    return f"model.layers.{layer[1]}.{inside[layer[2]]}"


_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")

# Within a layer: what each point is computed from. "output" and "attention_residual" are the residual stream.
_FROM_WITHIN = {
    "query_key_value": ("input_norm",),
    "query_norm": ("query_key_value",),
    "key_norm": ("query_key_value",),
    "rope": ("query_key_value", "query_norm", "key_norm"),
    "attention_core": ("rope", "query_key_value"),
    "attention_output": ("attention_core",),
    "post_attention_norm": ("attention_residual", "attention_output"),
    "gate_up": ("post_attention_norm",),
    "activation": ("gate_up",),
    "down": ("activation",),
    "output": ("attention_residual", "attention_output", "down"),
}
# From the layer before, or the embedding: the stream that enters the layer.
_FROM_STREAM = ("input_norm", "attention_residual")


def propagation_edges(shape: ModelShape) -> tuple[PropagationEdge, ...]:
    """Return which point of the forward feeds which, for a Llama or Qwen3 model; traced or not."""
    return tuple(_edges(shape))


def _edges(shape: ModelShape) -> Iterator[PropagationEdge]:
    stream = "embedding"
    for index in range(shape.layers):
        here = f"layers.{index}."
        for target in _FROM_STREAM:
            yield PropagationEdge(source=stream, target=here + target)
        yield PropagationEdge(source=here + "attention_output", target=here + "attention_residual")
        for target, sources in _FROM_WITHIN.items():
            for source in sources:
                if shape.qk_norm or "query_norm" not in (source, target) and "key_norm" not in (source, target):
                    yield PropagationEdge(source=here + source, target=here + target)
        stream = here + "output"
    yield PropagationEdge(source=stream, target="final_norm")
    yield PropagationEdge(source="final_norm", target="head")
