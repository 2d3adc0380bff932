"""The shape of a model as its published configuration gives it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from mismatch_hooks.schema.enums import ModelFamily
from mismatch_hooks.schema.freeze import FrozenMapping, SchemaError


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes and numeric settings of a decoder-only transformer.

    Attributes:
        architecture: Hugging Face architecture name (``"LlamaForCausalLM"``).
        family: row of the threshold table.
        layers: decoder layers.
        hidden_size: model width.
        ffn_size: width of the gated MLP.
        query_heads: attention heads.
        kv_heads: key/value heads.
        head_dim: width of one head.
        vocab_size: unpadded vocabulary.
        norm_epsilon: RMSNorm epsilon.
        rope_theta: rotary base.
        rope_scaling: the model file's rope scaling (``{}`` when there is none; ``{"rope_type": "llama3", …}``).
        tied_embeddings: True when the head shares the embedding.
        qk_norm: True when queries and keys are normalised per head (Qwen3).
        attention_bias: True when q, k, v projections carry a bias.
    """

    architecture: str
    family: ModelFamily = ModelFamily.DENSE
    layers: int
    hidden_size: int
    ffn_size: int
    query_heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    norm_epsilon: float
    rope_theta: float
    rope_scaling: Mapping[str, object] = field(default_factory=FrozenMapping)
    tied_embeddings: bool
    qk_norm: bool
    attention_bias: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "rope_scaling", FrozenMapping(self.rope_scaling))
        if self.query_heads % self.kv_heads:
            raise SchemaError(
                f"{self.architecture}: {self.query_heads} query heads do not divide by {self.kv_heads} KV heads."
            )

    @property
    def traits(self) -> tuple[str, ...]:
        """Traits that a factor's prerequisites may ask for."""
        found = ["rope", "gated_mlp", "rmsnorm"]
        if self.qk_norm:
            found.append("qk_norm")
        if self.family is not ModelFamily.DENSE:
            found.append("moe")
        return tuple(found)
