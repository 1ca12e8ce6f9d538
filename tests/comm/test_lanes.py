"""Several nodes: pairs inside a node have a lane of their own. The order rules, on a model and between processes."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from seqpar.comm import Comm, PeerError
from seqpar.comm.protocol import LANES, Round, rounds
from seqpar.testing import run_processes, run_threads
from tests.cases import OVER_RANKS, Case
from tests.comm import cases, nccl_cases
from tests.comm.cases import tag
from tests.comm.suite import Exchanges


class TestTwoLanes(Exchanges):
    """The common suite on nodes of two ranks: the same exchanges, subs and errors as in one lane."""

    size = 6
    crowd_size, crowd_tensors = 40, 5

    def run(self, size: int, fn: Any, *args: Any, timeout: float = 120.0) -> list[Any]:
        return run_threads(size, fn, *args, timeout=timeout, direct=False, node=2)


DELAYS = [(0.004, 0.0), (0.0, 0.004)]  # the lane whose messages are late: across nodes, or inside


@pytest.mark.parametrize("delay", DELAYS)
@pytest.mark.parametrize(("size", "node"), [(4, 2), (5, 3), (6, 1), (3, 8)])
def test_random_exchanges_over_nodes_equal_the_specification(size: int, node: int, delay: tuple[float, float]) -> None:
    for wrong, counted, predicted, _ in run_threads(size, cases.sparse, 1, 10, delay=delay, node=node):
        assert wrong == []
        assert counted == predicted


@pytest.mark.parametrize("delay", DELAYS)
@pytest.mark.parametrize("case", [case for case in OVER_RANKS if case.ranks == 4], ids=str)
def test_attention_does_not_rely_on_the_order_of_two_lanes(case: Case, delay: tuple[float, float]) -> None:
    """A lane that is late, or early, changes nothing: what is posted later may arrive before, in the other lane."""
    assert run_threads(4, nccl_cases.attention, case, delay=delay, node=2, direct=False) == [[]] * 4


def test_an_exchange_inside_a_node_overtakes_one_across() -> None:
    """Ranks 0 and 1 are a node. Rank 0 waits for rank 2, which waits until the node's exchange is over."""

    def rank_main(comm: Comm) -> list[float]:
        x, y = torch.full((1,), float(comm.rank)), torch.zeros(1)
        if comm.rank == 0:
            first = comm.exchange({}, {2: [y]}, tag=tag(0))
            comm.exchange({1: [x]}, {}, tag=tag(1)).wait()
            first.wait()
        elif comm.rank == 1:
            comm.exchange({}, {0: [y]}, tag=tag(1)).wait()
            over.set()
        else:
            assert over.wait(60)
            comm.exchange({0: [x]}, {}, tag=tag(0)).wait()
        return y.tolist()

    over = threading.Event()
    assert run_threads(3, rank_main, node=2) == [[2.0], [0.0], [0.0]]


def test_one_exchange_in_both_lanes_is_complete_when_both_are() -> None:
    def rank_main(comm: Comm) -> list[float]:
        got = {peer: [torch.zeros(1)] for peer in range(4) if peer != comm.rank}
        sent = {peer: [torch.full((1,), float(comm.rank))] for peer in got}
        work = comm.exchange(sent, got, tag=tag(0))
        work.wait()
        return [x.item() for (x,) in got.values()]

    for delay in DELAYS:
        found = run_threads(4, rank_main, delay=delay, node=2)
        assert found == [[float(peer) for peer in range(4) if peer != rank] for rank in range(4)]


def test_waits_in_a_circle_through_both_lanes_are_named() -> None:
    """Rank 0 waits for rank 2 of the other node, that for rank 1, and rank 1 for rank 0 of its node."""
    order = {0: [(0, 2), (1, 1)], 1: [(1, 0), (2, 2)], 2: [(2, 1), (0, 0)]}

    def rank_main(comm: Comm) -> None:
        for call, peer in order.get(comm.rank, []):
            comm.exchange({peer: [torch.ones(1)]}, {peer: [torch.zeros(1)]}, tag=tag(call)).wait()

    with pytest.raises(PeerError, match="in a cycle: ") as raised:
        run_threads(4, rank_main, node=2)
    for rank, call, where, peer in ((0, 0, "", 2), (2, 2, "", 1), (1, 1, " inside a node", 0)):
        waits = f"rank {rank} in call {call} phase 0 stage 0 with plan 5eed{where} waits for rank {peer}"
        assert waits in str(raised.value)


def test_the_end_of_a_chain_is_followed_in_the_lane_that_waits() -> None:
    def rank_main(comm: Comm) -> None:
        if comm.rank == 2:
            comm.exchange({}, {3: [torch.zeros(1)]}, tag=tag(5)).wait()

    with pytest.raises(PeerError, match=r"waited 0\.5 s in call 5 .* inside a node for rank 3, which has posted"):
        run_threads(4, rank_main, timeout=0.5, node=2)


def finishes(posted: list[list[tuple[int, Round]]]) -> bool:
    """Whether devices come to an end that run one batch at a time, in the order of posting.

    posted: for each rank, (number of the exchange, round). A batch runs until all its messages are at the head of the
    queues of both ranks, and are over.
    """
    queues = [[((call, part.key), {*part.sends, *part.recvs}) for call, part in mine] for mine in posted]
    moved = True
    while moved:
        moved = False
        for rank, queue in enumerate(queues):
            key, peers = queue[0] if queue else ((0, (0, 0, 0)), set())
            for peer in list(peers):
                if queues[peer] and queues[peer][0][0] == key:
                    peers.remove(peer)
                    queues[peer][0][1].discard(rank)
                    moved = True
            while queue and not queue[0][1]:
                queue.pop(0)
                moved = True
    return not any(queues)


@pytest.mark.parametrize("seed", range(20))
def test_one_order_of_both_lanes_needs_no_second_kernel_beside_the_first(seed: int) -> None:
    draw = random.Random(seed)
    size = draw.choice([4, 6, 8])
    nodes = [rank // 2 for rank in range(size)]
    posted: list[list[tuple[int, Round]]] = [[] for _ in range(size)]
    for call in range(5):
        messages: dict[Any, list[torch.Tensor]] = cases.sent(seed, call, size, crowd=0.7, most=2)
        for rank in range(size):
            sends = {b: tensors for (a, b), tensors in messages.items() if a == rank}
            recvs = {a: tensors for (a, b), tensors in messages.items() if b == rank}
            posted[rank] += [(call, part) for part in rounds(rank, size, sends, recvs, nodes)]
    assert {part.lane for mine in posted for _, part in mine} == {*LANES}
    assert finishes(posted)


def test_another_order_on_one_rank_would_hang_there() -> None:
    """Two ranks of each node, both pairs of neighbours in one exchange; rank 0 posts what is inside its node first."""
    x = [torch.ones(1)]
    pairs = {0: (1, 2), 1: (0, 3), 2: (3, 0), 3: (2, 1)}
    posted = [[(0, p) for p in rounds(r, 4, dict.fromkeys(pairs[r], x), dict.fromkeys(pairs[r], x), (0, 0, 1, 1))]
              for r in range(4)]  # fmt: skip
    assert finishes(posted)
    posted[0].reverse()
    posted[3].reverse()
    assert not finishes(posted)


def test_each_node_has_a_communicator_of_its_own_ranks_alone(tmp_path: Path) -> None:
    """Ranks 0, 1, 2 and 4 of 5 make a comm, of which the first and the third share a node."""
    *ranks, elsewhere, last = run_processes(5, nccl_cases.of_nodes, tmp_path)
    assert elsewhere == "elsewhere"
    aborted, shut = ["group", "abort", "end"], ["shutdown"]
    for rank, (wrong, counted, opened, used, calls) in enumerate([*ranks, last]):
        assert wrong == [] and counted
        across = [peer for peer in range(4) if peer != rank and {peer, rank} != {0, 2}]
        assert used[0] == across, "whatever is inside a node goes over the node's"
        if rank in (0, 2):
            assert opened == [[], [1 - rank // 2]] and used[1] == [1 - rank // 2]
            assert calls == ([aborted, ["abort"]] if rank == 0 else [shut, shut]), "both end, and together"
        else:
            assert opened == [[]] and calls == ([aborted] if rank == 1 else [shut])


def test_a_rank_that_hangs_in_one_lane_is_named_and_both_end() -> None:
    for rank, (calls, error) in enumerate(run_processes(3, nccl_cases.hangs_inside)):
        aborted = [["group", "abort", "end"], ["abort"]]
        assert calls == (aborted if rank < 2 else aborted[:1])
        assert "waited 1 s in call 6 phase 0 stage 0 with plan 5eed for ranks [1]" in error


@pytest.mark.parametrize("case", [OVER_RANKS[7]], ids=str)
def test_attention_over_two_nodes_is_that_of_one_device(case: Case) -> None:
    assert run_processes(4, nccl_cases.attention_on_nodes, case, "aabb") == [[]] * 4
