"""Which module wires which factor of the attention operator into the live engines."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mismatch_hooks.operator_checks.attention import kernel_sites, rope_sites, softmax_sites
from mismatch_hooks.pipeline.bind import Site
from mismatch_hooks.schema.enums import PolicyRole
from mismatch_hooks.schema.shape import ModelShape

_Parameters = Callable[[ModelShape], Mapping[str, object]]
_Sites = Callable[[str, PolicyRole, Any, Mapping[str, object]], Sequence[Site]]
_WIRING: Mapping[str, tuple[_Parameters, _Sites]] = {
    "attention.kernel": (kernel_sites.parameters, kernel_sites.sites),
    "attention.rope_fusion": (rope_sites.parameters, rope_sites.sites),
    "attention.softmax_precision": (softmax_sites.parameters, softmax_sites.sites),
}


def parameters(factor: str, shape: ModelShape) -> Mapping[str, object]:
    """Return the parameters of the factor's reference for a model shape."""
    return _WIRING[factor][0](shape)


def sites(factor: str, role: PolicyRole, model: Any, parameters: Mapping[str, object]) -> Sequence[Site]:
    """Return every place in the live ``model`` of ``role`` that the factor binds.

    Raises:
        BindingError: the live model has a form that the factor's reference does not cover.
    """
    return _WIRING[factor][1](factor, role, model, parameters)
