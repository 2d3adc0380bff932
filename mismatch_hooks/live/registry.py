"""Find operator checks by entry point, the built-in ones like those of other distributions."""

import importlib
import importlib.util
import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cache
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any, Protocol, cast

from mismatch_hooks.live.isolation import ErrorLedger
from mismatch_hooks.pipeline.bind import BindingError, Site
from mismatch_hooks.pipeline.evidence import EVIDENCE
from mismatch_hooks.pipeline.guards import PITFALLS
from mismatch_hooks.schema.enums import PolicyRole, RebindCost, SettingChannel, Value
from mismatch_hooks.schema.factor import MismatchFactor
from mismatch_hooks.schema.freeze import FrozenMapping, SchemaError, thaw

GROUP = "mismatch_hooks.operator_checks"
_OURS = "mismatch_hooks.operator_checks"


class UnknownFactorError(ValueError):
    """A factor id or glob matches nothing that is registered."""


class Adapter(Protocol):
    """What ``operator_checks/<operator>/adapter.py`` offers."""

    def sites(self, factor: str, role: PolicyRole, model: Any, parameters: Mapping[str, object]) -> Sequence[Site]:
        """Return every place in the live ``model`` of ``role`` that the factor binds; change nothing.

        ``parameters`` holds what ``parameters()`` returned, ``implementation`` (the name of the chosen reference) and
        ``value`` (what the switch is to be set to, ``"native"`` included). In a pass of the factor's ``repeat_under``
        it holds ``repeated_under`` as well, the variables in force; what reads them once has to be built anew here.
        """
        ...

    def parameters(self, factor: str, shape: Any) -> Mapping[str, object]:
        """Return the plain parameters of what is bound for a model shape; one truth for both roles."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Registry:
    """Every registered factor, and where its adapter lives.

    Attributes:
        factors: factor id to declaration, in order of id.
        adapters: factor id to the dotted name of its adapter module; imported only when asked for.
        broken: operator package to the error that kept it out; the others work.
    """

    factors: Mapping[str, MismatchFactor]
    adapters: Mapping[str, str]
    broken: Mapping[str, str] = field(default_factory=FrozenMapping)

    def __post_init__(self) -> None:
        for name in ("factors", "adapters", "broken"):
            object.__setattr__(self, name, FrozenMapping(getattr(self, name)))

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
        return cast(Adapter, importlib.import_module(self.adapters[factor]))

    def live_switches(self, role: PolicyRole) -> dict[str, RebindCost]:
        """Return the switch paths that adapters flip in the live process of ``role``."""
        switches = (factor.switch for factor in self.factors.values())
        return {
            switch.path: switch.rebind_cost
            for switch in switches
            if role in switch.roles
            and switch.channel is not SettingChannel.SCORING_PASS
            and switch.rebind_cost is RebindCost.PER_REQUEST
        }

    def pass_arguments(self, choices: Mapping[str, Value]) -> dict[str, tuple[str, Value]]:
        """Return what a binding sets for a scoring pass: switch path to the factor and its value, native included."""
        switches = {factor: self.factors[factor].switch for factor in choices if factor in self.factors}
        return {
            switch.path: (factor, choices[factor])
            for factor, switch in switches.items()
            if switch.channel is SettingChannel.SCORING_PASS
        }

    def sites(
        self,
        choices: Mapping[str, Value],
        parameters: Mapping[str, Mapping[str, object]],
        role: PolicyRole,
        model: Any,
    ) -> dict[str, Sequence[Site]]:
        """Return where each factor of a binding is bound in the live ``model`` of ``role``; change nothing.

        Arguments of a scoring pass have no place in the model and are left out: the engine sets them.

        Raises:
            BindingError: a factor is not registered here, or does not fit the live model.
        """
        unknown = sorted(set(choices) - set(self.factors))
        if unknown:
            broken = "".join(f" {name} did not load: {why}." for name, why in self.broken.items())
            raise BindingError(
                f"no factor {', '.join(unknown)} is registered on the {role.value} side; registered: "
                f"{', '.join(self.factors) or 'none'}.{broken}"
            )
        found: dict[str, Sequence[Site]] = {}
        for factor, value in choices.items():
            if self.factors[factor].switch.channel is SettingChannel.SCORING_PASS:
                continue
            given = {**parameters.get(factor, {}), "value": thaw(value)}
            places = self.adapter(factor).sites(factor, role, model, given)
            found[factor] = tuple(replace(site, value=value) for site in places)
        return found


@cache
def load_registry() -> Registry:
    """Return everything registered under the entry-point group, read once per process.

    A package that cannot be used is named in ``broken`` with the reason. Where two declare one factor, ours keeps it,
    and among others the first by entry-point name.
    """
    factors: dict[str, MismatchFactor] = {}
    adapters: dict[str, str] = {}
    plugins = ErrorLedger()
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: (entry.value != _OURS, entry.name, entry.value)):
        operators: list[str] = []
        with plugins.guard(f"operator check {entry.value}"):
            operators = _operators(entry.load())
        for operator in operators:
            with plugins.guard(f"operator check {operator}"):
                declared = _declared(operator)
                _refuse_taken(declared, adapters)
                factors.update(declared)
                adapters.update(dict.fromkeys(declared, f"{operator}.adapter"))
    return Registry(
        factors=dict(sorted(factors.items())),
        adapters=adapters,
        broken={one.cause.removeprefix("operator check "): one.message for one in plugins.firsts()},
    )


def _operators(package: ModuleType) -> list[str]:
    return [f"{package.__name__}.{found.name}" for found in pkgutil.iter_modules(package.__path__) if found.ispkg]


def _refuse_taken(declared: Mapping[str, MismatchFactor], adapters: Mapping[str, str]) -> None:
    for factor in declared:
        if factor in adapters:
            raise SchemaError(
                f"{factor} is declared by {adapters[factor].removesuffix('.adapter')} already; rename one."
            )


def _refuse_unknown_words(factor: MismatchFactor) -> None:
    for what, named, known in (
        ("pitfalls", factor.pitfalls, PITFALLS),
        ("required_evidence", [name for name in factor.required_evidence if "." not in name], EVIDENCE),
    ):
        unknown = [name for name in named if name not in known]
        if unknown:
            near = get_close_matches(unknown[0], list(known), n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise SchemaError(f"{factor.id}: {what} names {unknown[0]!r}; accepts {', '.join(known)}.{hint}")


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
        _refuse_unknown_words(factor)
        found[factor.id] = factor
    needing = [factor.id for factor in found.values() if factor.needs_adapter]
    if needing and importlib.util.find_spec(f"{operator}.adapter") is None:
        raise SchemaError(f"{operator} has no adapter.py, so {', '.join(needing)} cannot be bound; add one.")
    return found
