"""The remedies that errors give, read from the source, and `advised`, which a case uses to follow one.

A remedy is what stands after the last semicolon of an error's message: the error says what was given and what was
expected, and then what to do. A test that follows a remedy makes the mistake inside `advised`, then does what the
remedy says and asserts that the result is right::

    with advised(ValueError, "drop the batch dimension"):
        module(x[None])
    assert torch.equal(module(x), expected)

`test_every_remedy.py` reads all remedies from the raises of the package, reads all followed ones from the files of
this folder, and fails for the difference.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "seqpar"
ERRORS = {"TypeError", "ValueError", "NotImplementedError", "RuntimeError", "PeerError"}
HOLE = "{}"  # what an f-string fills in


def remedies(paths: Iterable[Path], functions: frozenset[str] = frozenset()) -> dict[str, list[str]]:
    """Every remedy of the errors made in these files, with the places; of these functions alone, if any are named."""
    places: dict[str, list[str]] = {}
    for path in paths:
        tree = ast.parse(path.read_text())
        scopes = [tree] if not functions else [n for n in ast.walk(tree) if getattr(n, "name", None) in functions]
        for call in (node for scope in scopes for node in ast.walk(scope) if _makes_an_error(node)):
            if remedy := remedy_of(_template(call.args[0])):
                places.setdefault(remedy, []).append(f"{path.relative_to(PACKAGE.parent)}:{call.lineno}")
    return places


def remedy_of(message: str) -> str:
    """What stands after the last semicolon of a message, or nothing."""
    return " ".join(message.rpartition(";")[2].split()) if ";" in message else ""


def followed() -> dict[str, str]:
    """The remedies that the tests of this folder follow, with the function that does it.

    What a rank does in a process of its own returns whether it ended right, for the test to assert.
    """
    functions: dict[str, str] = {}
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        for function in ast.parse(path.read_text()).body:
            for block in (node for node in ast.walk(function) if isinstance(node, ast.With)):
                for remedy in filter(None, map(_advised, block.items)):
                    judged = [n.lineno for n in ast.walk(function) if isinstance(n, (ast.Assert, ast.Return))]
                    assert max(judged, default=0) > (block.end_lineno or 0), (
                        f"{path.name}: nothing judges how following {remedy!r} at line {block.lineno} ends"
                    )
                    functions[remedy] = f"{path.name}:{block.lineno}"
    return functions


@contextmanager
def advised(error: type[Exception] | tuple[type[Exception], ...], remedy: str) -> Iterator[None]:
    """A block that must end in that error, whose message ends in that remedy; ``{}`` stands for what varies."""
    with pytest.raises(error) as raised:
        yield
    pattern = ".*".join(re.escape(part) for part in remedy.split(HOLE))
    said = " ".join(str(raised.value).split())
    assert re.search(rf"; {pattern}(?:$|: |\. )", said), f"the message does not end in {remedy!r}: {said}"


def _makes_an_error(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ERRORS and bool(node.args)


def _template(node: ast.expr) -> str:
    """The text of a string expression, with a hole for everything that is computed."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else HOLE
    if isinstance(node, ast.JoinedStr):
        return "".join(_template(part) for part in node.values)
    if isinstance(node, ast.BinOp):
        return _template(node.left) + _template(node.right)
    return HOLE


def _advised(item: ast.withitem) -> str | None:
    call = item.context_expr
    if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "advised":
        return ast.literal_eval(call.args[1])  # type: ignore[no-any-return]
    return None
