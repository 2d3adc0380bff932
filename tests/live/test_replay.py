"""Distances between tensors, and engines that cannot play anything."""

import math

import pytest
import torch

from mismatch_hooks.live.replay import distance, replay_operator
from mismatch_hooks.schema.enums import Choice, PolicyRole
from mismatch_hooks.schema.replay import NotReplayableError
from mismatch_hooks.schema.score import Binding
from tests.fake_engines import FACTOR, FakeEngine
from tests.live.test_ablation import SEQUENCES


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_a_unit_in_the_last_place_is_a_step_to_the_next_number(dtype: torch.dtype) -> None:
    one = torch.tensor([1.0, -2.0, 0.0, 0.1], dtype=dtype)
    up = torch.nextafter(one, torch.full((), math.inf, dtype=dtype))
    found = distance(one, up)
    assert (found.elements, found.differing, found.max_ulp) == (4, 4, 1)
    assert found.dtype == str(dtype).removeprefix("torch.")
    assert found.max_abs == float((up.double() - one.double()).max())


def test_the_zeros_are_one_number_and_steps_are_counted_across_them() -> None:
    smallest = torch.tensor([2.0**-149])
    assert distance(torch.tensor([0.0]), torch.tensor([-0.0])).differing == 0
    assert distance(smallest, -smallest).max_ulp == 2


def test_nan_equals_nan_and_is_infinitely_far_from_a_number() -> None:
    nan = torch.tensor([math.nan])
    assert distance(nan, nan).differing == 0
    found = distance(nan, torch.tensor([1.0]))
    assert (found.differing, found.max_abs) == (1, math.inf)


def test_the_wider_dtype_counts() -> None:
    found = distance(torch.tensor([1.0], dtype=torch.bfloat16), torch.tensor([1.0 + 2.0**-23]))
    assert (found.dtype, found.max_ulp) == ("float32", 1)


def test_other_shapes_are_refused() -> None:
    with pytest.raises(NotReplayableError, match=r"\[2\] and \[3\]"):
        distance(torch.zeros(2), torch.zeros(3))


def test_an_engine_without_the_calls_is_named() -> None:
    engines = {role: FakeEngine(side=role) for role in PolicyRole}
    bindings = {role: Binding(role=role, choices={FACTOR: Choice.NATIVE}, parameters={}) for role in PolicyRole}
    found = replay_operator(engines, bindings, SEQUENCES)
    assert [one.reason for one in found] == [
        f"{role.value}: FakeEngine has no record_calls and play_calls" for role in PolicyRole
    ]
