"""C12: a prefix cache that outlives a weight update; a re-score by prefill bypasses the cache and sees nothing."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from mismatch_hooks.integrations.megatron.weights import live_tensors
from mismatch_hooks.pipeline.guards import tripped
from mismatch_hooks.pipeline.metrics import from_lists, measure
from mismatch_hooks.schema.capture import RolloutSequence
from mismatch_hooks.schema.enums import ExecutionPath, PolicyRole
from mismatch_hooks.schema.readback import Unobservable
from mismatch_hooks.schema.score import ScoringSequence
from tests.pipeline.samples import guard_input
from tests.tiny_engines import TinyEngines

pytestmark = pytest.mark.engine
# vLLM's CPU build caches blocks of 128 tokens, so shorter prompts are never cached.
PROMPTS = [[(3 + 7 * i + 13 * row) % 500 for i in range(300)] for row in range(4)]
OTHERS = [[(5 + 11 * i) % 500 for i in range(300)]] * 3  # three samples of one prompt
CACHED = 256


def sampled(
    tiny: TinyEngines, prompts: Sequence[Sequence[int]] = PROMPTS, *, salt: str = "", version: str = ""
) -> tuple[RolloutSequence, ...]:
    from vllm import SamplingParams

    backend: Any = tiny.engines[PolicyRole.ROLLOUT]
    params = [
        SamplingParams(max_tokens=16, temperature=1.0, seed=seed, logprobs=0, detokenize=False, ignore_eos=True)
        for seed in range(len(prompts))
    ]
    given = [{"prompt_token_ids": [*prompt], **({"cache_salt": salt} if salt else {})} for prompt in prompts]
    outputs = backend._llm.generate(given, params, use_tqdm=False)
    found: tuple[RolloutSequence, ...] = backend.sequences(outputs, params, weight_version=version)
    return found


def blocked(sequences: Sequence[RolloutSequence]) -> tuple[str, ...]:
    training = [[(value or 0.0) - 0.01 for value in one.rollout_logprobs] for one in sequences]
    return tripped(guard_input([*sequences], training, training_rescored=training))


def cached(sequences: Sequence[RolloutSequence]) -> list[int | None]:
    return [one.cached_tokens for one in sequences]


@contextmanager
def updated(tiny: TinyEngines) -> Iterator[Any]:
    """Every weight of the rollout engine moved by about 5 %; gives the engine, and puts everything back."""
    backend: Any = tiny.engines[PolicyRole.ROLLOUT]
    sources = live_tensors(tiny.models[PolicyRole.TRAINING])
    tensors = {name: source() for name, source in sources.items() if not isinstance(source, Unobservable)}
    stream = torch.Generator().manual_seed(0)
    noise = {name: 0.05 * torch.randn(tensor.shape, generator=stream) for name, tensor in tensors.items()}

    def load(share: float) -> None:
        with torch.no_grad():
            moved = [(name, (one * (1 + share * noise[name])).to(one.dtype)) for name, one in tensors.items()]
        backend._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(moved)})

    backend._llm.reset_prefix_cache()
    try:
        yield lambda: load(1.0)
    finally:
        load(0.0)
        backend._llm.reset_prefix_cache()


def test_C12_cached_tokens_of_the_old_weights_are_counted_and_block(long_engines: TinyEngines) -> None:
    backend: Any = long_engines.engines[PolicyRole.ROLLOUT]
    with updated(long_engines) as update:
        first, again = sampled(long_engines), sampled(long_engines)
        assert cached(first) + cached(again) == [0] * 4 + [CACHED] * 4
        assert blocked(again) == ()  # the weights have not changed, so these blocks are right
        update()
        stale = sampled(long_engines, version="7")
        assert cached(stale) == [CACHED] * 4
        (sentence,) = blocked(stale)
        assert sentence == (
            f"Rollout's prefix cache was not reset after the weight update to version 7: {4 * CACHED} cached tokens "
            "served to 4 sequences; call reset_prefix_cache after every sync."
        )
        # The fault is real: the same tokens, decoded from no cache, have other log-probs.
        backend._llm.reset_prefix_cache()
        scored = backend.score(
            [
                ScoringSequence(
                    prompt_token_ids=one.prompt_token_ids,
                    response_token_ids=one.response_token_ids,
                    response_mask=one.mask,
                )
                for one in stale
            ],
            path=ExecutionPath.ROLLOUT_DECODE,
        )
        fresh = [piece.logprobs for piece in scored.shards[0].slices]
        state = measure(*from_lists(fresh, [one.rollout_logprobs for one in stale]), epsilon_low=0.2, epsilon_high=0.2)
        found = state.finalize()
        assert found["dlogp_mean"] > 0.02 and found["clip_fraction"] > 0.0, found
    assert backend.weights_digest().tensors == long_engines.engines[PolicyRole.TRAINING].weights_digest().tensors


def test_C12_control_a_reset_after_the_update_is_quiet(long_engines: TinyEngines) -> None:
    with updated(long_engines) as update:
        sampled(long_engines)
        update()
        backend: Any = long_engines.engines[PolicyRole.ROLLOUT]
        backend._llm.reset_prefix_cache()
        sampled(long_engines)
        again = sampled(long_engines)
        assert (cached(again), blocked(again)) == ([CACHED] * 4, ())


def test_C12_control_a_salt_for_each_version_is_quiet_and_a_salt_that_stays_is_not(long_engines: TinyEngines) -> None:
    with updated(long_engines) as update:
        sampled(long_engines, salt="v6")
        update()
        fresh, again = (sampled(long_engines, salt="v7") for _ in range(2))
        assert (cached(fresh), cached(again)) == ([0] * 4, [CACHED] * 4)
        assert blocked(fresh) == blocked(again) == ()
    with updated(long_engines) as update:
        sampled(long_engines, salt="same")
        update()
        (sentence,) = blocked(sampled(long_engines, salt="same"))
        assert "was not reset after the weight update" in sentence


def test_C12_control_samples_of_one_new_prompt_share_what_one_of_them_computed(long_engines: TinyEngines) -> None:
    with updated(long_engines) as update:
        sampled(long_engines)
        update()
        new = sampled(long_engines, OTHERS)
        assert sorted(cached(new)) == [0, CACHED, CACHED]  # type: ignore[type-var]
        assert blocked(new) == ()


def test_C12_control_without_a_cache_nothing_can_be_stale(uncached_engines: TinyEngines) -> None:
    with updated(uncached_engines) as update:
        sampled(uncached_engines)
        update()
        found = sampled(uncached_engines)
        assert not any(cached(found))
        assert blocked(found) == ()
