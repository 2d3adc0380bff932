"""Gather the surroundings that discovery needs, and plan."""

from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version

from mismatch_hooks.live.config import ConfigError
from mismatch_hooks.live.registry import Registry, UnknownFactorError
from mismatch_hooks.pipeline.discover import discover
from mismatch_hooks.pipeline.plan import plan
from mismatch_hooks.schema.backend import ScoringBackend
from mismatch_hooks.schema.enums import Origin, PolicyRole
from mismatch_hooks.schema.factor import MismatchFactor
from mismatch_hooks.schema.plan import Plan, Surroundings
from mismatch_hooks.schema.shape import ModelShape


def make_plan(
    factors: str | Sequence[str],
    registry: Registry,
    engines: Mapping[PolicyRole, ScoringBackend],
    shape: ModelShape,
    origin: Origin,
) -> Plan:
    """Return what an ablation will run on these engines.

    Raises:
        ConfigError: ``factors`` names something that is not registered.
    """
    try:
        chosen = registry.select(factors)
    except UnknownFactorError as error:
        raise ConfigError(f"mismatch_hooks.factors: {error}") from None
    return plan(discover(chosen, _surroundings(chosen, engines, shape)), origin=origin)


def _surroundings(
    factors: Sequence[MismatchFactor], engines: Mapping[PolicyRole, ScoringBackend], shape: ModelShape
) -> Surroundings:
    import torch

    needs = [
        need for factor in factors for need in (factor.prerequisites, *(r.prerequisites for r in factor.references))
    ]
    return Surroundings(
        packages=_installed({package for need in needs for package in need.packages}),
        cuda_devices=torch.cuda.device_count() if torch.cuda.is_available() else 0,
        model_traits=shape.traits,
        capabilities={role: engine.capabilities for role, engine in engines.items()},
    )


def _installed(packages: set[str]) -> dict[str, str]:
    # Only what somebody asks for: reading every distribution's metadata takes half a second.
    found = {}
    for package in sorted(packages):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
