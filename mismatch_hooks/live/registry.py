"""Find operator checks by entry point, the built-in ones like those of other distributions."""

import importlib
import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any, Protocol, cast

from mismatch_hooks.pipeline.bind import PatchSite
from mismatch_hooks.schema.enums import PolicyRole
from mismatch_hooks.schema.factor import MismatchFactor
from mismatch_hooks.schema.freeze import SchemaError

GROUP = "mismatch_hooks.operator_checks"


class UnknownFactorError(ValueError):
    """A factor id or glob matches nothing that is registered."""


class Adapter(Protocol):
    """What ``operator_checks/<operator>/adapter.py`` offers."""

    def sites(self, factor: str, role: PolicyRole, model: Any, parameters: Mapping[str, object]) -> Sequence[PatchSite]:
        """Return every place in the live ``model`` of ``role`` that the factor's reference replaces; patch nothing."""
        ...

    def parameters(self, factor: str, shape: Any) -> Mapping[str, object]:
        """Return the plain parameters of the reference for a model shape; one truth for both roles."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Registry:
    """Every registered factor, and where its adapter lives.

    Attributes:
        factors: factor id to declaration, in order of id.
        adapters: operator to the dotted name of its adapter module; imported only when asked for.
        broken: operator package to the error that kept it out; the others work.
    """

    factors: Mapping[str, MismatchFactor]
    adapters: Mapping[str, str]
    broken: Mapping[str, str] = field(default_factory=dict)

    def select(self, patterns: str | Sequence[str]) -> tuple[MismatchFactor, ...]:
        """Return the factors that ``"all"``, ids or globs name, in order of id.

        Raises:
            UnknownFactorError: a pattern matches nothing; names what exists and the nearest.
        """
        from fnmatch import fnmatchcase

        wanted = ["*"] if patterns == "all" else [patterns] if isinstance(patterns, str) else list(patterns)
        chosen: set[str] = set()
        for pattern in wanted:
            matches = [factor for factor in self.factors if fnmatchcase(factor, pattern)]
            if not matches:
                near = get_close_matches(pattern, list(self.factors), n=1)
                hint = f" Did you mean {near[0]!r}?" if near else ""
                raise UnknownFactorError(
                    f"no factor matches {pattern!r}; registered: {', '.join(self.factors) or 'none'}.{hint}"
                )
            chosen.update(matches)
        return tuple(self.factors[factor] for factor in sorted(chosen))

    def adapter(self, factor: str) -> Adapter:
        """Import and return the adapter of a factor's operator."""
        return cast(Adapter, importlib.import_module(self.adapters[self.factors[factor].operator]))


@cache
def load_registry() -> Registry:
    """Return everything registered under the entry-point group, read once per process."""
    factors: dict[str, MismatchFactor] = {}
    adapters: dict[str, str] = {}
    broken: dict[str, str] = {}
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        try:
            package = entry.load()
        except ImportError as error:
            broken[entry.value] = str(error)
            continue
        for operator in _subpackages(package):
            name = f"{package.__name__}.{operator}"
            try:
                declared = _declared(name)
            except (ImportError, SchemaError) as error:
                broken[name] = str(error)
                continue
            factors.update(declared)
            adapters[operator] = f"{name}.adapter"
    return Registry(factors=dict(sorted(factors.items())), adapters=adapters, broken=broken)


def _subpackages(package: ModuleType) -> list[str]:
    return [module.name for module in pkgutil.iter_modules(package.__path__) if module.ispkg]


def _declared(operator: str) -> dict[str, MismatchFactor]:
    folder = importlib.import_module(f"{operator}.factors")
    found: dict[str, MismatchFactor] = {}
    for module in pkgutil.iter_modules(folder.__path__):
        factor = importlib.import_module(f"{folder.__name__}.{module.name}").FACTOR
        if factor.id != f"{operator.rsplit('.', 1)[-1]}.{module.name}":
            raise SchemaError(
                f"{folder.__name__}.{module.name} declares {factor.id!r}; its file and folder say "
                f"'{operator.rsplit('.', 1)[-1]}.{module.name}'."
            )
        found[factor.id] = factor
    return found
