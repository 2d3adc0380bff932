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
from mismatch_hooks.schema.enums import PolicyRole
from mismatch_hooks.schema.readback import Unobservable
from tests.pipeline.samples import guard_input
from tests.tiny_engines import TinyEngines

pytestmark = pytest.mark.engine
# vLLM's CPU build caches blocks of 128 tokens, so a shorter prompt is never cached.
PROMPTS = [[(3 + 7 * i + row) % 500 for i in range(200)] for row in range(2)]
ONE_BLOCK = 128


def sampled(tiny: TinyEngines) -> tuple[RolloutSequence, ...]:
    from vllm import SamplingParams

    backend: Any = tiny.engines[PolicyRole.ROLLOUT]
    params = [SamplingParams(max_tokens=16, temperature=0.0, logprobs=0, detokenize=False) for _ in PROMPTS]
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    outputs = backend._llm.generate(prompts, params, use_tqdm=False)
    found: tuple[RolloutSequence, ...] = backend.sequences(outputs, params)
    return found


def blocked(sequences: Sequence[RolloutSequence]) -> tuple[str, ...]:
    training = [[(value or 0.0) - 0.01 for value in one.rollout_logprobs] for one in sequences]
    return tripped(guard_input(sequences, training))


@contextmanager
def updated(tiny: TinyEngines) -> Iterator[Any]:
    """All weights of the rollout engine 5 % larger; gives the engine, and puts everything back."""
    backend: Any = tiny.engines[PolicyRole.ROLLOUT]
    sources = live_tensors(tiny.models[PolicyRole.TRAINING])
    tensors = {name: source() for name, source in sources.items() if not isinstance(source, Unobservable)}

    def load(factor: float) -> None:
        with torch.no_grad():
            weights = iter([(name, (tensor * factor).to(tensor.dtype)) for name, tensor in tensors.items()])
        backend._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})

    try:
        load(1.05)
        yield backend._llm
    finally:
        load(1.0)
        backend._llm.reset_prefix_cache()


def test_C12_cached_tokens_of_the_old_weights_are_counted_and_block(llama_engines: TinyEngines) -> None:
    backend: Any = llama_engines.engines[PolicyRole.ROLLOUT]
    backend._llm.reset_prefix_cache()
    first = sampled(llama_engines)
    again = sampled(llama_engines)
    assert [one.cached_tokens for one in (*first, *again)] == [0, 0, ONE_BLOCK, ONE_BLOCK]
    assert blocked(again) == ()  # the weights have not changed, so these blocks are right
    with updated(llama_engines) as llm:
        stale = sampled(llama_engines)
        assert [one.cached_tokens for one in stale] == [ONE_BLOCK] * 2
        (sentence,) = blocked(stale)
        assert f"was not reset after the weight update: {2 * ONE_BLOCK} cached tokens served to 2 sequences" in sentence
        llm.reset_prefix_cache()
        fresh = sampled(llama_engines)
        assert ([one.cached_tokens for one in fresh], blocked(fresh)) == ([0, 0], ())
    # The fault is real: the same weights, the same prompts, and other log-probs than after the reset.
    pair = [[one.rollout_logprobs[0] for one in found] for found in (stale, fresh)]
    state = measure(*from_lists([pair[0]], [pair[1]]), epsilon_low=0.2, epsilon_high=0.2)
    assert state.finalize()["dlogp_mean"] > 0.0
    assert backend.weights_digest().tensors == llama_engines.engines[PolicyRole.TRAINING].weights_digest().tensors


def test_C12_control_a_reset_after_the_update_is_quiet(llama_engines: TinyEngines) -> None:
    sampled(llama_engines)
    with updated(llama_engines) as llm:
        llm.reset_prefix_cache()
        sampled(llama_engines)
        again = sampled(llama_engines)
        assert ([one.cached_tokens for one in again], blocked(again)) == ([ONE_BLOCK] * 2, ())
