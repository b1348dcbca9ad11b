"""The size budget of the package: small rooms, short functions, full types; printed, enforced."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from statistics import median, quantiles

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "terrazzo"
PACKAGE_LINES, FILE_LINES = 8000, 300
MEDIAN_LINES, P90_LINES, FUNCTION_LINES = 8, 30, 60

Function = ast.FunctionDef | ast.AsyncFunctionDef


def length(function: Function) -> int:
    return (function.end_lineno or function.lineno) - function.lineno + 1


def is_annotated(function: Function) -> bool:
    typed = [each for each in ast.walk(function.args) if isinstance(each, ast.arg)]
    named = [each for each in typed if each.arg not in ("self", "cls")]
    return function.returns is not None and all(each.annotation for each in named)


def is_forbidden(node: ast.AST) -> bool:
    """A bare or broad `except`, or a call of `hasattr`."""
    if isinstance(node, ast.ExceptHandler):
        broad = ("Exception", "BaseException")
        names = [each.id for each in ast.walk(node.type or node) if isinstance(each, ast.Name)]
        return node.type is None or any(name in broad for name in names)
    return isinstance(node, ast.Name) and node.id == "hasattr"


def main() -> int:
    files = {file: file.read_text(encoding="utf-8") for file in sorted(PACKAGE.rglob("*.py"))}
    lines = {file.relative_to(PACKAGE): text.count("\n") for file, text in files.items()}
    nodes = [(file, node) for file, text in files.items() for node in ast.walk(ast.parse(text))]
    functions = [(file, node) for file, node in nodes if isinstance(node, Function)]
    lengths = [length(node) for _, node in functions]
    longest = max(lines, key=lambda file: lines[file])
    checks = [
        ("package lines", sum(lines.values()), PACKAGE_LINES),
        (f"lines of the longest file, {longest}", lines[longest], FILE_LINES),
        (f"median lines of {len(lengths)} functions", median(lengths), MEDIAN_LINES),
        ("90th percentile", quantiles(lengths, n=10)[-1], P90_LINES),
        ("longest function", max(lengths), FUNCTION_LINES),
    ]
    faults = [f"{name}: {seen:g} > {limit}" for name, seen, limit in checks if seen > limit]
    untyped = [f"{file}:{each.lineno}" for file, each in functions if not is_annotated(each)]
    faults += [f"{place}: not fully annotated" for place in untyped]
    faults += [f"{file}: broad except or hasattr" for file, node in nodes if is_forbidden(node)]
    print("\n".join(f"{name}: {seen:g} of at most {limit}" for name, seen, limit in checks))
    print("\n".join(faults) or "within the budget")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
