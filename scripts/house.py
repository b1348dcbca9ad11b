"""Rewrites the table of files in docs/house.md from the first sentence of every module."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "terrazzo"
PAGE = ROOT / "docs" / "house.md"
HEADING = "## Files\n"
GROUND = (
    "errors.py",
    "env.py",
    "spec.py",
    "packing.py",
    "spellings.py",
    "rules.py",
    "idle_rules.py",
    "__init__.py",
    "__main__.py",
)
ROOMS = (
    "checkpoint",
    "kernels",
    "nn",
    "dialects",
    "models",
    "engine",
    "quantization",
    "importing",
    "inspection",
    "server",
    "bench",
    "cli",
)


def summary(file: Path) -> str:
    """The first paragraph of the docstring, on one line."""
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return " ".join(text.split("\n\n")[0].split()).replace("|", "\\|")


def section(title: str, files: list[Path]) -> str:
    rows = [f"| {file.relative_to(PACKAGE)} | {summary(file)} |" for file in files]
    return "\n".join([f"### {title}", "", "| file | one line |", "|---|---|", *rows])


def files_of(room: str) -> list[Path]:
    """Every module of a room; an `__init__.py` only where it holds more than its sentence."""
    files = sorted((PACKAGE / room).rglob("*.py"))
    return [file for file in files if file.name != "__init__.py" or len(file.read_text()) > 1000]


def main() -> None:
    sections = [section("ground floor", [PACKAGE / name for name in GROUND])]
    sections += [section(room, files_of(room)) for room in ROOMS if files_of(room)]
    above, _, _ = PAGE.read_text(encoding="utf-8").partition(HEADING)
    table = "\n\n".join(sections)
    PAGE.write_text(f"{above}{HEADING}\n{table}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
