"""The plan that surrounds the layers of a model: ``with parallel(plan, comm):``."""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor

from seqpar.comm import Comm
from seqpar.ops import bind
from seqpar.ops.core.backward import backward_pass, next_node, node_under_way
from seqpar.plan import Plan


class Surrounding(NamedTuple):
    """A plan, a comm, the handle of both for compiled code, and the seed that layers derive theirs from."""

    plan: Plan
    comm: Comm
    handle: Tensor
    seed: int


class OpenBlock:
    """A block that is open.

    first: the first node that was recorded under it, and after the last block inside of it that a forward used. within:
    the backward pass in which it was entered, -1 outside of all. used: whether a forward asked for it. above: whether
    one asked for a block inside of it.
    """

    def __init__(self, surrounding: Surrounding) -> None:
        self.surrounding, self.first, self.within = surrounding, next_node(), backward_pass()
        self.used = self.above = False


class EndedBlock:
    """A block that has ended, under which the nodes from first to before end were recorded. Keeps no plan alive."""

    def __init__(self, block: OpenBlock) -> None:
        plan, comm, _, self.seed = block.surrounding
        self.plan, self.comm, self.first, self.end = weakref.ref(plan), weakref.ref(comm), block.first, next_node()

    def surrounding(self) -> Surrounding | None:
        """What surrounded its layers, if that is still there."""
        plan, comm = self.plan(), self.comm()
        return None if plan is None or comm is None else Surrounding(plan, comm, bind(plan, comm), self.seed)


class ThreadBlocks:
    """Those of a thread: open ones, the innermost last, and the last that ended and that a forward used."""

    def __init__(self) -> None:
        self.open: list[OpenBlock] = []
        self.ended: deque[EndedBlock] = deque(maxlen=ENDED)

    def of_node(self, node: int) -> Surrounding | None:
        """What surrounded the call that the backward of a node makes again: a block inside of what it makes again, or
        the one in which the node was recorded."""
        for block in reversed(self.open):
            if block.within == backward_pass() or (block.used and node >= block.first):
                return block.surrounding
        return next((each.surrounding() for each in self.ended if each.first <= node < each.end), None)


class _Own(threading.local):
    def __init__(self) -> None:
        self.blocks = ThreadBlocks()


AFTER = "a block of seqpar.parallel after one that ended with an error"
ENDED = 16  # blocks that a backward pass may come after
_own = _Own()
# of the threads that recorded under some
_threads: weakref.WeakKeyDictionary[threading.Thread, ThreadBlocks] = weakref.WeakKeyDictionary()
_blocks: weakref.WeakKeyDictionary[Comm, int] = weakref.WeakKeyDictionary()
_left: weakref.WeakSet[Comm] = weakref.WeakSet()  # whose last block was left by an error, maybe on this rank alone


@contextmanager
def parallel(plan: Plan, comm: Comm, *, seed: int | None = None) -> Iterator[Surrounding]:
    """Make plan and comm those of every layer of this thread that is given none, until the block ends. Blocks nest.

    seed: what the layers of `seqpar.nn` derive the seeds of their dropout from, equal on all ranks and different for
    each step; by default the number of blocks that this comm object had before.

    The backward pass may run anywhere if it calls no layer again. Where it does, as with checkpoints, a layer that is
    given no plan takes the one that surrounded its forward: the block may have ended, if the plan is still there and
    the thread is the same. Else it raises RuntimeError: give it its plan, or ``seqpar.bind(plan, comm)``.

    A block after one that was left by an error begins with an agreement of all ranks: a rank that goes on alone, as in
    a loop that catches what a batch raises, would else meet the others in the middle of their forward.

    Raises: ValueError for a plan of another number of ranks than the comm's, and on all ranks where some go on after an
    error that the others did not have.
    """
    if not isinstance(plan, Plan) or plan.ranks != comm.size:
        raise ValueError(f"parallel takes a plan for the comm's {comm.size} ranks, got {plan!r:.200}")
    before = _blocks.get(comm, 0)
    _blocks[comm] = before + 1
    if comm in _left:
        if comm.size > 1:  # as many blocks on all ranks, so that none is a batch ahead from here on
            comm.agree(AFTER, {"blocks before": before})
        _left.discard(comm)
    around = Surrounding(plan, comm, bind(plan, comm), before if seed is None else seed)
    block = OpenBlock(around)
    own = _own.blocks
    own.open.append(block)
    if block.within < 0:
        _threads[threading.current_thread()] = own
    try:
        yield around
    except BaseException:
        _left.add(comm)
        raise
    finally:
        own.open.remove(block)
        if block.used:
            own.ended.append(EndedBlock(block))
        if own.open and (block.used or block.above):
            own.open[-1].first, own.open[-1].above = next_node(), True


def surrounding() -> Surrounding:
    """The innermost plan and comm of this thread; in a thread of autograd's, of the one thread that ever had any.

    In a backward pass that calls a layer again, those that surrounded its forward.

    Raises: RuntimeError outside every block, and where it is not known what surrounded the forward.
    """
    node, own = node_under_way(), _own.blocks
    if node < 0:
        if not own.open:
            raise RuntimeError("no plan surrounds this call; call it inside `with seqpar.parallel(plan, comm):`")
        own.open[-1].used = True
        return own.open[-1].surrounding
    if not own.open and threading.current_thread() not in _threads:  # autograd's own
        own = next(iter(_threads.values())) if len(_threads) == 1 else own
    around = own.of_node(node)
    if around is None:
        raise RuntimeError(
            "a layer without a plan of its own is called again in a backward pass, as a checkpoint does, and it is not "
            "known which block of seqpar.parallel was around its forward; run the backward inside that block, or give "
            "the layer its plan, or seqpar.bind(plan, comm), as an argument"
        )
    return around


def derived_seed(seed: int, number: int) -> int:
    """63 bits of a seed and a number: of a step and its layers, of a training and its forwards."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {number}".encode(), digest_size=8).digest(), "little") >> 1
