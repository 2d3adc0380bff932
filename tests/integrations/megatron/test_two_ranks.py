"""Two tensor-parallel ranks over gloo give one complete score, evidence of each rank, and the numbers of one rank."""

from typing import Any

import pytest

from mismatch_hooks.integrations.megatron import MegatronBackend
from mismatch_hooks.schema.freeze import thaw
from tests.integrations.megatron.tiny_gpt import LLAMA, build_model, sequences
from tests.two_ranks import run_two_ranks

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("megatron")]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    store = tmp_path_factory.mktemp("store") / "store"
    return run_two_ranks(["-m", "tests.integrations.megatron.two_ranks"], str(store))


def logprobs_of(score: dict[str, Any]) -> list[float]:
    return [value for part in score["shards"][0]["slices"] for value in part["logprobs"]]


def test_both_ranks_hold_the_same_score_and_one_covers_the_tokens(ranks: list[dict[str, Any]]) -> None:
    for key in ("native", "bound"):
        first, second = (rank[key] for rank in ranks)
        assert first["shards"] == second["shards"]
        assert [(shard["rank"], shard["world_size"], len(shard["slices"])) for shard in first["shards"]] == [
            (0, 2, 3),
            (1, 2, 0),
        ]


def test_the_sharded_head_gives_the_log_probs_of_the_whole_one(ranks: list[dict[str, Any]]) -> None:
    # Not to the bit: row-parallel products are summed over ranks in bf16.
    score = MegatronBackend(build_model(LLAMA), micro_batch=2).score(sequences((5, 7), (3, 12), (9, 1)))
    whole = [value for part in score.shards[0].slices for value in part.logprobs]
    assert logprobs_of(ranks[0]["native"]) == pytest.approx(whole, abs=0.1)


def test_evidence_comes_from_every_rank(ranks: list[dict[str, Any]]) -> None:
    evidence = ranks[1]["bound"]["evidence"]
    assert evidence["forwards"] == [2, 2]
    assert [(call["rank"], call["expected"], call["observed"]) for call in evidence["calls"]] == [(0, 8, 8), (1, 8, 8)]
    assert [(state["rank"], state["effective"]) for state in evidence["switches"]] == [
        (0, "reference"),
        (1, "reference"),
    ]


def test_the_ranks_are_restored(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert logprobs_of(rank["bound"]) != logprobs_of(rank["native"])
        assert rank["again"]["shards"] == rank["native"]["shards"]


def test_a_rank_that_is_out_of_time_stops_both(ranks: list[dict[str, Any]]) -> None:
    assert [rank["stopped"] for rank in ranks] == [True, True]


def test_what_is_sharded_is_not_digested(ranks: list[dict[str, Any]]) -> None:
    first, second = (rank["digests"] for rank in ranks)
    whole = MegatronBackend(build_model(LLAMA), shape=LLAMA).weights_digest().tensors
    assert first == second
    assert {name for name, digest in first.items() if digest == whole[name]} == {
        name for name in whole if "norm" in name
    }
    assert {digest for name, digest in first.items() if "norm" not in name} == {"unobservable: sharded over 2 ranks"}


def test_what_every_rank_holds_whole_is_traced_and_the_rest_is_left_out(ranks: list[dict[str, Any]]) -> None:
    first, second = (rank["traced"] for rank in ranks)
    assert (first["modules"], first["left_out"]) == (second["modules"], second["left_out"])
    whole = ("input_norm", "attention_output", "attention_residual", "post_attention_norm", "down", "output")
    assert [module["semantic"] for module in first["modules"]] == [
        "embedding",
        *(f"layers.{layer}.{point}" for layer in (0, 1) for point in whole),
        "final_norm",
    ]
    assert set(first["left_out"].values()) == {"its rows are cut over 2 tensor-parallel ranks"}
    assert len(first["left_out"]) == 11
    (embedding, *_) = (
        MegatronBackend(build_model(LLAMA), micro_batch=2).trace(sequences((5, 7), (3, 12), (9, 1))).modules
    )
    assert first["modules"][0] == thaw(embedding)


def test_the_readback_names_the_ranks(ranks: list[dict[str, Any]]) -> None:
    assert [rank["parallel.tensor"] for rank in ranks] == [2, 2]
    assert ranks[0]["model.vocab.logits_width"]["reason"] == "the head is sharded over 2 ranks"
