"""The SwiGLU reference: right to a stated bound, rounded once, and the same bits wherever an element stands."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import silu

from mismatch_hooks.references.activation import swiglu


def _drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return (3 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


# ---- right --------------------------------------------------------------------------------------------------------


def test_the_activation_is_that_of_float64_to_the_error_of_its_fp32_operations() -> None:
    """The bound: relative 8 u, u = 2⁻²⁴: the exponential is within 2 u (one ulp), and five operations round once.

    (decay, 1 + decay, gate times the choice, the quotient, times up; the quotient's own relative error in the
    denominator is no larger than the decay's.)
    """
    gate_up = _drawn(40, 128)
    gate, up = gate_up.double().chunk(2, dim=-1)
    exact = gate / (1 + (-gate).exp()) * up
    assert bool(((swiglu(gate_up).double() - exact).abs() <= exact.abs() * 8 * 2.0**-24).all())


def test_the_first_half_is_the_gate() -> None:
    assert swiglu(torch.tensor([[0.0, 5.0]])).item() == 0.0
    assert swiglu(torch.tensor([[5.0, 0.0]])).item() == 0.0
    assert swiglu(torch.tensor([[60.0, 2.0]])).item() == 120.0  # exp(−60) is below half a spacing of 1
    assert swiglu(torch.tensor([[-200.0, 2.0]])).item() == 0.0


def test_low_precision_inputs_are_computed_in_fp32_and_rounded_once() -> None:
    """Both engines' own kernels round silu(gate) before they multiply; that shows in some elements, not in all."""
    gate_up = _drawn(64, 128, dtype=torch.bfloat16)
    once = swiglu(gate_up)
    assert once.dtype is torch.bfloat16
    assert torch.equal(once, swiglu(gate_up.float()).bfloat16())
    gate, up = gate_up.chunk(2, dim=-1)
    twice = silu(gate) * up
    assert 0 < int((once != twice).sum()) < once.numel()


# ---- the same bits ------------------------------------------------------------------------------------------------


def test_torchs_own_silu_gives_an_element_other_bits_at_the_end_of_a_vector() -> None:
    """Why the reference writes it out. A torch that passes here may be used as it is, and the trap's comment goes."""
    gate = _drawn(4096)
    alone = torch.cat([silu(gate[at : at + 1]) for at in range(4096)])
    assert not torch.equal(silu(gate), alone)


@settings(max_examples=40)
@given(
    rows=st.integers(1, 40),
    width=st.sampled_from([1, 3, 17, 64, 250]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 2**32),
)
def test_a_row_does_not_depend_on_its_neighbours_their_order_or_their_number(
    rows: int, width: int, dtype: torch.dtype, seed: int
) -> None:
    gate_up = _drawn(rows, 2 * width, dtype=dtype, seed=seed)
    whole = swiglu(gate_up)
    assert torch.equal(torch.cat([swiglu(gate_up[row : row + 1]) for row in range(rows)]), whole)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(swiglu(gate_up[order]), whole[order])
    padded = torch.cat((gate_up, torch.zeros(7, 2 * width, dtype=dtype)))
    assert torch.equal(swiglu(padded)[:rows], whole)


def test_an_element_does_not_depend_on_how_the_width_is_split_over_ranks() -> None:
    """Tensor parallel ranks hold parts of the gate and the same parts of up."""
    gate_up = _drawn(5, 192, dtype=torch.bfloat16)
    gate, up = gate_up.chunk(2, dim=-1)
    for ranks in (2, 4):
        parts = zip(gate.chunk(ranks, dim=-1), up.chunk(ranks, dim=-1), strict=True)
        assert torch.equal(torch.cat([swiglu(torch.cat(part, dim=-1)) for part in parts], dim=-1), swiglu(gate_up))


def test_the_number_of_threads_changes_no_bit() -> None:
    """With 997 rows of 250 no share of a thread is a whole number of vector registers."""
    gate_up, threads, seen = _drawn(997, 500), torch.get_num_threads(), []
    try:
        for count in (1, 2, 3, 5):
            torch.set_num_threads(count)
            seen.append(swiglu(gate_up))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one, seen[0]) for one in seen)


def test_megatrons_layout_and_vllms_layout_have_the_same_bits() -> None:
    gate_up = _drawn(11, 4, 128, dtype=torch.bfloat16)
    training = swiglu(gate_up)
    for sample in range(4):
        assert torch.equal(training[:, sample], swiglu(gate_up[:, sample].contiguous()))


# ---- gradients ----------------------------------------------------------------------------------------------------


def test_gradients_are_those_of_finite_differences() -> None:
    gate_up = _drawn(4, 10).double().requires_grad_()
    assert torch.autograd.gradcheck(swiglu, (gate_up,))


@pytest.mark.parametrize(
    ("gate", "slope"),
    [
        pytest.param(0.0, 0.5, id="where both branches meet"),
        pytest.param(-200.0, 0.0, id="where exp(−gate) is above every fp32"),
        pytest.param(200.0, 1.0, id="where it is zero"),
    ],
)
def test_the_gradient_is_finite_and_right_at_the_edges(gate: float, slope: float) -> None:
    gate_up = torch.tensor([[gate, 1.0]], requires_grad=True)
    swiglu(gate_up).backward()
    assert gate_up.grad is not None
    assert gate_up.grad[0, 0].item() == slope
