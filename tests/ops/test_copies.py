"""How often an element is copied on its way, and in how many messages: by `switch`, `relayout` and the head trade."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch

import seqpar
from seqpar import native
from seqpar.comm import Comm
from seqpar.facts.layout import Layout
from seqpar.facts.mask import Mask
from seqpar.ops.attention.call import Phase
from seqpar.ops.move import pack as parcel
from seqpar.plan import Plan
from seqpar.testing import run_processes, run_threads
from tests.ops.recorded import Recorder, step


@dataclass
class Counts:
    """Calls of `copy` by one rank, and the elements that each copied."""

    calls: list[int] = field(default_factory=list)

    @property
    def elements(self) -> int:
        """Of all calls."""
        return sum(self.calls)


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, Counts]]:
    """What each rank's thread packs, unpacks and copies itself."""
    found: dict[int, Counts] = defaultdict(Counts)
    copy = parcel.copy

    def counted(pairs) -> None:
        elements = [(p.src if p.src_rows is None else p.src[p.src_rows.long()]).numel() for p in pairs if p.dst.numel()]
        if sum(elements):
            found[threading.get_ident()].calls.append(sum(elements))
        copy(pairs)

    monkeypatch.setattr(parcel, "copy", counted)
    return found


def switched(comm: Comm, copies: dict[int, Counts], dims: tuple[int, int]) -> tuple[Counts, int, int]:
    """[4 P, 4 P, 3] with dims[1] sharded to dims[0] sharded."""
    shape = [4 * comm.size, 4 * comm.size, 3]
    shape[dims[1]] = 4
    x = torch.arange(4.0 * 4 * comm.size * 3).view(shape)
    seqpar.switch(x, comm, split_dim=dims[0], concat_dim=dims[1])
    return copies[threading.get_ident()], comm.stats.messages_sent, comm.stats.bytes_received // 4


@pytest.mark.parametrize("dims", [(0, 1), (1, 0)])
def test_switch_copies_each_element_once_on_a_direct_comm(copies, dims) -> None:
    for counts, messages, received in run_threads(4, switched, copies, dims):
        # each message is copied by the comm, from where it lies to where it belongs
        assert counts.calls == [48]
        assert received + counts.elements == 4 * 48
        assert messages == 3


@pytest.mark.parametrize(("dims", "calls"), [((0, 1), [4 * 48]), ((1, 0), [3 * 48, 48])])
def test_switch_packs_or_unpacks_once_on_another_comm(copies, dims, calls) -> None:
    """Splitting the first dim, pieces lie contiguously; joining it, they arrive where they belong."""
    for counts, messages, _ in run_threads(4, switched, copies, dims, direct=False):
        assert counts.calls == calls
        assert messages == 3


def test_switch_of_inner_dims_packs_once_and_unpacks_once(copies) -> None:
    def middle(comm: Comm) -> Counts:
        seqpar.switch(torch.zeros(2, 3, 4 * 3), comm, split_dim=2, concat_dim=1)
        return copies[threading.get_ident()]

    for counts in run_threads(3, middle, direct=False):
        assert counts.calls == [2 * 2 * 3 * 4, 3 * 2 * 3 * 4]


@pytest.mark.parametrize("direct", [True, False])
def test_relayout_packs_once_and_unpacks_once(copies, direct) -> None:
    src, dst = Layout.contiguous(12, 2), Layout.striped(12, 2)

    def moved(comm: Comm) -> tuple[Counts, int]:
        x = torch.ones(6, 5)
        seqpar.relayout(x, comm, src=src, dst=dst)
        return copies[threading.get_ident()], comm.stats.messages_sent

    for counts, messages in run_threads(2, moved, direct=direct):
        # three rows leave, which are not consecutive and so packed; three stay; three arrive where they belong
        assert counts.calls == [15, 15]
        assert messages == 1


def traded(comm: Comm, copies: dict[int, Counts], plan: Plan, heads: tuple[int, int]) -> tuple[Recorder, Counts]:
    recorder = Recorder(comm)
    step(recorder, plan, heads, (8, 4), 0, torch.float64)
    recorder.comm = None
    return recorder, copies[threading.get_ident()]


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
def test_what_is_traded_goes_in_one_exchange_and_is_packed_and_unpacked_once(copies, layout, direct) -> None:
    tokens, ranks = 24, 4
    layouts = {"zigzag": Layout.zigzag([tokens], ranks), "striped": Layout.striped(tokens, ranks)}
    plan = Plan(Mask([tokens]), layouts.get(layout, Layout.contiguous(tokens, ranks)), ulysses=ranks)
    # of a share, two query heads and one key head: q, k and v in; out and lse out; dout and dlse in; dq, dk and dv out
    mine = tokens // ranks
    widths = {Phase.ENTER: (3, 28), Phase.LEAVE: (2, 10), Phase.BACK_ENTER: (2, 10), Phase.BACK_LEAVE: (2, 28)}
    # whose rows are not consecutive inside: those of the last rank of a zigzag are, in the middle
    torn = {"contiguous": [], "zigzag": [0, 1, 2], "striped": [0, 1, 2, 3]}[layout]
    for rank, (recorder, counts) in enumerate(run_threads(ranks, traded, copies, plan, (8, 4), direct=direct)):
        others = [member for member in range(ranks) if member != rank]
        calls = []
        for phase, (legs, width) in widths.items():
            assert len(recorder.posted(phase)) == 1
            inwards = phase in (Phase.ENTER, Phase.BACK_ENTER)
            if direct:
                # rows that go to two places make two messages, which need not be packed
                travelling = [rank] * len(others) if inwards else others
                split = sum(member in torn for member in travelling) if layout == "zigzag" else 0
                assert recorder.messages[phase] == legs * (len(others) + split)
                packed = len(others) * (layout == "striped" and not inwards)
                unpacked = len(others) * (layout == "striped" and inwards)
            else:
                assert recorder.messages[phase] == len(others)
                packed = len(others)
                unpacked = sum(member in torn for member in others) if inwards else len(others)
            # own rows are copied with those that are unpacked
            calls += [n * mine * width for n in (packed, 1 + unpacked) if n]
        assert counts.calls == calls


def test_other_keys_than_queries_make_messages_of_their_own(copies) -> None:
    plan = Plan(Mask([8], causal=False, kv_lengths=[12]), Layout.contiguous(8, 2), kv_layout=Layout.contiguous(12, 2),
                ulysses=2)  # fmt: skip
    for recorder, _ in run_threads(2, traded, copies, plan, (4, 2), direct=False):
        assert recorder.messages[Phase.ENTER] == 2
        assert recorder.messages[Phase.BACK_LEAVE] == 2


def staged(comm: Comm, layout: Layout, tokens: int) -> int:
    step(comm, Plan(Mask([tokens]), layout, ulysses=comm.size), (4, 2), (8, 4), 0, torch.float64)
    seqpar.switch(torch.zeros(3, 4, 2), comm, split_dim=1, concat_dim=0)
    return comm.stats.staged_bytes


@pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))
@pytest.mark.parametrize("kind", ["contiguous", "zigzag"])
def test_shared_memory_is_written_where_it_belongs(kind) -> None:
    tokens = 16
    layout = Layout.contiguous(tokens, 2) if kind == "contiguous" else Layout.zigzag([tokens], 2)
    assert run_processes(2, staged, layout, tokens, comm="shm") == [0, 0]


def conjugated(comm: Comm) -> list[torch.Tensor]:
    x = torch.complex(torch.arange(12.0), torch.arange(12.0) + comm.rank).view(4, 3).conj()
    src, dst = Layout.contiguous(8, 2), Layout.striped(8, 2)
    return [
        seqpar.switch(x, comm, split_dim=0, concat_dim=1), seqpar.relayout(x, comm, src=src, dst=dst),
        seqpar.switch(x.imag, comm, split_dim=0, concat_dim=1),
    ]  # fmt: skip


def test_what_is_lazily_conjugated_or_negated_arrives_so() -> None:
    whole = torch.cat([torch.complex(torch.arange(12.0), torch.arange(12.0) + rank).view(4, 3) for rank in range(2)])
    whole = whole.conj().resolve_conj()
    wide = torch.cat([whole[:4], whole[4:]], 1)
    for run in (run_processes, run_threads):
        for rank, (there, moved, part) in enumerate(run(2, conjugated)):
            assert torch.equal(there, wide[2 * rank : 2 * rank + 2])
            assert torch.equal(moved, whole[rank::2])
            assert torch.equal(part, wide[2 * rank : 2 * rank + 2].imag)
