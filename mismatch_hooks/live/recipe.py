"""A recipe as the ``run`` command finds it: a YAML file whose key ``loop`` names the Python file that trains."""

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import yaml


class CallError(ValueError):
    """What was given on the command line does not work; one sentence that says what to change."""


class Loop(Protocol):
    """The ``main`` of a recipe's Python file."""

    def __call__(self, raw: Mapping[str, object], *, out: Path) -> object:
        """Run the raw configuration and leave the results in ``out``."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A loop and the configuration to run it with.

    Attributes:
        main: the loop.
        raw: the YAML file's mapping with the overrides applied; the loop checks it.
    """

    main: Loop
    raw: Mapping[str, Any]


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read the YAML file, apply ``key.sub=value`` overrides and import the loop.

    Raises:
        CallError: the file, the loop or an override is not usable.
    """
    raw = _read(path)
    for override in overrides:
        _override(raw, override)
    loop = raw.get("loop")
    if not isinstance(loop, str):
        raise CallError(f"{path}: loop: got {loop!r}; accepts the name of a Python file beside it, such as train.py.")
    return Recipe(main=_import_main(path, path.parent / loop), raw=raw)


def _read(path: Path) -> dict[str, Any]:
    try:
        raw = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        beside = [found.name for found in path.parent.glob("*.yaml")] if path.parent.is_dir() else []
        near = get_close_matches(path.name, beside, n=1)
        hint = f" Did you mean {path.parent / near[0]}?" if near else ""
        raise CallError(f"{path}: {error.strerror}; give the path of a recipe's YAML file.{hint}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise CallError(f"{path}: is not YAML ({' '.join(str(error).split())}); correct the file.") from None
    if not isinstance(raw, dict):
        raise CallError(f"{path}: holds a {type(raw).__name__}; accepts a mapping of keys.")
    return raw


def _override(raw: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    *sections, last = key.split(".")
    if not separator or not all((*sections, last)):
        raise CallError(f"--set: got {override!r}; accepts KEY=VALUE with a dotted key, such as optimizer.lr=1e-5.")
    for section in sections:
        if raw.get(section) is None:
            raw[section] = {}
        raw = raw[section]
        if not isinstance(raw, dict):
            raise CallError(f"--set {override}: {section} holds a value, not keys; set {section} itself.")
    try:
        raw[last] = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise CallError(f"--set {override}: the value is not YAML ({' '.join(str(error).split())}).") from None


def _import_main(recipe: Path, file: Path) -> Loop:
    if not file.is_file():
        raise CallError(f"{recipe}: loop: there is no {file}; accepts the name of a Python file beside the recipe.")
    # By its dotted name: the loop imports its neighbours, and worker processes import its classes, by that name.
    root, parts = file.resolve().parent, [file.stem]
    while (root / "__init__.py").is_file():
        root, parts = root.parent, [root.name, *parts]
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    main = getattr(import_module(".".join(parts)), "main", None)
    if not callable(main):
        raise CallError(f"{file}: has no function main; a recipe's loop is main(raw, *, out).")
    loop: Loop = main
    return loop


class _Loader(yaml.SafeLoader):
    """YAML as people write it: YAML 1.1 reads ``1e-5`` as text, because it has no point."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)
