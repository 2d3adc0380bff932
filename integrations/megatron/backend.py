"""The training side as the pipeline sees it: score, bind, read back, digest; the run never notices."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mismatch_hooks.integrations.megatron import logprobs
from mismatch_hooks.integrations.megatron.activations import TracedPass
from mismatch_hooks.integrations.megatron.live_model import (
    gpt_model,
    outermost,
    parallel_sizes,
    require_tested_version,
)
from mismatch_hooks.integrations.megatron.mutations import MutationCounter
from mismatch_hooks.integrations.megatron.observed_pass import ObservedPass, normalised_columns, rows_given
from mismatch_hooks.integrations.megatron.readback import model_readings
from mismatch_hooks.integrations.megatron.readings import name_of
from mismatch_hooks.integrations.megatron.required_settings import required_settings
from mismatch_hooks.integrations.megatron.untouched import untouched
from mismatch_hooks.integrations.megatron.weights import digest, digests, live_tensors
from mismatch_hooks.live.activation_recorder import token_digests, traced_tokens
from mismatch_hooks.live.call_recorder import CallRecorder, play_calls
from mismatch_hooks.live.pass_arguments import Seen, call_counts, switch_states
from mismatch_hooks.live.registry import load_registry
from mismatch_hooks.pipeline.bind import (
    BindingError,
    CallCounter,
    PatchSite,
    RestoreError,
    Site,
    held_environment,
    held_now,
    is_as_before,
    patched,
    read_switches,
)
from mismatch_hooks.schema.activation import ActivationCapture
from mismatch_hooks.schema.enums import Choice, ExecutionPath, PolicyRole, RebindCost, Source, Value
from mismatch_hooks.schema.environment import RequiredSetting
from mismatch_hooks.schema.readback import Readback, Reading, Unobservable
from mismatch_hooks.schema.replay import NotReplayableError, PlayedCall
from mismatch_hooks.schema.score import (
    Binding,
    Evidence,
    LogprobShard,
    Score,
    ScoringSequence,
    ShardSlice,
    SwitchState,
    WeightsDigest,
)
from mismatch_hooks.schema.shape import ModelShape

TokenLogprobs = Callable[[Any, Tensor], Tensor]

_MICRO_BATCH, _WRITE_BACK = "scoring.micro_batch", "scoring.write_back"
_REDUCTION = "operator.linear.reduction"
_CONVENTION, _PACKING = "scoring.convention", "scoring.packing"
# What the backend flips itself, an argument of each pass, and what only a new engine can change; the rest is adapters'.
_OWN = {
    _MICRO_BATCH: RebindCost.PER_REQUEST,
    _WRITE_BACK: RebindCost.PER_REQUEST,
    _CONVENTION: RebindCost.PER_REQUEST,
    _PACKING: RebindCost.PER_REQUEST,
    "training.attention_backend": RebindCost.ENGINE_REBUILD,
    "model.dtype": RebindCost.ENGINE_REBUILD,
    "parallel.tensor": RebindCost.PROCESS_GROUP_REBUILD,
    "parallel.context": RebindCost.PROCESS_GROUP_REBUILD,
    "parallel.sequence": RebindCost.PROCESS_GROUP_REBUILD,
}


class ScoringTimeout(TimeoutError):
    """A scoring pass took longer than it was given; nothing of it is kept and the engine is as before."""


class MegatronBackend:
    """A live ``GPTModel`` that scores given tokens under any binding and leaves the run untouched.

    With tensor parallelism every rank of the group holds one of these and calls each method at the same time with the
    same arguments; each gets the same complete answer. Data-parallel replicas score their own sequences.
    """

    def __init__(
        self,
        model: Any,
        *,
        shape: ModelShape | None = None,
        token_logprobs: TokenLogprobs | None = None,
        micro_batch: int = 8,
        weight_version: Callable[[], str] | None = None,
    ) -> None:
        """Look at the model; nothing is changed and no forward runs.

        Args:
            model: what the loop calls for a forward: a ``GPTModel``, wrapped or not, or a list of one.
            shape: the model file's shape, the requested side of the readback; also says which columns are words.
            token_logprobs: ``(model, input_ids [batch, sequence] int64, right-padded) -> [batch, sequence − 1]`` fp32
                log-probs of each next token: the loop's own, so that every pass scores exactly as the loop does. None:
                ``token_logprobs`` of this package, over the words of ``shape``.
            micro_batch: sequences per forward.
            weight_version: the loop's label of the present weights; None: ``""``.

        Raises:
            UnsupportedTrainerError: megatron-core is of a version that was never run, or ``model`` is not of its kind.
            ValueError: ``micro_batch`` is not an integer of 1 or more.
        """
        require_tested_version()
        if isinstance(micro_batch, bool) or not isinstance(micro_batch, int) or micro_batch < 1:
            raise ValueError(f"micro_batch: got {micro_batch!r}; accepts an integer of 1 or more.")
        self._called = model
        self._model = gpt_model(model)
        self._shape = shape
        self._own_logprobs = token_logprobs
        self._rows_given: Reading | Unobservable | None = None
        self._micro_batch = micro_batch
        self._weight_version = weight_version or (lambda: "")
        self._sizes = parallel_sizes(self._model)
        self._counter = CallCounter()
        self._mutations = MutationCounter(self._model)
        self._binding: Binding | None = None
        self._sites: dict[str, Sequence[Site]] = {}
        self._frequencies: Tensor | None = None

    @property
    def role(self) -> PolicyRole:
        """Training."""
        return PolicyRole.TRAINING

    @property
    def capabilities(self) -> Mapping[str, RebindCost]:
        """Operators are switched live, unless CUDA graphs replay what was captured; layouts need a rebuild."""
        live = load_registry().live_switches(self.role)
        if self._sizes.tensor == 1:  # nothing is added up over ranks
            live[_REDUCTION] = RebindCost.PROCESS_GROUP_REBUILD
        if getattr(self._model.config, "cuda_graph_impl", "none") != "none":
            live = dict.fromkeys(live, RebindCost.ENGINE_REBUILD)
        return {**_OWN, **live}

    @property
    def paths(self) -> tuple[ExecutionPath, ...]:
        """Full prefill; a trainer never decodes."""
        return (ExecutionPath.TRAINING_FULL_PREFILL,)

    @contextmanager
    def bind(self, binding: Binding) -> Iterator[None]:
        """Hold ``binding`` in the live model for the length of the block, then prove it restored.

        Raises:
            BindingError: a binding is in force already, names another role or an unknown factor, or does not fit the
                live model; nothing was changed.
            RestoreError: after the block, an attribute is not the object that was there before.
        """
        if self._binding is not None:
            raise BindingError("a binding is in force on the training side; leave its block before entering another.")
        with held_environment(binding.environment):
            sites = self._find_sites(binding)
            every = [site for found in sites.values() for site in found]
            before = [held_now(site) for site in every]
            try:
                with patched(_held(binding, sites), self._counter):
                    self._binding, self._sites = binding, sites
                    yield
            finally:
                self._binding, self._sites = None, {}
                for site, held in zip(every, before, strict=True):
                    if not is_as_before(site, held):
                        raise RestoreError(f"{site.site} is not what it was before the binding; restart the run.")

    @contextmanager
    def hold(self, binding: Binding) -> Iterator[None]:
        """Hold ``binding`` while the loop trains: forwards, and the backwards of their graphs.

        Raises:
            BindingError: see ``bind``; or the model adds its gradients up inside the native product, which a reference
                would leave out.
            RestoreError: see ``bind``.
        """
        if self._model.config.gradient_accumulation_fusion:
            raise BindingError(
                "the trainer fuses the accumulation of gradients into its native linears, and a reference would lose "
                "them; build the model with gradient_accumulation_fusion=False to train on references."
            )
        with self.bind(binding):
            yield

    def score(
        self,
        sequences: Sequence[ScoringSequence],
        *,
        path: ExecutionPath | None = None,
        timeout_s: float | None = None,
    ) -> Score:
        """Return the log-probs of the response tokens by full prefill, under the binding in force.

        The model scores in the mode that it is in; with dropout above 0 in training mode the values are random, which
        ``training.mode`` and ``training.dropout.*`` show.

        Args:
            sequences: scored in this order, ``micro_batch`` at a time, right-padded to the longest of each forward.
            path: ``TRAINING_FULL_PREFILL``, or None, which is the same.
            timeout_s: checked between forwards.

        Raises:
            ValueError: another path; or a token id outside the model's vocabulary, with the sequence that holds it.
            ScoringTimeout: the time is over.
        """
        if path is not None and path not in self.paths:
            raise ValueError(f"path: got {path.name}; a training engine accepts TRAINING_FULL_PREFILL.")
        self._refuse_foreign_tokens(sequences)
        started = time.perf_counter()
        slices: list[ShardSlice] = []
        self._counter.reset()
        binding = self._binding or Binding(role=self.role)
        arguments = load_registry().pass_arguments(binding.choices)
        held = _held(binding, self._sites)
        rows = self._rows_per_forward(arguments, len(sequences))
        write_back = arguments.get(_WRITE_BACK, ("", Choice.NATIVE))[1]
        convention = arguments.get(_CONVENTION, ("", Choice.NATIVE))[1]
        with (
            untouched(outermost(self._called)),
            ObservedPass(self._model, lambda: self._counter.see_forward(held)) as observed,
        ):
            for first in range(0, len(sequences), rows):
                self._check_time(started, timeout_s, scored=first, of=len(sequences))
                slices += self._score_together(sequences[first : first + rows], first, write_back, convention)
        if observed.frequencies is not None:
            self._frequencies = observed.frequencies
        asked = {path: value for path, (_, value) in arguments.items() if value is not Choice.NATIVE}
        expected = -(-len(sequences) // rows)
        seen = {
            path: Seen(
                value=value if observed.forwards == expected else None, expected=expected, observed=observed.forwards
            )
            for path, value in asked.items()
        }
        return self._complete(slices, observed.forwards, time.perf_counter() - started, arguments, seen)

    def trace(
        self,
        sequences: Sequence[ScoringSequence],
        *,
        values_of: Sequence[str] = (),
        timeout_s: float | None = None,
    ) -> ActivationCapture:
        """Return a digest of what each module gave for every token, by full prefill, under the binding in force.

        The pass is the one that ``score`` makes. With tensor parallelism only points of which each rank holds whole
        rows are recorded, and a loop's own ``token_logprobs`` must give the model the tokens as it got them.

        Args:
            sequences: prompts with their responses; one with an empty response takes no part.
            values_of: points whose values are kept too, for this process only.
            timeout_s: checked between forwards.

        Raises:
            ValueError: a token id outside the model's vocabulary, with the sequence that holds it.
            ScoringTimeout: the time is over.
        """
        self._refuse_foreign_tokens(sequences)
        started = time.perf_counter()
        self._counter.reset()
        binding = self._binding or Binding(role=self.role)
        arguments = load_registry().pass_arguments(binding.choices)
        held = _held(binding, self._sites)
        rows = self._rows_per_forward(arguments, len(sequences))
        words = None if self._shape is None else self._shape.vocab_size
        traced = TracedPass(self._model, traced_tokens(sequences), values_of, vocab_size=words)
        with (
            untouched(outermost(self._called)),
            ObservedPass(self._model, lambda: self._counter.see_forward(held)) as observed,
            traced,
        ):
            for first in range(0, len(sequences), rows):
                self._check_time(started, timeout_s, scored=first, of=len(sequences))
                batch = sequences[first : first + rows]
                traced.next_forward(first, len(batch))
                self._score_together(batch, first)
        modules, left_out = traced.finish()
        seconds = time.perf_counter() - started
        return ActivationCapture(
            role=self.role,
            binding=binding,
            token_digests=token_digests(sequences),
            modules=modules,
            left_out=left_out,
            evidence=self._complete([], observed.forwards, seconds, arguments, {}).evidence,
            seconds=seconds,
        )

    def record_calls(
        self, binding: Binding, sequence: ScoringSequence, *, timeout_s: float | None = None
    ) -> tuple[PlayedCall, ...]:
        """Return every call of the factor that ``binding`` names, in one native forward of a sequence.

        Args:
            binding: one factor, with the parameters of its reference; it is not bound.
            sequence: what the forward is over.
            timeout_s: see ``score``.

        Raises:
            NotReplayableError: ranks hold parts of the operands, or the factor's calls cannot be taken apart.
            RestoreError: a call site is not what it was before.
        """
        recorder = CallRecorder(self._whole_sites(binding), next(self._model.parameters()).device)
        with patched(recorder.sites, CallCounter()):
            self.score([sequence], timeout_s=timeout_s)
        return tuple(recorder.calls)

    def play_calls(self, binding: Binding, captured: Sequence[PlayedCall]) -> tuple[PlayedCall, ...]:
        """Return what the native and the reference implementation here give for calls that the rollout captured.

        Raises:
            NotReplayableError: see ``record_calls``.
        """
        sites = self._whole_sites(binding)
        with untouched(outermost(self._called)):
            return tuple(play_calls(sites, captured, next(self._model.parameters()).device))

    def switch_states(self, binding: Binding) -> tuple[SwitchState, ...]:
        """Return what the live model holds for each factor that ``binding`` names; binds and scores nothing."""
        rank, sites = self._model.pg_collection.tp.rank(), self._find_sites(binding)
        arguments = load_registry().pass_arguments(binding.choices)
        return read_switches({factor: binding.choices[factor] for factor in sites}, sites, rank=rank) + switch_states(
            arguments, {}, rank=rank
        )

    def required_settings(self, longest: int) -> tuple[RequiredSetting, ...]:
        """Return what has to be pinned here for bits to mean something, however long the sequences are."""
        return required_settings()

    def read_back(self) -> Readback:
        """Return the effective settings.

        Where the vocabulary is padded, one short forward tells what is masked; of a loop's own log-prob function, one
        tells once whether it packs rows.
        """
        settings = model_readings(self._model, self._shape, self._rotated_with())
        scorer = self._own_logprobs
        name = "mismatch_hooks.integrations.megatron.token_logprobs" if scorer is None else name_of(scorer)
        settings["training.logprobs.function"] = Reading(
            effective=name, source=Source.REQUESTED, where="MegatronBackend"
        )
        settings["training.logprobs.micro_batch"] = Reading(
            effective=self._micro_batch, source=Source.REQUESTED, where="MegatronBackend"
        )
        settings["weights.version"] = Reading(
            effective=self._weight_version(), source=Source.REQUESTED, where="weight_version of MegatronBackend"
        )
        settings["model.vocab.logits_width"] = self._logits_width()
        settings["training.logprobs.packing"] = self._packing()
        return Readback(role=self.role, settings=settings)

    def weights_digest(self, prefixes: Sequence[str] | None = None) -> WeightsDigest:
        """Return what is loaded, by content, under Hugging Face names.

        Args:
            prefixes: limit the work to tensors whose name starts with one of these; None is all of them.
        """
        words = None if self._shape is None else self._shape.vocab_size
        derived: dict[str, str] = {}
        frequencies = self._rotated_with()
        name = "model.rotary_emb.inv_freq"
        if frequencies is not None and (prefixes is None or name.startswith(tuple(prefixes))):
            derived[name] = digest(frequencies.float())
        return WeightsDigest(
            role=self.role,
            version=self._weight_version(),
            tensors=digests(live_tensors(self._model, vocab_size=words), prefixes),
            derived=derived,
        )

    def mutation_count(self) -> int:
        """Return a count that grows when a weight was written since the last call; see ``MutationCounter``."""
        return self._mutations.count()

    def _whole_sites(self, binding: Binding) -> list[Site]:
        if self._sizes.tensor > 1 or self._sizes.pipeline > 1:
            raise NotReplayableError(
                f"a rank holds a part of the model (tensor parallel {self._sizes.tensor}, pipeline parallel "
                f"{self._sizes.pipeline}), and operands are played whole"
            )
        return [site for found in self._find_sites(binding).values() for site in found]

    def _find_sites(self, binding: Binding) -> dict[str, Sequence[Site]]:
        if binding.role is not self.role:
            raise BindingError(f"the binding is for {binding.role.value}; this engine is {self.role.value}.")
        sites = load_registry().sites(binding.choices, binding.parameters, self.role, self._model)
        for site in (site for found in sites.values() for site in found):
            if isinstance(site, PatchSite) and not hasattr(site.owner, site.name):
                raise BindingError(
                    f"{site.site}: this megatron-core has no {site.name} there; the patch does not fit it."
                )
        return sites

    def _rows_per_forward(self, arguments: Mapping[str, tuple[str, Value]], sequences: int) -> int:
        if arguments.get(_PACKING, ("", Choice.NATIVE))[1] is not Choice.NATIVE:
            return 1  # nothing to pack, nothing to pad
        asked = arguments.get(_MICRO_BATCH, ("", Choice.NATIVE))[1]
        if asked is Choice.NATIVE:
            return self._micro_batch
        return asked if isinstance(asked, int) else max(sequences, 1)

    def _refuse_foreign_tokens(self, sequences: Sequence[ScoringSequence]) -> None:
        words = self._model.vocab_size
        for index, sequence in enumerate(sequences):
            tokens = sequence.prompt_token_ids + sequence.response_token_ids
            if not all(0 <= token < words for token in tokens):
                bad = next(token for token in tokens if not 0 <= token < words)
                raise ValueError(f"sequence {index}: token id {bad}; accepts 0 to {words - 1}, the model's vocabulary.")

    def _check_time(self, started: float, timeout_s: float | None, *, scored: int, of: int) -> None:
        if timeout_s is None:
            return
        late = time.perf_counter() - started > timeout_s
        if self._sizes.tensor > 1:  # all ranks go on or none does: a forward is collective
            flag = torch.tensor([float(late)], device=next(self._model.parameters()).device)
            dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._model.pg_collection.tp)
            late = bool(flag.item())
        if late:
            raise ScoringTimeout(
                f"{scored} of {of} sequences were scored in {timeout_s} s; allow more time or score fewer."
            )

    def _score_together(
        self,
        sequences: Sequence[ScoringSequence],
        first: int,
        write_back: Value = Choice.NATIVE,
        convention: Value = Choice.NATIVE,
    ) -> list[ShardSlice]:
        rows = [sequence.prompt_token_ids + sequence.response_token_ids for sequence in sequences]
        width = max(len(row) for row in rows)
        if self._model.config.sequence_parallel:  # the sequence is cut into one equal part a rank
            width += -width % self._sizes.tensor
        input_ids = torch.zeros(len(rows), width, dtype=torch.long)
        for index, row in enumerate(rows):
            input_ids[index, : len(row)] = torch.tensor(row)
        input_ids = input_ids.to(next(self._model.parameters()).device)
        if write_back is Choice.NATIVE and convention is Choice.NATIVE:
            scores = self._token_logprobs(self._called, input_ids)
        else:
            words = None if self._shape is None else self._shape.vocab_size
            scores = logprobs.token_logprobs(
                self._called,
                input_ids,
                vocab_size=words,
                write_back="fp32" if write_back is Choice.NATIVE else str(write_back),
                temperatures=[one.temperature for one in sequences] if convention == "processed" else None,
            )
        if tuple(scores.shape) != (len(rows), width - 1):
            raise ValueError(
                f"token_logprobs returned {list(scores.shape)} for input_ids {[len(rows), width]}; accepts "
                f"{[len(rows), width - 1]}, the log-prob of each next token."
            )
        scores = scores.float().cpu()
        return [
            ShardSlice(
                sequence=first + index,
                start=0,
                logprobs=tuple(scores[index, len(sequence.prompt_token_ids) - 1 : len(row) - 1].tolist()),
            )
            for index, (sequence, row) in enumerate(zip(sequences, rows, strict=True))
        ]

    def _token_logprobs(self, model: Any, input_ids: Tensor) -> Tensor:
        if self._own_logprobs is not None:
            return self._own_logprobs(model, input_ids)
        words = None if self._shape is None else self._shape.vocab_size
        return logprobs.token_logprobs(model, input_ids, vocab_size=words)

    def _complete(
        self,
        slices: list[ShardSlice],
        forwards: int,
        seconds: float,
        arguments: Mapping[str, tuple[str, Value]],
        seen: Mapping[str, Seen],
    ) -> Score:
        binding = self._binding or Binding(role=self.role)
        group, ranks = self._model.pg_collection.tp, self._sizes.tensor
        rank = group.rank()
        bound = {factor: binding.choices[factor] for factor in self._sites}
        mine = (
            forwards,
            self._counter.counts(_held(binding, self._sites), forwards=forwards, rank=rank)
            + call_counts(arguments, seen, rank=rank),
            read_switches(bound, self._sites, rank=rank) + switch_states(arguments, seen, rank=rank),
        )
        every: list[Any] = [mine]
        if ranks > 1:
            every = [None] * ranks
            dist.all_gather_object(every, mine, group=group)
        # Every rank of the group holds the same log-probs; the first one's count, so that no token is covered twice.
        shards = tuple(
            LogprobShard(rank=index, world_size=ranks, slices=tuple(slices) if index == 0 else ())
            for index in range(ranks)
        )
        return Score(
            path=ExecutionPath.TRAINING_FULL_PREFILL,
            binding=binding,
            shards=shards,
            evidence=Evidence(
                forwards=tuple(forwards for forwards, _, _ in every),
                calls=tuple(call for _, calls, _ in every for call in calls),
                switches=tuple(state for _, _, states in every for state in states),
            ),
            seconds=seconds,
        )

    def _rotated_with(self) -> Tensor | None:
        """The frequencies of the last pass's rotary table; before any pass, those that a new table would have."""
        rotary = getattr(self._model, "rotary_pos_emb", None)
        if self._frequencies is not None or rotary is None:
            return self._frequencies
        frequencies: Tensor = rotary.inv_freq
        factor = getattr(rotary, "seq_len_interpolation_factor", None)
        return frequencies if factor is None else frequencies * (1 / factor)

    def _packing(self) -> Reading | Unobservable:
        if self._own_logprobs is None:
            where = "mismatch_hooks.integrations.megatron.token_logprobs"
            return Reading(effective="one sequence a row", source=Source.REQUESTED, where=where)
        if self._rows_given is None:
            words = int(self._model.vocab_size) if self._shape is None else self._shape.vocab_size
            with untouched(outermost(self._called)):
                self._rows_given = rows_given(self._model, self._called, self._own_logprobs, words)
        return self._rows_given

    def _logits_width(self) -> Reading | Unobservable:
        padded = int(self._model.vocab_size)
        if not self._model.post_process:
            return Unobservable(reason="this pipeline stage has no head")
        if self._shape is None or self._shape.vocab_size == padded:
            return Reading(effective=padded, source=Source.LIVE_MODULE, where="columns of output_layer")
        if self._sizes.tensor > 1:
            return Unobservable(reason=f"the head is sharded over {self._sizes.tensor} ranks")
        with untouched(outermost(self._called)):
            return normalised_columns(self._model, self._called, self._token_logprobs, self._shape.vocab_size)


def _held(binding: Binding, sites: Mapping[str, Sequence[Site]]) -> list[Site]:
    return [site for factor in binding.bound for site in sites.get(factor, ())]
