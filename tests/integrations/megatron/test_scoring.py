"""A score is what the loop would have computed, and the loop never notices that it was taken."""

import random
from typing import Any

import numpy
import pytest
import torch

from mismatch_hooks.integrations.megatron import (
    MegatronBackend,
    ScoringTimeout,
    UnsupportedTrainerError,
    token_logprobs,
)
from mismatch_hooks.schema.enums import ExecutionPath, PolicyRole
from mismatch_hooks.schema.score import Score, ScoringSequence
from tests.integrations.megatron.tiny_gpt import LLAMA, QWEN3, build_model, sequences

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("megatron")]

LENGTHS = ((5, 7), (3, 12), (9, 1))


def logits_of(model: Any, tokens: tuple[int, ...]) -> torch.Tensor:
    length = len(tokens)
    mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    found: torch.Tensor = model(torch.tensor([tokens]), torch.arange(length)[None], mask)[0]
    return found


def logprobs_of(score: Score) -> list[tuple[float, ...]]:
    return [part.logprobs for part in score.shards[0].slices]


@pytest.mark.parametrize("shape", [pytest.param(LLAMA, id="Llama"), pytest.param(QWEN3, id="Qwen3")])
def test_a_score_is_the_log_softmax_of_the_models_own_logits(shape: Any) -> None:
    model = build_model(shape)
    batch = sequences(*LENGTHS)
    score = MegatronBackend(model, micro_batch=1).score(batch)
    for sequence, logprobs in zip(batch, logprobs_of(score), strict=True):
        tokens = sequence.prompt_token_ids + sequence.response_token_ids
        with torch.no_grad():
            table = logits_of(model, tokens).float().log_softmax(dim=-1)
        start = len(sequence.prompt_token_ids)
        expected = tuple(float(table[position - 1, tokens[position]]) for position in range(start, len(tokens)))
        assert logprobs == expected


def test_a_padded_batch_scores_like_single_sequences() -> None:
    # Not to the bit: the attention's products are taken over the padded length, in another order.
    backend = MegatronBackend(build_model(LLAMA), micro_batch=8)
    together, alone = backend.score(sequences(*LENGTHS)), MegatronBackend(build_model(LLAMA), micro_batch=1)
    for padded, single in zip(logprobs_of(together), logprobs_of(alone.score(sequences(*LENGTHS))), strict=True):
        assert padded == pytest.approx(single, abs=0.05)


def test_micro_batches_keep_the_order_and_are_counted() -> None:
    score = MegatronBackend(build_model(LLAMA), micro_batch=2).score(sequences(*LENGTHS))
    assert [(part.sequence, part.start, len(part.logprobs)) for part in score.shards[0].slices] == [
        (0, 0, 7),
        (1, 0, 12),
        (2, 0, 1),
    ]
    assert (score.path, score.evidence.forwards) == (ExecutionPath.TRAINING_FULL_PREFILL, (2,))
    assert (score.shards[0].rank, score.shards[0].world_size) == (0, 1)
    assert (score.binding.role, score.evidence.calls, score.evidence.switches) == (PolicyRole.TRAINING, (), ())


def test_the_loops_own_function_scores() -> None:
    model = build_model(LLAMA)
    asked: list[tuple[Any, list[int]]] = []

    def own(called: Any, input_ids: torch.Tensor) -> torch.Tensor:
        asked.append((called, list(input_ids.shape)))
        return token_logprobs(called, input_ids) / 2

    batch = sequences(*LENGTHS)
    halved = MegatronBackend([model], token_logprobs=own).score(batch)
    whole = MegatronBackend(model).score(batch)
    assert asked == [([model], [3, 15])]
    assert logprobs_of(halved) == [tuple(value / 2 for value in row) for row in logprobs_of(whole)]


def test_a_wrapped_model_is_found_and_called_through_its_wrapper() -> None:
    model = build_model(LLAMA)
    calls: list[int] = []

    class Wrapper(torch.nn.Module):
        def __init__(self, module: Any) -> None:
            super().__init__()
            self.module = module

        def forward(self, *arguments: Any) -> Any:
            calls.append(len(arguments))
            return self.module(*arguments)

    batch = sequences(*LENGTHS)
    wrapped = MegatronBackend([Wrapper(Wrapper(model))]).score(batch)
    assert calls == [3, 3]
    assert logprobs_of(wrapped) == logprobs_of(MegatronBackend(model).score(batch))


def test_columns_of_padding_are_kept_out_of_the_log_sum_exp() -> None:
    batch = sequences(*LENGTHS)
    plain = MegatronBackend(build_model(LLAMA), shape=LLAMA).score(batch)
    padded = MegatronBackend(build_model(LLAMA, padded_vocab=640), shape=LLAMA).score(batch)
    assert logprobs_of(padded) == logprobs_of(plain)


def test_scoring_consumes_no_random_number_and_keeps_the_modes() -> None:
    model = build_model(LLAMA).train()
    model.decoder.layers[1].eval()

    def draws(called: Any, input_ids: torch.Tensor) -> torch.Tensor:
        torch.rand(3), random.random(), numpy.random.rand()
        called.eval()
        return token_logprobs(called, input_ids)

    backend = MegatronBackend(model, token_logprobs=draws)
    numbers: Any = numpy.random.get_state
    before = torch.get_rng_state(), random.getstate(), numbers()[1].copy()
    modes = [module.training for module in model.modules()]
    backend.score(sequences(*LENGTHS))
    backend.read_back()
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert (numbers()[1] == before[2]).all()
    assert [module.training for module in model.modules()] == modes
    assert torch.is_grad_enabled()


def test_position_ids_are_not_read_by_rope() -> None:
    model = build_model(LLAMA)
    mask = torch.ones(1, 1, 5, 5, dtype=torch.bool).triu(1)
    tokens, positions = torch.tensor([[1, 2, 3, 4, 5]]), torch.arange(5)[None]
    with torch.no_grad():
        assert torch.equal(model(tokens, positions, mask), model(tokens, positions + 11, mask))


def test_dropout_in_training_mode_is_scored_as_it_trains() -> None:
    model = build_model(LLAMA, hidden_dropout=0.5).train()
    backend = MegatronBackend(model)
    torch.manual_seed(1)
    dropped = backend.score(sequences(*LENGTHS))
    assert logprobs_of(backend.score(sequences(*LENGTHS))) == logprobs_of(dropped)  # the stream was put back
    model.eval()
    assert logprobs_of(backend.score(sequences(*LENGTHS))) != logprobs_of(dropped)


def test_a_forward_made_before_a_score_still_gives_its_gradients() -> None:
    gradients = []
    for scored in (False, True):
        model = build_model(LLAMA).train()
        (sequence,) = sequences((6, 10))
        loss = logits_of(model, sequence.prompt_token_ids + sequence.response_token_ids).float().logsumexp(-1).sum()
        if scored:
            MegatronBackend(model).score(sequences(*LENGTHS, (20, 30)))
            assert all(parameter.grad is None for parameter in model.parameters())
        loss.backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    assert all(torch.equal(plain, after) for plain, after in zip(*gradients, strict=True))
    assert all(gradient.abs().sum() > 0 for gradient in gradients[0])


def test_a_score_that_takes_too_long_stops_between_forwards() -> None:
    model = build_model(LLAMA)
    backend = MegatronBackend(model, micro_batch=1)
    with pytest.raises(
        ScoringTimeout, match=r"^0 of 3 sequences were scored in 0\.0 s; allow more time or score fewer\.$"
    ):
        backend.score(sequences(*LENGTHS), timeout_s=0.0)
    assert not model._forward_pre_hooks and not model.rotary_pos_emb._forward_hooks


def test_an_exception_in_the_loops_function_leaves_no_hook_behind() -> None:
    model = build_model(LLAMA)

    def fails(called: Any, input_ids: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        MegatronBackend(model, token_logprobs=fails).score(sequences(*LENGTHS))
    assert not model._forward_pre_hooks and not model.rotary_pos_emb._forward_hooks
    assert torch.is_grad_enabled()


def test_what_cannot_be_scored_is_one_sentence() -> None:
    model = build_model(LLAMA)
    foreign = ScoringSequence(prompt_token_ids=(1, 2), response_token_ids=(3, 512), response_mask=(True, True))
    with pytest.raises(ValueError, match=r"^sequence 1: token id 512; accepts 0 to 511, the model's vocabulary\.$"):
        MegatronBackend(model).score([*sequences((2, 2)), foreign])
    short = MegatronBackend(model, token_logprobs=lambda called, input_ids: torch.zeros(input_ids.shape))
    with pytest.raises(
        ValueError, match=r"^token_logprobs returned \[1, 4\] for input_ids \[1, 4\]; accepts \[1, 3\], "
    ):
        short.score(sequences((2, 2)))


def test_a_trainer_prefills_and_refuses_any_other_path() -> None:
    backend, (path,) = MegatronBackend(build_model(LLAMA)), (ExecutionPath.TRAINING_FULL_PREFILL,)
    assert backend.paths == (path,)
    assert backend.score(sequences((4, 6)), path=path).shards == backend.score(sequences((4, 6))).shards
    with pytest.raises(ValueError, match=r"^path: got ROLLOUT_DECODE; a training engine accepts TRAINING_FULL_PREFILL"):
        backend.score(sequences((4, 6)), path=ExecutionPath.ROLLOUT_DECODE)


def test_what_is_no_trainer_is_refused_at_construction() -> None:
    with pytest.raises(UnsupportedTrainerError, match=r"^model: got Linear; accepts a megatron-core GPTModel"):
        MegatronBackend(torch.nn.Linear(1, 1))
    model = build_model(LLAMA)
    with pytest.raises(UnsupportedTrainerError, match=r"^model: got 2 model chunks; accepts one"):
        MegatronBackend([model, model])
    with pytest.raises(ValueError, match=r"^micro_batch: got True; accepts an integer of 1 or more\.$"):
        MegatronBackend(model, micro_batch=True)


def test_another_release_line_is_refused_with_both_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mismatch_hooks.integrations.megatron.live_model.version", lambda name: "0.17.0")
    with pytest.raises(UnsupportedTrainerError, match=r"^megatron-core 0\.17\.0 is installed; .*>=0\.16\.1"):
        MegatronBackend(None)
