"""What is registered, what would run and what this host lacks, as plain documents; nothing is started or imported."""

import os
import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet

from mismatch_hooks.live.registry import Registry, UnknownFactorError
from mismatch_hooks.live.supported import ENGINES
from mismatch_hooks.pipeline.discover import discover, unmet_prerequisites
from mismatch_hooks.pipeline.plan import needed_operators, plan
from mismatch_hooks.schema.enums import (
    Arm,
    Expansion,
    ExpectedOutcome,
    ModelFamily,
    NoiseFloor,
    Origin,
    PlanOutcome,
    PolicyRole,
    RebindCost,
)
from mismatch_hooks.schema.factor import MismatchFactor
from mismatch_hooks.schema.freeze import thaw
from mismatch_hooks.schema.plan import Candidate, Surroundings
from mismatch_hooks.schema.thresholds import threshold

# A model of each family that has everything; what one model lacks shows once its folder is given.
TRAITS = {
    ModelFamily.DENSE: ("rope", "gated_mlp", "rmsnorm", "qk_norm"),
    ModelFamily.MOE: ("rope", "gated_mlp", "rmsnorm", "qk_norm", "moe"),
    ModelFamily.LARGE_MOE: ("rope", "gated_mlp", "rmsnorm", "qk_norm", "moe"),
}
# Variables that decide whether two runs can give the same bits, and what makes them do so.
_DETERMINISM = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NCCL_ALGO": "Tree or Ring, one of them everywhere",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
}


class UnknownOperatorError(ValueError):
    """An operator is named that nothing registers."""


def choose(registry: Registry, *, operator: str | None, factor: str | None = None) -> tuple[MismatchFactor, ...]:
    """Return the factors of an operator, or those that an id or glob names, in order of id; all without either.

    Raises:
        UnknownOperatorError: names the registered operators and the nearest.
        UnknownFactorError: names what is registered and the nearest.
    """
    chosen = registry.select(factor if factor is not None else "all") if registry.factors else ()
    if operator is None:
        return chosen
    operators = sorted({one.operator for one in registry.factors.values()})
    if operator not in operators:
        near = get_close_matches(operator, operators, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise UnknownOperatorError(f"--operator: got {operator!r}; registered: {', '.join(operators) or 'none'}.{hint}")
    kept = tuple(one for one in chosen if one.operator == operator)
    if not kept:
        raise UnknownFactorError(f"--factor {factor}: no factor of {operator} matches; leave one of the two out.")
    return kept


def surroundings(
    factors: Sequence[MismatchFactor],
    traits: Sequence[str],
    capabilities: Mapping[PolicyRole, Mapping[str, RebindCost]] | None = None,
) -> Surroundings:
    """Return this host as discovery sees it.

    Args:
        factors: only what they ask for is looked up: reading every distribution's metadata takes half a second.
        traits: of the model.
        capabilities: of live engines; without them, what the factors' own declarations say.
    """
    needs = [need for one in factors for need in (one.prerequisites, *(r.prerequisites for r in one.references))]
    return Surroundings(
        packages=_installed({package for need in needs for package in need.required_packages}),
        cuda_devices=cuda_devices(),
        model_traits=tuple(traits),
        ops=_registered({name for need in needs for name in need.required_ops}),
        capabilities=_declared(factors) if capabilities is None else capabilities,
    )


def list_factors(registry: Registry, *, operator: str | None = None) -> dict[str, Any]:
    """Return every factor with its switch, its cost and whether its prerequisites are met here."""
    factors = choose(registry, operator=operator)
    here = surroundings(factors, TRAITS[ModelFamily.MOE])
    rows = [_row(one, candidate, here) for one, candidate in zip(factors, discover(factors, here), strict=True)]
    return {"factors": rows, "broken": dict(registry.broken)}


def plan_factors(
    registry: Registry,
    *,
    operator: str | None,
    factor: str | None,
    origin: Origin,
    noise_floor: NoiseFloor,
    family: ModelFamily,
    model: Path | None,
) -> dict[str, Any]:
    """Return the arms that would run, in order, with their passes, and what is left out and why.

    Without a model's folder the plan is for a model of the family that has every trait; on live engines a factor may
    still be refused by the model that it meets.

    Raises:
        UnknownOperatorError, UnknownFactorError: names what is registered.
        ShapeError: the folder holds no model that is known.
    """
    from mismatch_hooks.model_meta.shapes import shape_from_folder

    factors = choose(registry, operator=operator, factor=factor)
    traits = TRAITS[family] if model is None else shape_from_folder(model).traits
    every = tuple(registry.factors.values())
    here = surroundings(every, traits)
    made = plan(
        discover(factors, here),
        origin=origin,
        beside=discover(every, here) if origin is Origin.ALIGNED else (),
        needed=needed_operators(traits, here.capabilities),
    )
    row = threshold(family, noise_floor, routing_replay=False)
    return {
        "origin": made.origin.value,
        "fallback": made.fallback,
        "noise_floor": noise_floor.name.lower(),
        "model_family": family.value,
        "model_traits": list(here.model_traits),
        "dlogp_mean_suspect_above": row.dlogp_mean_suspect_above,
        "passes": made.passes,
        "passes_with_proofs": made.passes_with_proofs,
        "cases": [
            {
                "factor": case.factor.id,
                "reference": case.reference.name if case.reference else "",
                "arms": list(case.factor.arms),
                "expected": _expected(case.factor, made.origin),
                "passes": len(case.factor.passes),
                "passed_over": case.reason,
            }
            for case in made.cases
        ],
        "bound_beside": [one.factor.id for one in made.background],
        "left_out": [
            {
                "factor": left.factor.id,
                "outcome": left.outcome.value,
                "cost": left.factor.switch.rebind_cost.name.lower(),
                "reason": left.reason,
            }
            for left in made.left_out
        ],
        "broken": dict(registry.broken),
    }


def examine_host(registry: Registry) -> dict[str, Any]:
    """Return engines, packages, environment and plugins, each with what was found, whether it does, and the fix."""
    checks = [*_engine_checks(), *_environment_checks(), *_plugin_checks(registry)]
    factors = tuple(registry.factors.values())
    here = surroundings(factors, TRAITS[ModelFamily.MOE])
    needs = [{"factor": one.id, "unmet": unmet, "fix": _fix(unmet)} for one in factors for unmet in _unmet(one, here)]
    return {"checks": checks, "factors": needs, "ok": all(check["ok"] for check in checks)}


def cuda_devices() -> int:
    """Return how many CUDA devices this process may see, without loading torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    present = sum(path.name[len("nvidia") :].isdigit() for path in Path("/dev").glob("nvidia*"))
    if visible is None:
        return present
    named = [one for one in visible.split(",") if one.strip() and one.strip() != "-1"]
    return min(present, len(named))


def _row(factor: MismatchFactor, candidate: Candidate, here: Surroundings) -> dict[str, Any]:
    return {
        "id": factor.id,
        "question": factor.question,
        "category": factor.category.value,
        "expansion": factor.expansion.value,
        "switch": factor.switch.path,
        "values": list(factor.switch.allowed),
        "roles": [role.value for role in factor.switch.roles],
        "cost": factor.switch.rebind_cost.name.lower(),
        "references": [
            {
                "name": reference.name,
                "authority": reference.authority.name.lower(),
                "verified_on": reference.verified_on,
                "unmet": list(unmet_prerequisites(reference.prerequisites, here)),
            }
            for reference in factor.references
        ],
        "reference": candidate.reference.name if candidate.reference else "",
        "outcome": candidate.outcome.value,
        "reason": "" if candidate.outcome is PlanOutcome.PLANNED else candidate.reason,
        "model_traits": list(factor.prerequisites.required_model_traits),
        "pitfalls": thaw(factor.pitfalls),
    }


def _expected(factor: MismatchFactor, origin: Origin) -> dict[str, str]:
    if factor.expansion is Expansion.STANDARD_FOUR:
        return {arm: Arm(arm).expected(origin).value for arm in factor.arms}
    return dict.fromkeys(factor.arms, ExpectedOutcome.MEASURE_ONLY.value)


def _declared(factors: Sequence[MismatchFactor]) -> dict[PolicyRole, dict[str, RebindCost]]:
    return {
        role: {one.switch.path: one.switch.rebind_cost for one in factors if role in one.switch.roles}
        for role in PolicyRole
    }


def _registered(ops: Iterable[str]) -> tuple[str, ...]:
    # An operator is there once its library is loaded; a command that loads no engine has none.
    torch = sys.modules.get("torch")
    if torch is None:
        return ()
    parts = {name: name.split("::") for name in ops}
    return tuple(name for name, (space, own) in parts.items() if hasattr(getattr(torch.ops, space), own))


def _installed(packages: Iterable[str]) -> dict[str, str]:
    found = {}
    for package in sorted(packages):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _engine_checks() -> list[dict[str, Any]]:
    checks = []
    for engine in ENGINES:
        found = _installed(engine.distributions)
        installed = next(iter(found.values()), "")
        fits = bool(installed) and SpecifierSet(engine.versions).contains(installed, prereleases=True)
        checks.append(
            _check(
                f"{engine.role} engine {engine.name}",
                found=", ".join(f"{name} {one}" for name, one in found.items()) or "not installed",
                wanted=f"{engine.name} {engine.versions}",
                ok=fits,
                fix=f"pip install 'mismatch-hooks[{engine.extra}]'",
            )
        )
    torch = _installed(["torch"]).get("torch", "")
    checks.append(
        _check("torch", found=torch or "not installed", wanted="any", ok=bool(torch), fix="pip install torch")
    )
    return checks


def _environment_checks() -> list[dict[str, Any]]:
    devices = cuda_devices()
    checks = [
        _check("python", found=platform.python_version(), wanted=">=3.11", ok=True),
        _check("CUDA devices", found=str(devices), wanted="any number", ok=True),
        _check("OMP_NUM_THREADS", found=os.environ.get("OMP_NUM_THREADS", "not set"), wanted="any", ok=True),
    ]
    for name, wanted in _DETERMINISM.items():
        found = os.environ.get(name)
        checks.append(
            _check(
                name,
                found=found or "not set",
                wanted=f"{wanted} where bits are expected" if devices else "read on CUDA only",
                ok=True if not devices else found is not None,
                fix=f"export {name}={wanted.split(' ')[0]}",
            )
        )
    batch_invariant = os.environ.get("VLLM_BATCH_INVARIANT", "0")
    checks.append(
        _check(
            "VLLM_BATCH_INVARIANT",
            found=batch_invariant,
            wanted="0 on a CPU, where it kills the engine at its first forward",
            ok=bool(devices) or batch_invariant in ("", "0"),
            fix="unset VLLM_BATCH_INVARIANT",
        )
    )
    return checks


def _plugin_checks(registry: Registry) -> list[dict[str, Any]]:
    broken = [
        _check(f"operator check {name}", found=why, wanted="imports and declares", ok=False, fix=f"mend {name}")
        for name, why in registry.broken.items()
    ]
    return broken or [
        _check(
            "operator checks",
            found=f"{len(registry.factors)} factors",
            wanted="at least one",
            ok=bool(registry.factors),
        )
    ]


def _check(name: str, *, found: str, wanted: str, ok: bool, fix: str = "") -> dict[str, Any]:
    return {"check": name, "found": found, "wanted": wanted, "ok": ok, "fix": "" if ok else fix}


def _unmet(factor: MismatchFactor, here: Surroundings) -> list[str]:
    unmet = list(unmet_prerequisites(factor.prerequisites, here))
    for reference in factor.references:
        unmet += [f"{reference.name}: {one}" for one in unmet_prerequisites(reference.prerequisites, here)]
    return unmet


def _fix(unmet: str) -> str:
    need = unmet.split(": ")[-1]
    if need.endswith("is not installed"):
        return f"pip install '{need.removesuffix(' is not installed')}'"
    if need.endswith("is needed"):
        return f"pip install '{need.rsplit(' and ', 1)[1].removesuffix(' is needed')}'"
    return "a host with the CUDA devices" if "CUDA" in need else "another model"
