"""What the embedding factor declares, and how it looks up in a table that is sharded over ranks."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mismatch_hooks.operator_checks.embedding import adapter
from mismatch_hooks.operator_checks.embedding.factors.lookup import FACTOR
from mismatch_hooks.pipeline.bind import BindingError
from mismatch_hooks.pipeline.guards import GUARDS
from mismatch_hooks.schema.enums import ExecutionPath, PolicyRole, RebindCost


def test_the_factor_declares_one_live_switch_and_one_site_a_side() -> None:
    assert (FACTOR.switch.rebind_cost, FACTOR.switch.roles) == (RebindCost.PER_REQUEST, tuple(PolicyRole))
    assert {site.role: site.name for site in FACTOR.call_sites} == {
        PolicyRole.ROLLOUT: adapter._ROLLOUT_SITE,
        PolicyRole.TRAINING: adapter._TRAINING_SITE,
    }
    assert FACTOR.references[0].covers_paths == tuple(ExecutionPath)
    assert [pitfall for pitfall in FACTOR.pitfalls if pitfall not in GUARDS] == []
    assert "{side}" in FACTOR.recommendation


def test_a_pipeline_stage_without_an_embedding_has_no_site() -> None:
    assert adapter.sites(FACTOR.id, PolicyRole.TRAINING, SimpleNamespace(pre_process=False), {}) == []


def _table() -> torch.Tensor:
    return torch.randn(24, 8, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)


IDS = torch.tensor([[3, 12, 23], [11, 0, 13]])


def test_two_training_ranks_that_add_up_give_the_whole_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank's part of the sum is what it hands to its reduction; here that is caught and added up."""
    parallel = pytest.importorskip("megatron.core.tensor_parallel", reason="megatron-core is not installed")
    parts: list[torch.Tensor] = []

    def reduced(rows: torch.Tensor, group: Any) -> torch.Tensor:
        parts.append(rows)
        return rows

    monkeypatch.setattr(parallel, "reduce_from_tensor_model_parallel_region", reduced)
    for rank in range(2):
        table = SimpleNamespace(
            tp_group=SimpleNamespace(size=lambda: 2),
            vocab_start_index=12 * rank,
            weight=_table()[12 * rank : 12 * (rank + 1)],
            reduce_scatter_embeddings=False,
            forward=None,
        )
        model = SimpleNamespace(pre_process=True, embedding=SimpleNamespace(word_embeddings=table))
        (site,) = adapter.sites(FACTOR.id, PolicyRole.TRAINING, model, {})
        site.build(table.forward)(IDS)
    assert torch.equal(parts[0] + parts[1], _table()[IDS])


# ---- rollout ------------------------------------------------------------------------------------------------------


@pytest.fixture
def rollout_table() -> Any:
    """vLLM's embedding over the whole table, without its constructor, which asks for a process group."""
    layers = pytest.importorskip("vllm.model_executor.layers.vocab_parallel_embedding", reason="vLLM is not installed")
    made = layers.VocabParallelEmbedding.__new__(layers.VocabParallelEmbedding)
    torch.nn.Module.__init__(made)
    made.quant_method, made.parallel_group = layers.UnquantizedEmbeddingMethod(), None
    made.tp_size, made.num_added_embeddings, made.reduce_results = 1, 0, True
    made.weight = torch.nn.Parameter(_table(), requires_grad=False)
    return made


def _rollout_site(table: Any) -> Any:
    model = torch.nn.ModuleDict({"model": torch.nn.ModuleDict({"embed_tokens": table})})
    (site,) = adapter.sites(FACTOR.id, PolicyRole.ROLLOUT, model, {})
    return site


def test_two_rollout_ranks_that_add_up_give_the_whole_table(
    rollout_table: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank's tensor has padding rows after its own, which an id of the next rank must not reach."""
    monkeypatch.setattr("vllm.distributed.tensor_model_parallel_all_reduce", lambda rows: rows)
    rollout_table.tp_size, parts = 2, []
    for rank in range(2):
        own = _table()[12 * rank : 12 * (rank + 1)]
        rollout_table.shard_indices = SimpleNamespace(num_org_elements=12, org_vocab_start_index=12 * rank)
        rollout_table.weight = torch.nn.Parameter(torch.cat((own, torch.ones(4, 8, dtype=own.dtype))), False)
        parts.append(_rollout_site(rollout_table).build(None)(IDS))
    assert torch.equal(parts[0] + parts[1], _table()[IDS])


@pytest.mark.parametrize(
    ("attribute", "value"),
    [
        pytest.param("quant_method", object(), id="quantised"),
        pytest.param("num_added_embeddings", 16, id="rows that LoRA added"),
        pytest.param("parallel_group", object(), id="a group of its own"),
        pytest.param("reduce_results", False, id="left unreduced"),
    ],
)
def test_a_rollout_table_that_is_not_plain_is_refused(rollout_table: Any, attribute: str, value: object) -> None:
    setattr(rollout_table, attribute, value)
    with pytest.raises(BindingError, match=r"^the rollout's model\.embed_tokens is a VocabParallelEmbedding that is"):
        _rollout_site(rollout_table)
