"""The CUDA references are called as the pinned packages declare them.

Neither package imports without a GPU, so their source is read from the wheels, and the calls are read from
``rope_sites.py`` itself: a call that changes is checked as it is, not as it was.
"""

import ast
import inspect
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from mismatch_hooks.operator_checks.attention.factors.rope_fusion import FACTOR

WHEELS = Path(__file__).resolve().parents[3] / ".cuda-signatures"
PINS = {pin.package: pin.version for reference in FACTOR.references for pin in reference.pinned_libraries}


def _wiring() -> ast.Module:
    spec = find_spec("mismatch_hooks.operator_checks.attention.rope_sites")
    assert spec is not None and spec.origin is not None
    return ast.parse(Path(spec.origin).read_text(encoding="utf-8"))


def _calls() -> list[tuple[str, str, ast.Call]]:
    """Module, function and call of everything that the wiring calls of the two packages."""
    found = []
    for builder in (node for node in ast.walk(_wiring()) if isinstance(node, ast.FunctionDef)):
        imported = {
            alias.asname or alias.name: (node.module, alias.name)
            for node in builder.body
            if isinstance(node, ast.ImportFrom) and node.module
            for alias in node.names
            if node.module.partition(".")[0] in ("flashinfer", "transformer_engine")
        }
        for node in ast.walk(builder):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in imported:
                found.append((*imported[node.func.id], node))
    return found


def _signature(module: str, function: str) -> inspect.Signature:
    package = {"flashinfer": "flashinfer-python", "transformer_engine": "transformer-engine"}[module.partition(".")[0]]
    name = f"{package.replace('-', '_')}-{PINS[package]}-*.whl"
    wheel = next(WHEELS.glob(name), None)
    if wheel is None:
        pytest.skip(f"no {name} in {WHEELS.name}/; make test downloads it where a package index is reachable")
    with zipfile.ZipFile(wheel) as archive:
        tree = ast.parse(archive.read(f"{module.replace('.', '/')}.py"))
    found = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function)
    positional, defaults = [*found.args.posonlyargs, *found.args.args], found.args.defaults
    required = len(positional) - len(defaults)
    kinds = inspect.Parameter
    parameters = [
        kinds(
            argument.arg,
            kinds.POSITIONAL_OR_KEYWORD,
            default=kinds.empty if index < required else ast.unparse(defaults[index - required]),
        )
        for index, argument in enumerate(positional)
    ] + [
        kinds(argument.arg, kinds.KEYWORD_ONLY, default=kinds.empty if default is None else ast.unparse(default))
        for argument, default in zip(found.args.kwonlyargs, found.args.kw_defaults, strict=True)
    ]
    return inspect.Signature(parameters)


def test_the_wiring_calls_one_function_of_each_package() -> None:
    assert sorted((module, function) for module, function, _ in _calls()) == [
        ("flashinfer.rope", "apply_rope_with_cos_sin_cache"),
        ("transformer_engine.pytorch.attention.rope", "apply_rotary_pos_emb"),
    ]


@pytest.mark.parametrize(("module", "function", "call"), _calls(), ids=[module for module, _, _ in _calls()])
def test_a_call_binds_to_the_signature_of_the_pinned_package(module: str, function: str, call: ast.Call) -> None:
    given = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg is not None}
    assert len(given) == len(call.keywords), "a call with ** cannot be checked"
    bound = _signature(module, function).bind(*call.args, **given)
    assert len(bound.arguments) == len(call.args) + len(given)


def test_a_keyword_that_the_package_does_not_have_would_be_refused() -> None:
    signature = _signature("flashinfer.rope", "apply_rope_with_cos_sin_cache")
    with pytest.raises(TypeError, match="head_size"):
        signature.bind(positions=0, query=0, key=0, head_dim=0, cos_sin_cache=0, is_neox=True)


def test_the_keywords_mean_what_the_wiring_passes() -> None:
    """The values that are constants in the calls: halves rotated, not interleaved pairs, in Megatron's layout."""
    constants = {
        keyword.arg: keyword.value.value
        for _, _, call in _calls()
        for keyword in call.keywords
        if isinstance(keyword.value, ast.Constant)
    }
    assert constants == {"is_neox": True, "tensor_format": "sbhd", "interleaved": False, "fused": True}
