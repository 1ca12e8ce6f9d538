"""The plan that surrounds the layers of a model: ``with parallel(plan, comm):``."""

from __future__ import annotations

import hashlib
import threading
import weakref
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


class Blocks(threading.local):
    """Those of a thread, the innermost last."""

    def __init__(self) -> None:
        self.open: list[OpenBlock] = []


AFTER = "a block of seqpar.parallel after one that ended with an error"
_own = Blocks()
# open blocks by the thread that recorded under some
_open: weakref.WeakKeyDictionary[threading.Thread, list[OpenBlock]] = weakref.WeakKeyDictionary()
_blocks: weakref.WeakKeyDictionary[Comm, int] = weakref.WeakKeyDictionary()
_left: weakref.WeakSet[Comm] = weakref.WeakSet()  # whose last block was left by an error, maybe on this rank alone


@contextmanager
def parallel(plan: Plan, comm: Comm, *, seed: int | None = None) -> Iterator[Surrounding]:
    """Make plan and comm those of every layer of this thread that is given none, until the block ends. Blocks nest.

    seed: what the layers of `seqpar.nn` derive the seeds of their dropout from, equal on all ranks and different for
    each step; by default the number of blocks that this comm object had before.

    The backward pass may run anywhere if it calls no layer again. Where it does, as with checkpoints, run it inside the
    block of its forward, or give the layers their plan, or ``seqpar.bind(plan, comm)``, as an argument: a layer that is
    given none raises RuntimeError if the innermost block is not that of its forward.

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
    _own.open.append(block)
    if block.within < 0:
        _open[threading.current_thread()] = _own.open
    try:
        yield around
    except BaseException:
        _left.add(comm)
        raise
    finally:
        _own.open.remove(block)
        if _own.open and (block.used or block.above):
            _own.open[-1].first, _own.open[-1].above = next_node(), True


def surrounding() -> Surrounding:
    """The innermost plan and comm of this thread; in a thread of autograd's, of the one thread that ever had any.

    Raises: RuntimeError outside every block, and in a backward pass that calls a layer again whose forward was not in
    that block.
    """
    node = node_under_way()
    if node >= 0:
        return _recorded_around(node)
    if not _own.open:
        raise RuntimeError("no plan surrounds this call; call it inside `with seqpar.parallel(plan, comm):`")
    _own.open[-1].used = True
    return _own.open[-1].surrounding


def _recorded_around(node: int) -> Surrounding:
    """What surrounds a call that the backward of a node makes again: a block inside of what it makes again, or the
    one in which the node was recorded."""
    if _own.open or threading.current_thread() in _open:
        block = _own.open[-1] if _own.open else None
    else:
        threads = list(_open.values())
        block = threads[0][-1] if len(threads) == 1 and threads[0] else None
    if block is not None and (block.within == backward_pass() or (block.used and node >= block.first)):
        return block.surrounding
    raise RuntimeError(
        "a layer without a plan of its own is called again in a backward pass, as a checkpoint does, and the block of "
        "seqpar.parallel around its forward is not the innermost one by then; run the backward inside the block of its "
        "forward, or give the layer its plan, or seqpar.bind(plan, comm), as an argument"
    )


def derived_seed(seed: int, number: int) -> int:
    """63 bits of a seed and a number: of a step and its layers, of a training and its forwards."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {number}".encode(), digest_size=8).digest(), "little") >> 1
