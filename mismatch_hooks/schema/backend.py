"""The one surface that an engine offers to the pipeline."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from mismatch_hooks.schema.enums import ExecutionPath, PolicyRole, RebindCost
from mismatch_hooks.schema.environment import RequiredSetting
from mismatch_hooks.schema.readback import Readback
from mismatch_hooks.schema.score import Binding, Score, ScoringSequence, SwitchState, WeightsDigest


class ScoringBackend(Protocol):
    """One engine, reached only through plain data, so that it may live in this process, another one, or many ranks."""

    @property
    def role(self) -> PolicyRole:
        """The side that this engine plays."""
        ...

    @property
    def capabilities(self) -> Mapping[str, RebindCost]:
        """Switch paths that this engine knows to the cost of flipping them; ``PER_REQUEST`` is live."""
        ...

    @property
    def paths(self) -> tuple[ExecutionPath, ...]:
        """The ways in which this engine, as it was built, can compute log-probs; the first is what None stands for."""
        ...

    def bind(self, binding: Binding) -> AbstractContextManager[None]:
        """Hold ``binding`` for the length of the block; always restore, exceptions included.

        Raises:
            BindingError: the binding cannot be applied, or what was restored is not what was there.
        """
        ...

    def hold(self, binding: Binding) -> AbstractContextManager[None]:
        """Hold ``binding`` for the loop's own work, sampling or training, and not for scoring passes alone.

        Nothing that was computed under another binding is served meanwhile, nor afterwards.

        Raises:
            BindingError: the binding cannot be applied, or the loop's work is not safe under it.
        """
        ...

    def score(
        self,
        sequences: Sequence[ScoringSequence],
        *,
        path: ExecutionPath | None = None,
        timeout_s: float | None = None,
    ) -> Score:
        """Return the log-probs of the given response tokens under the binding in force, with evidence.

        Raises:
            ValueError: ``path`` is not one of ``paths``.
        """
        ...

    def switch_states(self, binding: Binding) -> tuple[SwitchState, ...]:
        """Return what the live objects hold for the factors that ``binding`` names; binds and scores nothing."""
        ...

    def required_settings(self, longest: int) -> tuple[RequiredSetting, ...]:
        """Return what has to be pinned here for bits to mean something; ``longest``: tokens of the longest sequence."""
        ...

    def read_back(self) -> Readback:
        """Return the effective settings."""
        ...

    def weights_digest(self, prefixes: Sequence[str] | None = None) -> WeightsDigest:
        """Return what is loaded, by content, under Hugging Face tensor names; all, or those with a given prefix."""
        ...

    def mutation_count(self) -> int:
        """Return a cheap counter that grows whenever a weight is written in place; equal means "probably unchanged"."""
        ...
