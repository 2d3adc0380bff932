"""Plan an ablation on live engines."""

from collections.abc import Mapping, Sequence

from mismatch_hooks.live.config import ConfigError
from mismatch_hooks.live.overview import surroundings
from mismatch_hooks.live.registry import Registry, UnknownFactorError
from mismatch_hooks.pipeline.discover import discover
from mismatch_hooks.pipeline.plan import needed_operators, plan
from mismatch_hooks.schema.backend import ScoringBackend
from mismatch_hooks.schema.enums import Origin, PolicyRole
from mismatch_hooks.schema.plan import Plan
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
    capabilities = {role: engine.capabilities for role, engine in engines.items()}
    every = tuple(registry.factors.values())
    here = surroundings(every, shape.traits, capabilities)
    return plan(
        discover(chosen, here),
        origin=origin,
        beside=discover(every, here) if origin is Origin.ALIGNED else (),
        needed=needed_operators(shape.traits, capabilities),
    )
