"""bf16 matrix products at usable speed on a CPU without bf16 instructions (AVX2 only).

Without AVX-512, oneDNN takes no bf16: torch falls back to a scalar loop, and vLLM to torch. One step of the demo took
256 s on such a host. Products here convert their operands, which is exact, accumulate in fp32 and round once, as bf16
instructions do.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_OPERATORS = ("mm", "bmm", "addmm", "baddbmm")
_library: torch.library.Library | None = None


def has_bf16_products() -> bool:
    """Whether this host multiplies bf16 matrices by itself at a usable speed."""
    return torch.cuda.is_available() or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def multiply_through_fp32() -> None:
    """Give this process's torch fast bf16 products, backward passes included; they are made of the same operators."""
    global _library
    if _library is not None:
        return
    _library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        # "Overriding a previously registered kernel": that is what is wanted.
        warnings.simplefilter("ignore", UserWarning)
        for name in _OPERATORS:
            native = torch.library.get_kernel(f"aten::{name}", "CPU")
            _library.impl(name, _through_fp32(native), "CPU", with_keyset=True)


def keep_fp32_copies() -> None:
    """Let vLLM's CPU linears keep their weights converted, where with AVX-512 they keep them packed for oneDNN.

    Without it every decode step would convert all weights again. Written against vLLM 0.32, whose linears ask
    ``vllm._custom_ops`` for oneDNN at each load and drop their own weight once they have its handler.
    """
    from vllm import _custom_ops

    _custom_ops._supports_onednn = True
    _custom_ops.create_onednn_mm = lambda weight, *_: weight.float()
    _custom_ops.onednn_mm = _multiply


def _multiply(weight: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
    product = x.float() @ weight
    return (product if bias is None else product + bias).to(x.dtype)


def _through_fp32(native: Any) -> Callable[..., Tensor]:
    def product(keys: Any, first: Tensor, *rest: Any, **scalars: Any) -> Tensor:
        if first.dtype is not torch.bfloat16:
            result: Tensor = native.call_boxed(keys, first, *rest, **scalars)
            return result
        wide = (operand.float() if isinstance(operand, Tensor) else operand for operand in rest)
        rounded: Tensor = native.call_boxed(keys, first.float(), *wide, **scalars).bfloat16()
        return rounded

    return product
