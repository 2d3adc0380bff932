"""Records are immutable all the way down, travel to other processes, and hold plain data only."""

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch

from mismatch_hooks.schema.enums import Choice, NoiseFloor, PolicyRole
from mismatch_hooks.schema.freeze import FrozenMapping, SchemaError, freeze, thaw


def _assign(mapping: Any) -> None:
    mapping["a"] = 2


def _delete(mapping: Any) -> None:
    del mapping["a"]


def _set_attribute(mapping: Any) -> None:
    mapping._items = {}


def _delete_attribute(mapping: Any) -> None:
    del mapping._items


@pytest.mark.parametrize(
    ("change", "error"),
    [
        pytest.param(_assign, TypeError, id="item assignment"),
        pytest.param(_delete, TypeError, id="item deletion"),
        pytest.param(_set_attribute, AttributeError, id="attribute assignment"),
        pytest.param(_delete_attribute, AttributeError, id="attribute deletion"),
    ],
)
def test_a_frozen_mapping_refuses_every_change(change: Callable[[Any], None], error: type[Exception]) -> None:
    mapping = FrozenMapping({"a": 1})
    with pytest.raises(error):
        change(mapping)
    assert mapping == {"a": 1}


def test_a_frozen_mapping_is_a_snapshot_of_what_it_was_given() -> None:
    given = {"outer": {"inner": [1, {"deep": {2}}]}}
    mapping = FrozenMapping(given)
    given["outer"]["inner"].append(3)
    given["more"] = {}
    assert mapping == {"outer": FrozenMapping({"inner": (1, FrozenMapping({"deep": frozenset({2})}))})}


def test_nested_containers_are_frozen_too() -> None:
    mapping = FrozenMapping({"list": [1], "map": {"a": [2]}, "set": {3}, "proxy": MappingProxyType({"b": 4})})
    assert (type(mapping["list"]), type(mapping["map"]), type(mapping["set"]), type(mapping["proxy"])) == (
        tuple,
        FrozenMapping,
        frozenset,
        FrozenMapping,
    )
    assert type(mapping["map"]["a"]) is tuple


def test_a_frozen_mapping_survives_pickling_with_its_type() -> None:
    mapping = FrozenMapping({"a": {"b": (1, 2)}, "choice": Choice.REFERENCE})
    copy = pickle.loads(pickle.dumps(mapping))
    assert copy == mapping
    assert (type(copy), type(copy["a"])) == (FrozenMapping, FrozenMapping)


def test_equal_frozen_mappings_hash_alike_whatever_the_order() -> None:
    one, other = FrozenMapping({"a": 1, "b": [2]}), FrozenMapping({"b": [2], "a": 1})
    assert (one == other, hash(one) == hash(other), len({one, other})) == (True, True, 1)
    assert one != FrozenMapping({"a": 1, "b": [3]})


def test_a_frozen_mapping_equals_a_plain_mapping_with_its_items() -> None:
    assert FrozenMapping({"a": 1}) == {"a": 1}
    assert FrozenMapping({"a": 1}) != {"a": 2}
    assert FrozenMapping({"a": 1}) != [("a", 1)]


def test_keys_are_strings_or_enum_members() -> None:
    assert FrozenMapping({PolicyRole.ROLLOUT: 1})[PolicyRole.ROLLOUT] == 1
    with pytest.raises(SchemaError, match=r"^a mapping in a record has the key 7; keys are strings or enum members\.$"):
        FrozenMapping({7: 1})


@dataclass
class _Mutable:
    number: int = 0


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        pytest.param(torch.zeros(2), "Tensor", id="a tensor"),
        pytest.param(np.zeros(2), "ndarray", id="an array"),
        pytest.param(_Mutable(), "_Mutable", id="a mutable dataclass"),
        pytest.param(object(), "object", id="any object"),
    ],
)
def test_what_cannot_be_snapshotted_is_refused_at_any_depth(value: object, kind: str) -> None:
    with pytest.raises(SchemaError, match=f"^a record cannot hold a {kind}; it takes"):
        freeze({"outer": [value]})


def test_thaw_gives_json_ready_data() -> None:
    frozen = freeze({"role": PolicyRole.ROLLOUT, "floor": NoiseFloor.PRODUCTION, "values": [1, {"a": {2, 1}}]})
    assert thaw(frozen) == {"role": "rollout", "floor": "production", "values": [1, {"a": [1, 2]}]}
    assert thaw(FrozenMapping({PolicyRole.TRAINING: 1})) == {"training": 1}
