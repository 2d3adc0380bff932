"""vLLM as a scoring backend: log-probs by prefill, bindings, readback and digests of an ``LLM``."""

import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from packaging.specifiers import SpecifierSet

from mismatch_hooks.integrations.vllm import (
    FORCED_DECODE,
    WORKER_EXTENSION,
    activations,
    capture,
    readback,
    scoring_pass,
)
from mismatch_hooks.integrations.vllm.prefix_cache import PrefixCacheWatch
from mismatch_hooks.integrations.vllm.random_streams import random_streams_untouched
from mismatch_hooks.integrations.vllm.required_settings import required_settings
from mismatch_hooks.integrations.vllm.worker import WorkerExtension
from mismatch_hooks.live.activation_recorder import token_digests, traced_tokens
from mismatch_hooks.live.pass_arguments import switch_states
from mismatch_hooks.live.registry import load_registry
from mismatch_hooks.live.supported import VLLM
from mismatch_hooks.pipeline.bind import BindingError, RestoreError
from mismatch_hooks.schema.activation import ActivationCapture
from mismatch_hooks.schema.capture import RolloutSequence
from mismatch_hooks.schema.enums import Choice, ExecutionPath, PolicyRole, RebindCost, Source
from mismatch_hooks.schema.environment import RequiredSetting
from mismatch_hooks.schema.freeze import thaw
from mismatch_hooks.schema.readback import Readback, Reading, Unobservable
from mismatch_hooks.schema.replay import NotReplayableError, PlayedCall
from mismatch_hooks.schema.score import (
    Binding,
    LogprobShard,
    Score,
    ScoringSequence,
    ShardSlice,
    SwitchState,
    WeightsDigest,
)

TESTED_VERSIONS = SpecifierSet(VLLM.versions)
# What the backend flips itself, an argument of each pass, and what only a new engine can change; the rest is adapters'.
_OWN = {
    scoring_pass.BATCH_SIZE: RebindCost.PER_REQUEST,
    scoring_pass.PACKING: RebindCost.PER_REQUEST,
    "engine.compiled": RebindCost.ENGINE_REBUILD,
    "model.dtype": RebindCost.ENGINE_REBUILD,
    "model.head.dtype": RebindCost.ENGINE_REBUILD,
    "operator.attention.implementation": RebindCost.ENGINE_REBUILD,
    "rollout.kv_cache_dtype": RebindCost.ENGINE_REBUILD,
    "rollout.logprobs_mode": RebindCost.ENGINE_REBUILD,
    "rollout.prefix_caching": RebindCost.ENGINE_REBUILD,
    "rollout.quantization": RebindCost.ENGINE_REBUILD,
    "parallel.tensor": RebindCost.PROCESS_GROUP_REBUILD,
    "parallel.pipeline": RebindCost.PROCESS_GROUP_REBUILD,
    "engine.device": RebindCost.PROCESS_RESTART,
}
_REDUCTION = "operator.linear.reduction"
_GENERATION_CONFIG = "generation_config.json"


class EngineSetupError(RuntimeError):
    """The engine was not built in a way that can be examined; start-up must stop."""


class ScoringError(ValueError):
    """A batch that the engine cannot score as given."""


class ScoringTimeout(TimeoutError):
    """A scoring pass took longer than it may; its requests are aborted and the engine is idle."""


class VllmBackend:
    """The rollout side, around a ``vllm.LLM`` that was built with the worker extension.

    Args:
        llm: the engine, in this process or in its own, of any tensor or pipeline parallel size.
        weight_version: returns the loop's label of the loaded weights; the engine's own label survives a reload
            unchanged and is not used.

    Raises:
        EngineSetupError: another engine, a version outside the tested range, or no worker extension.
    """

    def __init__(self, llm: Any, *, weight_version: Callable[[], str] | None = None) -> None:
        self._llm = llm
        self._weight_version = weight_version
        self._bindings: list[Binding] = []
        self._passes = 0
        _require_engine(llm)
        # Read once: a reload from a path re-points model_config at that path, which may be gone by the next reading.
        self._generation_defaults = dict(readback.generation_defaults(self._config.model_config))
        self._default_params = llm.get_default_sampling_params()
        self._prefix_cache = PrefixCacheWatch(llm, weights=self.mutation_count())
        mode = self.read_back().effective("rollout.logprobs_mode")
        self._logprobs_mode = mode if isinstance(mode, str) else str(self._config.model_config.logprobs_mode)

    @property
    def role(self) -> PolicyRole:
        """The side that this engine plays."""
        return PolicyRole.ROLLOUT

    @property
    def capabilities(self) -> Mapping[str, RebindCost]:
        """Switch paths that this engine knows to the cost of flipping them; ``PER_REQUEST`` is live."""
        decode = {scoring_pass.PATH: RebindCost.PER_REQUEST} if ExecutionPath.ROLLOUT_DECODE in self.paths else {}
        live = load_registry().live_switches(self.role)
        if self._config.parallel_config.tensor_parallel_size == 1:  # nothing is added up over ranks
            live[_REDUCTION] = RebindCost.PROCESS_GROUP_REBUILD
        return {**_OWN, **decode, **live}

    @contextmanager
    def bind(self, binding: Binding) -> Iterator[None]:
        """Hold ``binding`` on every worker for the length of the block; bindings nest, the innermost counts calls.

        Raises:
            BindingError: a worker refused; every worker is as it was.
            RestoreError: at the end of the block some worker does not hold what it held before.
        """
        depth = len(self._bindings)
        try:
            refused = {reply["refused"] for reply in self._call("mh_bind", _plain(binding), depth)} - {""}
            if refused:
                raise BindingError(" ".join(sorted(refused)))
            self._bindings.append(binding)
            yield
        finally:
            del self._bindings[depth:]
            broken = [
                f"rank {reply['rank']}: {why}" for reply in self._call("mh_unbind", depth) for why in reply["broken"]
            ]
            if broken:
                raise RestoreError(" ".join(broken))

    @contextmanager
    def hold(self, binding: Binding) -> Iterator[None]:
        """Hold ``binding`` while the loop samples; cached prefixes of before are forgotten, and those of it afterwards.

        Raises:
            BindingError: see ``bind``; or requests of the loop are running, whose cached blocks cannot be forgotten.
            RestoreError: see ``bind``; or requests are running at the end.
        """
        if not self._llm.reset_prefix_cache():
            raise BindingError("the rollout's prefix cache cannot be reset while requests of the loop are running.")
        try:
            with self.bind(binding):
                yield
        finally:
            if not self._llm.reset_prefix_cache():
                raise RestoreError("the rollout's prefix cache could not be reset after its operators were put back.")

    @property
    def paths(self) -> tuple[ExecutionPath, ...]:
        """Prefill, and decode where the live sampler can be told the tokens and hands out raw log-probs."""
        # Any, not all: of a pipeline only the last stage samples.
        if self._logprobs_mode == "raw_logprobs" and any(
            reply["installed"] for reply in self._call("mh_forced_decode")
        ):
            return (ExecutionPath.ROLLOUT_FULL_PREFILL, ExecutionPath.ROLLOUT_DECODE)
        return (ExecutionPath.ROLLOUT_FULL_PREFILL,)

    def score(
        self,
        sequences: Sequence[ScoringSequence],
        *,
        path: ExecutionPath | None = None,
        timeout_s: float | None = None,
    ) -> Score:
        """Return the log-probs of the given response tokens under the binding in force, with evidence.

        Decode serves the sequences as the loop's own requests would be: all admitted at once, prompts prefilled,
        responses decoded token by token in one shrinking batch from the paged cache.

        No random stream moves, here or in a worker, and no cache block of the pass is ever served to another request.

        Args:
            sequences: prompts with the responses to score; an empty response takes no part in the pass.
            path: one of ``paths``; None: what the binding in force says, or else prefill.
            timeout_s: seconds; looked at between engine steps, so a pass ends at most one step later.

        Returns:
            One complete shard (the engine gathers over its ranks); fp32 nats, NaN where the engine delivered nothing.

        Raises:
            ScoringError: a path that this engine has not, a sequence that is too long or holds a token outside the
                vocabulary, an engine that returns logits, or unfinished requests of the loop.
            ScoringTimeout: the pass was aborted.
        """
        started = time.perf_counter()
        binding = self._bindings[-1] if self._bindings else Binding(role=self.role)
        arguments = load_registry().pass_arguments(binding.choices)
        path = path or scoring_pass.asked_path(arguments.get(scoring_pass.PATH, ("", Choice.NATIVE))[1])
        self._require_path(path)
        self._require_scorable(sequences, path)
        batches = scoring_pass.batches(sequences, scoring_pass.asked_size(arguments))
        outputs: dict[int, Any] = {}
        with random_streams_untouched():
            try:
                self._call("mh_begin_pass")
                for batch in batches:
                    outputs |= self._serve(sequences, batch, path, None if timeout_s is None else started + timeout_s)
            finally:
                passes = self._call("mh_end_pass")
        slices = tuple(
            ShardSlice(
                sequence=index, start=0, logprobs=scoring_pass.response_logprobs(sequence, path, outputs.get(index))
            )
            for index, sequence in enumerate(sequences)
        )
        return Score(
            path=path,
            binding=binding,
            shards=(LogprobShard(rank=0, world_size=1, slices=slices),),
            evidence=scoring_pass.evidence(
                passes,
                arguments,
                scoring_pass.expected_forwards(sequences, batches, path),
                scoring_pass.decoded_tokens(slices, path),
            ),
            seconds=time.perf_counter() - started,
        )

    def trace(
        self,
        sequences: Sequence[ScoringSequence],
        *,
        values_of: Sequence[str] = (),
        timeout_s: float | None = None,
    ) -> ActivationCapture:
        """Return a digest of what each module gave for every token, by prefill, under the binding in force.

        The pass is the one that ``score`` makes, with the same batches and the same promises. With tensor parallelism
        only points of which each rank holds whole rows are recorded.

        Args:
            sequences: prompts with their responses; one with an empty response takes no part.
            values_of: points whose values are kept too, for this process only.
            timeout_s: seconds; looked at between engine steps.

        Raises:
            ScoringError: see ``score``.
            ScoringTimeout: the pass was aborted.
        """
        started, path = time.perf_counter(), ExecutionPath.ROLLOUT_FULL_PREFILL
        binding = self._bindings[-1] if self._bindings else Binding(role=self.role)
        arguments = load_registry().pass_arguments(binding.choices)
        self._require_scorable(sequences, path)
        batches = scoring_pass.batches(sequences, scoring_pass.asked_size(arguments))
        with random_streams_untouched():
            try:
                self._call("mh_begin_pass")
                self._call("mh_begin_trace", traced_tokens(sequences), list(values_of))
                for batch in batches:
                    self._serve(sequences, batch, path, None if timeout_s is None else started + timeout_s)
            finally:
                replies = self._call("mh_end_trace")
                passes = self._call("mh_end_pass")
        modules, left_out = activations.merged(replies)
        return ActivationCapture(
            role=self.role,
            binding=binding,
            token_digests=token_digests(sequences),
            modules=modules,
            left_out=left_out,
            evidence=scoring_pass.evidence(
                passes, arguments, scoring_pass.expected_forwards(sequences, batches, path), {}
            ),
            seconds=time.perf_counter() - started,
        )

    def record_calls(
        self, binding: Binding, sequence: ScoringSequence, *, timeout_s: float | None = None
    ) -> tuple[PlayedCall, ...]:
        """Return every call of the factor that ``binding`` names, in one native prefill of a sequence.

        Args:
            binding: one factor, with the parameters of its reference; it is not bound.
            sequence: what is prefilled.
            timeout_s: seconds; looked at between engine steps.

        Raises:
            NotReplayableError: workers hold parts of the operands, or the factor's calls cannot be taken apart.
            RestoreError: a call site is not what it was before.
            ScoringError: see ``score``.
        """
        try:
            self._require_replayable("mh_begin_recording", _plain(binding))
            self.score([sequence], path=ExecutionPath.ROLLOUT_FULL_PREFILL, timeout_s=timeout_s)
        finally:
            reply, *_ = self._call("mh_end_recording")
            if reply["broken"]:
                raise RestoreError(reply["broken"])
        return tuple(PlayedCall(**call) for call in reply["calls"])

    def play_calls(self, binding: Binding, captured: Sequence[PlayedCall]) -> tuple[PlayedCall, ...]:
        """Return what the native and the reference implementation here give for calls that the trainer captured.

        Raises:
            NotReplayableError: see ``record_calls``.
        """
        reply = self._require_replayable("mh_play_calls", _plain(binding), thaw(tuple(captured)))
        return tuple(PlayedCall(**call) for call in reply["calls"])

    def switch_states(self, binding: Binding) -> tuple[SwitchState, ...]:
        """Return what every worker's live modules hold for the factors that ``binding`` names; changes nothing.

        Raises:
            BindingError: a worker cannot find the call sites of a factor.
        """
        replies = self._call("mh_switch_states", _plain(binding))
        refused = {reply["refused"] for reply in replies} - {""}
        if refused:
            raise BindingError(" ".join(sorted(refused)))
        arguments = load_registry().pass_arguments(binding.choices)
        live = tuple(scoring_pass.switch_state(switch) for reply in replies for switch in reply["switches"])
        return live + switch_states(arguments, {}, rank=0)

    def required_settings(self, longest: int) -> tuple[RequiredSetting, ...]:
        """Return what has to be pinned here for bits to mean something; ``longest``: tokens of the longest sequence."""
        return required_settings(longest)

    def read_back(self) -> Readback:
        """Return the effective settings of every worker, merged, and those of the engine around them."""
        replies = self._call("mh_read_back")
        settings = readback.merged({reply["rank"]: readback.from_plain(reply["settings"]) for reply in replies})
        settings.update(self._generation_defaults)
        settings.update(self._scheduler_settings())
        settings["weights.version"] = (
            Unobservable(reason="the loop gives no label of its weights")
            if self._weight_version is None
            else Reading(effective=self._weight_version(), source=Source.REQUESTED, where="label given by the loop")
        )
        return Readback(role=self.role, settings=settings)

    def weights_digest(self, prefixes: Sequence[str] | None = None) -> WeightsDigest:
        """Return what is loaded, by content, under Hugging Face tensor names.

        Args:
            prefixes: only tensors whose name starts with one of these; all of them when None.
        """
        replies = self._call("mh_weights_digest", None if prefixes is None else list(prefixes))
        return WeightsDigest(
            role=self.role,
            version=self._weight_version() if self._weight_version is not None else "",
            tensors=_agreed([reply["tensors"] for reply in replies]),
            derived=_agreed([reply["derived"] for reply in replies]),
        )

    def mutation_count(self) -> int:
        """Return how many times a change of the loaded weights was seen between two calls, over all workers."""
        return sum(int(reply["count"]) for reply in self._call("mh_mutation_count"))

    def sequences(
        self,
        outputs: Sequence[Any],
        sampling_params: Any = None,
        *,
        weight_version: str | None = None,
        response_masks: Sequence[Sequence[bool]] | None = None,
    ) -> tuple[RolloutSequence, ...]:
        """Return the sampled sequences with the live engine's log-prob mode and the sources of their settings.

        Args:
            outputs: the finished ``RequestOutput`` objects of ``LLM.generate``.
            sampling_params: what ``generate`` was given; None when it was given none, and the engine chose.
            weight_version: label of the weights that sampled; the backend's own label when None.
            response_masks: one for each completion, True on tokens that count.

        Raises:
            CaptureError: see ``capture.sequences``.
        """
        sources: dict[str, str] | None = None
        if sampling_params is None:
            sampling_params = self._default_params
            sources = {
                name: _GENERATION_CONFIG
                if f"rollout.generation_config.{name}" in self._generation_defaults
                else Source.CLASS_DEFAULT.value
                for name in capture.SETTINGS
            }
        label = weight_version if weight_version is not None else self._weight_version() if self._weight_version else ""
        served = [
            ([*output.prompt_token_ids, *output.outputs[0].token_ids], output.num_cached_tokens or 0)
            for output in outputs
        ]
        return capture.sequences(
            outputs,
            sampling_params,
            weight_version=label,
            response_masks=response_masks,
            logprobs_mode=self._logprobs_mode,
            sources=sources,
            cache_outlived_weights=self._prefix_cache.outlived_weights(self.mutation_count(), served),
        )

    @property
    def _config(self) -> Any:
        return self._llm.llm_engine.vllm_config

    def _call(self, method: str, *args: Any) -> list[dict[str, Any]]:
        replies: list[dict[str, Any]] = self._llm.collective_rpc(method, args=args)
        return replies

    def _require_replayable(self, method: str, *args: Any) -> dict[str, Any]:
        parallel = self._config.parallel_config
        if parallel.world_size > 1:
            raise NotReplayableError(
                f"a worker holds a part of the model (tensor parallel {parallel.tensor_parallel_size}, pipeline "
                f"parallel {parallel.pipeline_parallel_size}), and operands are played whole"
            )
        (reply,) = self._call(method, *args)
        if reply["refused"]:
            raise NotReplayableError(reply["refused"])
        return reply

    def _scheduler_settings(self) -> dict[str, Reading | Unobservable]:
        core = getattr(self._llm.llm_engine.engine_core, "engine_core", None)
        scheduler = getattr(core, "scheduler", None)
        if scheduler is None:  # the engine core runs in its own process
            return {}
        config = scheduler.scheduler_config
        return {
            "rollout.prefix_caching": Reading(
                effective=bool(scheduler.kv_cache_manager.enable_caching),
                source=Source.LIVE_MODULE,
                where="scheduler.kv_cache_manager.enable_caching",
            ),
            "rollout.block_size": Reading(
                effective=int(scheduler.block_size), source=Source.LIVE_MODULE, where="scheduler.block_size"
            ),
            "rollout.chunked_prefill": Reading(
                effective=bool(config.enable_chunked_prefill),
                source=Source.LIVE_MODULE,
                where="scheduler.scheduler_config",
            ),
        }

    def _require_path(self, path: ExecutionPath) -> None:
        if path is ExecutionPath.ROLLOUT_FULL_PREFILL or path in (paths := self.paths):
            return
        if path is ExecutionPath.TRAINING_FULL_PREFILL:
            raise ScoringError(
                f"path: got {path.name}; this rollout engine accepts {' or '.join(known.name for known in paths)}."
            )
        if self._logprobs_mode != "raw_logprobs":
            raise ScoringError(
                f"path: got ROLLOUT_DECODE, and logprobs_mode is {self._logprobs_mode!r}, which gives 0.0 for every "
                "token that is forced; build the LLM with logprobs_mode='raw_logprobs'."
            )
        raise ScoringError(
            "path: got ROLLOUT_DECODE, and no worker of this engine can be told the tokens; build it with LLM(…, "
            f"logits_processors=[{FORCED_DECODE!r}]) and without speculative decoding."
        )

    def _require_scorable(self, sequences: Sequence[ScoringSequence], path: ExecutionPath) -> None:
        if self._logprobs_mode not in ("raw_logprobs", "processed_logprobs"):
            raise ScoringError(
                f"logprobs_mode is {self._logprobs_mode!r}, so the engine scores in logits; build the LLM with "
                "logprobs_mode='raw_logprobs'."
            )
        model = self._config.model_config
        words = int(model.get_vocab_size())
        # A request has to sample at least one token: prefill throws one away, after all the given ones.
        extra = 1 if path is ExecutionPath.ROLLOUT_FULL_PREFILL else 0
        for index, sequence in enumerate(sequences):
            tokens = len(sequence.prompt_token_ids) + len(sequence.response_token_ids)
            if tokens + extra > int(model.max_model_len):
                raise ScoringError(
                    f"sequence {index} has {tokens} tokens; {path.value} scores at most {model.max_model_len - extra}: "
                    f"build the LLM with max_model_len={tokens + extra} or more."
                )
            foreign = max((*sequence.prompt_token_ids, *sequence.response_token_ids))
            if foreign >= words:
                raise ScoringError(
                    f"sequence {index} holds token {foreign}; the vocabulary of this engine ends at {words - 1}: score "
                    "what this engine sampled."
                )
        if self._llm.llm_engine.has_unfinished_requests():
            raise ScoringError(
                "the engine has unfinished requests, whose outputs a scoring pass would swallow; score "
                "between rollouts."
            )

    def _serve(
        self, sequences: Sequence[ScoringSequence], batch: Sequence[int], path: ExecutionPath, deadline: float | None
    ) -> dict[int, Any]:
        from vllm.inputs import tokens_input

        engine, self._passes = self._llm.llm_engine, self._passes + 1
        names = {f"mismatch_hooks-{self._passes}-{index}": index for index in batch}
        admitted: list[str] = []
        finished: dict[int, Any] = {}
        try:
            for name, index in names.items():
                token_ids, params = scoring_pass.request(sequences[index], path)
                # The salt keeps blocks written under a binding from ever matching a request of the loop.
                prompt = tokens_input(token_ids, cache_salt=uuid.uuid4().hex)
                admitted.append(engine.add_request(name, prompt, params))
            while len(finished) < len(names):
                if deadline is not None and time.perf_counter() > deadline:
                    raise ScoringTimeout(
                        f"scoring {len(names)} sequences ran out of time with {len(finished)} done; allow more seconds "
                        "or sample fewer sequences."
                    )
                finished.update({names[output.request_id]: output for output in engine.step() if output.finished})
        finally:
            if len(finished) < len(admitted):
                engine.abort_request(admitted, internal=True)
        return finished


def _require_engine(llm: Any) -> None:
    import vllm

    if not TESTED_VERSIONS.contains(vllm.__version__, prereleases=True):
        raise EngineSetupError(
            f"vllm {vllm.__version__} is installed; this integration is written against {TESTED_VERSIONS}. "
            "Install a version in that range."
        )
    if not isinstance(llm, vllm.LLM):
        raise EngineSetupError(f"VllmBackend got a {type(llm).__name__}; accepts a vllm.LLM.")
    named = llm.llm_engine.vllm_config.parallel_config.worker_extension_cls
    if not named or not _is_ours(named):
        raise EngineSetupError(
            f"this LLM has worker_extension_cls {named!r}; build it with LLM(…, "
            f"worker_extension_cls={WORKER_EXTENSION!r}), or with a subclass of it."
        )


def _is_ours(named: str) -> bool:
    module, _, name = named.rpartition(".")
    found = getattr(import_module(module), name, None)
    return isinstance(found, type) and issubclass(found, WorkerExtension)


def _plain(binding: Binding) -> dict[str, Any]:
    return {name: thaw(getattr(binding, name)) for name in ("choices", "parameters", "environment")}


def _agreed(ranks: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Digests over ranks: each rank lists the tensors of its own pipeline stage; a copy that differs is not a value."""
    found: dict[str, str] = {}
    for tensors in ranks:
        for name, digest in tensors.items():
            if found.setdefault(name, digest) != digest:
                found[name] = "unobservable: its copies differ between ranks"
    return found
