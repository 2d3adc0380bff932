"""Readings of the process itself."""

import pytest

from mismatch_hooks.live.host_readback import environment_readings, library_readings
from mismatch_hooks.schema.enums import Source
from mismatch_hooks.schema.readback import Reading, Unobservable


def test_a_library_is_its_installed_version_or_unobservable() -> None:
    found = library_readings(["numpy", "no-such-distribution"])
    numpy = found["library.numpy"]
    assert isinstance(numpy, Reading)
    assert numpy.effective.count(".") == 2
    assert found["library.no-such-distribution"] == Unobservable(
        reason="no distribution no-such-distribution is installed here"
    )


def test_variables_that_are_set_are_read_and_secrets_never(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VLLM_ONE", "VLLM_API_KEY", "OTHER_ONE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    found = environment_readings(["VLLM_*", "CUBLAS_WORKSPACE_CONFIG"])
    assert found["environment.VLLM_ONE"] == Reading(effective="1", source=Source.ENVIRONMENT, where="VLLM_ONE")
    assert not {"environment.VLLM_API_KEY", "environment.OTHER_ONE", "environment.CUBLAS_WORKSPACE_CONFIG"} & set(found)
