"""The tables of ``list``, ``plan`` and ``doctor``, from the documents that ``--json`` prints."""

import io
import shutil
from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

_WIDEST = 120
# Columns of ids, which somebody copies: never cut while another column can be broken into lines.
_IDS = ("factor", "left out", "reference")


def to_text(rendered: RenderableType) -> str:
    """Return what is printed, at the terminal's width, without colours where nobody can see them."""
    width = min(shutil.get_terminal_size((_WIDEST, 24)).columns, _WIDEST)
    console = Console(file=io.StringIO(), width=width, highlight=False)
    with console.capture() as captured:
        console.print(rendered)
    return captured.get()


def render_factors(document: Mapping[str, Any]) -> RenderableType:
    """Return one row a factor: its id, its switch, where it is set, what it costs, and what keeps it from running."""
    table = _table("factor", "roles", "arms", "cost", "reference", "here")
    for factor in document["factors"]:
        table.add_row(
            factor["id"],
            " ".join(factor["roles"]),
            _words(factor["expansion"]),
            _words(factor["cost"]),
            factor["reference"] or "–",
            _here(factor),
        )
    return Group(table, *_broken(document))


def render_plan(document: Mapping[str, Any]) -> RenderableType:
    """Return the arms in the order in which they run, and what is left out with the reason."""
    head = Text(
        f"from {document['origin']}, {_words(document['noise_floor'])}, {_words(document['model_family'])}: "
        f"{len(document['cases'])} factors, {document['passes']} passes "
        f"({document['passes_with_proofs']} with the proofs)"
    )
    cases = _table("", "factor", "reference", "passes", "arms")
    for number, case in enumerate(document["cases"], start=1):
        cases.add_row(
            str(number), case["factor"], case["reference"] or "–", f"+{case['passes']}", ", ".join(case["arms"])
        )
    left = _table("left out", "outcome", "reason")
    for one in document["left_out"]:
        left.add_row(one["factor"], _words(one["outcome"]), one["reason"])
    parts: list[RenderableType] = [head]
    if document["fallback"]:
        parts.append(Text(f"not from aligned: {document['fallback']}", style="yellow"))
    if document["bound_beside"]:
        parts.append(Text(f"on their references beside them: {', '.join(document['bound_beside'])}", style="dim"))
    parts += ["", cases]
    if document["left_out"]:
        parts += ["", left]
    return Group(*parts, *_broken(document))


def render_plans(document: Mapping[str, Any]) -> RenderableType:
    """Return one plan after the other."""
    first, *rest = (render_plan(plan) for plan in document["plans"])
    return Group(first, *(part for plan in rest for part in ("", plan)))


def render_host(document: Mapping[str, Any]) -> RenderableType:
    """Return one row a check, and one for each thing that a factor lacks here."""
    checks = _table("check", "found", "wanted", "", "fix")
    for check in document["checks"]:
        checks.add_row(
            check["check"], check["found"], check["wanted"], "ok" if check["ok"] else "MISSING", check["fix"]
        )
    needs = _table("factor", "lacks here", "fix")
    for need in document["factors"]:
        needs.add_row(need["factor"], need["unmet"], need["fix"])
    parts: list[RenderableType] = [checks]
    if document["factors"]:
        parts += ["", needs]
    return Group(*parts)


def _here(factor: Mapping[str, Any]) -> str:
    if factor["outcome"] == "skipped":
        return f"skipped: {factor['reason']}"
    return "can run" if factor["outcome"] == "planned" else "offline"


def _broken(document: Mapping[str, Any]) -> list[RenderableType]:
    return [Text(f"{name} did not load: {why}", style="yellow") for name, why in document["broken"].items()]


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for column in columns:
        table.add_column(column, no_wrap=column in _IDS)
    return table


def _words(text: str) -> str:
    return text.replace("_", " ")
