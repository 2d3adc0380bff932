"""The documents point at files that exist, and the concepts name every word of the closed vocabularies."""

import re
from enum import Enum
from pathlib import Path

import pytest

from mismatch_hooks.schema.contract import ComparisonRule
from mismatch_hooks.schema.enums import Arm, Diagnosis, Expansion, GateName, NoiseFloor, Origin, PlanOutcome, PolicyRole

ROOT = Path(__file__).parents[2]
TEXTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: text.name)
def test_every_relative_link_names_a_file(text: Path) -> None:
    links = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", text.read_text(encoding="utf-8"))
    assert [link for link in links if not (text.parent / link).exists()] == []


@pytest.mark.parametrize("words", [Arm, ComparisonRule, Diagnosis, GateName, NoiseFloor, Origin, PolicyRole])
def test_the_concepts_name_every_word_of_a_vocabulary(words: type[Enum]) -> None:
    spelled = {word.name.lower() for word in words}
    assert spelled - _named() == set()


def test_the_concepts_name_why_a_factor_is_not_examined() -> None:
    assert {outcome.value for outcome in PlanOutcome if outcome is not PlanOutcome.PLANNED} <= _named()


def test_the_concepts_have_a_row_for_every_expansion() -> None:
    rows = (ROOT / "docs" / "concepts.md").read_text(encoding="utf-8").split("## Expansions")[1].split("## Paths")[0]
    words = {"four arms" if one is Expansion.STANDARD_FOUR else one.value.replace("_", " ") for one in Expansion}
    assert {row.split("|")[1].strip() for row in rows.splitlines() if row.startswith("| ")} - {"expansion"} == words


def _named() -> set[str]:
    return set(re.findall(r"`(\w+)`", (ROOT / "docs" / "concepts.md").read_text(encoding="utf-8")))
