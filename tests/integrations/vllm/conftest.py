"""Two real engines for all tests of this folder: one with every misleading setting of the cases, one healthy twin."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from mismatch_hooks.integrations.vllm import FORCED_DECODE, WORKER_EXTENSION, VllmBackend
from tests.tiny_models import tiny_checkpoint

_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
GENERATION_CONFIG = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.1}


def build(folder: Path, **settings: Any) -> Any:
    """A small in-process engine with everything of ours in it."""
    from vllm import LLM

    return LLM(
        str(folder),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=512,
        max_num_batched_tokens=512,
        max_num_seqs=16,
        kv_cache_memory_bytes=64 * 2**20,  # the default of 1 GB an engine would be touched, and all engines stay
        disable_log_stats=True,
        use_tqdm_on_load=False,
        worker_extension_cls=WORKER_EXTENSION,
        **{"logits_processors": [FORCED_DECODE], **settings},
    )


@pytest.fixture(scope="session")
def environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in _ENVIRONMENT.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_checkpoint(tmp_path_factory.mktemp("model"), shape="llama")
    (folder / "generation_config.json").write_text(json.dumps(GENERATION_CONFIG), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def qwen3_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), shape="qwen3")


@pytest.fixture(scope="session")
def llama(environment: None, llama_folder: Path) -> Iterator[VllmBackend]:
    """Llama shape, prefix caching on; three requests that this host does not honour, and sampling defaults on file."""
    os.environ["VLLM_NO_SUCH_VARIABLE"] = "1"
    llm = build(llama_folder, attention_backend="FLASH_ATTN", hf_overrides={"rope_theta": 500000})
    yield VllmBackend(llm, weight_version=lambda: "7")
    llm.llm_engine.engine_core.shutdown()
    del os.environ["VLLM_NO_SUCH_VARIABLE"]


@pytest.fixture(scope="session")
def qwen3(environment: None, qwen3_folder: Path) -> Iterator[VllmBackend]:
    """Qwen3 shape; the rope override that takes effect, and no other."""
    llm = build(qwen3_folder, hf_overrides={"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}})
    yield VllmBackend(llm)
    llm.llm_engine.engine_core.shutdown()


def model_of(backend: VllmBackend) -> Any:
    """The live model of an in-process engine."""
    return backend._llm.apply_model(lambda model: model)[0]
