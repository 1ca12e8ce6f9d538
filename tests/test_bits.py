"""`bench/bits.py`: equal bits are found equal, and a changed one is found."""

from __future__ import annotations

import pytest
import torch

import seqpar
from bench import bits
from bench.lib.corpus.digest import digest
from bench.lib.corpus.groups import BROKEN, GROUPS, cases, outcome, refused


@pytest.mark.parametrize("group", ["attention", "steps"])
def test_a_case_is_equal_with_itself(group: str) -> None:
    case = next(reversed(cases(group).values()))
    assert outcome(case) == outcome(case) and not outcome(case).startswith(BROKEN)


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


@pytest.mark.parametrize("group", ["kernels", "planner"])
def test_what_a_group_wants_refused_is_refused(group) -> None:
    wanted = {name: case for name, case in cases(group).items() if getattr(case, "func", None) is refused}
    assert len(wanted) == {"kernels": 12, "planner": 4}[group]
    assert all(case().startswith("refused with") for case in wanted.values())


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
