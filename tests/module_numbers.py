"""Refuses new numbers at the level of a module: ``python -m tests.module_numbers [--write]``.

A number belongs into the frozen configuration of its component, beside its reason, or follows from
another. What a format, a library or mathematics fixes may stay where it is used: its docstring
begins with "Fixed by" and says who fixes it. Files that had numbers before this rule may keep as
many as ``module_numbers.txt`` says, which only falls: ``--write`` writes what is left there, and
raises nothing.
"""

import ast
import sys
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ALLOWED = Path(__file__).with_suffix(".txt")
ROOMS = ("client", "coordinator", "dht", "node")


def numbers(source: str) -> list[str]:
    """Names that a module gives to plain numbers that others do not fix, alone or several in one
    statement."""
    body = ast.parse(source).body
    return [
        name
        for statement, after in zip_longest(body, body[1:])
        if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None
        if not _fixed(after)
        for target in (
            statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        )
        for name, value in _pairs(target, statement.value)
        if _is_number(value)
    ]


def _fixed(after: ast.stmt | None) -> bool:
    """Whether the statement behind a number is a docstring that says who fixes it."""
    match after:
        case ast.Expr(value=ast.Constant(value=str(text))):
            return text.startswith("Fixed by ")
    return False


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(target, ast.Name):
        yield target.id, value
    elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for each in zip(target.elts, value.elts, strict=False):
            yield from _pairs(*each)


def _is_number(value: ast.expr) -> bool:
    """Whether an expression is made of numbers alone; what follows from a name is derived."""
    match value:
        case ast.Constant(value=number):
            return isinstance(number, int | float) and not isinstance(number, bool)
        case ast.UnaryOp(operand=operand):
            return _is_number(operand)
        case ast.BinOp(left=left, right=right):
            return _is_number(left) and _is_number(right)
    return False


def found(root: Path = ROOT) -> dict[str, list[str]]:
    """The names of numbers of each file of the product that has some."""
    paths = sorted(path for room in ROOMS for path in (root / room).rglob("*.py"))
    named = {str(path.relative_to(root)): numbers(path.read_text()) for path in paths}
    return {path: names for path, names in named.items() if names}


def allowed() -> dict[str, int]:
    """How many numbers a file may keep."""
    lines = (line.rsplit(" ", 1) for line in ALLOWED.read_text().splitlines())
    return {path: int(count) for path, count in lines}


def complaints(named: dict[str, list[str]], limits: dict[str, int]) -> list[str]:
    """What is wrong, a line for each file with more numbers than it may have."""
    return [
        f"{path}: {len(names)} module-level numbers, {limits.get(path, 0)} allowed"
        f" ({', '.join(names)}); a new one belongs into a config dataclass"
        for path, names in named.items()
        if len(names) > limits.get(path, 0)
    ]


def main() -> None:
    named, limits = found(), allowed()
    if "--write" in sys.argv[1:]:
        left = {path: min(limits[path], len(named.get(path, ()))) for path in limits}
        lines = (f"{path} {count}" for path, count in sorted(left.items()) if count)
        ALLOWED.write_text("".join(f"{line}\n" for line in lines))
    if said := complaints(named, limits):
        sys.exit("\n".join(said))


if __name__ == "__main__":
    main()
