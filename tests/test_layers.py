"""Rules of the layers that ``lint-imports`` cannot express."""

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("mismatch_hooks", "integrations", "operator_checks", "recipes")  # outer folders: rglob follows no link
MAY_FAIL_OPEN = Path("mismatch_hooks/live/isolation.py")


@cache
def import_graph() -> grimp.ImportGraph:
    return grimp.build_graph("mismatch_hooks", include_external_packages=True, cache_dir=None)


def imported_by(folder: str) -> set[str]:
    """Top-level names outside the library, and folders inside it, that the modules of ``folder`` import."""
    graph = import_graph()
    package = f"mismatch_hooks.{folder}"
    modules = {package, *graph.find_descendants(package)}
    found = {name for module in modules for name in graph.find_modules_directly_imported_by(module)} - modules
    return {name for name in found if name.split(".")[0] not in sys.stdlib_module_names}


def test_schema_imports_only_the_standard_library() -> None:
    assert imported_by("schema") == set()


def test_references_import_torch_and_nothing_else() -> None:
    assert imported_by("references") == {"torch"}


def broad_handlers(source: str) -> Iterator[int]:
    """Lines of handlers that catch everything; ``BaseException`` is let through where it is raised again."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.ExceptHandler):
            continue
        caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        names = {name.id if isinstance(name, ast.Name) else "" for name in caught if name is not None}
        raised_again = isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None
        if node.type is None or "Exception" in names or ("BaseException" in names and not raised_again):
            yield node.lineno


@pytest.mark.parametrize(
    ("handler", "found"),
    [
        pytest.param("except:\n    raise", [3], id="bare"),
        pytest.param("except Exception:\n    raise", [3], id="Exception, even raised again"),
        pytest.param("except (OSError, Exception) as error:\n    print(error)", [3], id="Exception in a tuple"),
        pytest.param("except BaseException:\n    print()", [3], id="BaseException that ends there"),
        pytest.param("except BaseException:\n    print()\n    raise", [], id="BaseException raised again"),
        pytest.param("except OSError:\n    print()", [], id="a named error"),
    ],
)
def test_broad_handlers_are_recognised(handler: str, found: list[int]) -> None:
    assert list(broad_handlers(f"try:\n    print()\n{handler}\n")) == found


def test_only_isolation_catches_everything() -> None:
    files = [file.relative_to(ROOT) for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py"))]
    assert MAY_FAIL_OPEN in files
    broad = [
        f"{file}:{line}"
        for file in files
        if file != MAY_FAIL_OPEN
        for line in broad_handlers((ROOT / file).read_text(encoding="utf-8"))
    ]
    assert broad == []
