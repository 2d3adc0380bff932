"""Collect the rows of traced modules as they are computed; both engines' traced passes feed one of these."""

import base64
import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from blake3 import blake3
from torch import Tensor

from mismatch_hooks.schema.activation import ModuleActivations, SequenceActivations
from mismatch_hooks.schema.score import ScoringSequence

_DIGEST_BYTES = 8
_NOT_CALLED = (
    "no row was recorded: the engine did not call it as a module with eager hooks, as in a fused, compiled or captured "
    "forward"
)


def token_digests(sequences: Sequence[ScoringSequence]) -> tuple[str, ...]:
    """Return one digest of each sequence's token ids, prompt and response, for ``ActivationCapture``."""
    return tuple(
        hashlib.blake2b(repr((one.prompt_token_ids, one.response_token_ids)).encode(), digest_size=16).hexdigest()
        for one in sequences
    )


def traced_tokens(sequences: Sequence[ScoringSequence]) -> list[list[int]]:
    """Return each sequence's token ids as a traced pass goes over them: none where the response is empty."""
    return [[*one.prompt_token_ids, *one.response_token_ids] if one.response_token_ids else [] for one in sequences]


@dataclass(slots=True)
class _Rows:
    """One sequence's rows of one module, by position; a position is missing until it was seen."""

    digests: dict[int, str] = field(default_factory=dict)
    largest: dict[int, float] = field(default_factory=dict)
    values: dict[int, bytes] = field(default_factory=dict)


@dataclass(slots=True)
class _Module:
    """What was seen of one point."""

    dtype: str
    width: int
    sequences: list[_Rows]


class ActivationRecorder:
    """Digests rows at the moment they are handed over, so that nothing written over them later can be seen.

    The first row of a position is kept and any later one ignored: a preempted request repeats what it has computed, and
    a warm-up forward may reuse the buffers of the pass.
    """

    def __init__(self, sequences: Sequence[Sequence[int]], values_of: Collection[str] = ()) -> None:
        """Start with no rows.

        Args:
            sequences: token ids of each sequence; an empty one takes no part.
            values_of: points whose values are kept too.
        """
        self.tokens = [tuple(sequence) for sequence in sequences]
        self._values_of = frozenset(values_of)
        self._modules: dict[str, _Module] = {}
        self._expected: list[str] = []
        self._left_out: dict[str, str] = {}

    def expect(self, semantic: str) -> None:
        """Say that the live model has this point, so that it is named when nothing of it arrives."""
        self._expected.append(semantic)

    def leave_out(self, semantic: str, reason: str) -> None:
        """Record nothing of a point, and say why."""
        self._left_out[semantic] = reason

    def add(self, semantic: str, rows: Tensor, *, sequence: int, start: int) -> None:
        """Digest consecutive rows of one sequence.

        Args:
            semantic: the point.
            rows: ``[positions, …]``, any floating dtype and device; read, never kept.
            sequence: index of the sequence.
            start: position of the first row.
        """
        if semantic in self._left_out:
            return
        kept = self._modules.get(semantic)
        if kept is None:
            kept = self._modules[semantic] = _Module(
                dtype=str(rows.dtype).removeprefix("torch."),
                width=rows[0].numel(),
                sequences=[_Rows() for _ in self.tokens],
            )
        into = kept.sequences[sequence]
        # Adding zero turns −0.0 into 0.0 and, on a tensor that is fp32 already, makes the copy.
        plain = rows.detach().flatten(1).to(torch.promote_types(rows.dtype, torch.float32)) + 0
        largest = plain.abs().amax(dim=1).tolist()
        for offset, row in enumerate(plain.cpu().contiguous().numpy()):
            position, data = start + offset, row.tobytes()
            if position not in into.digests:
                into.digests[position] = blake3(data).hexdigest(length=_DIGEST_BYTES)
                into.largest[position] = largest[offset]
                if semantic in self._values_of:
                    into.values[position] = data

    def finish(self) -> tuple[list[ModuleActivations], dict[str, str]]:
        """Return the points of which every row was seen, and why each other one is left out."""
        left_out = {semantic: _NOT_CALLED for semantic in self._expected if semantic not in self._modules}
        left_out |= self._left_out
        complete = []
        for semantic, module in self._modules.items():
            if semantic in left_out:
                continue
            wanted = [self._wanted(semantic, index) for index in range(len(self.tokens))]
            seen = sum(len(rows.digests) for rows in module.sequences)
            if seen != sum(wanted):
                left_out[semantic] = f"{seen} of {sum(wanted)} rows were recorded"
                continue
            complete.append(
                ModuleActivations(
                    semantic=semantic,
                    dtype=module.dtype,
                    width=module.width,
                    sequences=tuple(
                        _in_order(rows, count) for rows, count in zip(module.sequences, wanted, strict=True)
                    ),
                )
            )
        return complete, left_out

    def _wanted(self, semantic: str, sequence: int) -> int:
        # The logits of the last token predict what nobody sampled; the rollout engine does not score them.
        return max(0, len(self.tokens[sequence]) - (semantic == "head"))


def _in_order(rows: _Rows, count: int) -> SequenceActivations:
    return SequenceActivations(
        digests=tuple(rows.digests[position] for position in range(count)),
        largest=tuple(rows.largest[position] for position in range(count)),
        values=base64.b64encode(b"".join(rows.values[position] for position in sorted(rows.values))).decode(),
    )
