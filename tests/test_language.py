"""Phrases that no engineer would say aloud are not in docstrings, comments, help texts and errors.

The patterns are a review's, and only those: each was found in several places, where a noun was missing or a participle
stood for one.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# pattern -> (a sentence that it finds, how to say it)
PHRASES = {
    r"(?<!there )(?<!there's )\b(is|are) none\b": ("sizes that are none", "which are not positive integers"),
    r"(?<![Tt]here )\b(is|are) no (?!longer\b|more\b|less\b|\w+er\b)\w+": ('"a b" is no form', '"a b" is not a form'),
    r"\bof which\b": ("rows of which each rank has some", "rows; each rank has some of them"),
    r"\b[Ww]hat (is|has)\b": ("what is not used may differ", "unused options may differ"),
    r"\b[Ll]ikewise\b": ("values, likewise", "values too"),
    r"\bsays what\b": ("the plan says what moves", "the plan has the messages"),
    r"\b(is|are) made\b": ("the sum is made here", "the sum is computed here"),
    r"\bthere(?= too\b|[.,;:)](?:\s|$)| yet\b)": ("the keys that lie there.", "the keys in this buffer."),
}
SOURCES = [
    path
    for folder in ("seqpar", "csrc", "examples", "bench")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in {".py", ".h", ".cpp", ".cu"}
]
WORDS = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}


@cache
def prose(path: Path) -> list[tuple[int, str]]:
    """The lines of a file's comments and strings, by number."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        return [(number, line.partition("//")[2]) for number, line in enumerate(text.splitlines(), 1)]
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    words = [(token.start[0], token.string) for token in tokens if token.type in WORDS]
    return [(first + offset, line) for first, string in words for offset, line in enumerate(string.splitlines())]


@pytest.mark.parametrize("pattern", PHRASES)
def test_no_sentence_has_a_phrase_that_nobody_says(pattern: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in SOURCES
        for number, line in prose(path)
        if re.search(pattern, line)
    ]
    example, better = PHRASES[pattern]
    assert not found, f'say "{better}" instead of "{example}":\n' + "\n".join(found)


@pytest.mark.parametrize("pattern", PHRASES)
def test_a_pattern_finds_its_phrase_and_not_the_better_one(pattern: str) -> None:
    example, better = PHRASES[pattern]
    assert re.search(pattern, example) and not re.search(pattern, better)


@pytest.mark.parametrize(
    "good",
    [
        "there is none",
        "There are no atomics",
        "the fit is no slower",
        "there are no ranks",
        "there is no plan there is",
    ],
)
def test_common_sentences_pass(good: str) -> None:
    assert not any(re.search(pattern, good) for pattern in PHRASES)


def test_prose_is_found_in_every_kind_of_file(tmp_path: Path) -> None:
    python, header = tmp_path / "a.py", tmp_path / "a.h"
    python.write_text('"""First.\n\nSecond."""\nx = f"third {x}"  # fourth\nof_which = 1\n', encoding="utf-8")
    header.write_text("int x;  // fifth\n", encoding="utf-8")
    words = " ".join(line for path in (python, header) for _, line in prose(path))
    assert [word in words for word in ("First", "Second", "third", "fourth", "fifth")] == [True] * 5
    assert "of_which" not in words


DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def summaries(text: str) -> Iterator[tuple[int, str]]:
    """The first paragraphs of docstrings, with the lines where they begin."""
    nodes: list[ast.AST] = [ast.parse(text)]
    for node in nodes:
        if isinstance(node, DOCUMENTED) and (docstring := ast.get_docstring(node)):
            yield node.body[0].lineno, docstring.partition("\n\n")[0]
        nodes += [inner for inner in ast.iter_child_nodes(node) if not isinstance(inner, ast.expr)]


def wraps(summary: str) -> bool:
    """Whether a summary goes on in a second line."""
    return not summary.partition("\n")[0].rstrip().endswith((".", ":"))


def test_the_summary_of_a_docstring_is_one_line() -> None:
    files = [path for folder in ("seqpar", "examples", "bench", "tests") for path in (ROOT / folder).rglob("*.py")]
    long = [
        f"{path.relative_to(ROOT)}:{line}: {summary}"
        for path in sorted(files)
        for line, summary in summaries(path.read_text(encoding="utf-8"))
        if "\n" in summary and wraps(summary)
    ]
    assert not long, "one line of at most 120 characters, and the rest below an empty line:\n" + "\n".join(long)


def test_a_summary_of_two_lines_is_found() -> None:
    found = dict(summaries('"""One\ntwo."""\n\ndef f():\n    """One.\n\n    Two\n    three."""\n'))
    assert found == {1: "One\ntwo.", 5: "One."} and wraps(found[1]) and not wraps(found[5])
