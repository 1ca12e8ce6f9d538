"""`bench/bits.py`: equal bits are found equal, and a changed one is found."""

from __future__ import annotations

import pytest
import torch

import seqpar
from bench import bits
from bench.lib.corpus.digest import digest
from bench.lib.corpus.groups import GROUPS, cases, outcome


@pytest.mark.parametrize("group", ["attention", "steps"])
def test_a_case_is_equal_with_itself(group: str) -> None:
    case = next(reversed(cases(group).values()))
    assert outcome(case) == outcome(case) and "Error" not in outcome(case)


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
    _, different = bits.compare(old, new)
    assert len(different) == sum(name.startswith("merge") for name in group) > 0
    assert all(line.startswith("merge: merge") for line in different)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_digest_sees_the_last_bit_the_shape_and_the_dtype(dtype: torch.dtype) -> None:
    x = torch.ones(6, dtype=dtype)
    nudged = x.clone()
    nudged[5] += torch.finfo(dtype).eps
    others = [nudged, x.view(2, 3), x.double() if dtype != torch.float64 else x.float(), None]
    assert len({digest(value) for value in [x, *others]}) == 5
    assert digest(x.expand(2, 6).t()) == digest(x.expand(2, 6).t().contiguous())


@pytest.mark.parametrize("group", list(GROUPS))
def test_every_group_has_cases(group: str) -> None:
    assert len(cases(group)) >= 10
