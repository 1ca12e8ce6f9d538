"""The packer: what it refuses, what it packs once, and the order of its sums."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from seqpar.comm import Comm, Tag
from seqpar.ops.move.pack import Place, post
from seqpar.testing import run_threads

TAG = Tag(0, 0, 0, 0)


class Work:
    """An exchange that has ended."""

    def wait(self) -> None:
        pass


class Sent:
    """Keeps what rank 0 of 3 sends."""

    rank, size, direct = 0, 3, False

    def exchange(self, sends: dict[int, list[Tensor]], recvs: dict[int, list[Tensor]], *, tag: Tag) -> Work:
        self.sends = sends
        return Work()

    def empty(self, *args: object, **kwargs: object) -> Tensor:
        raise AssertionError("nothing is received")


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("places", [(2, 1), (1, 2)])
def test_a_rank_sends_itself_as_many_places_as_it_receives(size, places) -> None:
    def refused(comm: Comm) -> None:
        sent, received = ([Place(torch.zeros(2))] * n for n in places)
        for sends, recvs in (([sent], [received]), ([[place] for place in sent], [[place] for place in received])):
            with pytest.raises(ValueError, match=r"zip\(\)"):
                post(comm, {comm.rank: sends}, {comm.rank: recvs}, TAG)

    run_threads(size, refused)


def test_peers_that_share_a_message_share_its_buffer() -> None:
    comm, keys, values = Sent(), torch.arange(12.0).view(4, 3), -torch.arange(8.0).view(4, 2)
    rows = torch.tensor([3, 1])
    shared, other = [Place(keys, rows), Place(values, rows)], [Place(keys, rows), Place(values, rows)]
    post(comm, {1: [shared, other], 2: [shared]}, {}, TAG)()
    (first, second), (third,) = comm.sends[1], comm.sends[2]
    assert first is third and first.data_ptr() != second.data_ptr()
    expected = torch.cat([keys[rows], values[rows]], 1)
    assert torch.equal(first, expected) and torch.equal(second, expected)


@pytest.mark.parametrize("direct", [True, False])
def test_sums_are_in_ascending_order_of_ranks(direct) -> None:
    """In fp32 the sum of these four depends on their order; the order in which peers are named must not matter."""
    values = [3e7, 1.0, 1.0, -3e7]

    def summed(comm: Comm) -> float:
        x, y = torch.tensor([values[comm.rank]]), torch.zeros(1)
        recvs = {peer: [[Place(y, summed=True)]] for peer in sorted(range(4), key=lambda peer: (peer + comm.rank) % 4)}
        post(comm, {peer: [[Place(x)]] for peer in range(4)}, recvs, TAG)()
        return y.item()

    expected = torch.zeros(1)
    for value in values:
        expected += value
    assert expected.item() != (torch.tensor([3e7]) - 3e7 + 2).item()
    assert run_threads(4, summed, direct=direct) == [expected.item()] * 4
