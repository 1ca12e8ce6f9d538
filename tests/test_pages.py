"""What pages of docs/ say of the package and of its records is true."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

from bench.cpu import architectures_page
from tests.advice.remedies import PACKAGE, messages

ROOT = Path(__file__).parent.parent
DOCS, RESULTS = ROOT / "docs", ROOT / "bench" / "results"


def test_the_page_of_architectures_is_that_of_the_record() -> None:
    record = json.loads((RESULTS / "architectures.json").read_text())
    assert (DOCS / "architectures.md").read_text() == architectures_page.page(record)


TROUBLES = (DOCS / "troubleshooting.md").read_text()
TREES = [ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))]
MESSAGES = {" ".join(text.split()) for tree in TREES for _, text in messages(tree)}


def rows(page: str, first: str) -> list[list[str]]:
    """The rows of the tables of a page whose first column has that name."""
    tables = re.findall(rf"^\| {re.escape(first)} \|.*\n\|[-|]+\n((?:\|.*\n)+)", page, re.MULTILINE)
    return [re.split(r" *\| *", line.strip("|").strip()) for table in tables for line in table.strip().splitlines()]


@pytest.mark.parametrize("quoted", [row[0] for row in rows(TROUBLES, "message")])
def test_a_quoted_message_is_one_of_the_package(quoted: str) -> None:
    text = re.fullmatch(r"`([^`]+)`(?: \(a warning\))?", quoted)
    assert text, quoted
    pattern = re.compile(".*".join(re.escape(part.strip()) for part in text[1].split("…")))
    assert any(pattern.search(message) for message in MESSAGES)


def test_every_class_of_error_is_explained() -> None:
    classes = [node for tree in TREES for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    own = {node.name for node in classes if any(re.search("Error$|^Exception$", ast.unparse(b)) for b in node.bases)}
    explained = {name for row in rows(TROUBLES, "class") for name in re.findall(r"`(\w+)`", row[0])}
    assert len(own) >= 3 and own <= explained, own - explained
