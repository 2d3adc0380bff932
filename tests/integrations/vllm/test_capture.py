"""Capture from the outputs of real rollouts."""

from types import SimpleNamespace
from typing import Any

import pytest

from mismatch_hooks.integrations.vllm import VllmBackend, sequences
from mismatch_hooks.integrations.vllm.capture import CaptureError
from mismatch_hooks.schema.score import ScoringSequence
from tests.integrations.vllm.conftest import GENERATION_CONFIG

pytestmark = pytest.mark.engine


def generate(backend: VllmBackend, prompts: list[list[int]], params: Any = None) -> list[Any]:
    outputs: list[Any] = backend._llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    return outputs


def params(**settings: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(**{"max_tokens": 6, "logprobs": 0, "seed": 3, "detokenize": False, **settings})


def test_every_completion_is_one_sequence_with_the_engines_own_values(llama: VllmBackend) -> None:
    sampling = params(n=2, temperature=0.9, top_p=0.8)
    outputs = generate(llama, [[5, 6, 7], [9, 8]], sampling)
    captured = llama.sequences(outputs, sampling, response_masks=[[True] * 6, [False] + [True] * 5] * 2)
    assert [found.prompt_token_ids for found in captured] == [(5, 6, 7), (5, 6, 7), (9, 8), (9, 8)]
    flat = [completion for output in outputs for completion in output.outputs]
    assert [found.response_token_ids for found in captured] == [tuple(completion.token_ids) for completion in flat]
    assert captured[3].rollout_logprobs == tuple(
        entry[token].logprob for token, entry in zip(flat[3].token_ids, flat[3].logprobs, strict=True)
    )
    assert captured[1].mask == (False, True, True, True, True, True)
    assert (captured[0].weight_version, captured[0].finish_reason) == ("7", "length")
    assert (captured[0].sampling.temperature, captured[0].sampling.top_p) == (0.9, 0.8)
    assert captured[0].sampling.logprobs_mode == "raw_logprobs"
    assert captured[0].sampling.sources["top_p"] == "requested"


def test_captured_values_are_those_that_scoring_gives_up_to_rounding(llama: VllmBackend) -> None:
    sampling = params(max_tokens=16)
    (captured,) = llama.sequences(generate(llama, [[5, 6, 7, 8]], sampling), sampling)
    score = llama.score(
        [
            ScoringSequence(
                prompt_token_ids=captured.prompt_token_ids,
                response_token_ids=captured.response_token_ids,
                response_mask=captured.mask,
            )
        ]
    )
    # One bf16 rounding step of a logit near 8 is 0.03; a shift by one position would be off by whole nats.
    assert score.shards[0].slices[0].logprobs == pytest.approx(captured.rollout_logprobs, abs=0.12)


def test_tokens_served_from_the_prefix_cache_are_counted(llama: VllmBackend) -> None:
    llama._llm.reset_prefix_cache()
    prompt, sampling = [*range(3, 303)], params()
    counts = [llama.sequences(generate(llama, [prompt], sampling), sampling)[0].cached_tokens for _ in range(2)]
    assert counts == [0, 256]


def test_settings_that_nobody_asked_for_carry_the_file_they_came_from(llama: VllmBackend) -> None:
    outputs = generate(llama, [[5, 6, 7]])  # no SamplingParams: the checkpoint's file supplies them, log-probs excepted
    with pytest.raises(CaptureError, match=r"carries no log-probs; sample with SamplingParams\(logprobs=0\)"):
        llama.sequences(outputs)
    logged = generate(llama, [[5, 6, 7]], params(max_tokens=len(outputs[0].outputs[0].token_ids)))
    (captured,) = llama.sequences(logged)
    for name, value in GENERATION_CONFIG.items():
        assert getattr(captured.sampling, name) == value
        assert captured.sampling.sources[name] == "generation_config.json"
    assert captured.sampling.sources["min_p"] == "class default"


def test_explicit_settings_beside_the_same_file_are_the_requested_ones(llama: VllmBackend) -> None:
    sampling = params(temperature=1.0, top_p=1.0, top_k=0, repetition_penalty=1.0)
    (captured,) = llama.sequences(generate(llama, [[5, 6, 7]], sampling), sampling)
    assert (captured.sampling.temperature, captured.sampling.top_p) == (1.0, 1.0)
    assert (captured.sampling.top_k, captured.sampling.repetition_penalty) == (0, 1.0)
    assert set(captured.sampling.sources.values()) == {"requested"}


def test_logits_are_not_taken_for_log_probs() -> None:
    with pytest.raises(CaptureError, match="logprobs_mode is 'raw_logits'.*logprobs_mode='raw_logprobs'"):
        sequences([], None, logprobs_mode="raw_logits")


def test_lists_that_do_not_pair_up_are_refused_with_both_counts() -> None:
    output = SimpleNamespace(outputs=[object(), object()])
    with pytest.raises(CaptureError, match="3 sampling_params for 1 outputs"):
        sequences([output], [None] * 3)
    with pytest.raises(CaptureError, match="1 response_masks for 2 completions"):
        sequences([output], None, response_masks=[[True]])
