"""What all communicators share: rounds cut alike by sender and receiver, and the verdict on the ranks' claims."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from seqpar.comm import Stats, Tag
from seqpar.comm.protocol import INSIDE, MESSAGES_PER_EXCHANGE, Claim, raise_first, rounds


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


def test_settle_returns_on_equal_claims():
    raise_first([Claim.of("attention", {"heads": 8}, None)] * 3, None)


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


def test_a_tag_reads_as_a_sentence():
    assert str(Tag(0xABC, 7, 0, 2)) == "call 7 phase 0 stage 2 with plan abc"


def test_stats_count_bytes_by_peer():
    stats = Stats()
    stats.count({1: [torch.empty(2), torch.empty(3, dtype=torch.int64)]}, {2: [torch.empty(1)]})
    assert (stats.bytes_sent, stats.bytes_received, stats.sent_to) == (32, 4, {1: 32})
    assert (stats.messages_sent, stats.messages_received, stats.exchanges) == (2, 1, 1)
    stats.reset()
    assert stats == Stats()
