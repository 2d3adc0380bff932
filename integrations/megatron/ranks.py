"""One trainer of several tensor-parallel ranks as one engine: rank 0 leads, the others do what it says.

A forward of a sharded model is collective, so whatever the leader does every rank must do too, in the same order. The
leader sends each call as plain data over the tensor-parallel group; the followers make the same call on their own
backend, and all ranks tell how it went before any goes on.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from mismatch_hooks.integrations.megatron.backend import MegatronBackend
from mismatch_hooks.pipeline.bind import BindingError, RestoreError
from mismatch_hooks.schema.activation import ActivationCapture
from mismatch_hooks.schema.enums import ExecutionPath, PolicyRole, RebindCost
from mismatch_hooks.schema.environment import RequiredSetting
from mismatch_hooks.schema.readback import Readback
from mismatch_hooks.schema.score import Binding, Score, ScoringSequence, SwitchState, WeightsDigest

# What a backend may raise and go on; anything else ends the rank, and the others run into the group's timeout.
_REFUSALS = (BindingError, RestoreError, ValueError, TimeoutError)
_END = "end"


class RanksDisagreeError(RuntimeError):
    """A call went through on this rank and not on another one; the trainer's ranks are not in step."""


@dataclass(slots=True)
class _Rank:
    """One rank's backend and the binding that it is in."""

    backend: MegatronBackend
    group: Any
    binding: ExitStack = field(default_factory=ExitStack)

    def carry_out(self, call: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """Make one call together with all other ranks, and return what each got.

        Raises:
            Exception: what the call raised on this rank, as it is; the ranks that entered a binding have left it.
            RanksDisagreeError: another rank refused; its words.
        """
        answer, refusal = None, None
        try:
            answer = self._call(call, args, kwargs)
        except _REFUSALS as error:
            refusal = error
        every: list[Any] = [None] * self.group.size()
        dist.all_gather_object(every, (answer, "" if refusal is None else str(refusal)), group=self.group)
        refused = {rank: words for rank, (_, words) in enumerate(every) if words}
        if call == "enter" and refused:
            self.binding.close()
        if refusal is not None:
            raise refusal
        if refused:
            raise RanksDisagreeError("; ".join(f"tensor rank {rank}: {words}" for rank, words in refused.items()))
        return [got for got, _ in every]

    def _call(self, call: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if call == "enter":
            self.binding.enter_context(self.backend.bind(*args))
            return None
        if call == "leave":
            return self.binding.close()
        return getattr(self.backend, call)(*args, **kwargs)


def follow(backend: MegatronBackend, group: Any) -> None:
    """Do what the leader does until it ends; call it on every rank of ``group`` but the first.

    Args:
        backend: around this rank's part of the model.
        group: the tensor-parallel process group.
    """
    rank = _Rank(backend, group)
    while (said := _said(group)) != _END:
        call, args, kwargs = said
        try:
            rank.carry_out(call, args, kwargs)
        except (*_REFUSALS, RanksDisagreeError):
            continue  # the leader has raised it too, to whoever called


class LeadingBackend:
    """The ``ScoringBackend`` of a trainer of several tensor-parallel ranks, on the first of them.

    Between construction and ``end`` the other ranks are in ``follow`` and take part in nothing else.
    """

    def __init__(self, backend: MegatronBackend, group: Any) -> None:
        """Lead the ranks of ``group``.

        Args:
            backend: around this rank's part of the model.
            group: the tensor-parallel process group.

        Raises:
            ValueError: this rank is not the first of the group.
        """
        if group.rank() != 0:
            raise ValueError(f"tensor rank {group.rank()} cannot lead; call follow(backend, group) there.")
        self._rank = _Rank(backend, group)

    @property
    def role(self) -> PolicyRole:
        """Training."""
        return self._rank.backend.role

    @property
    def capabilities(self) -> Mapping[str, RebindCost]:
        """Those of the backend; every rank has the same."""
        return self._rank.backend.capabilities

    @property
    def paths(self) -> tuple[ExecutionPath, ...]:
        """Full prefill."""
        return self._rank.backend.paths

    @contextmanager
    def bind(self, binding: Binding) -> Iterator[None]:
        """Hold ``binding`` on every rank for the length of the block.

        Raises:
            BindingError: it does not fit this rank's model; every rank is as it was.
            RanksDisagreeError: it does not fit another rank's; likewise.
            RestoreError: after the block, an attribute is not the object that was there before.
        """
        self._on_all("enter", binding)
        try:
            yield
        finally:
            self._on_all("leave")

    @contextmanager
    def hold(self, binding: Binding) -> Iterator[None]:
        """Refuse: the other ranks follow for scoring passes, and are not led while the loop trains.

        Raises:
            BindingError: always.
        """
        raise BindingError("ranks that are led score only; a run that trains on references needs one trainer rank.")
        yield

    def score(
        self,
        sequences: Sequence[ScoringSequence],
        *,
        path: ExecutionPath | None = None,
        timeout_s: float | None = None,
    ) -> Score:
        """Return the log-probs of the response tokens, with the evidence of every rank; see ``MegatronBackend``."""
        scores: list[Score] = self._on_all("score", tuple(sequences), path=path, timeout_s=timeout_s)
        return scores[0]

    def trace(
        self,
        sequences: Sequence[ScoringSequence],
        *,
        values_of: Sequence[str] = (),
        timeout_s: float | None = None,
    ) -> ActivationCapture:
        """Return what the first rank's modules gave; see ``MegatronBackend``."""
        captures: list[ActivationCapture] = self._on_all(
            "trace", tuple(sequences), values_of=tuple(values_of), timeout_s=timeout_s
        )
        return captures[0]

    def switch_states(self, binding: Binding) -> tuple[SwitchState, ...]:
        """Return what the live model of every rank holds for each factor that ``binding`` names."""
        return tuple(state for states in self._on_all("switch_states", binding) for state in states)

    def required_settings(self, longest: int) -> tuple[RequiredSetting, ...]:
        """Those of the backend; every rank has the same."""
        return self._rank.backend.required_settings(longest)

    def read_back(self) -> Readback:
        """Return the effective settings as the first rank reads them."""
        readings: list[Readback] = self._on_all("read_back")
        return readings[0]

    def weights_digest(self, prefixes: Sequence[str] | None = None) -> WeightsDigest:
        """Return what is loaded on all ranks together, by content, under Hugging Face names."""
        digests: list[WeightsDigest] = self._on_all("weights_digest", None if prefixes is None else tuple(prefixes))
        return digests[0]

    def mutation_count(self) -> int:
        """Return a count that grows when a weight was written on any rank since the last call."""
        return sum(self._on_all("mutation_count"))

    def end(self) -> None:
        """Let the followers return."""
        _say(self._rank.group, _END)

    def _on_all(self, call: str, *args: Any, **kwargs: Any) -> list[Any]:
        _say(self._rank.group, (call, args, kwargs))
        return self._rank.carry_out(call, args, kwargs)


def _say(group: Any, said: Any) -> None:
    dist.broadcast_object_list([said], src=dist.get_global_rank(group, 0), group=group)


def _said(group: Any) -> Any:
    heard: list[Any] = [None]
    dist.broadcast_object_list(heard, src=dist.get_global_rank(group, 0), group=group)
    return heard[0]
