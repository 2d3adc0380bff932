"""A fingerprint names its input: equal in every process, different for every other input, and never a guess."""

import hashlib
import os
import subprocess
import sys
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch

from mismatch_hooks.schema.enums import Choice, NoiseFloor, Origin, PolicyRole
from mismatch_hooks.schema.fingerprint import fingerprint
from mismatch_hooks.schema.freeze import FrozenMapping, SchemaError
from mismatch_hooks.schema.score import Binding, CallCount

_PRINT = """
from mismatch_hooks.schema.enums import Choice, PolicyRole
from mismatch_hooks.schema.fingerprint import fingerprint
from mismatch_hooks.schema.score import Binding
names = {"c", "a", "b", "d"}
print(fingerprint({"b": names, "a": [1, 0.1, None, True, b"x"], "c": Binding(
    role=PolicyRole.ROLLOUT, choices={name: Choice.NATIVE for name in names})}))
"""


def test_a_fingerprint_is_the_same_in_every_process_and_under_every_hash_seed() -> None:
    seen = {
        subprocess.run(
            [sys.executable, "-c", _PRINT],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("0", "1", "4242")
    }
    assert len(seen) == 1
    assert len(seen.pop()) == 64


def test_a_fingerprint_is_the_sha256_of_canonical_json() -> None:
    assert (
        fingerprint({"b": 0.5, "a": 1})
        == hashlib.sha256(b'{"map":{"a":1,"b":{"float":"0x1.0000000000000p-1"}}}').hexdigest()
    )


_DISTINCT: dict[str, Any] = {
    "none": None,
    "true": True,
    "false": False,
    "one": 1,
    "one as a float": 1.0,
    "one as text": "1",
    "zero": 0.0,
    "minus zero": -0.0,
    "one ulp above one": 1.0000000000000002,
    "nan": float("nan"),
    "infinity": float("inf"),
    "bytes": b"1",
    "an empty list": [],
    "an empty mapping": {},
    "an empty set": set(),
    "a nested list": [[]],
    "a pair": ["a", 1],
    "a mapping": {"a": 1},
    "a mapping with another value": {"a": 2},
    "a mapping with another key": {"b": 1},
    "a mapping spelled like a tag": {"float": "0x1.0p+0"},
    "a mapping spelled like a record": {"record": ["CallCount", {}]},
    "an enum member": Choice.NATIVE,
    "a member of the same value in another enum": Origin.NATIVE,
    "an ordered enum member": NoiseFloor.SINGLE_LAYER_ANCHOR,
    "a record": CallCount(factor="a.b", site="s", rank=0, expected=1, observed=1),
    "the record with one field changed": CallCount(factor="a.b", site="s", rank=0, expected=1, observed=2),
    "a record of another role": Binding(role=PolicyRole.ROLLOUT),
    "a record of the other role": Binding(role=PolicyRole.TRAINING),
}


def test_no_two_different_inputs_share_a_fingerprint() -> None:
    seen: dict[str, str] = {}
    for name, value in _DISTINCT.items():
        clash = seen.setdefault(fingerprint(value), name)
        assert clash == name, f"{name} has the fingerprint of {clash}"


def test_order_of_keys_and_kind_of_container_do_not_matter() -> None:
    plain = fingerprint({"a": [1, 2], "b": {"c": {3, 4}}})
    assert fingerprint(FrozenMapping({"b": {"c": {4, 3}}, "a": (1, 2)})) == plain
    assert fingerprint(OrderedDict([("b", {"c": frozenset({4, 3})}), ("a", [1, 2])])) == plain


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        pytest.param(torch.zeros(1), "a fingerprint cannot contain a Tensor", id="a tensor"),
        pytest.param(np.int64(1), "a fingerprint cannot contain a int64", id="a numpy integer"),
        pytest.param(object(), "a fingerprint cannot contain a object", id="any object"),
        pytest.param(CallCount, "a fingerprint cannot contain a type", id="a class"),
        pytest.param({1: 2}, "a fingerprint takes mappings with string keys only", id="an integer key"),
        pytest.param({"a": [{"b": 1j}]}, "a fingerprint cannot contain a complex", id="nested in a list"),
    ],
)
def test_what_has_no_canonical_spelling_is_refused(value: Any, sentence: str) -> None:
    with pytest.raises(SchemaError, match=f"^{sentence}"):
        fingerprint(value)
