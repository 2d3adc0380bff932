"""The trainer's own switches: the mode of its modules and torch's global matmul flags.

Written against megatron-core 0.16 and torch 2.13.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from mismatch_hooks.pipeline.bind import StateSite
from mismatch_hooks.schema.enums import PolicyRole
from mismatch_hooks.schema.shape import ModelShape


def parameters(factor: str, shape: ModelShape) -> Mapping[str, object]:
    """Return nothing: a mode and a flag depend on no model."""
    return {}


def sites(factor: str, role: PolicyRole, model: Any, parameters: Mapping[str, object]) -> Sequence[StateSite]:
    """Return the one state that the factor holds.

    Args:
        factor: ``"training.forward_mode"`` or ``"training.matmul_precision"``.
        role: training.
        model: the ``GPTModel``.
        parameters: ``value``: a value of the factor's switch.
    """
    value = parameters["value"]
    return [_mode(factor, model, value) if factor == "training.forward_mode" else _precision(factor, value)]


def _mode(factor: str, model: Any, value: object) -> StateSite:
    modules = list(model.modules())

    def read() -> tuple[bool, ...]:
        return tuple(module.training for module in modules)

    def write(modes: tuple[bool, ...]) -> None:
        for module, training in zip(
            modules, modes, strict=True
        ):  # not model.train(): modules may differ among themselves
            module.training = training

    held = read() if value == "native" else (value == "train",) * len(modules)
    return StateSite(factor=factor, site="GPTModel: training", read=read, write=write, held=held)


def _precision(factor: str, value: object) -> StateSite:
    import torch

    matmul = torch.backends.cuda.matmul

    def read() -> tuple[str, Any, Any]:
        return (
            torch.get_float32_matmul_precision(),
            matmul.allow_bf16_reduced_precision_reduction,
            matmul.allow_fp16_reduced_precision_reduction,
        )

    def write(flags: tuple[str, Any, Any]) -> None:
        torch.set_float32_matmul_precision(flags[0])
        matmul.allow_bf16_reduced_precision_reduction = flags[1]
        matmul.allow_fp16_reduced_precision_reduction = flags[2]

    held = {"full": ("highest", False, False), "reduced": ("medium", True, True)}.get(str(value), read())
    return StateSite(factor=factor, site="torch: matmul precision flags", read=read, write=write, held=held)
