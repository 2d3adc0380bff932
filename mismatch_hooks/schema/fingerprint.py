"""Fingerprints: SHA-256 of canonical JSON, equal across processes and hash seeds, refusing what has no one spelling."""

import hashlib
import json
import math
from collections.abc import Mapping
from enum import Enum
from typing import Any

from mismatch_hooks.schema.freeze import SchemaError


def fingerprint(value: Any) -> str:
    """Return the hexadecimal SHA-256 of ``value``'s canonical JSON.

    Raises:
        SchemaError: ``value`` contains a type without a canonical spelling; nothing is ever passed through ``str()``.
    """
    text = json.dumps(_canonical(value), sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def _canonical(value: Any) -> Any:
    # Each non-JSON type is tagged, so that an enum, a tuple of pairs and a string never share a spelling.
    if isinstance(value, Enum):
        return {"enum": [type(value).__name__, value.name]}
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return {"float": value.hex() if math.isfinite(value) else repr(value)}
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, Mapping):
        if any(not isinstance(key, str) for key in value):
            raise SchemaError("a fingerprint takes mappings with string keys only.")
        return {"map": {key: _canonical(member) for key, member in value.items()}}
    if isinstance(value, tuple | list):
        return {"list": [_canonical(member) for member in value]}
    if isinstance(value, frozenset | set):
        return {
            "set": sorted(
                (_canonical(member) for member in value), key=lambda member: json.dumps(member, sort_keys=True)
            )
        }
    parameters = getattr(type(value), "__dataclass_params__", None)
    if parameters is not None and parameters.frozen:
        fields = {name: _canonical(getattr(value, name)) for name in type(value).__dataclass_fields__}
        return {"record": [type(value).__name__, fields]}
    raise SchemaError(
        f"a fingerprint cannot contain a {type(value).__name__}; it takes scalars, sequences, mappings, records."
    )
