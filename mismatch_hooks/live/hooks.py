"""The object that sits in the loop: three calls a step, none of which can stop or change it."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from mismatch_hooks.live.ablation import WHILE_DECODING, AblationResult, NotRestoredError, ablate
from mismatch_hooks.live.alerts import Alert, AlertBook, AlertSettings, AlertState
from mismatch_hooks.live.alignment import Alignment, aligned_bindings
from mismatch_hooks.live.cadence import Cadence
from mismatch_hooks.live.capture import StepCapture, add_training
from mismatch_hooks.live.config import ConfigError, HooksConfig, check_config
from mismatch_hooks.live.execution import execution_of
from mismatch_hooks.live.isolation import ErrorLedger, Fanout
from mismatch_hooks.live.passes import CapturedBatch
from mismatch_hooks.live.planning import make_plan
from mismatch_hooks.live.registry import load_registry
from mismatch_hooks.live.settings import with_digest, with_sampling
from mismatch_hooks.live.tracing import trace_batch
from mismatch_hooks.live.weights import WeightsWatch
from mismatch_hooks.pipeline.bind import RestoreError
from mismatch_hooks.pipeline.compare import differing_settings, not_as_requested, suspect_settings, unpinned
from mismatch_hooks.pipeline.floors import noise_above
from mismatch_hooks.pipeline.guards import GuardInput, notes, tripped
from mismatch_hooks.pipeline.metrics import MetricState, measure, merge
from mismatch_hooks.pipeline.score import response_logprobs
from mismatch_hooks.schema.backend import ScoringBackend
from mismatch_hooks.schema.capture import RolloutSequence
from mismatch_hooks.schema.enums import ModelFamily, NoiseFloor, Origin, PolicyRole
from mismatch_hooks.schema.freeze import thaw
from mismatch_hooks.schema.plan import Plan
from mismatch_hooks.schema.readback import Readback
from mismatch_hooks.schema.shape import ModelShape
from mismatch_hooks.schema.thresholds import fingerprint as thresholds_fingerprint
from mismatch_hooks.schema.thresholds import threshold
from mismatch_hooks.sinks.build import build_sinks
from mismatch_hooks.sinks.event import Event, readback_payload, verdict_payload

if TYPE_CHECKING:
    from torch import Tensor

Gather = Callable[[Mapping[str, Any]], Sequence[Mapping[str, Any]]]


class MismatchHooks:
    """Capture, measure, ablate and report inside a live GRPO loop.

    Promises to the run: read-only (weights, optimizer state, random streams, sampled tokens and log-probs are bitwise
    those of a run without hooks), fail-open (an error is counted, logged once a cause and streamed), restored (proven
    after every ablation), budgeted, private (sinks get numbers only). Wrong configuration raises at construction.

    Every rank of a data-parallel trainer makes one and calls it in step with the others; rank 0 reports.

    Attributes:
        last_step: metrics and overhead of the last finished step, for a progress line; None before the first.
    """

    def __init__(
        self,
        config: Mapping[str, Any] | HooksConfig,
        *,
        rollout: ScoringBackend,
        training: ScoringBackend,
        shape: ModelShape,
        run_dir: str | Path,
        clip_range: tuple[float, float] = (0.2, 0.2),
        on_alert: Callable[[Alert], None] | None = None,
        rank: int = 0,
        world_size: int = 1,
        gather: Gather | None = None,
    ) -> None:
        """Check the configuration, read both engines' settings back and say what will run.

        Args:
            config: the ``mismatch_hooks`` section.
            rollout: the sampling engine; ``VllmBackend(llm)``.
            training: the training engine; ``MegatronBackend(model)``.
            shape: what the model file says; ``shape_from_folder(path)``.
            run_dir: where ``events.jsonl`` and the like go.
            clip_range: ``(epsilon_low, epsilon_high)`` of the loop's own clipping.
            on_alert: called with every alert, in the loop's thread, guarded.
            rank: this trainer rank.
            world_size: trainer ranks; above 1 capture and metrics run on every rank, ablation does not.
            gather: from this rank's plain data to every rank's, in rank order; a collective that each rank enters
                exactly once in every ``end_step``. Needed when ``world_size`` is above 1.

        Raises:
            ConfigError: a key is wrong; one sentence.
            SinkError: a sink that was asked for cannot be built.
            BindingError: an operator of ``align`` cannot be put on its reference; nothing is bound then.
        """
        self._config = check_config(config)
        if world_size > 1 and gather is None:
            raise ConfigError(
                f"gather: got None with world_size {world_size}; accepts a function that returns every rank's data, "
                "so that metrics are of all tokens."
            )
        self._started = self._step_started = time.perf_counter()
        self._engines: dict[PolicyRole, ScoringBackend] = {PolicyRole.ROLLOUT: rollout, PolicyRole.TRAINING: training}
        self._shape = replace(shape, family=ModelFamily(self._config.model_family))
        self._epsilon_low, self._epsilon_high = clip_range
        self._on_alert = on_alert
        self._rank, self._world_size, self._gather = rank, world_size, gather
        self._noise_floor = NoiseFloor[self._config.noise_floor.upper()]
        self._refuse_noisier_run()
        self._registry = load_registry()
        origins = (Origin.ALIGNED, Origin.NATIVE) if self._config.origin == "both" else (Origin(self._config.origin),)
        made = [
            make_plan(self._config.factors, self._registry, self._engines, self._shape, origin) for origin in origins
        ]
        # Where aligned is not to be had, both are one.
        self._plans = made if len({one.origin for one in made}) == len(made) else made[:1]
        self._no_ablation = "" if world_size == 1 else f"the trainer has {world_size} ranks; ablation runs on one"
        self._cadence = Cadence(every=self._config.ablate_every, budget=self._config.time_budget)
        self._weights = WeightsWatch(self._engines, layers=shape.layers)
        self._alerts = AlertBook(
            threshold=threshold(self._shape.family, self._noise_floor, routing_replay=False),
            settings=AlertSettings(**self._config.alerts.clip_fraction.model_dump()),
            run_dir=str(run_dir),
        )
        self._alignment = self._align(world_size)
        self._capture: StepCapture | None = None
        self._not_reached: tuple[str, ...] = ()
        self._state: MetricState | None = None
        self._ablation_s = self._hook_s = self._hook_total_s = 0.0
        # Whether it is known that training values equal to the rollout's are the trainer's own.
        self._told_apart = False
        self._closed = self._sampling_shown = False
        self.last_step: dict[str, float] | None = None

        self._ledger = ErrorLedger()
        names = self._config.sinks if rank == 0 else ()
        sinks = build_sinks(names, run_dir=Path(run_dir), project=self._config.wandb_project)
        self._alignment.start()  # the last thing that may be refused, so that nothing is bound when something is
        self._fanout = Fanout(sinks, self._ledger, timeout_s=self._config.sink_timeout)
        self._emit("run", None, self._opening())
        if self._alignment:
            self._emit("alignment", None, self._alignment.report())
        with self._ledger.guard("readback"):
            self._report_readback(None, *self._read_back())

    def _align(self, world_size: int) -> Alignment:
        entries = self._config.align
        if entries and world_size > 1:
            raise ConfigError(
                f"mismatch_hooks.align: got {entries!r} with {world_size} trainer ranks; accepts nothing there: "
                "references are held on one rank only."
            )
        made = aligned_bindings(entries, self._registry, self._engines, self._shape) if entries else {}
        return Alignment(made, self._engines)

    def _refuse_noisier_run(self) -> None:
        if self._noise_floor >= NoiseFloor.SHARDED_SINGLE_NODE:
            return
        readbacks = {role: engine.read_back() for role, engine in self._engines.items()}
        noise = noise_above(self._noise_floor, self._shape, readbacks)
        if noise:
            raise ConfigError(
                f"mismatch_hooks.noise_floor: got '{self._config.noise_floor}', and {noise}; name a later floor: "
                f"{', '.join(floor.name.lower() for floor in NoiseFloor if floor > self._noise_floor)}."
            )

    # ---- the three calls ------------------------------------------------------------------------------------------

    def capture_rollout(self, step: int, sequences: Sequence[RolloutSequence]) -> None:
        """Take what the rollout engine sampled in this step, as it returned it.

        Args:
            step: the loop's step, from 0, rising.
            sequences: token ids, log-probs, sampling settings and weight version of every sampled sequence.
        """
        with self._accounted(), self._ledger.guard("capture_rollout", step=step):
            self._state = None
            self._capture = StepCapture(
                step=step,
                sequences=tuple(sequences),
                weights_at_rollout=self._engines[PolicyRole.TRAINING].mutation_count(),
            )
            self._weights.see_update(step)

    def capture_training(
        self,
        step: int,
        training_logprobs: "Tensor",
        response_mask: "Tensor",
        *,
        advantages: "Tensor | None" = None,
        token_ids: "Tensor | None" = None,
        sequences: Sequence[int] | None = None,
        complete: bool = True,
    ) -> None:
        """Take the log-probs that the trainer computed anyway, before the step's first weight update.

        When an ablation is due it runs inside this call, between the rollout and the first optimizer step.

        Args:
            step: as in ``capture_rollout``.
            training_logprobs: ``[batch, response]`` fp32 or wider, nats, right-padded; may carry a gradient graph.
            response_mask: ``[batch, response]`` bool, True on active tokens.
            advantages: ``[batch]`` or ``[batch, response]``; only their signs are used.
            token_ids: ``[batch, response]`` the tokens that the forward saw; compared with those sampled, where given.
            sequences: indices of the rollouts that the rows belong to; None is all of them, in order.
            complete: False while more micro-batches of the same forward follow.
        """
        with self._accounted():
            with self._ledger.guard("capture_training", step=step) as guarded:
                capture = self._current(step)
                if self._captured_already(capture, sequences):
                    return  # a later forward of the same step: the weights have moved
                indices, rollout = add_training(capture, training_logprobs, response_mask, sequences, token_ids)
                state = measure(
                    training_logprobs,
                    rollout,
                    response_mask,
                    epsilon_low=self._epsilon_low,
                    epsilon_high=self._epsilon_high,
                    advantages=advantages,
                )
                self._state = state if self._state is None else merge([self._state, state])
                with self._ledger.guard("weights_check", step=step):
                    self._weights.check_some(step)
            if guarded.error is None and complete:
                if self._alignment:
                    with self._ledger.guard("alignment", step=step):
                        self._check_alignment(step, self._current(step))
                if self._ablation_is_due(step):
                    self._ablate(step, self._current(step))

    def end_step(self, step: int, *, host_metrics: Mapping[str, float] | None = None) -> None:
        """Close the step: merge, judge, alert, stream.

        Args:
            step: as in ``capture_rollout``.
            host_metrics: the loop's own figures (reward, loss), shown beside ours.
        """
        with self._accounted():
            state = self._gathered(step)
            with self._ledger.guard("end_step", step=step):
                metrics = self._metrics(state)
                host = dict(host_metrics or {})
                self._emit("step", step, {"metrics": metrics, "host": host, "weights": self._weights.report()})
                self._alert(step, metrics)
                self.last_step = metrics
            if not self._sampling_shown:
                with self._ledger.guard("readback", step=step):
                    self._report_readback(step, *self._read_back())
                    self._sampling_shown = self._capture is not None
        with self._ledger.guard("overhead", step=step):
            self._report_overhead(step)

    # ---- life -----------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        stopped = kind is not None and not issubclass(kind, Exception)
        self.close("finished" if kind is None else "stopped" if stopped else "failed")

    def close(self, state: str = "finished") -> None:
        """Flush and close every sink; never raises, takes bounded time, and may be called twice.

        Args:
            state: ``"finished"``, ``"stopped"`` or ``"failed"``, as the run ended.
        """
        if not self._closed:
            self._closed = True
            with self._ledger.guard("alignment"):
                self._alignment.stop()
            self._fanout.close(lambda: Event(type="run", payload=self._closing(state)))

    # ---- inside ---------------------------------------------------------------------------------------------------

    def _accounted(self) -> "_Accounted":
        return _Accounted(self)

    def _current(self, step: int) -> StepCapture:
        if self._capture is None or self._capture.step != step:
            seen = "nothing" if self._capture is None else f"step {self._capture.step}"
            raise ValueError(
                f"capture_training of step {step} follows capture_rollout of {seen}; call both for each step."
            )
        return self._capture

    def _captured_already(self, capture: StepCapture, sequences: Sequence[int] | None) -> bool:
        wanted = range(len(capture.sequences)) if sequences is None else sequences
        return bool(capture.training) and (self._weights_written(capture) > 0 or set(wanted) <= set(capture.covered))

    def _weights_written(self, capture: StepCapture) -> int:
        return self._engines[PolicyRole.TRAINING].mutation_count() - capture.weights_at_rollout

    def _gathered(self, step: int) -> MetricState | None:
        state = self._state if self._capture is not None and self._capture.step == step else None
        if self._gather is None:
            return state
        # Entered by every rank in every step, whatever happened before: an absent state travels as {}.
        with self._ledger.guard("gather", step=step):
            plain = self._gather({} if state is None else state.to_plain())
            return merge([MetricState.from_plain(one) for one in plain if one])
        return state

    def _metrics(self, state: MetricState | None) -> dict[str, float]:
        capture = self._capture
        if state is None or capture is None:
            return {}
        healthy = threshold(self._shape.family, self._noise_floor, routing_replay=False).dlogp_mean_suspect_above
        metrics: dict[str, float] = dict(state.finalize(healthy_dlogp_mean=healthy))
        if metrics["bitwise_fraction"] == 1.0 and not self._told_apart:
            metrics["not_measured"] = 1.0  # a copy would read the same
        sampled = sum(sum(sequence.mask) for sequence in capture.sequences)
        if self._world_size == 1 and sampled:
            metrics["token_coverage"] = (metrics["tokens"] + metrics["nonfinite"]) / sampled
        if self._alignment and self._alignment.last_step == capture.step:
            metrics["unequal_tokens"] = self._alignment.last_unequal
        return metrics | self._weights.figures()

    def _alert(self, step: int, metrics: Mapping[str, float]) -> None:
        for alert in self._alerts.observe(step, metrics):
            self._emit("alert", step, {key: value for key, value in thaw(alert).items() if key != "step"})
            if alert.state is not AlertState.CLOSED and alert.regression:
                self._cadence.requested = True
            if self._on_alert is not None:
                with self._ledger.guard("on_alert", step=step):
                    self._on_alert(alert)

    def _report_overhead(self, step: int) -> None:
        now = time.perf_counter()
        wall = now - self._step_started
        self._hook_total_s += self._hook_s
        figures = {
            "overhead_fraction": self._hook_s / wall,
            "overhead_seconds": self._hook_s,
            "ablation_seconds": self._ablation_s,
            "run_overhead_fraction": self._hook_total_s / (now - self._started),
            "run_ablation_fraction": self._cadence.spent_s / (now - self._started),
            "step_seconds": wall,
            "errors": self._ledger.total,
        }
        self._emit("overhead", step, {"metrics": figures})
        self.last_step = {**(self.last_step or {}), **figures}
        self._step_started, self._hook_s, self._ablation_s = now, time.perf_counter() - now, 0.0

    def _emit(self, kind: str, step: int | None, payload: Mapping[str, Any]) -> None:
        self._fanout.emit(Event(type=kind, step=step, payload=payload))

    # ---- ablation -------------------------------------------------------------------------------------------------

    def _ablation_is_due(self, step: int) -> bool:
        if self._no_ablation or not self._plans[0].cases:
            return False
        return self._cadence.decide(step, elapsed_s=time.perf_counter() - self._started)

    def _check_alignment(self, step: int, capture: StepCapture) -> None:
        timeout_s = self._config.scoring_timeout
        found = self._alignment.check(capture, timeout_s=timeout_s)
        if not self._told_apart:
            # Equal by alignment is told from a copy of the rollout's by a forward that nobody but the hooks made.
            chosen, sequences = capture.sample(self._config.sample_sequences)
            rescored = self._engines[PolicyRole.TRAINING].score(sequences, timeout_s=timeout_s)
            rows = response_logprobs(rescored, sequences)
            self._told_apart = all(
                tuple(row) == capture.training_row(index) for index, row in zip(chosen, rows, strict=True)
            )
        if found is not None:
            self._emit("alignment", step, {**self._alignment.report(), **thaw(found)})

    def _ablate(self, step: int, capture: StepCapture) -> None:
        started = time.perf_counter()
        results: list[AblationResult] = []
        try:
            with self._ledger.guard("ablation", step=step) as guarded:
                self._not_reached = ()
                allowance_s = self._cadence.allowance_s(elapsed_s=started - self._started)
                with self._alignment.suspended():
                    for index, plan in enumerate(self._plans):
                        left_s = allowance_s - (time.perf_counter() - started)
                        result = self._run_ablation(plan, capture, budget_s=left_s, suspects=self._cadence.requested)
                        results.append(result)
                        self._told_apart |= result.paths["training_rescore"]["bitwise_fraction"] == 1.0
                        first = [name.removesuffix(WHILE_DECODING) for name in result.not_reached]
                        self._plans[index] = plan.starting_with(first)
                        self._not_reached = tuple(dict.fromkeys((*self._not_reached, *result.not_reached)))
                        self._publish(step, result)
            if guarded.error is None and self._config.trace:
                with self._ledger.guard("trace", step=step):
                    self._trace(step, capture)
        finally:
            cost = time.perf_counter() - started
            self._ablation_s += cost
            around = cost - sum(result.seconds for result in results)
            least, whole = (sum(getattr(one, name) for one in results) for name in ("least_seconds", "whole_seconds"))
            self._cadence.record(cost, least_s=around + least, whole_s=around + whole)
        if isinstance(guarded.error, NotRestoredError | RestoreError):
            self._no_ablation = str(guarded.error)

    def _run_ablation(self, plan: Plan, capture: StepCapture, *, budget_s: float, suspects: bool) -> AblationResult:
        """Ablate one batch; with ``suspects``, the factors that a setting points to come first."""
        weights = self._weights.check_all(capture.step)
        chosen, sequences = capture.sample(self._config.sample_sequences)
        batch = CapturedBatch(
            sequences=sequences,
            rollout_logprobs=[capture.sequences[index].rollout_logprobs for index in chosen],
            training_logprobs=[capture.training_row(index) for index in chosen],
            epsilon_low=self._epsilon_low,
            epsilon_high=self._epsilon_high,
            weights=weights,
            differing_since=self._weights.differing_since,
        )
        rollout, training = (with_digest(readback, weights[readback.role]) for readback in self._read_back())
        self._report_readback(capture.step, rollout, training)
        if suspects:
            settings = suspect_settings(rollout, training)
            plan = plan.starting_with(
                [case.factor.id for case in plan.cases if any(map(case.factor.is_about, settings))]
            )
        guards = GuardInput(
            sequences=[
                replace(capture.sequences[index], response_mask=one.response_mask)
                for index, one in zip(chosen, sequences, strict=True)
            ],
            training_logprobs=batch.training_logprobs,
            aligned=bool(self._alignment),
            rollout=rollout,
            training=training,
            rollout_weights=weights[PolicyRole.ROLLOUT],
            training_weights=weights[PolicyRole.TRAINING],
            weights_written=self._weights_written(capture),
            rollout_updated_at=self._weights.updated_at,
            rollout_masks=[capture.sequences[index].response_mask for index in chosen],
            training_token_ids=capture.token_ids_of(chosen),
            bits_expected=plan.origin is Origin.ALIGNED,
        )
        return ablate(
            plan,
            batch,
            engines=self._engines,
            registry=self._registry,
            shape=self._shape,
            noise_floor=self._noise_floor,
            pitfalls=lambda rescored: tripped(replace(guards, training_rescored=rescored), self._noise_floor),
            notes=notes(guards, self._noise_floor),
            execution=execution_of(
                sequences,
                {PolicyRole.ROLLOUT: rollout, PolicyRole.TRAINING: training},
                weights,
                shape=self._shape,
                origin=plan.origin,
            ),
            timeout_s=self._config.scoring_timeout,
            budget_s=budget_s,
            live=self._alignment.bindings,
        )

    def _trace(self, step: int, capture: StepCapture) -> None:
        _, sequences = capture.sample(self._config.sample_sequences)
        timeout_s = self._config.scoring_timeout
        factors = tuple(self._registry.factors.values())
        found = trace_batch(self._engines, sequences, timeout_s=timeout_s, shape=self._shape, factors=factors)
        self._emit("trace", step, thaw(found))

    def _publish(self, step: int, result: AblationResult) -> None:
        for verdict in result.verdicts:
            about = {"factor": verdict.factor, "origin": verdict.origin, "path": verdict.path}
            for gate in verdict.gates:
                self._emit("gate", step, {**about, "gate": gate.name, "ok": gate.ok, "reason": gate.reason})
            for arm in verdict.arms:
                self._emit("arm", step, {**about, "arm": arm.arm, "metrics": arm.metrics})
            paths = {**result.paths} if verdict.arms else {}
            total = {
                "paths": paths,
                "ablation_passes": result.passes,
                "ablation_seconds": result.seconds,
                "not_reached": result.not_reached,
            }
            self._emit("verdict", step, verdict_payload(verdict) | total)

    # ---- what is said at start and end ----------------------------------------------------------------------------

    def _read_back(self) -> tuple[Readback, Readback]:
        rollout, training = (self._engines[role].read_back() for role in (PolicyRole.ROLLOUT, PolicyRole.TRAINING))
        if self._capture is not None:
            rollout = with_sampling(rollout, self._capture.sequences)
        return rollout, training

    def _report_readback(self, step: int | None, rollout: Readback, training: Readback) -> None:
        differences = differing_settings(rollout, training)
        requests = {one.role: not_as_requested(one) for one in (training, rollout)}
        longest = 0 if self._capture is None else self._capture.longest
        loose = {
            one.role: unpinned(one, self._engines[one.role].required_settings(longest)) for one in (training, rollout)
        }
        payload = readback_payload(
            rollout=rollout, training=training, differences=differences, not_as_requested=requests, unpinned=loose
        )
        self._emit("readback", step, payload)

    def _opening(self) -> dict[str, Any]:
        return {
            "state": "started",
            "config": self._config.model_dump(mode="json"),
            "clip_range": [self._epsilon_low, self._epsilon_high],
            "model": self._shape,
            "plan": _plan_payload(self._plans, self._no_ablation),
            "fingerprints": {"thresholds": thresholds_fingerprint()},
        }

    def _closing(self, state: str) -> dict[str, Any]:
        return {
            "state": state,
            "errors": self._ledger.by_cause(),
            "missing": self._fanout.missing(),
            "paths": self._fanout.locations(),
            "alignment": self._alignment.report() if self._alignment else {},
            "ablation": {
                "seconds": self._cadence.spent_s,
                "postponed": self._cadence.postponed,
                "not_reached": self._not_reached,
                "off": self._no_ablation,
            },
        }


class _Accounted:
    """Adds the wall time of a block to the hooks' own, ablations left out."""

    def __init__(self, hooks: MismatchHooks) -> None:
        self._hooks = hooks

    def __enter__(self) -> None:
        self._started, self._ablation = time.perf_counter(), self._hooks._ablation_s

    def __exit__(self, *_: object) -> None:
        spent = time.perf_counter() - self._started - (self._hooks._ablation_s - self._ablation)
        self._hooks._hook_s += spent


def _plan_payload(plans: Sequence[Plan], off: str) -> dict[str, Any]:
    first = plans[0]
    return {
        "origins": [plan.origin for plan in plans],
        "fallback": first.fallback,
        "passes": sum(plan.passes for plan in plans),
        "off": off,
        "cases": [
            {"factor": case.factor.id, "reference": case.reference.name if case.reference else ""}
            for case in first.cases
        ],
        "left_out": [
            {"factor": case.factor.id, "outcome": case.outcome, "reason": case.reason} for case in first.left_out
        ],
    }
