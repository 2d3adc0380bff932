"""Are the two sides' weights really the same? Checked by content: one layer a step, everything at an ablation."""

from collections.abc import Mapping
from typing import Any

from mismatch_hooks.schema.backend import ScoringBackend
from mismatch_hooks.schema.enums import PolicyRole
from mismatch_hooks.schema.fingerprint import fingerprint
from mismatch_hooks.schema.score import WeightsDigest

_DIGEST_CHARACTERS = 16
_MOST_NAMES = 20


class WeightsWatch:
    """Compares per-tensor digests, a rotating layer at a time, so that the whole model is covered in a round.

    A tensor that differs stays on the list until a later check finds it equal.

    Attributes:
        updated_at: the last step whose samples found the rollout's weights written since those of the step before; None
            while that was not seen.
    """

    def __init__(self, engines: Mapping[PolicyRole, ScoringBackend], *, layers: int) -> None:
        self._engines = engines
        self._groups: list[tuple[str, ...]] = [(f"model.layers.{layer}.",) for layer in range(layers)]
        self._groups.append(("model.embed_tokens.", "model.norm.", "lm_head."))
        self._next = 0
        self._checked = self._unread = 0
        self._differing: dict[str, int] = {}  # name to the step at which it was first seen to differ
        self._latest: Mapping[PolicyRole, WeightsDigest] = {}
        self._writes: int | None = None
        self.updated_at: int | None = None

    @property
    def differing_since(self) -> int | None:
        """The step at which the first of the tensors that differ now was seen to differ; None when none does."""
        return min(self._differing.values(), default=None)

    def see_update(self, step: int) -> None:
        """Note whether the rollout's weights were written since the last call; once a step, after sampling."""
        writes = self._engines[PolicyRole.ROLLOUT].mutation_count()
        if self._writes is not None and writes != self._writes:
            self.updated_at = step
        self._writes = writes

    def check_some(self, step: int) -> None:
        """Compare the tensors of the next layer, or those outside the layers."""
        self._compare(step, self._groups[self._next])
        self._next = (self._next + 1) % len(self._groups)

    def check_all(self, step: int) -> Mapping[PolicyRole, WeightsDigest]:
        """Compare every tensor, and return both digests."""
        return self._compare(step, None)

    def figures(self) -> dict[str, float]:
        """Return how many tensors were compared last, how many could not be, and how many are known to differ."""
        return {
            "weights_checked": self._checked,
            "weights_unread": self._unread,
            "weights_mismatched": len(self._differing),
        }

    def report(self) -> dict[str, Any]:
        """Return what each side reported last: version, one digest over the tensors compared, and names that differ."""
        sides = {
            role.value: {"version": found.version, "digest": combined_digest(found)}
            for role, found in self._latest.items()
        }
        return {"checked": self._checked, "differing": sorted(self._differing)[:_MOST_NAMES], **sides}

    def _compare(self, step: int, prefixes: tuple[str, ...] | None) -> Mapping[PolicyRole, WeightsDigest]:
        digests = {role: engine.weights_digest(prefixes) for role, engine in self._engines.items()}
        ours, theirs = digests[PolicyRole.TRAINING].tensors, digests[PolicyRole.ROLLOUT].tensors
        names = set(ours) | set(theirs)
        # A tensor that a side could not read is neither equal nor different; a verdict is blocked by it all the same.
        unread = {name for name in names if any(_is_unread(side.get(name, "")) for side in (ours, theirs))}
        differing = {name for name in names - unread if ours.get(name) != theirs.get(name)}
        self._checked, self._unread = len(names - unread), len(unread)
        known = {name: since for name, since in self._differing.items() if name in differing or name not in names}
        self._differing = dict.fromkeys(differing, step) | known
        self._latest = digests
        return digests


def combined_digest(found: WeightsDigest) -> str:
    """Return one short digest over a side's tensors, names included."""
    return fingerprint(found.tensors)[:_DIGEST_CHARACTERS]


def _is_unread(digest: str) -> bool:
    return digest.startswith("unobservable")
