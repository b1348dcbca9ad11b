"""The documentation is true: its Python examples run and print what they say."""

from __future__ import annotations

import doctest
import json
import re
from pathlib import Path

import pytest

from terrazzo.rules import RuleSet

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))


def fences(page: Path, language: str) -> list[str]:
    pattern = rf"^```{language}\n(.*?)^```$"
    return re.findall(pattern, page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_examples_print_what_the_page_says(page: Path) -> None:
    examples = "\n".join(fences(page, "pycon"))
    test = doctest.DocTestParser().get_doctest(examples, {}, page.name, str(page), 0)
    report: list[str] = []
    failed, _ = doctest.DocTestRunner(verbose=False).run(test, out=report.append)
    assert failed == 0, "".join(report)


def test_the_rules_page_has_examples() -> None:
    assert len(fences(ROOT / "docs" / "rules.md", "pycon")) >= 5


def test_the_config_on_the_rules_page_is_a_rule_set() -> None:
    (config,) = fences(ROOT / "docs" / "rules.md", "json")
    rules = RuleSet.parse(json.loads(config)["dynamic"], lm_head=True)
    assert str(rules.resolve_name("model.layers.1.mlp.down_proj").spec) == "8-bit g32 sym"
    assert str(rules.resolve_name("model.layers.10.mlp.down_proj").spec) == "4-bit g128 sym"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_files_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text(encoding="utf-8"))
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert missing == []


def test_every_room_has_its_sentence_and_no_row_is_stale() -> None:
    house = (ROOT / "docs" / "house.md").read_text(encoding="utf-8")
    package = ROOT / "src" / "terrazzo"
    sentences = house.split("## Files")[0]
    rooms = {file.parent.name for file in package.glob("*/__init__.py")}
    assert [room for room in sorted(rooms) if f"| {room} |" not in sentences] == []
    rows = re.findall(r"^\| ([\w/]+\.py) \|", house, re.MULTILINE)
    assert rows
    assert [row for row in rows if not (package / row).exists()] == []
