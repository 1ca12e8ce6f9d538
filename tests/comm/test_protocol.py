"""What all communicators share: rounds cut alike by sender and receiver, and the verdict on the ranks' claims."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from seqpar.comm import Comm, Stats, Tag
from seqpar.comm.header import AGREEING, Header, mismatch
from seqpar.comm.protocol import INSIDE, MESSAGES_PER_EXCHANGE, Claim, raise_first, rounds
from seqpar.testing import run_threads


@settings(max_examples=60, deadline=None)
@given(size=st.integers(2, 90), most=st.integers(1, 70), node=st.integers(0, 8), seed=st.integers(0, 2**16))
def test_sender_and_receiver_cut_an_exchange_alike(size, most, node, seed):
    draw = torch.Generator().manual_seed(seed)
    ranks = torch.randperm(size, generator=draw)[: min(size, 5)].tolist()
    nodes = [rank // node for rank in range(size)] if node else ()
    counts = {
        (a, b): int(torch.randint(0, most + 1, (1,), generator=draw)) for a in ranks for b in range(size) if a != b
    }
    tensors = {pair: [torch.empty(index % 4) for index in range(count)] for pair, count in counts.items()}
    for a in ranks:
        sent = rounds(a, size, {b: tensors[a, b] for b in range(size) if b != a}, {}, nodes)
        assert [part.key for part in sent] == sorted({part.key for part in sent}), "one order on all ranks"
        for part in sent:
            assert sum(map(len, part.sends.values())) <= MESSAGES_PER_EXCHANGE // 2
            assert all((part.lane == INSIDE) == (bool(node) and nodes[a] == nodes[b]) for b in part.sends)
        for b in range(size):
            if b == a:
                continue
            received = rounds(b, size, {}, {a: tensors[a, b]}, nodes)
            assert {part.key: list(map(id, part.recvs[a])) for part in received} == {
                part.key: list(map(id, part.sends[b])) for part in sent if b in part.sends
            }
            assert [id(t) for part in received for t in part.recvs[a]] == [id(t) for t in tensors[a, b] if t.numel()]


@pytest.mark.parametrize(
    ("claims", "expected"),
    [
        ([("a", {"x": 1}), ("a", {"x": 2}), ("a", {"x": 1})], "a: ranks differ in x: 1 on ranks 0, 2; 2 on rank 1"),
        ([("a", {"x": 1}), ("b", {"x": 1})], "ranks differ in the call: a on rank 0; b on rank 1"),
        ([("a", {"x": 1}), ("a", {})], "ranks differ in x: 1 on rank 0; not given on rank 1"),
        ([("a", {"x": i // 10}) for i in range(11)], "0 on ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more; 1 on rank 10"),
    ],
)
def test_settle_says_who_gave_what(claims, expected):
    with pytest.raises(ValueError) as raised:
        raise_first([Claim.of(what, facts, None) for what, facts in claims], None)
    assert expected in str(raised.value)
    said = "make the same calls on all ranks, and evaluate on one rank inside `with handle.local():`"
    assert str(raised.value).endswith(f"; {said}" if "the call" in expected else "; give all ranks the same")


def test_facts_are_a_mapping() -> None:
    def rank(comm: Comm) -> None:
        with pytest.raises(TypeError, match="step: facts must be a mapping of names to values, got 3; give a dict"):
            comm.agree("step", 3)  # type: ignore[arg-type]
        comm.agree("step", {"number": 3})

    run_threads(2, rank)


def test_a_part_of_a_verb_that_this_rank_has_not_come_to_has_the_verbs_name() -> None:
    before = [Tag(7, 0, 1, 0, "attention (forward, keys and values)")]
    own = Tag(0, 3, AGREEING, 0, "sync_gradients (gathering)")
    headers = [Header.of(0, tag, [torch.empty(2)]) for tag in (Tag(7, 0, 4, 1), own, Tag(8, 0, 4, 1))]
    for header, said in (
        (headers[0], "attention (part 4), call 0 stage 1"),
        (headers[2], "call 0 phase 4 stage 1 with"),
    ):
        assert f"rank 0 sent for {said}" in mismatch(0, header, 1, headers[1], own, before)


def test_stats_count_bytes_by_peer():
    stats = Stats()
    stats.count({1: [torch.empty(2), torch.empty(3, dtype=torch.int64)]}, {2: [torch.empty(1)]})
    assert (stats.bytes_sent, stats.bytes_received, stats.sent_to) == (32, 4, {1: 32})
    assert (stats.messages_sent, stats.messages_received, stats.exchanges) == (2, 1, 1)
    stats.reset()
    assert stats == Stats()
