"""What one traced pass saw of each module: a digest of every token's row, and the values themselves only when asked."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from mismatch_hooks.schema.enums import PolicyRole
from mismatch_hooks.schema.freeze import FrozenMapping, SchemaError
from mismatch_hooks.schema.score import Binding, Evidence

BEFORE_LAYERS = ("embedding",)
# Two of these are no module's own output: the residual stream after the attention, and after the whole layer.
IN_LAYER = (
    "input_norm",
    "query_key_value",
    "query_norm",
    "key_norm",
    "rope",
    "attention_core",
    "attention_output",
    "attention_residual",
    "post_attention_norm",
    "gate_up",
    "activation",
    "down",
    "output",
)
AFTER_LAYERS = ("final_norm", "head")


def forward_position(semantic: str) -> tuple[int, int, int]:
    """Return a key that sorts traced points into the order of the forward.

    Args:
        semantic: ``"embedding"``, ``"layers.<n>.<point>"``, ``"final_norm"`` or ``"head"``.

    Raises:
        SchemaError: another word.
    """
    if semantic in BEFORE_LAYERS:
        return 0, 0, BEFORE_LAYERS.index(semantic)
    if semantic in AFTER_LAYERS:
        return 2, 0, AFTER_LAYERS.index(semantic)
    start, _, rest = semantic.partition(".")
    layer, _, point = rest.partition(".")
    if start != "layers" or not layer.isdecimal() or point not in IN_LAYER:
        raise SchemaError(
            f"semantic: got {semantic!r}; accepts {', '.join(BEFORE_LAYERS + AFTER_LAYERS)}, or layers.<n>. and one of "
            f"{', '.join(IN_LAYER)}."
        )
    return 1, int(layer), IN_LAYER.index(point)


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceActivations:
    """One module's rows of one sequence, by token position from 0.

    Attributes:
        digests: 64 bits of the BLAKE3 of each row's values, 16 hexadecimal digits. Values are widened to fp32 first,
            which is exact, and −0.0 is taken as 0.0: equal digests are equal values in whatever dtype they were stored.
        largest: the largest absolute value of each row; a row of exact zeros was probably never computed.
        values: base64 of the rows as little-endian fp32, ``[positions, width]``; empty unless they were asked for.
            Never for a sink.
    """

    digests: tuple[str, ...]
    largest: tuple[float, ...]
    values: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "digests", tuple(self.digests))
        object.__setattr__(self, "largest", tuple(self.largest))
        if len(self.digests) != len(self.largest):
            raise SchemaError(
                f"a sequence has {len(self.digests)} digests and {len(self.largest)} largest values; both describe the "
                "same rows."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleActivations:
    """All rows of one traced point, complete.

    Attributes:
        semantic: the point, spelled alike on both sides; see ``forward_position``.
        dtype: what the engine stored it in (``"bfloat16"``).
        width: values a row, in the layout that both sides share (queries, keys, values; gate, up).
        sequences: one per sequence of the pass; without rows where the sequence took no part.
    """

    semantic: str
    dtype: str
    width: int
    sequences: tuple[SequenceActivations, ...]

    def __post_init__(self) -> None:
        forward_position(self.semantic)
        object.__setattr__(self, "sequences", tuple(self.sequences))


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationCapture:
    """One traced prefill pass of one role.

    Attributes:
        role: the side.
        binding: what was bound.
        token_digests: one per sequence, of its token ids; two captures of other tokens are never compared.
        modules: what was recorded completely, in the order of the forward.
        left_out: points that exist and were not recorded completely, or cannot be compared, to the reason.
        evidence: what ran.
        seconds: wall time of the pass.
    """

    role: PolicyRole
    binding: Binding
    token_digests: tuple[str, ...]
    modules: tuple[ModuleActivations, ...]
    left_out: Mapping[str, str] = field(default_factory=FrozenMapping)
    evidence: Evidence
    seconds: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "left_out", FrozenMapping(self.left_out))
        ordered = sorted(self.modules, key=lambda module: forward_position(module.semantic))
        object.__setattr__(self, "modules", tuple(ordered))
        for module in self.modules:
            if len(module.sequences) != len(self.token_digests):
                raise SchemaError(
                    f"{module.semantic} has rows of {len(module.sequences)} sequences and the pass had "
                    f"{len(self.token_digests)}; both are the same batch."
                )
        names = [module.semantic for module in self.modules]
        twice = sorted({name for name in names if names.count(name) > 1} | (set(names) & set(self.left_out)))
        if twice:
            raise SchemaError(f"{', '.join(twice)}: named twice; a point is recorded once or left out.")
