"""`bench/bits.py`: equal bits are found equal, and a changed one is found."""

from __future__ import annotations

import pytest
import torch

import seqpar
from bench import bits
from bench.lib.corpus.groups import GROUPS, cases, outcome, refused


def test_a_changed_bit_is_found_and_names_its_case(monkeypatch: pytest.MonkeyPatch) -> None:
    group = cases("merge")
    old = {"merge": {name: outcome(case) for name, case in group.items()}}
    merge = seqpar.merge

    def changed(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = merge(*tensors)
        one = torch.zeros_like(out)
        one.view(-1)[0] = torch.finfo(out.dtype).eps * 4
        return out + one, lse

    monkeypatch.setattr(seqpar, "merge", changed)
    new = {"merge": {name: outcome(case) for name, case in group.items()}}
    _, different, broken = bits.compare(old, new)
    assert len(different) == sum(name.startswith("merge") for name in group) > 0
    assert all(line.startswith("merge: merge") for line in different)
    assert not broken


def test_a_case_that_ends_in_an_error_is_broken_and_a_refused_one_is_a_case() -> None:
    def raises() -> None:
        raise ValueError("expected 3")

    said = {
        "raises": outcome(raises),
        "refused": outcome(lambda: refused(raises)),
        "taken": outcome(lambda: refused(int)),
    }
    _, different, broken = bits.compare({"plans": said | {"refused": said["taken"]}}, {"plans": said})
    assert broken == ["plans: raises: broken by ValueError: expected 3"]
    assert len(different) == 1 and different[0].startswith("plans: refused: ")


@pytest.mark.parametrize("group", list(GROUPS))
def test_every_group_has_cases(group: str) -> None:
    assert len(cases(group)) >= 10
