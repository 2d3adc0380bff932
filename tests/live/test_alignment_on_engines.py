"""With every operator on its reference, what vLLM returns while sampling is, to the bit, what the trainer computes.

Tokens are sampled by the live engine as a loop samples them, in batches of mixed lengths that shrink to one sequence;
the trainer scores the finished sequences. Equality is of fp32 bits, of every token.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from mismatch_hooks.live.alignment import Alignment, aligned_bindings
from mismatch_hooks.live.config import ConfigError
from mismatch_hooks.live.registry import load_registry
from mismatch_hooks.pipeline.bind import BindingError
from mismatch_hooks.schema.capture import RolloutSequence
from mismatch_hooks.schema.enums import PolicyRole
from mismatch_hooks.schema.score import ScoringSequence
from tests.tiny_engines import TinyEngines, engines_of, start_rollout
from tests.tiny_models import tiny_checkpoint

pytestmark = pytest.mark.engine

ROLLOUT, TRAINING = PolicyRole.ROLLOUT, PolicyRole.TRAINING
# Tokens of each prompt, and of each response: from the twentieth on the longest decodes alone.
PROMPTS, RESPONSES = (1, 150, 17, 40, 100, 5, 60, 2), (12, 20, 1, 9, 14, 3, 2, 40)


def _rollout_with(folder: Path, **options: Any) -> Iterator[tuple[Path, Any]]:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    checkpoint = tiny_checkpoint(folder, shape="llama")
    rollout = start_rollout(checkpoint, **options)
    yield checkpoint, rollout
    rollout._llm.llm_engine.engine_core.shutdown()


@pytest.fixture(scope="session")  # to stop one engine of this process takes the process groups from the others
def _chunked_rollout(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Any]]:
    yield from _rollout_with(
        tmp_path_factory.mktemp("chunked"), enable_chunked_prefill=True, max_num_batched_tokens=48, max_model_len=256
    )


@pytest.fixture(scope="module")
def chunked_engines(_chunked_rollout: tuple[Path, Any], megatron_core: None) -> TinyEngines:
    """Prompts are prefilled in pieces, beside what decodes."""
    return engines_of(*_chunked_rollout)


@pytest.fixture(scope="session")
def _crowded_rollout(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Any]]:
    yield from _rollout_with(tmp_path_factory.mktemp("crowded"), kv_cache_memory_bytes=512 * 2**10)


@pytest.fixture(scope="module")
def crowded_engines(_crowded_rollout: tuple[Path, Any], megatron_core: None) -> TinyEngines:
    """A cache of few blocks, in which not all sequences have room to the end."""
    return engines_of(*_crowded_rollout)


@contextmanager
def aligned(tiny: TinyEngines, entries: str | Sequence[str] = "all") -> Iterator[Alignment]:
    made = Alignment(aligned_bindings(entries, load_registry(), tiny.engines, tiny.shape), tiny.engines)
    made.start()
    try:
        yield made
    finally:
        made.stop()


def sampled(
    tiny: TinyEngines, prompts: Sequence[int] = PROMPTS, responses: Sequence[int] = RESPONSES
) -> tuple[RolloutSequence, ...]:
    from vllm import SamplingParams

    backend: Any = tiny.engines[ROLLOUT]
    ids = [[(7 * row + 3 * token) % 500 + 3 for token in range(length)] for row, length in enumerate(prompts)]
    # Without a seed of its own: vLLM's CPU build cannot step a request's stream back after a preemption.
    params = [SamplingParams(max_tokens=count, logprobs=0, ignore_eos=True, detokenize=False) for count in responses]
    outputs = backend._llm.generate([{"prompt_token_ids": one} for one in ids], params, use_tqdm=False)
    found: tuple[RolloutSequence, ...] = backend.sequences(outputs, params)
    return found


def unequal(tiny: TinyEngines, found: Sequence[RolloutSequence]) -> int:
    """How many tokens the trainer does not give the same fp32 bits."""
    scored = [
        ScoringSequence(
            prompt_token_ids=one.prompt_token_ids, response_token_ids=one.response_token_ids, response_mask=one.mask
        )
        for one in found
    ]
    rows = [piece.logprobs for piece in tiny.engines[TRAINING].score(scored).shards[0].slices]
    pairs = [pair for one, row in zip(found, rows, strict=True) for pair in zip(one.rollout_logprobs, row, strict=True)]
    assert len(pairs) == sum(len(one.response_token_ids) for one in found) > 0
    return sum(rollout is None or bool(torch.tensor(rollout) != torch.tensor(training)) for rollout, training in pairs)


@pytest.mark.parametrize("kind", ["llama_engines", "qwen3_engines", "uncached_engines", "chunked_engines"])
def test_sampled_and_trained_are_equal_on_every_token(kind: str, request: pytest.FixtureRequest) -> None:
    tiny: TinyEngines = request.getfixturevalue(kind)
    assert unequal(tiny, sampled(tiny)) > 0
    with aligned(tiny):
        assert unequal(tiny, sampled(tiny)) == 0
        assert unequal(tiny, sampled(tiny, PROMPTS[:1], RESPONSES[-1:])) == 0


def test_cached_prefixes_of_before_are_not_served_and_those_of_the_aligned_run_are(long_engines: TinyEngines) -> None:
    lengths = (300, 280, 150, 20)
    native = sampled(long_engines, lengths, (6, 5, 4, 3))
    with aligned(long_engines):
        first = sampled(long_engines, lengths, (6, 5, 4, 3))
        again = sampled(long_engines, lengths, (6, 5, 4, 3))
        assert [one.cached_tokens for one in first] == [0] * 4
        assert sum(one.cached_tokens or 0 for one in again) > 0
        assert unequal(long_engines, (*first, *again)) == 0
    after = sampled(long_engines, lengths, (6, 5, 4, 3))
    assert [one.cached_tokens for one in after] == [0] * 4
    assert [one.cached_tokens for one in native] == [0] * 4


def test_a_sequence_that_was_preempted_is_equal_too(crowded_engines: TinyEngines) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    preempted = []
    own = Scheduler._preempt_request

    def counted(*arguments: Any, **options: Any) -> Any:
        preempted.append(1)
        return own(*arguments, **options)

    with aligned(crowded_engines), patch.object(Scheduler, "_preempt_request", counted):
        found = sampled(crowded_engines, (100,) * 8, (60,) * 8)
    assert preempted
    with aligned(crowded_engines):
        assert unequal(crowded_engines, found) == 0


def test_native_scores_before_and_after_are_equal_to_the_bit(llama_engines: TinyEngines) -> None:
    def scores() -> Mapping[PolicyRole, Any]:
        found = [
            ScoringSequence(prompt_token_ids=(5, 6, 7), response_token_ids=(8, 9, 10 + row), response_mask=(True,) * 3)
            for row in range(3)
        ]
        return {role: engine.score(found).shards for role, engine in llama_engines.engines.items()}

    before = scores()
    with aligned(llama_engines) as alignment:
        held = scores()
        with alignment.suspended():
            assert scores() == before
        assert scores() == held
    assert scores() == before != held


def test_gradients_reach_every_parameter_of_an_aligned_trainer(llama_engines: TinyEngines) -> None:
    model = llama_engines.models[TRAINING]
    ids = torch.tensor([[5, 6, 7, 8, 9, 10]])
    positions, mask = torch.arange(6)[None], torch.ones(1, 1, 6, 6, dtype=torch.bool).triu(1)

    def gradients() -> dict[str, torch.Tensor]:
        model.zero_grad()
        chosen = model(ids, positions, mask)[:, :-1].float().log_softmax(-1).gather(2, ids[:, 1:, None])
        chosen.sum().backward()
        found = {name: parameter.grad.clone().flatten().float() for name, parameter in model.named_parameters()}
        model.zero_grad()
        return found

    native = gradients()
    with aligned(llama_engines):
        reference = gradients()
    assert native.keys() == reference.keys()
    # One direction, whatever the rounding: bf16 products of random weights differ by parts in a hundred.
    cosines = {name: float(torch.cosine_similarity(native[name], reference[name], dim=0)) for name in native}
    assert min(cosines.values()) > 0.99, cosines


def test_native_products_with_enough_rows_are_those_of_the_trainer(llama_engines: TinyEngines) -> None:
    """The engines' own linears and head, in a batch that shrinks to one row, beside references for all else."""
    padded = ["gemm.accumulation:padded_native", "logprob.head_dtype:padded_native"]
    entries = ["attention.*", "norm.*", "activation.*", "embedding.*", *padded]
    with aligned(llama_engines, entries) as alignment:
        told = alignment.report()["operators"]
        assert told["rollout"]["gemm.accumulation"] == told["training"]["logprob.head_dtype"] == "padded_native"
        assert unequal(llama_engines, sampled(llama_engines)) == 0


# ---- what a config may name ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entries", "rollout", "training"),
    [
        (["norm.rmsnorm@rollout"], ["norm.rmsnorm"], []),
        (["attention.*"], ["attention.kernel", "attention.rope_fusion"], ["attention.kernel", "attention.rope_fusion"]),
        (["norm.rmsnorm@training", "norm.rmsnorm@rollout"], ["norm.rmsnorm"], ["norm.rmsnorm"]),
    ],
)
def test_an_entry_names_operators_and_may_name_a_side(
    entries: list[str], rollout: list[str], training: list[str], llama_engines: TinyEngines
) -> None:
    made = aligned_bindings(entries, load_registry(), llama_engines.engines, llama_engines.shape)
    found = {role: sorted(binding.choices) for role, binding in made.items()}
    assert found == {role: names for role, names in ((ROLLOUT, rollout), (TRAINING, training)) if names}


@pytest.mark.parametrize(
    ("entry", "sentence"),
    [
        ("norm.rmsnorms", "norm.rmsnorms'; registered: .* Did you mean 'norm.rmsnorm'"),
        ("norm.rmsnorm@both", r"got 'norm\.rmsnorm@both'; accepts rollout or training behind the @"),
        ("norm.rmsnorm:fp64", r"norm\.rmsnorm has no reference 'fp64'; accepts fp32"),
        ("attention.rope_fusion:shared_backend", "cannot run here: transformer-engine"),
        ("rollout.batch_size", r"rollout\.batch_size has no reference to be kept on: it is a value sweep"),
        ("norm.qk_norm", r"norm\.qk_norm has no reference to be kept on: the model has no qk_norm"),
    ],
)
def test_an_entry_that_cannot_be_kept_is_refused(entry: str, sentence: str, llama_engines: TinyEngines) -> None:
    with pytest.raises(ConfigError, match=f"^mismatch_hooks.align: .*{sentence}"):
        aligned_bindings([entry], load_registry(), llama_engines.engines, llama_engines.shape)


def test_a_trainer_that_fuses_its_gradients_is_refused_and_nothing_is_bound(llama_engines: TinyEngines) -> None:
    config = llama_engines.models[TRAINING].config
    made = aligned_bindings("all", load_registry(), llama_engines.engines, llama_engines.shape)
    with (
        patch.object(config, "gradient_accumulation_fusion", new=True),
        pytest.raises(BindingError, match="gradient_accumulation_fusion=False"),
    ):
        Alignment(made, llama_engines.engines).start()
    native = llama_engines.engines[ROLLOUT].read_back().effective("operator.norm.implementation")
    assert "reference" not in str(native)
