"""Readings that do not depend on the engine: installed libraries and environment variables of this process."""

import os
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from mismatch_hooks.schema.enums import Source
from mismatch_hooks.schema.readback import Reading, Unobservable

# Readings are streamed and written to files: no variable with one of these in its name is ever read.
_SECRETS = ("KEY", "TOKEN", "SECRET", "PASSWORD", "CREDENTIAL")


def library_readings(names: Sequence[str]) -> dict[str, Reading | Unobservable]:
    """Return ``library.<distribution>`` with the installed version of each named distribution."""
    return {f"library.{name}": _library(name) for name in names}


def _library(name: str) -> Reading | Unobservable:
    try:
        return Reading(effective=version(name), source=Source.ENVIRONMENT, where=f"installed distribution {name}")
    except PackageNotFoundError:
        return Unobservable(reason=f"no distribution {name} is installed here")


def driver_readings(version_file: Path = Path("/sys/module/nvidia/version")) -> dict[str, Reading | Unobservable]:
    """Return ``engine.driver`` where an NVIDIA driver is loaded; a host without one has no such setting."""
    if not version_file.exists():
        return {}
    loaded = version_file.read_text(encoding="utf-8").strip()
    return {"engine.driver": Reading(effective=loaded, source=Source.ENVIRONMENT, where=str(version_file))}


def environment_readings(names: Sequence[str]) -> dict[str, Reading | Unobservable]:
    """Return ``environment.<VARIABLE>`` of every variable of this process that is set and named.

    Args:
        names: variables, or globs such as ``"NVTE_*"``; a variable whose name speaks of a secret is left out.
    """
    found: Mapping[str, str] = dict(sorted(os.environ.items()))
    return {
        f"environment.{name}": Reading(effective=value, source=Source.ENVIRONMENT, where=name)
        for name, value in found.items()
        if any(fnmatchcase(name, pattern) for pattern in names) and not any(secret in name for secret in _SECRETS)
    }
