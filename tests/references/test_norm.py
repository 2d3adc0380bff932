"""The norm reference: right to a stated bound, rounded once, and the same bits whatever else is in the batch."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mismatch_hooks.references.norm import add_rms_norm, rms_norm, sum_by_halves

EPSILON = 1e-5


def _drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _weights(width: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return (1.0 + 0.3 * _drawn(width, seed=99)).to(dtype)


def _rounded_before_the_weight(states: Tensor, weight: Tensor) -> Tensor:
    """Case C02's fault: the normalised value is rounded to the model's dtype, then multiplied and rounded again."""
    return weight * rms_norm(states.float(), torch.ones(states.shape[-1]), epsilon=EPSILON).to(states.dtype)


# ---- right --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 7, 64, 576])
def test_the_norm_is_that_of_float64_to_the_error_of_its_fp32_operations(width: int) -> None:
    """The bound: relative (width / 2 + 4) u, u = 2⁻²⁴.

    Squares round once each, a sum of n non-negative terms adds at most (n − 1) u in any order, the division and the
    epsilon one each: n + 2 in the mean square, halved by the square root. Root, reciprocal and two products: 4 more,
    of which the halved 2 leave room for second-order terms.
    """
    states, weight = _drawn(50, width), _weights(width, torch.float32)
    exact = states.double() / (states.double() ** 2).mean(-1, keepdim=True).add(EPSILON).sqrt() * weight.double()
    missed = (rms_norm(states, weight, epsilon=EPSILON).double() - exact).abs()
    assert bool((missed <= exact.abs() * (width / 2 + 5) * 2.0**-24).all())


def test_low_precision_inputs_are_computed_in_fp32_and_rounded_once() -> None:
    states, weight = _drawn(64, 128, dtype=torch.bfloat16), _weights(128)
    normalised = rms_norm(states, weight, epsilon=EPSILON)
    assert normalised.dtype is torch.bfloat16
    assert torch.equal(normalised, rms_norm(states.float(), weight.float(), epsilon=EPSILON).bfloat16())


def test_epsilon_and_weight_take_part() -> None:
    states, weight = torch.tensor([[2.0, -2.0]]), torch.tensor([0.5, 3.0])
    assert rms_norm(states, weight, epsilon=12.0).tolist() == [[0.25, -1.5]]  # ±2 / sqrt(4 + 12) * weight


def test_C02_rounding_before_the_weight_shows_only_where_weights_are_not_1() -> None:
    """The control of the case: with all weights 1 the planted fault changes no bit, so clearing the norm is right."""
    states = _drawn(64, 128, dtype=torch.bfloat16)
    ones, weight = torch.ones(128, dtype=torch.bfloat16), _weights(128)
    assert torch.equal(_rounded_before_the_weight(states, ones), rms_norm(states, ones, epsilon=EPSILON))
    faulty, right = _rounded_before_the_weight(states, weight), rms_norm(states, weight, epsilon=EPSILON)
    assert not torch.equal(faulty, right)
    # Only where the second rounding falls on another side: a spacing of bf16 apart (2⁻⁷ relative), never more.
    assert bool(((faulty.float() - right.float()).abs() <= right.float().abs() * 2.0**-7).all())


def test_pytorchs_norm_has_the_bits_of_the_reference_on_a_cpu() -> None:
    """It is what megatron-core's local layers build, and why training's native norm is no source of mismatch here."""
    for width in (32, 128, 576):
        states, weight = _drawn(64, width, dtype=torch.bfloat16), _weights(width)
        native = torch.nn.functional.rms_norm(states, (width,), weight, EPSILON)
        assert torch.equal(native, rms_norm(states, weight, epsilon=EPSILON))


def test_hugging_faces_norm_rounds_before_the_weight() -> None:
    llama = pytest.importorskip("transformers.models.llama.modeling_llama", reason="transformers is not installed")
    states, norm = _drawn(64, 128, dtype=torch.bfloat16), llama.LlamaRMSNorm(128, eps=EPSILON)
    norm.weight.data = _weights(128)
    assert torch.equal(norm(states), _rounded_before_the_weight(states, norm.weight))
    assert not torch.equal(norm(states), rms_norm(states, norm.weight, epsilon=EPSILON))


def test_what_is_normalised_is_the_rounded_sum_that_is_handed_on() -> None:
    states, residual = _drawn(64, 128, dtype=torch.bfloat16), _drawn(64, 128, dtype=torch.bfloat16, seed=1)
    weight = _weights(128)
    normalised, total = add_rms_norm(states, residual, weight, epsilon=EPSILON)
    assert torch.equal(total, states + residual)
    assert torch.equal(normalised, rms_norm(total, weight, epsilon=EPSILON))
    unrounded = rms_norm(states.float() + residual.float(), weight, epsilon=EPSILON).bfloat16()
    assert not torch.equal(normalised, unrounded)


# ---- the same bits ------------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(
    rows=st.integers(1, 40),
    width=st.sampled_from([1, 5, 32, 96, 128, 576]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 2**32),
)
def test_a_row_does_not_depend_on_its_neighbours_their_order_or_their_number(
    rows: int, width: int, dtype: torch.dtype, seed: int
) -> None:
    """Link one of rollout prefill = rollout decode: a row alone has the bits that it has in any batch."""
    states, weight = _drawn(rows, width, dtype=dtype, seed=seed) * 3, _weights(width)
    whole = rms_norm(states, weight, epsilon=EPSILON)
    alone = [rms_norm(states[row : row + 1], weight, epsilon=EPSILON) for row in range(rows)]
    assert torch.equal(torch.cat(alone), whole)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(rms_norm(states[order], weight, epsilon=EPSILON), whole[order])
    padded = torch.cat((states, torch.zeros(7, width, dtype=dtype)))
    assert torch.equal(rms_norm(padded, weight, epsilon=EPSILON)[:rows], whole)


def test_megatrons_layout_and_vllms_layout_have_the_same_bits() -> None:
    """Link two, trainer prefill = rollout prefill: [sequence, batch, width] against flat rows."""
    states, weight = _drawn(11, 4, 96, dtype=torch.bfloat16), _weights(96)
    training = rms_norm(states, weight, epsilon=EPSILON)
    for sample in range(4):
        assert torch.equal(training[:, sample], rms_norm(states[:, sample].contiguous(), weight, epsilon=EPSILON))


def test_how_a_row_lies_in_memory_changes_no_bit() -> None:
    """In fp32, where another order of summation shows at once."""
    states, weight = _drawn(11, 4, 96), _weights(96)
    turned = states.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    assert not turned.is_contiguous()
    assert torch.equal(rms_norm(turned, weight, epsilon=EPSILON), rms_norm(states, weight, epsilon=EPSILON))


def test_the_number_of_threads_changes_no_bit() -> None:
    states, weight, threads = _drawn(997, 250), _weights(250), torch.get_num_threads()
    seen = []
    try:
        for count in (1, 2, 3, 5):
            torch.set_num_threads(count)
            seen.append(rms_norm(states, weight, epsilon=EPSILON))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one, seen[0]) for one in seen)


@pytest.mark.parametrize("width", [1, 2, 3, 31, 576])
def test_the_sum_by_halves_is_exact_on_small_integers_and_the_same_for_any_number_of_rows(width: int) -> None:
    whole = torch.arange(9 * width, dtype=torch.float32).reshape(9, width)
    assert torch.equal(sum_by_halves(whole), whole.sum(-1, keepdim=True))
    values = _drawn(9, width)
    assert torch.equal(sum_by_halves(values)[4:5], sum_by_halves(values[4:5]))


def test_off_the_cpu_the_mean_square_is_the_sum_by_halves() -> None:
    """No GPU is at hand; the meta device shows which way is taken: a pad and ten halvings of 576 values, no mean."""
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: list[str] = []

    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func.__name__)
            return func(*args, **(kwargs or {}))

    with Log():  # type: ignore[no-untyped-call]
        rms_norm(torch.empty(3, 576, device="meta"), torch.empty(576, device="meta"), epsilon=EPSILON)
    assert ("mean.dim" in seen, seen.count("constant_pad_nd.default"), seen.count("add.Tensor")) == (False, 1, 10 + 1)


# ---- gradients ----------------------------------------------------------------------------------------------------


def test_gradients_of_states_residual_and_weight_are_those_of_finite_differences() -> None:
    states, residual, weight = (_drawn(3, 6, seed=seed).double().requires_grad_() for seed in (0, 1, 2))
    assert torch.autograd.gradcheck(
        lambda x, r, w: add_rms_norm(x, r, w[0], epsilon=EPSILON), (states, residual, weight)
    )


def test_gradients_through_the_sum_by_halves_are_ones() -> None:
    values = _drawn(2, 5).requires_grad_()
    sum_by_halves(values).sum().backward()
    assert values.grad is not None
    assert torch.equal(values.grad, torch.ones(2, 5))
