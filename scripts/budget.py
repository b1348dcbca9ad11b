"""The size budget of the package: small rooms, short functions, full types; printed, enforced."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from statistics import median, quantiles

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "terrazzo"
Function = ast.FunctionDef | ast.AsyncFunctionDef


def docs(tree: ast.AST) -> set[int]:
    """Lines of strings that stand alone: they explain, and do not count as code."""
    nodes = [each for each in ast.walk(tree) if isinstance(each, ast.Expr)]
    texts = [each for each in nodes if isinstance(each.value, ast.Constant)]
    return {line for each in texts for line in range(each.lineno, (each.end_lineno or 0) + 1)}


def span(function: Function) -> int:
    return (function.end_lineno or 0) - function.lineno + 1 - len(docs(function))


def code_lines(text: str) -> int:
    numbered = enumerate(text.splitlines(), start=1)
    code = {number for number, line in numbered if line.strip() and line.strip()[0] != "#"}
    return len(code - docs(ast.parse(text)))


def is_annotated(function: Function) -> bool:
    arguments = [each for each in ast.walk(function.args) if isinstance(each, ast.arg)]
    typed = [each.annotation is not None or each.arg in ("self", "cls") for each in arguments]
    return function.returns is not None and all(typed)


def main() -> int:
    texts = {str(file): file.read_text(encoding="utf-8") for file in PACKAGE.rglob("*.py")}
    nodes = [(file, each) for file, text in texts.items() for each in ast.walk(ast.parse(text))]
    functions = [(file, each) for file, each in nodes if isinstance(each, Function)]
    spans = {f"{file}:{each.lineno}": span(each) for file, each in functions}
    sizes = list(spans.values())
    files = {file: text.count("\n") for file, text in texts.items()}
    checks: list[tuple[str, float, int]] = []
    checks += [("lines of code", sum(map(code_lines, texts.values())), 15000)]
    checks += [("median function", median(sizes), 8)]
    checks += [("90th percentile of functions", quantiles(sizes, n=10)[-1], 30)]
    checks += [(f"longest function {max(spans, key=spans.__getitem__)}", max(sizes), 60)]
    checks += [(f"longest file {max(files, key=files.__getitem__)}", max(files.values()), 300)]
    faults = [f"{name}: {seen:g} > {limit}" for name, seen, limit in checks if seen > limit]
    faults += [f"{file}:{x.lineno}: not annotated" for file, x in functions if not is_annotated(x)]
    names = [(file, each.id) for file, each in nodes if isinstance(each, ast.Name)]
    faults += [f"{file}: hasattr" for file, name in names if name == "hasattr"]
    seen_lines = [f"{name}: {seen:g} of at most {limit}" for name, seen, limit in checks]
    print(*seen_lines, *faults, sep="\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
