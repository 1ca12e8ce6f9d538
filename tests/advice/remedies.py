"""The remedies that messages give, read from the source, and `advised`, which a case uses to follow one.

A remedy is what stands after the last semicolon of a message: the message says what was given and what was expected,
and then what to do. A test that follows a remedy makes the mistake inside `advised`, then does what the remedy says and
asserts that the result is right::

    with advised(ValueError, "drop the batch dimension"):
        module(x[None])
    assert torch.equal(module(x), expected)

`test_every_remedy.py` reads all remedies from the strings of the package, reads all followed ones from the files of
this folder, and fails for the difference. So a semicolon in a string, docstrings aside, is for a remedy alone, be the
string raised, warned of, kept or returned; and what stands after it is written out, not put together elsewhere.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch.distributed as dist

PACKAGE = Path(__file__).parents[2] / "seqpar"
HOLE = "{}"  # what an f-string fills in


def remedies(paths: Iterable[Path], skipped: frozenset[str] = frozenset()) -> dict[str, list[str]]:
    """Every remedy in the strings of these files, with the places; strings of the skipped functions aside."""
    places: dict[str, list[str]] = {}
    for path in paths:
        for line, message in messages(ast.parse(path.read_text()), skipped):
            if remedy := remedy_of(message):
                places.setdefault(remedy, []).append(f"{path.parent.name}/{path.name}:{line}")
    return places


def remedy_of(message: str) -> str:
    """What stands after the last semicolon of a message; a hole if that is put together elsewhere, or nothing."""
    return " ".join(message.rpartition(";")[2].split()) or HOLE if ";" in message else ""


def followed() -> dict[str, list[str]]:
    """The remedies that the tests of this folder follow, with the places that do it.

    What a rank does in a process of its own returns whether it ended right, for the test to assert.
    """
    places: dict[str, list[str]] = {}
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        for function in ast.parse(path.read_text()).body:
            for block in (node for node in ast.walk(function) if isinstance(node, ast.With)):
                for remedy in filter(None, map(_advised, block.items)):
                    judged = [n.lineno for n in ast.walk(function) if isinstance(n, (ast.Assert, ast.Return))]
                    assert max(judged, default=0) > (block.end_lineno or 0), (
                        f"{path.name}: nothing judges how following {remedy!r} at line {block.lineno} ends"
                    )
                    places.setdefault(remedy, []).append(f"{path.name}:{block.lineno}")
    return places


@contextmanager
def advised(kind: type[Exception] | tuple[type[Exception], ...], remedy: str) -> Iterator[None]:
    """A block that must end in that error, or give that warning, and the message in that remedy; ``{}`` is any text."""
    pattern = rf"; {'.*'.join(re.escape(part) for part in remedy.split(HOLE))}(?:$|: |\. )"
    if isinstance(kind, type) and issubclass(kind, Warning):
        with pytest.warns(kind, match=pattern):
            yield
        return
    with pytest.raises(kind) as raised:
        yield
    said = " ".join(str(raised.value).split())
    assert re.search(pattern, said), f"the message does not end in {remedy!r}: {said}"


def messages(node: ast.AST, skipped: frozenset[str] = frozenset()) -> Iterator[tuple[int, str]]:
    """The strings below a node, docstrings aside, with their lines."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.ClassDef)) and child.name in skipped:
            continue
        if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
            continue
        if isinstance(child, ast.expr) and (text := _template(child)) is not None:
            yield child.lineno, text
            for part in _holes(child):
                yield from messages(part, skipped)
        else:
            yield from messages(child, skipped)


def _template(node: ast.expr) -> str | None:
    """The text of a string expression, with a hole for everything that is computed; None of another expression."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(HOLE if (text := _template(part)) is None else text for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        both = [_template(part) for part in (node.left, node.right)]
        return None if both == [None, None] else "".join(HOLE if text is None else text for text in both)
    return None


def _holes(node: ast.expr) -> Iterator[ast.expr]:
    """What is computed in a string expression."""
    for part in ast.iter_child_nodes(node):
        if isinstance(part, ast.expr):
            if _template(part) is None:
                yield part
            else:
                yield from _holes(part)


def _advised(item: ast.withitem) -> str | None:
    call = item.context_expr
    if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "advised":
        return ast.literal_eval(call.args[1])  # type: ignore[no-any-return]
    return None


@contextmanager
def default_group() -> Iterator[None]:
    """A default group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
