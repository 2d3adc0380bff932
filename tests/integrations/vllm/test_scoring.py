"""Scoring by prefill, on a live engine: what it returns, what proves that a binding ran, and what it leaves behind."""

import math
import random
from typing import Any

import numpy
import pytest
import torch

from mismatch_hooks.integrations.vllm import VllmBackend
from mismatch_hooks.integrations.vllm.backend import EngineSetupError, ScoringError, ScoringTimeout
from mismatch_hooks.pipeline.bind import BindingError, RestoreError
from mismatch_hooks.schema.enums import Choice, ExecutionPath, PolicyRole, SwitchStatus
from mismatch_hooks.schema.score import Binding, ScoringSequence
from tests.integrations.vllm.conftest import model_of
from tests.integrations.vllm.planted_factors import SITE, registry

pytestmark = pytest.mark.engine


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mismatch_hooks.integrations.vllm.worker.load_registry", registry)
    monkeypatch.setattr("mismatch_hooks.integrations.vllm.backend.load_registry", registry)


def sequence(prompt: int, response: int = 20) -> ScoringSequence:
    return ScoringSequence(
        prompt_token_ids=tuple(range(3, 3 + prompt)),
        response_token_ids=tuple(range(40, 40 + response)),
        response_mask=(True,) * response,
    )


BATCH = [sequence(3), sequence(11), sequence(7)]


def binding(factor: str, choice: Choice = Choice.REFERENCE) -> Binding:
    return Binding(role=PolicyRole.ROLLOUT, choices={factor: choice}, parameters={factor: {"theta": 1e4}})


def logprobs(backend: VllmBackend, batch: list[ScoringSequence] = BATCH) -> list[tuple[float, ...]]:
    (shard,) = backend.score(batch).shards
    return [piece.logprobs for piece in shard.slices]


def streams() -> tuple[Any, ...]:
    return torch.get_rng_state().tolist(), random.getstate(), repr(numpy.random.get_state())


def test_a_native_score_is_one_complete_shard_with_no_calls(llama: VllmBackend) -> None:
    score = llama.score(BATCH)
    assert score.path is ExecutionPath.ROLLOUT_FULL_PREFILL
    assert [(shard.rank, shard.world_size) for shard in score.shards] == [(0, 1)]
    assert [(piece.sequence, piece.start, len(piece.logprobs)) for piece in score.shards[0].slices] == [
        (0, 0, 20),
        (1, 0, 20),
        (2, 0, 20),
    ]
    assert (score.evidence.forwards, score.evidence.calls, score.evidence.switches) == ((1,), (), ())


def test_scores_are_the_log_softmax_of_the_engines_own_logits(llama: VllmBackend) -> None:
    model = model_of(llama)
    seen: list[torch.Tensor] = []
    handle = model.logits_processor.register_forward_hook(lambda module, args, logits: seen.append(logits.clone()))
    try:
        (found,) = logprobs(llama, [sequence(5)])
    finally:
        handle.remove()
    # vLLM asks for the logits of the next sampled token, then for those of the prompt: 24 of 25 positions.
    prompt_logits = next(logits for logits in seen if logits.shape[0] == 24)
    expected = prompt_logits.float().log_softmax(-1)[4:].gather(1, torch.arange(40, 60)[:, None])[:, 0]
    assert torch.equal(torch.tensor(found, dtype=torch.float32), expected)


def test_scoring_twice_gives_the_same_bits(llama: VllmBackend) -> None:
    assert logprobs(llama) == logprobs(llama)


def test_an_empty_response_is_scored_as_no_tokens(llama: VllmBackend) -> None:
    assert [len(values) for values in logprobs(llama, [sequence(4, 0), sequence(4, 2)])] == [0, 2]


def test_no_random_stream_moves(llama: VllmBackend, planted: None) -> None:
    torch.manual_seed(5)
    before = streams()
    with llama.bind(binding("planted.same")):
        llama.score(BATCH)
    llama.weights_digest()
    llama.read_back()
    assert streams() == before


def test_scoring_changes_no_sampled_token(llama: VllmBackend) -> None:
    from vllm import SamplingParams

    def sample() -> list[list[int]]:
        params = SamplingParams(
            max_tokens=8, temperature=1.0, detokenize=False
        )  # no seed: draws from the global stream
        outputs = llama._llm.generate([{"prompt_token_ids": [5, 6, 7]}] * 3, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    torch.manual_seed(11)
    plain = [sample(), sample()]
    torch.manual_seed(11)
    first = sample()
    llama.score(BATCH)
    assert [first, sample()] == plain


def test_every_call_site_runs_once_a_layer_and_forward(llama: VllmBackend, planted: None) -> None:
    with llama.bind(binding("planted.same")):
        score = llama.score(BATCH)
    (count,) = score.evidence.calls
    assert (count.factor, count.site, count.rank) == ("planted.same", SITE, 0)
    assert (score.evidence.forwards, count.expected, count.observed) == ((1,), 2, 2)
    (switch,) = score.evidence.switches
    assert (switch.effective, switch.status) == (Choice.REFERENCE, SwitchStatus.APPLIED)


def test_calls_are_counted_over_every_forward_of_a_chunked_pass(llama: VllmBackend, planted: None) -> None:
    long = [sequence(300), sequence(301), sequence(302)]  # 963 tokens, 512 a forward
    with llama.bind(binding("planted.same")):
        evidence = llama.score(long).evidence
    assert evidence.forwards == (2,)
    assert [(count.expected, count.observed) for count in evidence.calls] == [(4, 4)]


def test_every_pass_of_a_binding_counts_from_zero(llama: VllmBackend, planted: None) -> None:
    with llama.bind(binding("planted.same")):
        counts = [llama.score(BATCH).evidence.calls[0].observed for _ in range(3)]
    assert counts == [2, 2, 2]


def test_a_native_choice_is_read_back_and_replaces_nothing(llama: VllmBackend, planted: None) -> None:
    with llama.bind(binding("planted.unrotated", Choice.NATIVE)):
        evidence = llama.score(BATCH).evidence
    assert evidence.calls == ()
    assert [(state.requested, state.effective) for state in evidence.switches] == [(Choice.NATIVE, Choice.NATIVE)]


def test_a_site_that_the_engine_never_looks_up_shows_no_call(llama: VllmBackend, planted: None) -> None:
    with llama.bind(binding("planted.skipped")):
        evidence = llama.score(BATCH).evidence
    assert [(count.expected, count.observed) for count in evidence.calls] == [(2, 0)]


def test_a_reference_is_in_effect_inside_only_and_named_by_the_readback(llama: VllmBackend, planted: None) -> None:
    native = logprobs(llama)
    with llama.bind(binding("planted.unrotated")):
        assert llama.read_back().effective("operator.rope.implementation") == "reference of planted.unrotated"
        assert logprobs(llama) != native
    assert llama.read_back().effective("operator.rope.implementation") == "RotaryEmbedding.forward_cpu"
    assert logprobs(llama) == native


def test_an_exception_in_the_block_restores(llama: VllmBackend, planted: None) -> None:
    native = logprobs(llama)
    with pytest.raises(ZeroDivisionError), llama.bind(binding("planted.unrotated")):
        raise ZeroDivisionError
    assert logprobs(llama) == native


def test_a_second_site_that_fails_undoes_the_first(llama: VllmBackend, planted: None) -> None:
    held = vars(model_of(llama).model.layers[0].self_attn.rotary_emb)["_forward_method"]
    with pytest.raises(ValueError, match="no reference for this shape"), llama.bind(binding("planted.unbuildable")):
        pass
    assert vars(model_of(llama).model.layers[0].self_attn.rotary_emb)["_forward_method"] is held
    assert llama.score(BATCH).binding.choices == {}


def test_bindings_nest_and_the_inner_one_counts(llama: VllmBackend, planted: None) -> None:
    with llama.bind(binding("planted.unrotated")):
        outer = logprobs(llama)
        with llama.bind(binding("planted.same")):
            assert [count.factor for count in llama.score(BATCH).evidence.calls] == ["planted.same"]
        assert logprobs(llama) == outer


def test_an_unknown_factor_is_refused_with_those_that_exist(llama: VllmBackend, planted: None) -> None:
    with pytest.raises(
        BindingError, match=r"no factor planted\.sam is registered .* planted\.same, planted\.unrotated"
    ):
        with llama.bind(binding("planted.sam")):
            pass


def test_a_foreign_patch_is_reported_and_left_alone(llama: VllmBackend, planted: None) -> None:
    rotary = model_of(llama).model.layers[0].self_attn.rotary_emb
    held = rotary._forward_method
    foreign = lambda *args: held(*args)  # noqa: E731
    try:
        with pytest.raises(RestoreError, match="unload the tool"), llama.bind(binding("planted.same")):
            rotary._forward_method = foreign
        assert rotary._forward_method is foreign
    finally:
        rotary._forward_method = held


def test_blocks_written_while_scoring_are_never_served_to_the_run(llama: VllmBackend, planted: None) -> None:
    from vllm import SamplingParams

    def cached(tokens: tuple[int, ...]) -> int:
        params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
        (output,) = llama._llm.generate([{"prompt_token_ids": list(tokens)}], params, use_tqdm=False)
        return int(output.num_cached_tokens)

    scored = sequence(300)
    tokens = scored.prompt_token_ids + scored.response_token_ids
    llama._llm.reset_prefix_cache()
    with llama.bind(binding("planted.unrotated")):
        llama.score([scored])
    assert cached(tokens) == 0  # nothing of the pass, though it held the same 320 tokens
    assert cached(tokens) == 256  # the run's own blocks
    with llama.bind(binding("planted.unrotated")):
        llama.score([scored])
    assert cached(tokens) == 256


def test_a_sequence_that_does_not_fit_is_refused_by_number(llama: VllmBackend) -> None:
    with pytest.raises(ScoringError, match=r"sequence 1 has 512 tokens; .* max_model_len=513"):
        llama.score([sequence(3), sequence(492)])
    assert not math.isnan(logprobs(llama, [sequence(491)])[0][-1])


def test_requests_of_the_loop_are_never_swallowed(llama: VllmBackend) -> None:
    from vllm import SamplingParams

    llama._llm.enqueue(
        [{"prompt_token_ids": [5, 6, 7]}], SamplingParams(max_tokens=2, detokenize=False), use_tqdm=False
    )
    with pytest.raises(ScoringError, match="score between rollouts"):
        llama.score(BATCH)
    assert len(llama._llm.wait_for_completion(use_tqdm=False)) == 1


def test_a_pass_that_runs_out_of_time_leaves_an_idle_engine(llama: VllmBackend, planted: None) -> None:
    native = logprobs(llama)
    long = [sequence(300), sequence(301), sequence(302)]
    with pytest.raises(ScoringTimeout, match="scoring 3 sequences"), llama.bind(binding("planted.unrotated")):
        llama.score(long, timeout_s=1e-6)
    assert not llama._llm.llm_engine.has_unfinished_requests()
    assert logprobs(llama) == native


def test_what_is_not_an_engine_with_the_extension_is_refused_with_what_to_pass(
    llama: VllmBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(EngineSetupError, match="got a object; accepts a vllm.LLM"):
        VllmBackend(object())
    parallel = llama._llm.llm_engine.vllm_config.parallel_config
    monkeypatch.setattr(parallel, "worker_extension_cls", "")
    with pytest.raises(EngineSetupError, match="worker_extension_cls='mismatch_hooks.integrations.vllm.worker.W"):
        VllmBackend(llama._llm)


def test_another_release_of_the_engine_is_refused_with_both_versions(
    llama: VllmBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm.__version__", "0.9.1")
    with pytest.raises(EngineSetupError, match=r"vllm 0\.9\.1 is installed; .*<0\.33,>=0\.32"):
        VllmBackend(llama._llm)
