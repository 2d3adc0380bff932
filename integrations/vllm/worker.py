"""The named methods that vLLM's workers gain: the only way in to the live model, plain data in and out.

vLLM mixes the class into its worker by name (``LLM(worker_extension_cls=…)``), so the same code serves an engine in
this process, in another one, tensor parallel, or behind a server. Written against vLLM 0.32.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from mismatch_hooks.live.registry import load_registry
from mismatch_hooks.pipeline.bind import (
    BindingError,
    CallCounter,
    RestoreError,
    Site,
    held_environment,
    held_now,
    is_as_before,
    patched,
    read_switches,
)
from mismatch_hooks.schema.enums import Choice, PolicyRole, Value
from mismatch_hooks.schema.freeze import thaw
from mismatch_hooks.schema.replay import NotReplayableError, PlayedCall

Plain = dict[str, Any]
_Mark = tuple[list[Callable[[], object]], int, bytes]


@dataclass(slots=True, kw_only=True)
class _Bound:
    """One binding in force on this worker.

    Attributes:
        choices: factor id to choice or value.
        sites: factor id to every place that it is bound at.
        before: what each bound site held, to prove the restoration.
        stack: closing it restores.
        counter: calls of the bound implementations.
    """

    choices: dict[str, Value]
    sites: dict[str, Sequence[Site]]
    before: list[tuple[Site, Any]]
    stack: ExitStack = field(default_factory=ExitStack)
    counter: CallCounter = field(default_factory=CallCounter)

    @property
    def held(self) -> list[Site]:
        """The sites that are not native."""
        return [site for site, _ in self.before]


@dataclass(slots=True, kw_only=True)
class _Pass:
    """One scoring pass that is running.

    Attributes:
        put_back_streams: puts the random streams back.
        remove_hook: takes the counting hook off the model.
        forwards: model forwards counted so far.
    """

    put_back_streams: Callable[[], None]
    remove_hook: Callable[[], None] = lambda: None
    forwards: int = 0


@dataclass(slots=True)
class _State:
    """What outlives one call; lives on the worker because every remote call is separate."""

    bindings: list[_Bound] = field(default_factory=list)
    running: _Pass | None = None
    traced: Any = None
    recording: Any = None
    writes: int = 0
    loaded: _Mark | None = None


class WorkerExtension:
    """Methods on every vLLM worker; each takes and returns JSON-able data and names its rank and the world size."""

    def mh_read_back(self) -> Plain:
        """Return the effective settings that this worker can read."""
        from mismatch_hooks.integrations.vllm.readback import as_plain, live_settings

        return self._mh_reply(settings=as_plain(live_settings(self)))

    def mh_weights_digest(self, prefixes: list[str] | None = None) -> Plain:
        """Return the digests of the live weights whose Hugging Face name starts with one of ``prefixes``, or of all."""
        from mismatch_hooks.integrations.vllm.random_streams import random_streams_untouched
        from mismatch_hooks.integrations.vllm.weights import derived_digests, weight_digests

        with random_streams_untouched():
            model = self._mh_model()
            return self._mh_reply(tensors=weight_digests(model, prefixes), derived=derived_digests(model, prefixes))

    def mh_mutation_count(self) -> Plain:
        """Return how often this worker has seen its weights rewritten, between one call and the next."""
        state, model = self._mh_state(), self._mh_model()
        loaded = _load_mark(model)
        if state.loaded is not None and not _same_load(state.loaded, loaded):
            state.writes += 1
        state.loaded = loaded
        return self._mh_reply(count=state.writes)

    def mh_bind(self, binding: Plain, depth: int) -> Plain:
        """Enter a binding above ``depth`` others; ``refused`` is empty, or the sentence that says why nothing changed.

        Args:
            binding: ``{"choices": {factor: "native" | "reference" | value}, "parameters": {factor: {…}},
                "environment": {variable: value}}``.
            depth: bindings that must be in force already.
        """
        state = self._mh_state()
        try:
            if len(state.bindings) != depth:
                raise BindingError(f"{len(state.bindings)} bindings are in force on this worker, not {depth}.")
            state.bindings.append(_bind(self._mh_model(), binding))
        except BindingError as error:
            return self._mh_reply(refused=str(error))
        return self._mh_reply(refused="")

    def mh_unbind(self, depth: int) -> Plain:
        """Leave every binding above ``depth``; ``broken`` lists what is not as it was before (empty when proven)."""
        state, broken = self._mh_state(), []
        while len(state.bindings) > depth:
            broken += _unbind(state.bindings.pop())
        return self._mh_reply(broken=broken)

    def mh_switch_states(self, binding: Plain) -> Plain:
        """Return what the live modules hold for each factor that ``binding`` names; changes nothing.

        ``refused`` is empty, or the sentence that says why the sites cannot be found.
        """
        try:
            choices, sites = _find_sites(self._mh_model(), binding)
        except BindingError as error:
            return self._mh_reply(refused=str(error), switches=[])
        rank = int(self.rank)  # type: ignore[attr-defined]
        return self._mh_reply(refused="", switches=thaw(read_switches(choices, sites, rank=rank)))

    def mh_forced_decode(self) -> Plain:
        """Return whether this worker's live sampler holds the class that forces tokens."""
        from mismatch_hooks.integrations.vllm.forced_decode import is_installed

        return self._mh_reply(installed=is_installed(self.model_runner))  # type: ignore[attr-defined]

    def mh_begin_pass(self) -> Plain:
        """Start counting: model forwards, and calls of what is bound; hold the random streams."""
        from mismatch_hooks.integrations.vllm.random_streams import hold_random_streams

        state, model = self._mh_state(), self._mh_model()
        if state.running is not None:
            self.mh_end_pass()
        if state.bindings:
            state.bindings[-1].counter.reset()
        running = _Pass(put_back_streams=hold_random_streams())

        bound = state.bindings[-1] if state.bindings else None

        def count(*_: object) -> None:
            running.forwards += 1
            if bound is not None:
                bound.counter.see_forward(bound.held)

        running.remove_hook = model.register_forward_pre_hook(count).remove
        state.running = running
        return self._mh_reply()

    def mh_end_pass(self) -> Plain:
        """Stop counting and return the evidence of the pass, read while the binding is still in force."""
        state = self._mh_state()
        running, state.running = state.running, None
        if running is None:
            return self._mh_reply(forwards=0, calls=[], switches=[])
        running.remove_hook()
        running.put_back_streams()
        if not state.bindings:
            return self._mh_reply(forwards=running.forwards, calls=[], switches=[])
        bound, rank = state.bindings[-1], int(self.rank)  # type: ignore[attr-defined]
        # A replayed CUDA graph shows no forward; it made one all the same, and expecting none would clear the factor.
        forwards = max(running.forwards, 1)
        calls = bound.counter.counts(bound.held, forwards=forwards, rank=rank)
        switches = read_switches(bound.choices, bound.sites, rank=rank)
        return self._mh_reply(forwards=running.forwards, calls=thaw(calls), switches=thaw(switches))

    def mh_begin_trace(self, sequences: list[list[int]], values_of: list[str]) -> Plain:
        """Start digesting what each module gives for the tokens of our next requests.

        Args:
            sequences: token ids of each sequence, by the index in its request's name; empty ones take no part.
            values_of: traced points whose values are returned as well.
        """
        from mismatch_hooks.integrations.vllm.activations import TracedPass

        self.mh_end_trace()
        runner = self.model_runner  # type: ignore[attr-defined]
        self._mh_state().traced = TracedPass(self._mh_model(), runner, sequences, values_of)
        return self._mh_reply()

    def mh_end_trace(self) -> Plain:
        """Stop digesting and return ``modules`` and ``left_out``, see ``TracedPass.finish``."""
        state = self._mh_state()
        traced, state.traced = state.traced, None
        return self._mh_reply(**({"modules": [], "left_out": {}} if traced is None else traced.finish()))

    def mh_begin_recording(self, binding: Plain) -> Plain:
        """Start capturing the calls of the factor that ``binding`` names, which stays native.

        ``refused`` is empty, or the sentence that says why they cannot be.
        """
        from mismatch_hooks.live.call_recorder import CallRecorder

        self.mh_end_recording()
        state, model = self._mh_state(), self._mh_model()
        try:
            _, sites = _find_sites(model, binding)
            found = [site for group in sites.values() for site in group]
            recorder = CallRecorder(found, next(model.parameters()).device)
        except (BindingError, NotReplayableError) as error:
            return self._mh_reply(refused=str(error))
        stack = ExitStack()
        stack.enter_context(patched(recorder.sites, CallCounter()))
        state.recording = recorder, stack
        return self._mh_reply(refused="")

    def mh_end_recording(self) -> Plain:
        """Take the recorder out and return ``calls``; ``broken`` is empty when every site is proven as before."""
        state = self._mh_state()
        if state.recording is None:
            return self._mh_reply(calls=[], broken="")
        (recorder, stack), state.recording = state.recording, None
        try:
            stack.close()
        except RestoreError as error:  # would be of another type when it reaches the driver's process
            return self._mh_reply(calls=[], broken=str(error))
        return self._mh_reply(calls=thaw(tuple(recorder.calls)), broken="")

    def mh_play_calls(self, binding: Plain, captured: list[Plain]) -> Plain:
        """Return as ``calls`` what the two implementations here give for captured ones; ``refused`` as above."""
        from mismatch_hooks.integrations.vllm.random_streams import random_streams_untouched
        from mismatch_hooks.live.call_recorder import play_calls

        model = self._mh_model()
        try:
            _, sites = _find_sites(model, binding)
            found = [site for group in sites.values() for site in group]
            calls = [PlayedCall(**call) for call in captured]
            with random_streams_untouched():
                played = play_calls(found, calls, next(model.parameters()).device)
        except (BindingError, NotReplayableError) as error:
            return self._mh_reply(refused=str(error), calls=[])
        return self._mh_reply(refused="", calls=thaw(tuple(played)))

    def _mh_reply(self, **content: Any) -> Plain:
        rank, parallel = self.rank, self.parallel_config  # type: ignore[attr-defined]
        return {"rank": int(rank), "world_size": int(parallel.world_size), **content}

    def _mh_model(self) -> Any:
        return self.get_model()  # type: ignore[attr-defined]

    def _mh_state(self) -> _State:
        state: _State | None = vars(self).get("_mh_kept")
        if state is None:
            state = self._mh_kept = _State()
        return state


def _bind(model: Any, binding: Mapping[str, Any]) -> _Bound:
    with ExitStack() as stack:
        stack.enter_context(held_environment(binding.get("environment", {})))
        choices, sites = _find_sites(model, binding)
        held = [site for factor, found in sites.items() if choices[factor] is not Choice.NATIVE for site in found]
        bound = _Bound(choices=choices, sites=sites, before=[(site, held_now(site)) for site in held])
        stack.enter_context(patched(held, bound.counter))
        bound.stack = stack.pop_all()
    return bound


def _find_sites(model: Any, binding: Mapping[str, Any]) -> tuple[dict[str, Value], dict[str, Sequence[Site]]]:
    choices = {factor: as_value(value) for factor, value in binding["choices"].items()}
    sites = load_registry().sites(choices, binding.get("parameters", {}), PolicyRole.ROLLOUT, model)
    return {factor: choices[factor] for factor in sites}, sites


def as_value(plain: Any) -> Value:
    """Return a switch's value as a binding spells it, from plain data."""
    return Choice(plain) if plain in (Choice.NATIVE.value, Choice.REFERENCE.value) else plain


def _unbind(bound: _Bound) -> list[str]:
    broken = []
    try:
        bound.stack.close()
    except RestoreError as error:
        broken.append(str(error))
    broken += [
        f"{site.site} is not what it was before the binding."
        for site, before in bound.before
        if not is_as_before(site, before)
    ]
    return broken


def _load_mark(model: Any) -> _Mark:
    """What changes when weights are written: packed kernels (held weakly: they own weights), versions, some bits."""
    import torch

    kernels: list[Callable[[], object]] = [
        weakref.ref(module.cpu_linear) for module in model.modules() if hasattr(module, "cpu_linear")
    ]
    tensors = [tensor.detach() for tensor in (*model.parameters(), *model.buffers()) if tensor.numel()]
    # A reload may copy through parameter.data, which leaves the version where it is; a few bits of each tensor tell.
    versions: int = sum(0 if tensor.is_inference() else tensor._version for tensor in tensors)
    sample = [tensor.flatten()[:: max(1, tensor.numel() // 8)][:8].double() for tensor in tensors]
    return kernels, versions, torch.cat(sample).cpu().numpy().tobytes() if sample else b""


def _same_load(seen: _Mark, found: _Mark) -> bool:
    # A kernel that is gone equals no kernel, not even a new one at its address.
    same_kernels = len(seen[0]) == len(found[0]) and all(
        old() is not None and old() is new() for old, new in zip(seen[0], found[0], strict=True)
    )
    return same_kernels and seen[1:] == found[1:]
