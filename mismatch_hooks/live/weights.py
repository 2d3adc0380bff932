"""Are the two sides' weights really the same? Checked by content: one layer a step, everything at an ablation."""

from collections.abc import Mapping

from mismatch_hooks.schema.backend import ScoringBackend
from mismatch_hooks.schema.enums import PolicyRole
from mismatch_hooks.schema.score import WeightsDigest


class WeightsWatch:
    """Compares per-tensor digests, a rotating layer at a time, so that the whole model is covered in a round."""

    def __init__(self, engines: Mapping[PolicyRole, ScoringBackend], *, layers: int) -> None:
        self._engines = engines
        self._groups: list[tuple[str, ...]] = [(f"model.layers.{layer}.",) for layer in range(layers)]
        self._groups.append(("model.embed_tokens.", "model.norm.", "lm_head."))
        self._next = 0
        self._checked = self._mismatched = 0

    def check_some(self) -> None:
        """Compare the tensors of the next layer, or those outside the layers."""
        self._compare(self._groups[self._next])
        self._next = (self._next + 1) % len(self._groups)

    def check_all(self) -> Mapping[PolicyRole, WeightsDigest]:
        """Compare every tensor, and return both digests."""
        return self._compare(None)

    def figures(self) -> dict[str, float]:
        """Return how many tensors were compared last, and how many of them differ."""
        return {"weights_checked": self._checked, "weights_mismatched": self._mismatched}

    def _compare(self, prefixes: tuple[str, ...] | None) -> Mapping[PolicyRole, WeightsDigest]:
        digests = {role: engine.weights_digest(prefixes) for role, engine in self._engines.items()}
        ours, theirs = digests[PolicyRole.TRAINING].tensors, digests[PolicyRole.ROLLOUT].tensors
        names = set(ours) | set(theirs)
        self._checked = len(names)
        # Two tensors that nobody could read are not equal, whatever the reasons say.
        self._mismatched = sum(
            ours.get(name) != theirs.get(name) or ours[name].startswith("unobservable") for name in names
        )
        return digests
