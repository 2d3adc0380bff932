"""The rope reference: right to a stated bound, and the same bits whatever else is in the batch."""

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from mismatch_hooks.references.rope import RotaryTable, UnsupportedRopeError, inverse_frequencies, rotate

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _table(theta: float = 1e4, rotary_dim: int = 64, scaling: Mapping[str, object] | None = None) -> RotaryTable:
    return RotaryTable(inverse_frequencies(theta=theta, rotary_dim=rotary_dim, scaling=scaling or {}))


def _states(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _oracle(states: Tensor, positions: Tensor, theta: float) -> Tensor:
    """The rotation in float64 from the formula alone."""
    half = states.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = (positions.double()[:, None] * frequencies)[:, None]
    first, second = states.double()[..., :half], states.double()[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


# ---- right --------------------------------------------------------------------------------------------------------


def test_the_rotation_is_that_of_float64_to_the_error_of_its_fp32_angles() -> None:
    """The bound: |Δ| ≤ (|a| + |b|)(p·f·(2 ln θ + 4) u + 5 u) for a pair (a, b), position p, frequency f, u = 2⁻²⁴.

    A frequency is one power, one division and the quotient in its exponent: its relative error is at most
    (ln θ · 2 + 3) u, which the position multiplies into an angle error; the product p·f rounds once more (u·p·f).
    Cosine and sine are within 2 u, products and the sum add 3 u at most.
    """
    theta, unit = 1e6, 2.0**-24
    positions = torch.tensor([0, 1, 7, 511, 4095])
    states = _states(5, 3, 64)
    rotated = rotate(states, *_table(theta).at(positions))
    frequencies = theta ** (-torch.arange(32, dtype=torch.float64) / 32)
    angle_error = positions.double()[:, None] * frequencies * (2 * math.log(theta) + 4) * unit
    sizes = states[..., :32].abs().double() + states[..., 32:].abs().double()
    bound = sizes * (angle_error[:, None] + 5 * unit)
    missed = (rotated.double() - _oracle(states, positions, theta)).abs()
    assert bool((missed <= torch.cat((bound, bound), dim=-1)).all())


def test_low_precision_inputs_are_computed_in_fp32_and_rounded_once() -> None:
    """Published for RoPE at this shape: fused bf16 is fp32 cast down, to the bit; arithmetic in bf16 is not."""
    states = _states(512, 14, 64, dtype=torch.bfloat16)
    table = _table(1e6)
    cos, sin = table.at(torch.arange(512))
    rotated = rotate(states, cos, sin)
    assert rotated.dtype is torch.bfloat16
    assert torch.equal(rotated, rotate(states.float(), cos, sin).bfloat16())
    first, second = states[..., :32], states[..., 32:]
    unfused = torch.cat(
        (first * cos.bfloat16() - second * sin.bfloat16(), second * cos.bfloat16() + first * sin.bfloat16()), -1
    )
    assert not torch.equal(rotated, unfused)


def test_position_zero_is_the_identity() -> None:
    states = _states(1, 2, 64, dtype=torch.bfloat16)
    assert torch.equal(rotate(states, *_table().at(torch.tensor([0]))), states)


def test_scores_depend_on_the_distance_of_positions_only() -> None:
    query, key = _states(1, 1, 64, seed=1), _states(1, 1, 64, seed=2)

    def attention_score(here: int, there: int) -> float:
        table = _table()
        rotated = rotate(query, *table.at(torch.tensor([here]))), rotate(key, *table.at(torch.tensor([there])))
        return float((rotated[0] * rotated[1]).sum())

    # 64 products of standard normals, each within some 100 · 2⁻²⁴ of position error.
    assert attention_score(9, 4) == pytest.approx(attention_score(105, 100), abs=64 * 100 * 2.0**-24)
    assert abs(attention_score(9, 4) - attention_score(9, 5)) > 0.1


def test_only_the_rotary_part_of_a_head_turns() -> None:
    states = _states(6, 2, 64, dtype=torch.bfloat16)
    cos, sin = _table(rotary_dim=32).at(torch.arange(6))
    rotated = rotate(states, cos, sin)
    assert rotated.shape == states.shape
    assert torch.equal(rotated[..., 32:], states[..., 32:])
    assert torch.equal(rotated[..., :32], rotate(states[..., :32], cos, sin))


# ---- the same bits ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_row_does_not_depend_on_its_neighbours(dtype: torch.dtype) -> None:
    """Link one of rollout prefill = rollout decode: each row alone has the bits that it has in the batch."""
    states, positions, table = _states(37, 3, 64, dtype=dtype), torch.arange(37) * 3, _table()
    whole = rotate(states, *table.at(positions))
    alone = torch.cat([rotate(states[row : row + 1], *table.at(positions[row : row + 1])) for row in range(37)])
    assert torch.equal(whole, alone)
    order = torch.randperm(37, generator=torch.Generator().manual_seed(0))
    assert torch.equal(rotate(states[order], *table.at(positions[order])), whole[order])
    assert torch.equal(rotate(states[:5], *table.at(positions[:5])), whole[:5])


def test_megatrons_layout_and_vllms_layout_have_the_same_bits() -> None:
    """Link two, trainer prefill = rollout prefill: [sequence, batch, heads, dim] rows against flat token rows."""
    states, table = _states(11, 4, 3, 64, dtype=torch.bfloat16), _table()
    cos, sin = table.first(11, torch.device("cpu"))
    training = rotate(states, cos[:11, None, None], sin[:11, None, None])
    for sample in range(4):
        rollout = rotate(states[:, sample], *table.at(torch.arange(11)))
        assert torch.equal(training[:, sample], rollout)


def test_a_table_that_grows_keeps_its_bits() -> None:
    grown, positions = _table(1e6), torch.arange(9)
    small = [rows.clone() for rows in grown.at(positions)]
    grown.at(torch.tensor([70_000]))
    assert all(torch.equal(before, now) for before, now in zip(small, grown.at(positions), strict=True))
    fresh = _table(1e6).first(100_000, torch.device("cpu"))
    assert all(
        torch.equal(grown.at(torch.tensor([p]))[i][0, 0], fresh[i][p]) for p in (8, 4_097, 70_000) for i in (0, 1)
    )


def test_a_table_gives_no_row_for_no_position() -> None:
    cos, sin = _table().at(torch.empty(0, dtype=torch.int64))
    assert (cos.shape, sin.shape) == ((0, 1, 32), (0, 1, 32))


# ---- frequencies --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("theta", "dim", "changes"),
    [
        pytest.param(5e5, 64, {}, id="Llama 3.2 1B"),
        pytest.param(5e5, 128, {"factor": 8.0}, id="Llama 3.1 8B"),
        pytest.param(1e4, 32, {"original_max_position_embeddings": 512}, id="a tiny model"),
    ],
)
def test_llama3_frequencies_are_those_of_hugging_face_to_the_bit(
    theta: float, dim: int, changes: dict[str, Any]
) -> None:
    rules = pytest.importorskip("transformers.modeling_rope_utils")
    scaling = {**LLAMA3, **changes}
    config = pytest.importorskip("transformers").LlamaConfig(
        hidden_size=dim, num_attention_heads=1, rope_parameters={**scaling, "rope_theta": theta}
    )
    ours = inverse_frequencies(theta=theta, rotary_dim=dim, scaling=scaling)
    theirs, attention_factor = rules.ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    assert attention_factor == 1.0
    assert torch.equal(ours, theirs)
    plain = inverse_frequencies(theta=theta, rotary_dim=dim, scaling={})
    assert (bool(ours[0] == plain[0]), bool(ours[-1] == plain[-1] / scaling["factor"])) == (True, True)


def test_c19_another_scaling_factor_gives_other_frequencies() -> None:
    last = [
        float(inverse_frequencies(theta=5e5, rotary_dim=64, scaling={**LLAMA3, "factor": f})[-1]) for f in (8.0, 32.0)
    ]
    assert last[0] == 4 * last[1]


@pytest.mark.parametrize(
    ("scaling", "factor"),
    [
        pytest.param({}, 1.0, id="none"),
        pytest.param({"rope_type": "default", "rope_theta": 1e4}, 1.0, id="default"),
        pytest.param({"rope_type": "linear", "factor": 4}, 4.0, id="linear"),
        pytest.param({"type": "linear", "factor": 4.0}, 4.0, id="linear in its older spelling"),
    ],
)
def test_linear_scaling_divides_every_frequency(scaling: dict[str, object], factor: float) -> None:
    plain = inverse_frequencies(theta=1e4, rotary_dim=8, scaling={})
    assert plain.tolist() == [1.0, *(torch.tensor([1.0]) / 1e4 ** torch.tensor([0.25, 0.5, 0.75])).tolist()]
    assert torch.equal(inverse_frequencies(theta=1e4, rotary_dim=8, scaling=scaling), plain / factor)


@pytest.mark.parametrize(
    ("scaling", "sentence"),
    [
        pytest.param(
            {"rope_type": "yarn", "factor": 4.0},
            "rope_type: got 'yarn'; the fp32 reference knows default, linear, llama3.",
            id="unknown type",
        ),
        pytest.param(
            {"rope_type": "linear"},
            "rope scaling factor: got None; accepts a number, as in the model file.",
            id="missing parameter",
        ),
        pytest.param(
            {**LLAMA3, "low_freq_factor": True},
            "rope scaling low_freq_factor: got True; accepts a number, as in the model file.",
            id="a boolean",
        ),
        pytest.param(
            {**LLAMA3, "factor": "32"},
            "rope scaling factor: got '32'; accepts a number, as in the model file.",
            id="text",
        ),
    ],
)
def test_a_rope_that_has_no_reference_is_refused_in_one_sentence(scaling: dict[str, object], sentence: str) -> None:
    with pytest.raises(UnsupportedRopeError) as refused:
        inverse_frequencies(theta=1e4, rotary_dim=64, scaling=scaling)
    assert str(refused.value) == sentence


# ---- gradients ----------------------------------------------------------------------------------------------------


def test_gradients_are_those_of_float64_autograd() -> None:
    """The gradient is the upstream one turned back: two fp32 products and a sum, so within 4 u · (|a| + |b|)."""
    states, upstream, positions = _states(7, 2, 16), _states(7, 2, 16, seed=1), torch.arange(7) * 5
    cos, sin = _table(rotary_dim=16).at(positions)
    ours = states.clone().requires_grad_()
    rotate(ours, cos, sin).backward(upstream)
    exact = states.double().requires_grad_()
    first, second = exact[..., :8], exact[..., 8:]
    wide_cos, wide_sin = cos.double(), sin.double()
    torch.cat((first * wide_cos - second * wide_sin, second * wide_cos + first * wide_sin), -1).backward(
        upstream.double()
    )
    assert ours.grad is not None and exact.grad is not None
    sizes = upstream[..., :8].abs() + upstream[..., 8:].abs()
    bound = 4 * 2.0**-24 * torch.cat((sizes, sizes), dim=-1).double()
    assert bool(((ours.grad.double() - exact.grad).abs() <= bound).all())


def test_the_part_that_does_not_turn_passes_its_gradient_through() -> None:
    states = _states(3, 1, 24).requires_grad_()
    upstream = _states(3, 1, 24, seed=1)
    rotate(states, *_table(rotary_dim=16).at(torch.arange(3))).backward(upstream)
    assert states.grad is not None
    assert torch.equal(states.grad[..., 16:], upstream[..., 16:])
