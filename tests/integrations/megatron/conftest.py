"""megatron-core on this host, for the length of a test module."""

from collections.abc import Iterator

import pytest

from tests.tiny_engines import megatron_of_one_rank


@pytest.fixture(scope="module")
def megatron() -> Iterator[None]:
    """megatron-core set up for one rank."""
    with megatron_of_one_rank():
        yield


@pytest.fixture(autouse=True)
def attention_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every model that is built sets these process-wide, and the next one with another backend asserts on them."""
    for variable in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
        monkeypatch.setenv(variable, "")  # so that it is removed again afterwards
        monkeypatch.delenv(variable)
