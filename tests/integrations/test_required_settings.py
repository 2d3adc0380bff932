"""What each engine says has to be pinned: data that the README repeats and that a live readback is held against."""

from pathlib import Path

import pytest

from mismatch_hooks.integrations.megatron.required_settings import required_settings as of_megatron
from mismatch_hooks.integrations.vllm.required_settings import required_settings as of_vllm
from mismatch_hooks.pipeline.compare import unpinned
from mismatch_hooks.pipeline.guards import PITFALLS
from mismatch_hooks.schema.enums import PolicyRole
from mismatch_hooks.schema.environment import RequiredSetting
from tests.pipeline.samples import ROLLOUT, TRAINING, readback
from tests.tiny_engines import TinyEngines

INTEGRATIONS = Path(__file__).parents[2] / "integrations"
REQUIRED = {"vllm": of_vllm(longest=300), "megatron": of_megatron()}
CUDA = {"engine.device": "cuda:0", "parallel.tensor.backend": "nccl"}


@pytest.mark.parametrize("engine", REQUIRED)
def test_the_readme_names_every_one_of_them_where_it_is_read_back(engine: str) -> None:
    readme = (INTEGRATIONS / engine / "README.md").read_text(encoding="utf-8")
    assert [one.readback for one in REQUIRED[engine] if f"`{one.readback}`" not in readme] == []


def test_what_they_guard_against_is_a_known_pitfall() -> None:
    named = {one.guards for found in REQUIRED.values() for one in found} - {""}
    assert {"collective_unpinned", "prefill_was_split", "patch_never_ran", "dropout_active"} <= named <= set(PITFALLS)


def _keys(found: list[tuple[RequiredSetting, str]]) -> list[str]:
    return [setting.key for setting, _ in found]


def test_a_scored_sequence_has_to_fit_into_one_forward_with_the_token_after_it() -> None:
    pinned = {
        "rollout.logprobs_mode": "raw_logprobs",
        "rollout.prefix_caching": False,
        "rollout.chunked_prefill": False,
        "rollout.max_batched_tokens": 301,
        "rollout.long_prefill_threshold": 0,
        "engine.compiled": False,
        "parallel.tensor.backend": "gloo",
    }
    assert unpinned(readback(ROLLOUT, pinned), REQUIRED["vllm"]) == []
    short = readback(ROLLOUT, {**pinned, "rollout.max_batched_tokens": 300})
    assert [why for _, why in unpinned(short, REQUIRED["vllm"])] == [
        "max_num_batched_tokens on rollout is 300; it has to be 301 or more."
    ]


def test_what_only_a_gpu_chooses_at_run_time_is_asked_for_on_a_gpu() -> None:
    pinned = {
        "training.attention_backend": "DotProductAttention",
        "training.dropout.attention": 0.0,
        "training.dropout.hidden": 0.0,
        "parallel.sequence": False,
        "model.head.dtype": "bfloat16",
        "engine.device": "cpu",
        "parallel.tensor.backend": "gloo",
    }
    assert unpinned(readback(TRAINING, pinned), REQUIRED["megatron"]) == []
    assert _keys(unpinned(readback(TRAINING, pinned | CUDA), REQUIRED["megatron"])) == [
        "CUBLAS_WORKSPACE_CONFIG",
        "NCCL_ALGO",
        "NCCL_PROTO",
        "torch.backends.cuda.matmul.fp32_precision",
        "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
        "torch.use_deterministic_algorithms",
    ]


@pytest.mark.engine
def test_live_engines_say_what_is_loose(llama_engines: TinyEngines) -> None:
    found = {
        role: _keys(unpinned(engine.read_back(), engine.required_settings(40)))
        for role, engine in llama_engines.engines.items()
    }
    # vLLM's own defaults, which the tiny engine keeps.
    loose = ["enable_prefix_caching", "enable_chunked_prefill"]
    assert found == {PolicyRole.ROLLOUT: loose, PolicyRole.TRAINING: []}
