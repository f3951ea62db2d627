"""What one test leaves behind for those that run after it in the same process."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
FILES = sorted(
    path
    for path in TESTS.rglob("*.py")
    if "smoke" not in path.parts and ".task(" in path.read_text()
)


def shared_tasks(source: str) -> Iterator[int]:
    """Yield the lines where a task is made without a word on whether it is shared."""
    for statement in ast.parse(source).body:
        nodes = list(ast.walk(statement))
        is_said = any(isinstance(node, ast.Constant) and node.value == "shared" for node in nodes)
        calls = {node.func: node.keywords for node in nodes if isinstance(node, ast.Call)}
        for node in nodes:
            if isinstance(node, ast.Attribute) and node.attr == "task":
                keywords = calls.get(node)
                if keywords is None and not is_decorator(node, nodes):
                    continue
                names = [each.arg for each in keywords or ()]
                if "shared" not in names and not (None in names and is_said):
                    yield node.lineno


def is_decorator(node: ast.AST, nodes: list[ast.AST]) -> bool:
    return any(node in getattr(each, "decorator_list", ()) for each in nodes)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(TESTS)))
def test_tasks_made_by_a_test_are_of_its_app_alone(path: Path) -> None:
    """A shared one is bound to every app that comes later, and a bad one has them all refused."""
    lines = sorted(set(shared_tasks(path.read_text())))
    assert lines == [], f"{path.name}: give these tasks shared=False"


@pytest.mark.parametrize(
    ("made", "is_found"),
    [
        ("app.task(shared=False)(body)", False),
        ("app.task(**{'shared': False, **more})(body)", False),
        ("app.task(base=Base)(body)", True),
        ("app.task(**more)(body)", True),
        ("made = app.task(base=Base)(body)", True),
        ("app.task", False),
    ],
)
def test_a_shared_task_is_found(made: str, is_found: bool) -> None:
    for source in (made, f"def test():\n    {made}"):
        assert bool(list(shared_tasks(source))) is is_found
    if "(" not in made:
        decorated = f"def test():\n    @{made}\n    def task(): ..."
        assert list(shared_tasks(decorated)) == [2]
