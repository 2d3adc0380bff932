"""Scoring by forced decode, on live engines: the bits of the live rollout again, and what it leaves behind.

The chain: forced decode = what the engine handed out while sampling (to the bit, here), and on a healthy tiny model
prefill = forced decode (to the bit); so what separates the two in ``tests/cases/test_c07.py`` is the planted fault.
"""

import dataclasses
import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

from mismatch_hooks.integrations.vllm import FORCED_DECODE, VllmBackend
from mismatch_hooks.integrations.vllm.backend import ScoringError, ScoringTimeout
from mismatch_hooks.schema.backend import ScoringBackend
from mismatch_hooks.schema.capture import RolloutSequence
from mismatch_hooks.schema.enums import Choice, ExecutionPath, PolicyRole, RebindCost, SwitchStatus
from mismatch_hooks.schema.score import Binding, ScoringSequence
from tests.integrations.vllm.conftest import build
from tests.integrations.vllm.planted_factors import registry

pytestmark = pytest.mark.engine

PREFILL, DECODE = ExecutionPath.ROLLOUT_FULL_PREFILL, ExecutionPath.ROLLOUT_DECODE
EOS = 1  # of the tiny checkpoints
Logprobs = list[tuple[float, ...]]


def sequence(prompt: int, response: Sequence[int]) -> ScoringSequence:
    return ScoringSequence(
        prompt_token_ids=tuple(range(3, 3 + prompt)),
        response_token_ids=tuple(response),
        response_mask=(True,) * len(response),
    )


BATCH = [sequence(3, range(40, 60)), sequence(11, range(70, 75)), sequence(7, [90])]


def scored(captured: Sequence[RolloutSequence]) -> list[ScoringSequence]:
    return [
        ScoringSequence(
            prompt_token_ids=found.prompt_token_ids,
            response_token_ids=found.response_token_ids,
            response_mask=found.mask,
        )
        for found in captured
    ]


def sample(backend: VllmBackend, prompts: Sequence[int], responses: Sequence[int]) -> tuple[RolloutSequence, ...]:
    """Sequences of the given lengths, sampled together."""
    from vllm import SamplingParams

    params = [
        SamplingParams(max_tokens=tokens, temperature=1.0, seed=seed, logprobs=0, detokenize=False, ignore_eos=True)
        for seed, tokens in enumerate(responses)
    ]
    inputs = [{"prompt_token_ids": list(range(3, 3 + prompt))} for prompt in prompts]
    return backend.sequences(backend._llm.generate(inputs, params, use_tqdm=False), params)


def logprobs(engine: ScoringBackend, batch: Sequence[ScoringSequence], path: ExecutionPath | None = DECODE) -> Logprobs:
    (shard,) = engine.score(batch, path=path).shards
    return [piece.logprobs for piece in shard.slices]


def streams() -> tuple[Any, ...]:
    return torch.get_rng_state().tolist(), random.getstate(), repr(numpy.random.get_state())


def sampler_of(backend: VllmBackend) -> Any:
    """The live sampler of an in-process engine."""
    return backend._llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.sampler


@pytest.fixture(params=["llama", "qwen3"])
def rollout(request: pytest.FixtureRequest) -> VllmBackend:
    found: VllmBackend = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mismatch_hooks.integrations.vllm.worker.load_registry", registry)


@pytest.fixture(scope="session")  # to stop one engine of this process takes the process groups from the others
def without(environment: None, qwen3_folder: Path) -> Iterator[VllmBackend]:
    """The twin of ``qwen3`` that cannot be told any token."""
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}
    llm = build(qwen3_folder, hf_overrides=rope, logits_processors=[])
    yield VllmBackend(llm)
    llm.llm_engine.engine_core.shutdown()


def test_a_batch_of_mixed_lengths_gets_the_bits_that_it_was_sampled_with(rollout: VllmBackend) -> None:
    captured = sample(rollout, prompts=(3, 11, 7, 20, 40), responses=(5, 20, 1, 33, 12))
    score = rollout.score(scored(captured), path=DECODE)
    assert score.path is DECODE
    assert [piece.logprobs for piece in score.shards[0].slices] == [found.rollout_logprobs for found in captured]
    assert score.evidence.forwards == (33,)  # one prefill, which gives every first token, and 32 steps of decoding


def test_decoding_twice_gives_the_same_bits(llama: VllmBackend) -> None:
    assert logprobs(llama, BATCH) == logprobs(llama, BATCH)


def test_stop_tokens_in_a_response_end_nothing(qwen3: VllmBackend) -> None:
    """Without a generation config of its own the engine takes the stop token from the model's file."""
    whole = logprobs(qwen3, [sequence(5, [40, EOS, 41, EOS, EOS, 42, EOS])])[0]
    assert [len(whole), sum(map(math.isnan, whole))] == [7, 0]
    assert logprobs(qwen3, [sequence(5, [40, EOS, 41])])[0] == whole[:3]


def test_an_empty_response_is_decoded_as_no_tokens(llama: VllmBackend) -> None:
    assert [len(values) for values in logprobs(llama, [sequence(4, []), *BATCH[1:]])] == [0, 5, 1]


def test_every_call_site_runs_once_a_layer_and_forward_and_is_as_before(llama: VllmBackend, planted: None) -> None:
    native = logprobs(llama, BATCH)
    factor = "planted.unrotated"
    with llama.bind(Binding(role=PolicyRole.ROLLOUT, choices={factor: Choice.REFERENCE}, parameters={factor: {}})):
        score = llama.score(BATCH, path=DECODE)
    (count,), (switch,) = score.evidence.calls, score.evidence.switches
    assert (score.evidence.forwards, count.expected, count.observed) == ((20,), 40, 40)
    assert (switch.effective, switch.status) == (Choice.REFERENCE, SwitchStatus.APPLIED)
    assert [piece.logprobs for piece in score.shards[0].slices] != native
    assert logprobs(llama, BATCH) == native


def test_the_path_that_a_binding_names_is_the_one_that_runs(llama: VllmBackend) -> None:
    factor = "rollout.execution_path"
    assert llama.capabilities["scoring.path"] is RebindCost.PER_REQUEST
    with llama.bind(Binding(role=PolicyRole.ROLLOUT, choices={factor: DECODE.value})):
        score = llama.score(BATCH)
        prefilled = llama.score(BATCH, path=PREFILL)
    (count,), (switch,) = score.evidence.calls, score.evidence.switches
    assert (score.path, count.site, count.expected, count.observed) == (DECODE, "scoring.path", 26, 26)
    assert (switch.effective, switch.status) == (DECODE.value, SwitchStatus.APPLIED)
    # A path that is asked for by name goes before the binding's, and the evidence says so.
    assert (prefilled.path, prefilled.evidence.calls) == (PREFILL, ())
    assert [state.status for state in prefilled.evidence.switches] == [SwitchStatus.FELL_BACK]


def test_a_batch_size_holds_for_decoding_too(llama: VllmBackend) -> None:
    with llama.bind(Binding(role=PolicyRole.ROLLOUT, choices={"rollout.batch_size": 2})):
        evidence = llama.score(BATCH, path=DECODE).evidence
    assert evidence.forwards == (21,)  # 20 for the first two sequences, 1 for the third
    assert [(count.expected, count.observed) for count in evidence.calls] == [(21, 21)]
    assert [state.status for state in evidence.switches] == [SwitchStatus.APPLIED]


def test_no_random_stream_moves(llama: VllmBackend) -> None:
    torch.manual_seed(5)
    before = streams()
    llama.score(BATCH, path=DECODE)
    assert streams() == before


def test_blocks_written_while_decoding_are_never_served_to_the_run(llama: VllmBackend) -> None:
    from vllm import SamplingParams

    long = sequence(300, range(40, 60))
    llama._llm.reset_prefix_cache()
    llama.score([long], path=DECODE)
    prompt = {"prompt_token_ids": [*long.prompt_token_ids, *long.response_token_ids]}
    params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
    served = [llama._llm.generate([prompt], params, use_tqdm=False)[0].num_cached_tokens for _ in range(2)]
    assert served == [0, 256]  # nothing of the pass, then the run's own blocks


def test_a_pass_that_runs_out_of_time_leaves_an_idle_engine(llama: VllmBackend) -> None:
    native = logprobs(llama, BATCH)
    with pytest.raises(ScoringTimeout, match="scoring 3 sequences ran out of time with 0 done"):
        llama.score(BATCH, path=DECODE, timeout_s=1e-6)
    assert not llama._llm.llm_engine.has_unfinished_requests()
    assert logprobs(llama, BATCH) == native


def test_requests_of_the_loop_are_never_swallowed(llama: VllmBackend) -> None:
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=2, detokenize=False)
    llama._llm.enqueue([{"prompt_token_ids": [5, 6, 7]}], params, use_tqdm=False)
    with pytest.raises(ScoringError, match="score between rollouts"):
        llama.score(BATCH, path=DECODE)
    assert len(llama._llm.wait_for_completion(use_tqdm=False)) == 1


def test_decode_takes_every_sequence_that_the_engine_can_sample(llama: VllmBackend) -> None:
    (longest,) = logprobs(llama, [sequence(500, range(40, 52))])
    assert [len(longest), sum(map(math.isnan, longest))] == [12, 0]
    with pytest.raises(ScoringError, match=r"sequence 1 has 513 tokens; rollout_decode scores at most 512: .*=513 or"):
        llama.score([BATCH[0], sequence(500, range(40, 53))], path=DECODE)


@pytest.mark.parametrize("path", [PREFILL, DECODE])
def test_a_token_outside_the_vocabulary_is_refused_before_it_reaches_the_engine(
    llama: VllmBackend, path: ExecutionPath
) -> None:
    with pytest.raises(ScoringError, match="sequence 1 holds token 512; the vocabulary of this engine ends at 511"):
        llama.score([BATCH[0], sequence(3, [40, 512])], path=path)


def test_tokens_after_one_that_the_engine_did_not_take_have_no_logprob(
    llama: VllmBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Installed is not run: with the sampler deaf, greedy decoding leaves the given tokens at once."""
    greedy = sequence(3, [40, 41])
    monkeypatch.setattr("mismatch_hooks.integrations.vllm.forced_decode.ForcedTokens.apply", lambda _, logits: logits)
    factor = "rollout.execution_path"
    with llama.bind(Binding(role=PolicyRole.ROLLOUT, choices={factor: DECODE.value})):
        score = llama.score([greedy])
    assert all(map(math.isnan, score.shards[0].slices[0].logprobs))
    assert [(count.expected, count.observed) for count in score.evidence.calls] == [(2, 0)]


def test_an_engine_without_the_class_offers_prefill_only_and_says_what_to_pass(without: VllmBackend) -> None:
    assert without.paths == (PREFILL,)
    assert "scoring.path" not in without.capabilities
    with pytest.raises(ScoringError, match=rf"got ROLLOUT_DECODE.*logits_processors=\['{FORCED_DECODE}'\]"):
        without.score(BATCH, path=DECODE)
    with pytest.raises(ScoringError, match="got TRAINING_FULL_PREFILL; this rollout engine accepts ROLLOUT_FULL_PRE"):
        without.score(BATCH, path=ExecutionPath.TRAINING_FULL_PREFILL)


def test_an_engine_with_the_class_offers_both_paths_prefill_first(qwen3: VllmBackend) -> None:
    assert qwen3.paths == (PREFILL, DECODE)
    assert logprobs(qwen3, BATCH, None) == logprobs(qwen3, BATCH, PREFILL)


def test_processed_logprobs_of_a_forced_token_are_zero_so_decode_is_refused(
    llama: VllmBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler_of(llama), "logprobs_mode", "processed_logprobs")
    assert logprobs(llama, BATCH[1:]) == [(0.0,) * 5, (0.0,)]  # the engine changed its mode behind this backend's back
    processed = VllmBackend(llama._llm)
    assert processed.paths == (PREFILL,)
    with pytest.raises(ScoringError, match="logprobs_mode is 'processed_logprobs', which gives 0.0 for every token"):
        processed.score(BATCH, path=DECODE)


def test_requests_of_the_loop_sample_the_same_bits_with_and_without_the_class(
    qwen3: VllmBackend, without: VllmBackend
) -> None:
    from vllm import SamplingParams

    settings: list[dict[str, Any]] = [
        {"temperature": 1.0, "seed": 1},
        {"temperature": 0.0},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 50, "min_p": 0.01, "seed": 2, "extra_args": {"of_others": [1]}},
        {"temperature": 1.0, "repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2, "seed": 3},
        {"temperature": 1.0, "min_tokens": 12, "stop_token_ids": list(range(100, 500)), "seed": 4},
        {"temperature": 1.0, "logit_bias": {7: 3.0}},  # no seed: draws from the global stream
    ]

    def sampled(backend: VllmBackend) -> list[tuple[tuple[int, ...], tuple[float | None, ...]]]:
        torch.manual_seed(3)
        params = [
            SamplingParams(max_tokens=16, logprobs=0, ignore_eos=True, detokenize=False, **own) for own in settings
        ]
        prompts = [{"prompt_token_ids": list(range(3, 9 + 2 * index))} for index in range(len(params))]
        return [
            (found.response_token_ids, found.rollout_logprobs)
            for found in backend.sequences(backend._llm.generate(prompts, params, use_tqdm=False), params)
        ]

    assert sampled(qwen3) == sampled(without)


def one_row_of_many(request: int, tokens: Sequence[int], *, decoded: Sequence[int]) -> tuple[Any, Any]:
    """The class as the first model runner holds it, with one forced request, and a batch of five rows of logits."""
    from vllm import SamplingParams
    from vllm.v1.sample.logits_processor import BatchUpdate

    from mismatch_hooks.integrations.vllm.forced_decode import ForcedTokens, forced_params

    processor = ForcedTokens(SimpleNamespace(), torch.device("cpu"), False)
    added = [(row, SamplingParams(), None, [5]) for row in range(5) if row != request]
    added.append((request, forced_params(tokens), None, list(decoded)))
    processor.update_state(BatchUpdate(batch_size=5, removed=[], added=added, moved=[]))
    return processor, torch.randn(5, 64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("decoded", "token"),
    [
        pytest.param([], 7, id="the first token"),
        pytest.param([7, -1], 9, id="the last one, with a placeholder of asynchronous scheduling before it"),
        pytest.param([7, 8, 9], None, id="a step past the end"),
    ],
)
def test_only_the_row_of_a_forced_request_is_written_to(decoded: list[int], token: int | None) -> None:
    processor, logits = one_row_of_many(3, [7, 8, 9], decoded=decoded)
    before = logits.clone()
    after = processor.apply(logits)
    assert torch.equal(after[[0, 1, 2, 4]], before[[0, 1, 2, 4]])
    assert torch.equal(after[3], before[3]) if token is None else after[3].isfinite().nonzero().tolist() == [[token]]


def test_the_second_model_runner_loads_the_class_and_forces_by_the_length_of_a_sequence() -> None:
    """vLLM's own loader and context; the runner around them needs Triton, so no engine ran it: not run on a GPU yet."""
    from vllm import SamplingParams
    from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext, build_custom_logits_processors

    from mismatch_hooks.integrations.vllm.forced_decode import forced_params

    names = ("device", "max_num_reqs", "vocab_size", "all_token_ids", "prefill_len", "total_len")
    states = SimpleNamespace(
        **dict.fromkeys(names), prompt_len=SimpleNamespace(np=numpy.array([0, 4, 0, 6, 5], dtype=numpy.int32))
    )
    (processor,) = build_custom_logits_processors(SimpleNamespace(), states, False, (FORCED_DECODE,))
    requests = {1: forced_params([7, 8, 9]), 3: SamplingParams(), 4: forced_params([20])}
    assert [processor.add_request(slot, params) for slot, params in requests.items()] == [True, False, True]

    def written(slots: list[int], lengths: list[int]) -> dict[int, int]:
        empty = {field.name: None for field in dataclasses.fields(LogitsContext)}
        ctx = LogitsContext(
            **{**empty, "idx_mapping_np": numpy.array(slots), "seq_lens_upper_bound_np": numpy.array(lengths)}
        )
        logits = torch.randn(len(slots), 64, generator=torch.Generator().manual_seed(0))
        before = logits.clone()
        after = processor.apply(logits, ctx)
        return {row: int(after[row].argmax()) for row in range(len(slots)) if not torch.equal(after[row], before[row])}

    assert written([3, 1, 4], [6, 4, 5]) == {1: 7, 2: 20}  # prompts of 6, 4 and 5 tokens just prefilled
    assert written([1, 3], [6, 8]) == {0: 9}
    assert written([1, 4], [3, 6]) == {}  # a prompt in pieces; a step past the end
    processor.add_request(1, SamplingParams())  # the slot goes to another request
    assert written([1, 3], [4, 6]) == {}
