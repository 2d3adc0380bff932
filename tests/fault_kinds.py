"""Kinds of faults that a real engine can have, each plantable on either side and in several sizes.

A kind changes one step of one operator; everything else in that operator stays the reference, so that a fault too small
to change a bit is seen to change none. What is in ``planted_faults`` and has no size is used from there.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional

from mismatch_hooks.references import attention
from mismatch_hooks.references.activation import swiglu
from mismatch_hooks.references.norm import rms_norm
from mismatch_hooks.references.rope import RotaryTable, inverse_frequencies, rotate
from mismatch_hooks.schema.enums import PolicyRole
from mismatch_hooks.schema.shape import ModelShape
from tests.planted_faults import Fault, scaled_output
from tests.tiny_engines import TinyEngines

_TRAINING = PolicyRole.TRAINING


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultKind:
    """One kind of fault in an operator.

    Attributes:
        name: in words; unique with ``factor``.
        factor: whose verdict has to name it.
        sizes: coarse first; one 0.0 where there is no size.
        plant: from the role and a size to the fault.
    """

    name: str
    factor: str
    plant: Callable[[PolicyRole, float], Fault]
    sizes: tuple[float, ...] = (0.0,)


@dataclass(frozen=True, slots=True, kw_only=True)
class StaleWeights:
    """The trainer moved, and what it moved did not arrive: always the rollout side's fault.

    Attributes:
        name: in words.
        sizes: coarse first.
        change: moves the trainer's model by a size.
    """

    name: str
    change: Callable[[TinyEngines, float], None]
    sizes: tuple[float, ...] = (0.0,)


# ---- norm -----------------------------------------------------------------------------------------------------------


def _norm(compute: Callable[[Tensor, Tensor, float], Tensor]) -> Fault:
    def fault(reference: Callable[..., Any], owner: Any, shape: ModelShape) -> Callable[..., Any]:
        def norm(x: Tensor, residual: Tensor | None = None) -> Any:
            stored = x if residual is None else x + residual
            out = compute(stored, owner.weight, shape.norm_epsilon)
            return out if residual is None else (out, stored)

        return norm

    return fault


def _all_in_model_dtype(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return x * torch.rsqrt((x * x).mean(dim=-1, keepdim=True) + epsilon) * weight


def _rounds_before_its_weight(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return rms_norm(x, torch.ones_like(weight), epsilon=epsilon) * weight


def _mean_taken_off(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return rms_norm(x - x.mean(dim=-1, keepdim=True), weight, epsilon=epsilon)


def _weight_is_offset(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return rms_norm(x, weight.float() + 1.0, epsilon=epsilon)


def _no_weight(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return rms_norm(x, torch.ones_like(weight), epsilon=epsilon)


def _other_epsilon(role: PolicyRole, times: float) -> Fault:
    return _norm(lambda x, weight, epsilon: rms_norm(x, weight, epsilon=epsilon * times))


# ---- rope -----------------------------------------------------------------------------------------------------------

_Turn = Callable[[Tensor, Tensor, Tensor], Tensor]


def _rope(
    role: PolicyRole,
    *,
    table: Callable[[ModelShape], RotaryTable] | None = None,
    turn: _Turn = rotate,
    stored: torch.dtype = torch.float32,
    ahead: int = 0,
) -> Fault:
    """A rope with another table, another rotation, a table kept in another dtype, or queries a few positions ahead."""

    def fault(reference: Callable[..., Any], owner: Any, shape: ModelShape) -> Callable[..., Any]:
        rows = (table or _table)(shape)

        def at(positions: Tensor) -> tuple[Tensor, Tensor]:
            cos, sin = (part.to(stored).float() for part in rows.at(positions))
            return cos, sin

        def training(t: Tensor, freqs: Tensor, config: Any, *rest: Any, **options: Any) -> Tensor:
            shift = ahead if t.shape[2] == shape.query_heads else 0
            return turn(t, *(part[:, None] for part in at(torch.arange(t.shape[0], device=t.device) + shift)))

        def rollout(positions: Tensor, query: Tensor, key: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
            def turned(x: Tensor, shift: int) -> Tensor:
                heads = x.reshape(x.shape[0], -1, shape.head_dim)
                return turn(heads, *at(positions.flatten() + shift)).reshape(x.shape)

            return turned(query, ahead), None if key is None else turned(key, 0)

        return training if role is _TRAINING else rollout

    return fault


def _table(shape: ModelShape, *, frequency: float = 1.0, theta: float = 1.0) -> RotaryTable:
    inverse = inverse_frequencies(theta=shape.rope_theta * theta, rotary_dim=shape.head_dim, scaling=shape.rope_scaling)
    return RotaryTable(inverse * frequency)


def _in_bf16(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = states.bfloat16().chunk(2, dim=-1)
    cos, sin = cos.bfloat16(), sin.bfloat16()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(states.dtype)


def _interleaved(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = states[..., 0::2].float(), states[..., 1::2].float()
    return torch.stack((first * cos - second * sin, second * cos + first * sin), -1).flatten(-2).to(states.dtype)


def _half_of_the_head(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    quarter = cos.shape[-1] // 2
    return rotate(states, cos[..., :quarter], sin[..., :quarter])


# ---- steps of any operator ------------------------------------------------------------------------------------------


def _of_output(change: Callable[[Tensor], Tensor]) -> Fault:
    def fault(reference: Callable[..., Any], owner: Any, shape: ModelShape) -> Callable[..., Any]:
        def runs(*arguments: Any, **options: Any) -> Any:
            found = reference(*arguments, **options)
            first = found[0] if isinstance(found, tuple) else found
            first.copy_(change(first))  # vLLM's attention hands over the buffer that it wrote into and reads that
            return found

        return runs

    return fault


def _of_input(place: int, name: str, change: Callable[[Tensor], Tensor]) -> Fault:
    """Another operand, passed by its place or by name."""

    def fault(reference: Callable[..., Any], owner: Any, shape: ModelShape) -> Callable[..., Any]:
        def runs(*arguments: Any, **options: Any) -> Any:
            if name in options:
                return reference(*arguments, **{**options, name: change(options[name])})
            return reference(*arguments[:place], change(arguments[place]), *arguments[place + 1 :], **options)

        return runs

    return fault


def _scaled(role: PolicyRole, bits: float) -> Fault:
    return partial(scaled_output, bits=int(bits))


def _times(x: Tensor, size: float) -> Tensor:
    return (x.float() * (1.0 + size)).to(x.dtype)


def _fp8(x: Tensor) -> Tensor:
    return x.to(torch.float8_e4m3fn).to(x.dtype)


# ---- attention ------------------------------------------------------------------------------------------------------


def _query(role: PolicyRole, change: Callable[[Tensor], Tensor]) -> Fault:
    return _of_input(0 if role is _TRAINING else 1, "query", change)


def _softmax_in_bf16(reference: Callable[..., Any], owner: Any, shape: ModelShape) -> Callable[..., Any]:
    sum_of_block = attention._sum_of_block

    def in_bf16(weights: Tensor) -> Tensor:
        weights.copy_(weights.bfloat16())
        return sum_of_block(weights).bfloat16().to(weights.dtype)

    def runs(*arguments: Any, **options: Any) -> Any:
        with patch.object(attention, "_sum_of_block", in_bf16):
            return reference(*arguments, **options)

    return runs


# ---- activation -----------------------------------------------------------------------------------------------------


def _gate(role: PolicyRole, compute: Callable[[Tensor, Tensor], Tensor]) -> Fault:
    """The gate is inside the trainer's MLP, between its two linears."""

    def fault(reference: Callable[..., Any], owner: Any, shape: ModelShape) -> Callable[..., Any]:
        def gated(gate_up: Tensor) -> Tensor:
            return compute(*gate_up.chunk(2, dim=-1)).to(gate_up.dtype)

        def mlp(hidden_states: Tensor, per_token_scale: Any = None, **ignored: Any) -> Any:
            gate_up, _ = owner.linear_fc1(hidden_states)
            return owner.linear_fc2(gated(gate_up))

        return mlp if role is _TRAINING else gated

    return fault


def _silu_rounds_early(gate: Tensor, up: Tensor) -> Tensor:
    return functional.silu(gate.float()).to(gate.dtype) * up


def _gelu(gate: Tensor, up: Tensor) -> Tensor:
    return functional.gelu(gate.float()) * up.float()


def _swapped(gate: Tensor, up: Tensor) -> Tensor:
    return swiglu(torch.cat((up, gate), dim=-1))


def _clamped(role: PolicyRole, most: float) -> Fault:
    return _gate(role, lambda gate, up: swiglu(torch.cat((gate.clamp(max=most), up), dim=-1)))


# ---- embedding and linears ------------------------------------------------------------------------------------------


def _next_row(role: PolicyRole, size: float) -> Fault:
    """Ids from the middle of the vocabulary on are looked up one row too far, as in a shard that starts there."""

    def fault(reference: Callable[..., Any], owner: Any, shape: ModelShape) -> Callable[..., Any]:
        middle, last = shape.vocab_size // 2, shape.vocab_size - 1
        return _of_input(0, "input_", lambda ids: torch.where(ids < middle, ids, (ids + 1).clamp(max=last)))(
            reference, owner, shape
        )

    return fault


def _states(role: PolicyRole, change: Callable[[Tensor], Tensor]) -> Fault:
    place, name = (0, "input") if role is _TRAINING else (1, "x")
    return _of_input(place, name, change)


def _two_halves(role: PolicyRole, size: float) -> Fault:
    """Each half of the inputs is summed and rounded to the model's dtype by itself, as over two ranks."""

    def fault(reference: Callable[..., Any], owner: Any, shape: ModelShape) -> Callable[..., Any]:
        def half(which: int) -> Callable[..., Any]:
            def alone(x: Tensor) -> Tensor:
                kept = torch.arange(x.shape[-1], device=x.device) // (x.shape[-1] // 2) == which
                return torch.where(kept, x, 0)

            return _states(role, alone)(reference, owner, shape)

        first, second = half(0), half(1)
        return lambda *arguments, **options: first(*arguments, **options) + second(*arguments, **options)

    return fault


# ---- the kinds ------------------------------------------------------------------------------------------------------


def _no_size(fault: Fault) -> Callable[[PolicyRole, float], Fault]:
    return lambda role, size: fault


_NORM, _ROPE, _KERNEL, _SWIGLU = "norm.rmsnorm", "attention.rope_fusion", "attention.kernel", "activation.swiglu"
_LOOKUP, _LINEAR, _HEAD = "embedding.lookup", "gemm.accumulation", "logprob.head_dtype"

OPERATOR_KINDS = (
    FaultKind(name="epsilon, times", factor=_NORM, plant=_other_epsilon, sizes=(100.0, 10.0, 2.0, 1.1)),
    FaultKind(name="rounds before its weight", factor=_NORM, plant=_no_size(_norm(_rounds_before_its_weight))),
    FaultKind(name="all in the model's dtype", factor=_NORM, plant=_no_size(_norm(_all_in_model_dtype))),
    FaultKind(name="takes off the mean", factor=_NORM, plant=_no_size(_norm(_mean_taken_off))),
    FaultKind(name="adds 1 to its weight", factor=_NORM, plant=_no_size(_norm(_weight_is_offset))),
    FaultKind(name="leaves its weight out", factor=_NORM, plant=_no_size(_norm(_no_weight))),
    FaultKind(
        name="frequencies, times",
        factor=_ROPE,
        plant=lambda role, size: _rope(role, table=partial(_table, frequency=size)),
        sizes=(1.1, 1.01, 1.001, 1.0001),
    ),
    FaultKind(
        name="theta, times",
        factor=_ROPE,
        plant=lambda role, size: _rope(role, table=partial(_table, theta=size)),
        sizes=(10.0, 1.1, 1.001),
    ),
    FaultKind(name="products in bf16", factor=_ROPE, plant=lambda role, size: _rope(role, turn=_in_bf16)),
    FaultKind(name="table in bf16", factor=_ROPE, plant=lambda role, size: _rope(role, stored=torch.bfloat16)),
    FaultKind(name="pairs interleaved", factor=_ROPE, plant=lambda role, size: _rope(role, turn=_interleaved)),
    FaultKind(name="half of the head", factor=_ROPE, plant=lambda role, size: _rope(role, turn=_half_of_the_head)),
    FaultKind(name="queries one position ahead", factor=_ROPE, plant=lambda role, size: _rope(role, ahead=1)),
    FaultKind(name="output, times 1 + 2^-", factor=_KERNEL, plant=_scaled, sizes=(4, 7)),
    FaultKind(
        name="scale of the scores, times 1 +",
        factor=_KERNEL,
        plant=lambda role, size: _query(role, lambda query: _times(query, size)),
        sizes=(0.4142, 0.0625, 0.0078125),
    ),
    FaultKind(name="queries in fp8", factor=_KERNEL, plant=lambda role, size: _query(role, _fp8)),
    FaultKind(name="softmax in bf16", factor=_KERNEL, plant=_no_size(_softmax_in_bf16)),
    FaultKind(name="output, times 1 + 2^-", factor=_SWIGLU, plant=_scaled, sizes=(4, 7)),
    FaultKind(name="gelu", factor=_SWIGLU, plant=lambda role, size: _gate(role, _gelu)),
    FaultKind(name="gate and up swapped", factor=_SWIGLU, plant=lambda role, size: _gate(role, _swapped)),
    FaultKind(name="silu rounds early", factor=_SWIGLU, plant=lambda role, size: _gate(role, _silu_rounds_early)),
    FaultKind(name="gate clamped at", factor=_SWIGLU, plant=_clamped, sizes=(0.1, 0.5)),
    FaultKind(name="output, times 1 + 2^-", factor=_LOOKUP, plant=_scaled, sizes=(4, 7)),
    FaultKind(name="a shard one row too far", factor=_LOOKUP, plant=_next_row),
    FaultKind(name="rows in fp8", factor=_LOOKUP, plant=_no_size(_of_output(_fp8))),
    FaultKind(name="output, times 1 + 2^-", factor=_LINEAR, plant=_scaled, sizes=(4, 7)),
    FaultKind(name="inputs in fp8", factor=_LINEAR, plant=lambda role, size: _states(role, _fp8)),
    FaultKind(
        name="a bias that the other side drops",
        factor=_LINEAR,
        plant=lambda role, size: _of_output(lambda x: x + size),
        sizes=(0.0625, 0.00390625),
    ),
    FaultKind(name="two halves, each rounded", factor=_LINEAR, plant=_two_halves),
    FaultKind(
        name="logits in bf16", factor=_HEAD, plant=_no_size(_of_output(lambda logits: logits.bfloat16().float()))
    ),
    FaultKind(name="logits in fp16", factor=_HEAD, plant=_no_size(_of_output(lambda logits: logits.half().float()))),
    FaultKind(
        name="temperature",
        factor=_HEAD,
        plant=lambda role, size: _of_output(lambda logits: logits / size),
        sizes=(1.1, 1.001),
    ),
    FaultKind(
        name="logits capped at",
        factor=_HEAD,
        plant=lambda role, size: _of_output(lambda logits: size * torch.tanh(logits / size)),
        sizes=(5.0, 50.0),
    ),
)


def _moved(*parts: str) -> Callable[[TinyEngines, float], None]:
    def change(tiny: TinyEngines, size: float) -> None:
        for name, parameter in tiny.models[_TRAINING].named_parameters():
            if any(part in name for part in parts):
                parameter.mul_(1.0 + size)

    return change


def _one_ulp(tiny: TinyEngines, size: float) -> None:
    bits = tiny.models[_TRAINING].decoder.layers[0].mlp.linear_fc2.weight.view(torch.int16)
    bits[0, 0] = bits[0, 0] ^ 1


def _gate_up_swapped(tiny: TinyEngines, size: float) -> None:
    weight = tiny.models[_TRAINING].decoder.layers[0].mlp.linear_fc1.weight
    weight.copy_(weight.roll(weight.shape[0] // 2, dims=0))


WEIGHT_KINDS = (
    StaleWeights(name="nothing arrived", change=_moved(""), sizes=(0.05, 0.0078125)),
    StaleWeights(name="one layer stale", change=_moved("layers.1."), sizes=(0.05, 0.0078125)),
    StaleWeights(name="embedding stale", change=_moved("word_embeddings"), sizes=(0.05, 0.0078125)),
    StaleWeights(name="last norm stale", change=_moved("final_layernorm"), sizes=(0.05, 0.0078125)),
    StaleWeights(name="one value off by one ULP", change=_one_ulp),
    StaleWeights(name="gate and up swapped", change=_gate_up_swapped),
)

# Kinds of the catalogue that no operator of one rank can have, and where they are planted.
NOT_PLANTED: Mapping[str, str] = {
    "an all-reduce in another order": "two ranks a side; gemm/tests/test_two_ranks.py among the operator checks",
    "a temperature in the loop's own scoring function": "logprob.convention; tests/cases/test_c08.py",
    "a position shifted in the inputs": "input.positions; input/tests among the operator checks",
}
