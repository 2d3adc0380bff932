"""Both live engines on one tiny checkpoint, for tests that bind a factor; loaded as a plugin by the root conftest.

A vLLM engine takes up to ten seconds to start, so each is started once a process; megatron-core is set up for each
test module and taken down again, because other modules of the process do the same.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from mismatch_hooks.live.registry import load_registry
from mismatch_hooks.model_meta.shapes import shape_from_folder
from mismatch_hooks.schema.backend import ScoringBackend
from mismatch_hooks.schema.enums import Choice, PolicyRole
from mismatch_hooks.schema.score import Binding
from mismatch_hooks.schema.shape import ModelShape
from tests.tiny_models import tiny_checkpoint

_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyEngines:
    """Two engines that hold the weights of one checkpoint.

    Attributes:
        shape: what the checkpoint's file says.
        engines: by role.
        models: the live model inside each.
    """

    shape: ModelShape
    engines: Mapping[PolicyRole, ScoringBackend]
    models: Mapping[PolicyRole, Any]

    def reference(self, role: PolicyRole, *factors: str) -> Binding:
        """The binding that puts one role's factors on the first reference that needs nothing installed."""
        registry = load_registry()
        parameters = {
            factor: {
                **registry.adapter(factor).parameters(factor, self.shape),
                "implementation": next(
                    one.name for one in registry.factors[factor].references if not one.prerequisites.required_packages
                ),
            }
            for factor in factors
        }
        return Binding(role=role, choices=dict.fromkeys(factors, Choice.REFERENCE), parameters=parameters)


@dataclass(slots=True)
class Calls:
    """What went into modules and came out, in order; copies, because an engine may write into either later.

    Attributes:
        seen: (module name, arguments, output) of each call.
    """

    seen: list[tuple[str, tuple[Any, ...], Any]] = field(default_factory=list)


@contextmanager
def recorded(model: Any, *names: str) -> Iterator[Calls]:
    """Record every call of the modules of ``model`` whose name ends with one of ``names``."""
    calls = Calls()

    def keep(name: str) -> Any:
        return lambda module, arguments, output: calls.seen.append((name, _copied(arguments), _copied(output)))

    hooks = [module.register_forward_hook(keep(name)) for name, module in model.named_modules() if name.endswith(names)]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def _copied(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_copied(part) for part in value)
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


@contextmanager
def megatron_of_one_rank() -> Iterator[None]:
    """megatron-core set up for one rank, with the two host shims that a machine without CUDA needs."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random as megatron_random

    before = torch.cuda.current_device
    tracker = megatron_random._CUDA_RNG_STATE_TRACKER, megatron_random._CUDA_RNG_STATE_TRACKER_INITIALIZED
    # The rotary table asks where to live, and attention forks the CUDA stream for its dropout, on any host.
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    megatron_random._CUDA_RNG_STATE_TRACKER_INITIALIZED = False
    megatron_random.initialize_rng_tracker(inference_rng_tracker=True)
    ours = not dist.is_initialized()  # a vLLM engine in this process has a group of one rank too
    if ours:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        if ours:
            dist.destroy_process_group()
        megatron_random._CUDA_RNG_STATE_TRACKER, megatron_random._CUDA_RNG_STATE_TRACKER_INITIALIZED = tracker
        torch.cuda.current_device = before


_ENGINE: dict[str, Any] = {
    "max_model_len": 256,
    "max_num_batched_tokens": 256,
    "max_num_seqs": 8,
    "kv_cache_memory_bytes": 32 * 2**20,
    "generation_config": "vllm",
}


def start_rollout(folder: Path, **options: Any) -> Any:
    """A vLLM engine of this process on a checkpoint."""
    from vllm import LLM

    from mismatch_hooks.integrations.vllm import FORCED_DECODE, WORKER_EXTENSION, VllmBackend

    with pytest.MonkeyPatch.context() as patch:
        for name, value in _ENVIRONMENT.items():
            patch.setenv(name, value)
        llm = LLM(
            str(folder),
            skip_tokenizer_init=True,
            dtype="bfloat16",
            enforce_eager=True,
            disable_log_stats=True,
            use_tqdm_on_load=False,
            worker_extension_cls=WORKER_EXTENSION,
            logits_processors=[FORCED_DECODE],
            **{**_ENGINE, **options},
        )
        return VllmBackend(llm)


def _training_model(folder: Path) -> Any:
    from safetensors.torch import load_file

    from recipes.grpo_smollm2.model_file import read_shape
    from recipes.grpo_smollm2.trainer import build_model
    from recipes.grpo_smollm2.weights import to_megatron

    shape = read_shape(folder)
    model = build_model(shape, dtype=torch.bfloat16)
    checkpoint = dict(to_megatron(load_file(folder / "model.safetensors"), shape))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(checkpoint[name])
    return model


def engines_of(folder: Path, rollout: Any) -> TinyEngines:
    """The trainer's model of the same checkpoint beside a rollout engine; inside ``megatron_of_one_rank``."""
    from mismatch_hooks.integrations.megatron import MegatronBackend

    shape, model = shape_from_folder(folder), _training_model(folder)
    return TinyEngines(
        shape=shape,
        engines={PolicyRole.ROLLOUT: rollout, PolicyRole.TRAINING: MegatronBackend(model, shape=shape)},
        models={
            PolicyRole.ROLLOUT: rollout._llm.apply_model(lambda live: live)[0],
            PolicyRole.TRAINING: model,
        },
    )


def _checkpoint(factory: pytest.TempPathFactory, shape: Literal["llama", "qwen3"]) -> Path:
    # Qwen3's small models tie the head to the embedding; Llama's need not.
    return tiny_checkpoint(factory.mktemp("tiny"), shape=shape, tied=shape == "qwen3")


@pytest.fixture(scope="session")
def _llama_rollout(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Any]]:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    folder = _checkpoint(tmp_path_factory, "llama")
    rollout = start_rollout(folder)
    yield folder, rollout
    rollout._llm.llm_engine.engine_core.shutdown()


@pytest.fixture(scope="session")
def _qwen3_rollout(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Any]]:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    folder = _checkpoint(tmp_path_factory, "qwen3")
    rollout = start_rollout(folder)
    yield folder, rollout
    rollout._llm.llm_engine.engine_core.shutdown()


@pytest.fixture(scope="module")
def megatron_core() -> Iterator[None]:
    """megatron-core for the length of a test module."""
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    with megatron_of_one_rank():
        yield


@pytest.fixture(scope="module")
def llama_engines(_llama_rollout: tuple[Path, Any], megatron_core: None) -> TinyEngines:
    """Llama shape, untied head."""
    return engines_of(*_llama_rollout)


@pytest.fixture(scope="session")  # to stop one engine of this process takes the process groups from the others
def _fp32_head_rollout(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Any]]:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    folder = _checkpoint(tmp_path_factory, "llama")
    rollout = start_rollout(folder, hf_overrides={"head_dtype": "float32"})
    yield folder, rollout
    rollout._llm.llm_engine.engine_core.shutdown()


@pytest.fixture(scope="module")
def fp32_head_engines(_fp32_head_rollout: tuple[Path, Any], megatron_core: None) -> TinyEngines:
    """Llama shape, untied head, which rollout runs in fp32 by vLLM's own option and training in bf16."""
    return engines_of(*_fp32_head_rollout)


@pytest.fixture(scope="session")
def _long_rollout(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Any]]:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    folder = _checkpoint(tmp_path_factory, "llama")
    rollout = start_rollout(folder, max_model_len=512, max_num_batched_tokens=2048)
    yield folder, rollout
    rollout._llm.llm_engine.engine_core.shutdown()


@pytest.fixture(scope="module")
def long_engines(_long_rollout: tuple[Path, Any], megatron_core: None) -> TinyEngines:
    """Llama shape, and prompts of several cache blocks."""
    return engines_of(*_long_rollout)


@pytest.fixture(scope="session")
def _uncached_rollout(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Any]]:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    folder = _checkpoint(tmp_path_factory, "llama")
    rollout = start_rollout(folder, max_model_len=512, max_num_batched_tokens=2048, enable_prefix_caching=False)
    yield folder, rollout
    rollout._llm.llm_engine.engine_core.shutdown()


@pytest.fixture(scope="module")
def uncached_engines(_uncached_rollout: tuple[Path, Any], megatron_core: None) -> TinyEngines:
    """Likewise, with prefix caching off."""
    return engines_of(*_uncached_rollout)


# What a checkpoint may recommend for chat, and what nobody asks for in GRPO.
CHAT_SAMPLING = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.1}


@pytest.fixture(scope="session")
def _chat_rollout(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Any]]:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    folder = _checkpoint(tmp_path_factory, "llama")
    (folder / "generation_config.json").write_text(json.dumps(CHAT_SAMPLING), encoding="utf-8")
    rollout = start_rollout(folder, generation_config="auto", logprobs_mode="processed_logprobs")
    yield folder, rollout
    rollout._llm.llm_engine.engine_core.shutdown()


@pytest.fixture(scope="module")
def chat_engines(_chat_rollout: tuple[Path, Any], megatron_core: None) -> TinyEngines:
    """Llama shape; rollout returns processed log-probs and takes sampling defaults from the checkpoint's folder."""
    return engines_of(*_chat_rollout)


@pytest.fixture(scope="module")
def qwen3_engines(_qwen3_rollout: tuple[Path, Any], megatron_core: None) -> TinyEngines:
    """Qwen3 shape: norms of queries and keys, tied head."""
    return engines_of(*_qwen3_rollout)
