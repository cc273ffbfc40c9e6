"""The table of cases in README.md is true: each test exists and says which case it is about."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent
CASE = re.compile(r"(?<![A-Za-z0-9])[A-E]\d\d(?![A-Za-z0-9])")
ROW = re.compile(r"^\| ([A-E]\d\d) \| `([^`]+\.py)` \| `(test_\w+)` \|$", re.MULTILINE)


def named_cases() -> dict[tuple[str, str], set[str]]:
    """Return the cases that each test names, in its name or its docstring, by (file, name)."""
    found = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                words = [*node.name.split("_"), ast.get_docstring(node) or ""]
                cases = {case for word in words for case in CASE.findall(word)}
                found[path.relative_to(TESTS).as_posix(), node.name] = cases
    return found


def rows() -> list[tuple[str, str, str]]:
    text = (TESTS / "README.md").read_text()
    found: list[tuple[str, str, str]] = ROW.findall(text)
    lines = [line for line in text.splitlines() if re.match(r"\| [A-E]\d", line)]
    assert len(found) == len(lines) > 50  # no row that the pattern above does not understand
    return found


def test_each_test_of_the_table_exists_and_names_its_case() -> None:
    tests = named_cases()

    wrong = [row for row in rows() if row[0] not in tests.get(row[1:], set())]

    assert wrong == []


def test_each_case_has_one_row_in_order() -> None:
    cases = [case for case, *_ in rows()]

    assert cases == sorted(set(cases))
