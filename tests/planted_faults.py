"""Plant one faulty operator in live engines whose every other operator is the reference.

Native operators of a real engine depart from the references by themselves, so a planted fault would not be the only
cause. Here "native" means the reference everywhere, except for the one implementation that a test makes faulty.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from mismatch_hooks.live.registry import load_registry
from mismatch_hooks.pipeline.bind import PatchSite
from mismatch_hooks.references.rope import RotaryTable, inverse_frequencies
from mismatch_hooks.schema.enums import PolicyRole
from mismatch_hooks.schema.shape import ModelShape
from tests.tiny_engines import TinyEngines

# From what the reference does at one site, and the object that holds the site, to what runs in its place.
Fault = Callable[[Callable[..., Any], Any, ModelShape], Callable[..., Any]]
_ABSENT = object()

OPERATORS = (
    "activation.swiglu",
    "attention.kernel",
    "attention.rope_fusion",
    "embedding.lookup",
    "gemm.accumulation",
    "logprob.head_dtype",
    "norm.rmsnorm",
)


def operators(shape: ModelShape) -> tuple[str, ...]:
    """Every factor that has a reference on this model."""
    return OPERATORS + (("norm.qk_norm",) if shape.qk_norm else ())


@contextmanager
def native_is_reference(
    tiny: TinyEngines,
    faults: Mapping[tuple[str, PolicyRole], Fault] | None = None,
    *,
    leave: Sequence[str] = (),
) -> Iterator[None]:
    """Make every operator of both engines its reference, and some of them faulty.

    Args:
        tiny: the engines.
        faults: (factor, role) to the fault.
        leave: factors whose own native implementation stays.
    """
    with ExitStack() as stack:
        for role in PolicyRole:
            for factor in operators(tiny.shape):
                fault = (faults or {}).get((factor, role))
                if factor in leave:
                    continue
                for site in _sites(tiny, factor, role):
                    stack.enter_context(_standing(site, fault, tiny.shape))
        yield


@contextmanager
def planted(tiny: TinyEngines, faults: Mapping[tuple[str, PolicyRole], Fault] | None = None) -> Iterator[None]:
    """Put faults into engines whose other operators stay native."""
    with ExitStack() as stack:
        for (factor, role), fault in (faults or {}).items():
            for site in _sites(tiny, factor, role):
                stack.enter_context(_standing(site, fault, tiny.shape))
        yield


def _sites(tiny: TinyEngines, factor: str, role: PolicyRole) -> list[PatchSite]:
    parameters = tiny.reference(role, factor).parameters[factor]
    found = load_registry().adapter(factor).sites(factor, role, tiny.models[role], parameters)
    return [site for site in found if isinstance(site, PatchSite)]


@contextmanager
def _standing(site: PatchSite, fault: Fault | None, shape: ModelShape) -> Iterator[None]:
    own = vars(site.owner).get(site.name, _ABSENT)
    runs = site.build(getattr(site.owner, site.name))
    if fault is not None:
        runs = fault(runs, site.owner, shape)
    # A plain function, as an engine's own would be: nothing that the hooks could take for a binding of theirs.
    setattr(site.owner, site.name, runs)
    try:
        yield
    finally:
        if own is _ABSENT:
            delattr(site.owner, site.name)
        else:
            setattr(site.owner, site.name, own)


# ---- faults ---------------------------------------------------------------------------------------------------------


def scaled_output(reference: Callable[..., Any], owner: Any, shape: ModelShape, *, bits: int = 7) -> Callable[..., Any]:
    """Every output is too large by a part of 2^bits, at 7 one bf16 step; fits any operator of either engine."""

    def runs(*arguments: Any, **options: Any) -> Any:
        found = reference(*arguments, **options)
        # In place: vLLM's attention hands over the buffer that it wrote into and reads that.
        (found[0] if isinstance(found, tuple) else found).mul_(1 + 2**-bits)
        return found

    return runs


def training_rope(*, dtype: torch.dtype = torch.float32, frequency: float = 1.0) -> Fault:
    """megatron-core's rope with its products in ``dtype`` and its inverse frequencies times ``frequency``.

    In bf16 it is what a fused rope does that keeps its intermediates in the model's dtype.
    """

    def fault(reference: Callable[..., Any], owner: Any, shape: ModelShape) -> Callable[..., Any]:
        table = _table(shape, frequency)

        def rope(t: Tensor, freqs: Tensor, config: Any, *rest: Any, **options: Any) -> Tensor:
            cos, sin = (part[: t.shape[0], None, None].to(dtype) for part in table.first(t.shape[0], t.device))
            first, second = t.to(dtype).chunk(2, dim=-1)
            return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(t.dtype)

        return rope

    return fault


def rollout_rope(*, dtype: torch.dtype = torch.float32, frequency: float = 1.0) -> Fault:
    """vLLM's rope with its products in ``dtype`` and its inverse frequencies times ``frequency``."""

    def fault(reference: Callable[..., Any], owner: Any, shape: ModelShape) -> Callable[..., Any]:
        table = _table(shape, frequency)

        def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            heads = x.reshape(x.shape[0], -1, shape.head_dim).to(dtype)
            first, second = heads.chunk(2, dim=-1)
            cos, sin = cos.to(dtype), sin.to(dtype)
            return (
                torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype).reshape(x.shape)
            )

        def rope(positions: Tensor, query: Tensor, key: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
            cos, sin = table.at(positions.flatten())
            return turned(query, cos, sin), None if key is None else turned(key, cos, sin)

        return rope

    return fault


def rollout_norm_rounds_early(reference: Callable[..., Any], owner: Any, shape: ModelShape) -> Callable[..., Any]:
    """The normalised value is rounded to the model's dtype before it is multiplied with the weight."""

    def norm(x: Tensor, residual: Tensor | None = None) -> Any:
        wide = x.float() if residual is None else x.float() + residual.float()
        stored = wide.to(x.dtype)
        out = _normalised(stored, shape.norm_epsilon).to(x.dtype) * owner.weight
        return out if residual is None else (out, stored)

    return norm


def training_norm_rounds_early(reference: Callable[..., Any], owner: Any, shape: ModelShape) -> Callable[..., Any]:
    """The same on the trainer, which adds its residual elsewhere."""
    return lambda x: _normalised(x, shape.norm_epsilon).to(x.dtype) * owner.weight


def training_norm_epsilon(epsilon: float) -> Fault:
    """Another epsilon on the trainer."""

    def fault(reference: Callable[..., Any], owner: Any, shape: ModelShape) -> Callable[..., Any]:
        return lambda x: (_normalised(x, epsilon) * owner.weight.float()).to(x.dtype)

    return fault


def rollout_norm_epsilon(epsilon: float, *, rows: int | None = None) -> Fault:
    """Another epsilon; with ``rows`` only in calls that have exactly so many rows."""

    def fault(reference: Callable[..., Any], owner: Any, shape: ModelShape) -> Callable[..., Any]:
        def norm(x: Tensor, residual: Tensor | None = None) -> Any:
            if rows is not None and x.shape[0] != rows:
                return reference(x, residual)
            stored = x if residual is None else (x.float() + residual.float()).to(x.dtype)
            out = (_normalised(stored, epsilon) * owner.weight.float()).to(x.dtype)
            return out if residual is None else (out, stored)

        return norm

    return fault


def training_logprobs_at(temperature: float) -> Callable[[Any, Tensor], Tensor]:
    """A loop's own scoring function, hard-wired to a temperature: ``(model, input_ids) -> [batch, sequence - 1]``."""

    def own(model: Any, input_ids: Tensor) -> Tensor:
        positions = torch.arange(input_ids.shape[1]).expand_as(input_ids)
        mask = torch.ones(1, 1, input_ids.shape[1], input_ids.shape[1], dtype=torch.bool).triu(1)
        logits = model(input_ids, positions, mask)[:, :-1].float() / temperature
        found: Tensor = logits.log_softmax(dim=-1).gather(2, input_ids[:, 1:, None])[..., 0]
        return found

    return own


def _normalised(x: Tensor, epsilon: float) -> Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + epsilon)


def _table(shape: ModelShape, frequency: float = 1.0) -> RotaryTable:
    inverse = inverse_frequencies(theta=shape.rope_theta, rotary_dim=shape.head_dim, scaling=shape.rope_scaling)
    return RotaryTable(inverse * frequency)
