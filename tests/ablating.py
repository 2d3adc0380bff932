"""One ablation of the tiny engines on a fixed batch of mixed lengths, as the hooks would run it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mismatch_hooks.live.ablation import AblationResult, ablate
from mismatch_hooks.live.execution import execution_of
from mismatch_hooks.live.passes import CapturedBatch
from mismatch_hooks.live.planning import make_plan
from mismatch_hooks.live.registry import load_registry
from mismatch_hooks.pipeline.guards import GuardInput, tripped
from mismatch_hooks.pipeline.metrics import from_lists, measure
from mismatch_hooks.schema.capture import RolloutSequence
from mismatch_hooks.schema.enums import ExecutionPath, NoiseFloor, Origin, PolicyRole
from mismatch_hooks.schema.score import ScoringSequence
from tests.tiny_engines import TinyEngines

# Mixed lengths, so that batches pad and a decoding batch shrinks.
SEQUENCES = tuple(
    ScoringSequence(
        prompt_token_ids=tuple(range(3, 3 + prompt)),
        response_token_ids=tuple((7 * row + 11 * i) % 500 for i in range(response)),
        response_mask=(True,) * response,
    )
    for row, (prompt, response) in enumerate([(5, 12), (9, 3), (4, 20), (16, 8), (7, 1)])
)


Live = Mapping[PolicyRole, Sequence[Sequence[float | None]]]


def live_values(tiny: TinyEngines, sequences: Sequence[ScoringSequence]) -> Live:
    """What a live run would have captured: the rollout's decoded log-probs and those of the trainer's forward."""
    paths = {PolicyRole.ROLLOUT: ExecutionPath.ROLLOUT_DECODE, PolicyRole.TRAINING: None}
    scores = {role: tiny.engines[role].score(sequences, path=path) for role, path in paths.items()}
    return {role: [piece.logprobs for piece in score.shards[0].slices] for role, score in scores.items()}


def guard_input(
    tiny: TinyEngines,
    sequences: Sequence[ScoringSequence] = SEQUENCES,
    *,
    training_logprobs: Sequence[Sequence[float | None]] | None = None,
) -> GuardInput:
    """What the guards would look at after a step that sampled ``sequences``, and computed ``training_logprobs``."""
    live = live_values(tiny, sequences)
    sampled = [
        RolloutSequence(
            prompt_token_ids=one.prompt_token_ids,
            response_token_ids=one.response_token_ids,
            rollout_logprobs=tuple(logprobs),
        )
        for one, logprobs in zip(sequences, live[PolicyRole.ROLLOUT], strict=True)
    ]
    return _captured(tiny, sampled, training_logprobs or live[PolicyRole.TRAINING])


def _captured(
    tiny: TinyEngines, sequences: Sequence[RolloutSequence], training_logprobs: Sequence[Sequence[float | None]]
) -> GuardInput:
    rollout, training = tiny.engines[PolicyRole.ROLLOUT], tiny.engines[PolicyRole.TRAINING]
    return GuardInput(
        sequences=sequences,
        training_logprobs=training_logprobs,  # type: ignore[arg-type]
        aligned=False,
        rollout=rollout.read_back(),
        training=training.read_back(),
        rollout_weights=rollout.weights_digest(),
        training_weights=training.weights_digest(),
        weights_written=0,
    )


def sampled_input(tiny: TinyEngines, sampling_params: Any = None, *, most_tokens: int = 24) -> GuardInput:
    """What the guards would look at after the engine has sampled sixteen sequences by itself.

    Args:
        tiny: the engines.
        sampling_params: what the engine is given; None: what it takes unasked, with log-probs.
        most_tokens: of a response.
    """
    backend: Any = tiny.engines[PolicyRole.ROLLOUT]
    given = sampling_params or backend._llm.get_default_sampling_params()
    params = []
    for seed in range(16):
        one = given.clone()
        one.max_tokens, one.logprobs, one.detokenize, one.seed, one.ignore_eos = most_tokens, 0, False, seed, True
        params.append(one)
    prompts = [{"prompt_token_ids": [3 + row, 40, 7 * row % 500]} for row in range(16)]
    outputs = backend._llm.generate(prompts, params, use_tqdm=False)
    found = backend.sequences(outputs, None if sampling_params is None else params)
    scored = [
        ScoringSequence(
            prompt_token_ids=one.prompt_token_ids, response_token_ids=one.response_token_ids, response_mask=one.mask
        )
        for one in found
    ]
    training = tiny.engines[PolicyRole.TRAINING]
    rows = [list(piece.logprobs) for piece in training.score(scored).shards[0].slices]
    return replace(_captured(tiny, found, rows), training_rescored=rows)  # a forward that nobody else made


def figures(found: GuardInput) -> dict[str, float]:
    """The metrics of what the guards looked at."""
    rollout = [one.rollout_logprobs for one in found.sequences]
    state = measure(*from_lists(found.training_logprobs, rollout), epsilon_low=0.2, epsilon_high=0.2)
    return dict(state.finalize())


def ablate_tiny(
    tiny: TinyEngines,
    factors: str | Sequence[str],
    origin: Origin = Origin.NATIVE,
    *,
    sequences: Sequence[ScoringSequence] = SEQUENCES,
    live: Live | None = None,
    guards: GuardInput | None = None,
    differing_since: int | None = None,
) -> AblationResult:
    """Ablate ``sequences`` with the captured ``live`` values, which are computed where they are not given."""
    rows: Live = live or live_values(tiny, sequences)
    batch = CapturedBatch(
        sequences=sequences,
        rollout_logprobs=rows[PolicyRole.ROLLOUT],
        training_logprobs=rows[PolicyRole.TRAINING],  # type: ignore[arg-type]
        epsilon_low=0.2,
        epsilon_high=0.2,
        weights={role: engine.weights_digest() for role, engine in tiny.engines.items()},
        differing_since=differing_since,
    )
    execution = execution_of(
        sequences,
        {role: engine.read_back() for role, engine in tiny.engines.items()},
        batch.weights,
        shape=tiny.shape,
        origin=origin,
    )
    return ablate(
        make_plan(factors, load_registry(), tiny.engines, tiny.shape, origin),
        batch,
        engines=tiny.engines,
        registry=load_registry(),
        shape=tiny.shape,
        noise_floor=NoiseFloor.PRODUCTION,
        pitfalls=lambda rescored: () if guards is None else tripped(replace(guards, training_rescored=rescored)),
        execution=execution,
        timeout_s=60.0,
    )
