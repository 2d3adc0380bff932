"""A traced pass is complete and ordered, or it cannot be built."""

from typing import Any

import pytest

from mismatch_hooks.schema.activation import (
    ActivationCapture,
    ModuleActivations,
    SequenceActivations,
    forward_position,
)
from mismatch_hooks.schema.enums import PolicyRole
from mismatch_hooks.schema.freeze import SchemaError, thaw
from mismatch_hooks.schema.score import Binding, Evidence

ROW = SequenceActivations(digests=("0011223344556677",), largest=(2.0,))


def module(semantic: str, sequences: int = 1) -> ModuleActivations:
    return ModuleActivations(semantic=semantic, dtype="bfloat16", width=4, sequences=(ROW,) * sequences)


def capture(**given: Any) -> ActivationCapture:
    settings: dict[str, Any] = {
        "role": PolicyRole.ROLLOUT,
        "binding": Binding(role=PolicyRole.ROLLOUT),
        "token_digests": ("t",),
        "modules": (module("head"), module("layers.1.output"), module("embedding")),
        "evidence": Evidence(forwards=(1,)),
        "seconds": 0.5,
    }
    return ActivationCapture(**(settings | given))


def test_modules_are_held_in_the_order_of_the_forward() -> None:
    assert [one.semantic for one in capture().modules] == ["embedding", "layers.1.output", "head"]


def test_layers_are_ordered_by_number_and_not_by_letter() -> None:
    assert forward_position("layers.9.output") < forward_position("layers.10.input_norm") < forward_position("head")


@pytest.mark.parametrize("semantic", ["layers.0.mlp", "layers.x.output", "output", "layers.0", "norm"])
def test_a_point_of_another_name_is_refused_with_those_that_exist(semantic: str) -> None:
    with pytest.raises(SchemaError, match=r"semantic: got .*; accepts embedding, final_norm, head, or layers"):
        module(semantic)


def test_rows_of_another_batch_are_refused() -> None:
    with pytest.raises(SchemaError, match="embedding has rows of 2 sequences and the pass had 1"):
        capture(modules=(module("embedding", sequences=2),))


@pytest.mark.parametrize(
    "given",
    [
        pytest.param({"modules": (module("head"), module("head"))}, id="recorded twice"),
        pytest.param({"left_out": {"head": "its rows are cut"}}, id="recorded and left out"),
    ],
)
def test_a_point_is_named_once(given: dict[str, Any]) -> None:
    with pytest.raises(SchemaError, match="head: named twice"):
        capture(**given)


def test_digests_and_largest_values_describe_the_same_rows() -> None:
    with pytest.raises(SchemaError, match="2 digests and 1 largest"):
        SequenceActivations(digests=("a", "b"), largest=(1.0,))


def test_a_module_survives_the_way_through_plain_data() -> None:
    plain = thaw(module("embedding"))
    sequences = tuple(SequenceActivations(**sequence) for sequence in plain["sequences"])
    assert ModuleActivations(**{**plain, "sequences": sequences}) == module("embedding")
