"""`bench/shape.py`: what it counts."""

from __future__ import annotations

from pathlib import Path

import torch

import seqpar
from bench import shape

SOURCE = '''"""A module.

With two lines."""

# a comment
import os  # and another


def f(x):
    """A docstring."""
    text = """not
a docstring"""
    return x, text  # type: ignore[no-any-return]
'''


def test_lines_of_code_comments_and_docstrings_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text(SOURCE)
    assert shape.lines(path) == (5, 2, 4)


def test_sizes_are_those_of_folders_and_of_long_files(tmp_path: Path) -> None:
    for name, count in {"seqpar/a": 3, "seqpar/trial/b": 451, "seqpar/train/checks": 4, "tests/c": 5, "d": 6}.items():
        path = tmp_path / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n" * count)
    assert list(shape.sizes(tmp_path).values()) == [458, 3, 1, 455, 5, 0]


def test_a_name_of_two_classes_or_of_a_class_and_an_alias_is_found(tmp_path: Path) -> None:
    for name, text in {"a": "class A: ...\nclass B: ...\nC = int\n", "b/c": "A = str\nC = str\nclass D: ...\n"}.items():
        path = tmp_path / "seqpar" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert shape.reused(tmp_path) == {"A": ["a.py", "b/c.py"]}


def test_functions_are_counted_once_and_only_those_of_seqpar() -> None:
    x = torch.zeros(4, 2, 8)
    positions, frequencies = torch.arange(4), torch.ones(4)
    names = shape.entered(lambda: [seqpar.rotary(x, positions, frequencies) for _ in range(3)])
    assert sum(name.endswith(" rotary") for name in names) == 1
    assert len(names) == len(set(names)) and all(
        (Path(seqpar.__file__).parent / n.split(":")[0]).exists() for n in names
    )
    assert shape.entered(lambda: torch.ones(3).sum()) == []
