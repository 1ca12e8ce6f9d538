"""`bench/shape.py`: what it counts."""

from __future__ import annotations

from pathlib import Path

import torch

import seqpar
from bench import shape


def test_functions_are_counted_once_and_only_those_of_seqpar() -> None:
    x = torch.zeros(4, 2, 8)
    positions, frequencies = torch.arange(4), torch.ones(4)
    names = shape.entered(lambda: [seqpar.rotary(x, positions, frequencies) for _ in range(3)])
    assert sum(name.endswith(" rotary") for name in names) == 1
    assert len(names) == len(set(names)) and all(
        (Path(seqpar.__file__).parent / n.split(":")[0]).exists() for n in names
    )
    assert shape.entered(lambda: torch.ones(3).sum()) == []
