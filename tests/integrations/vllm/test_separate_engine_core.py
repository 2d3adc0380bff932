"""The same code with vLLM's engine core in its own process: only named methods and plain data cross."""

import json
import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny_models import tiny_checkpoint

pytestmark = pytest.mark.engine
_ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    if not entry_points(group="mismatch_hooks.operator_checks"):
        pytest.skip("the project is not installed, so no process finds its operator checks")
    folder = tiny_checkpoint(tmp_path_factory.mktemp("model"), shape="llama", tied=True)
    scratch = tmp_path_factory.mktemp("trained")
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(_ROOT),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }
    script = Path(__file__).with_name("separate_engine_core.py")
    done = subprocess.run(
        [sys.executable, str(script), str(folder), str(scratch)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    document: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return document


def test_the_engine_core_is_out_of_reach(found: dict[str, Any]) -> None:
    assert found["own_process"]


def test_capture_and_digests_are_those_of_an_engine_in_process(found: dict[str, Any]) -> None:
    assert len(found["captured"]["rollout_logprobs"]) == 8
    assert found["digests"]


def test_a_binding_runs_there_and_is_counted_there(found: dict[str, Any]) -> None:
    (count,) = found["evidence"]["calls"]
    assert (found["evidence"]["forwards"], count["expected"], count["observed"]) == ([1], 2, 2)
    (switch,) = found["evidence"]["switches"]
    assert (switch["effective"], switch["status"]) == ("reference", "applied")
    assert found["bound_rope"] == "reference of attention.rope_fusion"


def test_tokens_are_forced_there_and_get_the_bits_that_they_were_sampled_with(found: dict[str, Any]) -> None:
    (piece,) = found["decoded"]["shards"][0]["slices"]
    assert piece["logprobs"] == found["captured"]["rollout_logprobs"]
    assert (found["decoded"]["path"], found["decoded"]["evidence"]["forwards"]) == ("rollout_decode", [8])


def test_activations_are_traced_there(found: dict[str, Any]) -> None:
    traced = found["traced"]
    assert (len(traced["modules"]), traced["left_out"], traced["evidence"]["forwards"]) == (25, {}, [1])
    assert [len(one["digests"]) for module in traced["modules"] for one in module["sequences"]] == [11] * 24 + [10]


def test_C20_a_patch_in_the_parent_of_an_engine_core_in_a_child_is_no_binding(found: dict[str, Any]) -> None:
    parent = found["bound_in_the_parent"]
    assert (parent["calls_here"], parent["effective"]) == (0, ["native"])
    assert parent["diagnosis"] == "variant_did_not_apply"
    assert "operator.norm.implementation on rollout rank 0: requested reference, effective native" in parent["reason"]
    assert "No evidence from model.layers.*" in parent["reason"]


def test_native_scores_are_bitwise_equal_before_and_after(found: dict[str, Any]) -> None:
    assert found["native_again"] == found["native"]
    assert found["rope_again"] == found["rope"] == "RotaryEmbedding.forward_cpu"


def test_a_tied_head_that_a_reload_left_behind_is_named(found: dict[str, Any]) -> None:
    # The CPU build multiplies with a packed copy of the tied head and packs it again only when it is delivered by name;
    # where oneDNN takes no bf16 (AVX2) nothing is packed, and a tied head is the embedding.
    packs = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert found["without_head"] == (["lm_head.weight"] if packs else [])
    assert found["with_head"] == []
    assert found["reloads"] == 2
