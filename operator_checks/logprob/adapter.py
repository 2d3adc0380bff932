"""Which module wires which factor of the log-prob operator into the live engines."""

from collections.abc import Mapping, Sequence
from typing import Any

from mismatch_hooks.operator_checks.logprob import head_sites
from mismatch_hooks.pipeline.bind import Site
from mismatch_hooks.schema.enums import PolicyRole
from mismatch_hooks.schema.shape import ModelShape

_PARAMETERS = {"logprob.head_dtype": head_sites.parameters}
_SITES = {"logprob.head_dtype": head_sites.sites}


def parameters(factor: str, shape: ModelShape) -> Mapping[str, object]:
    """Return the parameters of the factor's reference for a model shape."""
    return _PARAMETERS[factor](shape)


def sites(factor: str, role: PolicyRole, model: Any, parameters: Mapping[str, object]) -> Sequence[Site]:
    """Return every place in the live ``model`` of ``role`` that the factor binds.

    Raises:
        BindingError: the live model has a form that the factor's reference does not cover.
    """
    return _SITES[factor](factor, role, model, parameters)
