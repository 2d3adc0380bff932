"""The all-reduce behind the row-parallel linears, over two trainer ranks and two vLLM workers."""

from pathlib import Path
from typing import Any

import pytest

from mismatch_hooks.live.registry import load_registry
from mismatch_hooks.pipeline.bind import BindingError
from mismatch_hooks.schema.enums import Origin, PlanOutcome, PolicyRole
from tests.tiny_engines import TinyEngines
from tests.tiny_models import tiny_checkpoint
from tests.two_ranks import run_two_ranks

pytestmark = pytest.mark.engine
FACTOR = "gemm.forward_reduce"
SCRIPT = Path(__file__).with_name("two_rank_reduction.py").resolve()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each trainer rank found; rank 0 also ablates the factor against a vLLM engine of two ranks."""
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    pytest.importorskip("vllm", reason="vLLM is not installed")
    root = tmp_path_factory.mktemp("ranks")
    folder = tiny_checkpoint(root, shape="llama")
    environment = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # two workers and two trainer ranks may have fewer cores than that
    }
    return run_two_ranks(
        [str(SCRIPT)], str(root / "store"), str(folder), "both", environment=environment, timeout_s=180
    )


def test_the_tree_is_the_sum_of_both_ranks_parts_whichever_is_added_first(ranks: list[dict[str, Any]]) -> None:
    for name in ("self_attention.linear_proj", "mlp.linear_fc2"):
        first, second = (rank["reduced"][name] for rank in ranks)
        assert first["tree"] == first["ascending"] == first["descending"] == second["tree"]
        assert max(abs(tree - native) for tree, native in zip(first["tree"], first["native"], strict=True)) <= max(
            2.0**-8 * abs(value) for value in first["native"]
        )


def test_both_call_sites_are_counted_on_each_rank_and_restored(ranks: list[dict[str, Any]]) -> None:
    counted = {
        (call["site"], call["rank"]): (call["observed"], call["expected"])
        for call in ranks[0]["bound"]["evidence"]["calls"]
    }
    declared = {site.name for site in load_registry().factors[FACTOR].call_sites if site.role is PolicyRole.TRAINING}
    # Two layers, and one forward for all three sequences.
    assert counted == {(site, rank): (2, 2) for site in declared for rank in (0, 1)}
    assert [state["effective"] for state in ranks[0]["inside"]] == ["reference", "reference"]
    assert ranks[0]["again"]["shards"] == ranks[0]["native"]["shards"]
    assert [rank["restored"] for rank in ranks] == [True, True]


def test_a_binding_that_is_refused_leaves_the_ranks_in_step(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["refused"].startswith("no factor no.such is registered on the training side")
    assert ranks[0]["after_refusal"] == ranks[0]["native"]["shards"]


def test_the_factor_is_judged_with_both_engines_at_two_ranks(ranks: list[dict[str, Any]]) -> None:
    found = ranks[0]
    assert [(name, reason) for name, ok, reason in found["gates"] if not ok] == []
    # The sum of two bf16 parts is rounded once however it is made, so the tree of two ranks can move nothing.
    assert found["diagnosis"] == "not_this_factor", found["reason"]
    assert {bits for _, bits in found["effects"]} == {0}


def test_the_tree_is_repeated_over_a_group_of_its_own_in_each_environment(ranks: list[dict[str, Any]]) -> None:
    first, second = ranks
    assert first["repeated"] == first["bound"]["shards"]
    # Every trainer rank built one group for each value of NCCL_ALGO, and none has the variable any more.
    assert first["groups"] == second["groups"] == [{"NCCL_ALGO": "Ring"}, {"NCCL_ALGO": "Tree"}]
    assert first["variables_left"] == second["variables_left"] == []
    # Four passes of the arms, and two repeats on each of two roles.
    assert first["passes"] == 8


def test_the_contracts_of_both_engines_name_the_same_collectives(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["issues"] == []


def test_what_really_reduces_is_read_from_the_live_groups(ranks: list[dict[str, Any]]) -> None:
    assert [rank["implementation"] for rank in ranks] == ["gloo", "gloo"]
    # vLLM adds up in shared memory where its build for the processor has that, and by gloo elsewhere.
    assert ranks[0]["rollout_implementation"] in ("gloo", "gloo, _CPUSHMDistributed")


def test_on_one_rank_the_plan_says_that_it_needs_other_groups(llama_engines: TinyEngines) -> None:
    from mismatch_hooks.live.planning import make_plan

    made = make_plan([FACTOR], load_registry(), llama_engines.engines, llama_engines.shape, Origin.NATIVE)
    (left,) = made.left_out
    assert left.outcome is PlanOutcome.NOT_SWITCHABLE_IN_PROCESS
    assert "new process groups" in left.reason


@pytest.mark.parametrize("role", PolicyRole)
def test_one_rank_is_refused(llama_engines: TinyEngines, role: PolicyRole) -> None:
    with (
        pytest.raises(BindingError, match=rf"^the {role.value} model adds nothing up over ranks"),
        llama_engines.engines[role].bind(llama_engines.reference(role, FACTOR)),
    ):
        pass
