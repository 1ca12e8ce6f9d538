"""The plan that surrounds a model's layers: ``with parallel(plan, comm):``."""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

from torch import Tensor, is_grad_enabled

from seqpar.comm import Comm
from seqpar.comm.entry import on_one_rank
from seqpar.comm.local import warn_alone
from seqpar.ops import bind
from seqpar.ops.core.collective_op import layer_calls
from seqpar.plan import Plan
from seqpar.private.torch import backward_pass, next_node, node_under_way


class Surrounding(NamedTuple):
    """A plan, a comm, their handle for compiled code, and the seed from which layers derive theirs."""

    plan: Plan
    comm: Comm
    handle: Tensor
    seed: int


class OpenBlock:
    """An open block.

    first: the first node recorded under it since the last inner block that a forward used. within: the backward pass in
    which it was entered, -1 outside of all. used: whether a forward looked it up. above: whether one looked up an inner
    block.
    """

    def __init__(self, surrounding: Surrounding) -> None:
        self.surrounding, self.first, self.within = surrounding, next_node(), backward_pass()
        self.used = self.above = False


class EndedBlock:
    """A block that has ended, and its recorded nodes, from first to before end. Keeps no plan alive."""

    def __init__(self, block: OpenBlock) -> None:
        plan, comm, _, self.seed = block.surrounding
        self.plan, self.comm, self.first, self.end = weakref.ref(plan), weakref.ref(comm), block.first, next_node()

    def surrounding(self) -> Surrounding | None:
        """The plan and comm of the block, if they still exist."""
        plan, comm = self.plan(), self.comm()
        return None if plan is None or comm is None else Surrounding(plan, comm, bind(plan, comm), self.seed)


class ThreadBlocks:
    """The blocks of a thread: the open ones, innermost last, and the last ended ones that a forward used.

    repeated: the ended block whose code was repeated last, since the last forward.
    """

    def __init__(self) -> None:
        self.open: list[OpenBlock] = []
        self.ended: deque[EndedBlock] = deque(maxlen=ENDED)
        self.repeated: EndedBlock | None = None

    def of_node(self, node: int) -> Surrounding | None:
        """The surrounding of the call that a node's backward repeats.

        It is a block opened within the repeated code, else the block in which the node was recorded. A node recorded
        after that block, as that of a checkpoint inside a checkpoint, was recorded by the code that is repeated now.
        """
        for block in reversed(self.open):
            if block.within == backward_pass() or (block.used and node >= block.first):
                return block.surrounding
        found = next((each for each in reversed(self.ended) if each.first <= node < each.end), None)
        if found is None and self.repeated is not None and node >= self.repeated.end:
            found = self.repeated
        self.repeated = found
        return None if found is None else found.surrounding()


class _Own(threading.local):
    def __init__(self) -> None:
        self.blocks = ThreadBlocks()


AFTER = "a block of seqpar.parallel after one that ended with an error"
ENDED = 1024  # blocks that may end before their backward pass
_own = _Own()
# threads that recorded nodes under a block
_threads: weakref.WeakKeyDictionary[threading.Thread, ThreadBlocks] = weakref.WeakKeyDictionary()
_blocks: weakref.WeakKeyDictionary[Comm, int] = weakref.WeakKeyDictionary()
_left: weakref.WeakSet[Comm] = weakref.WeakSet()  # comms whose last block ended with an error, maybe on this rank alone


def parallel(plan: Plan, comm: Comm, *, seed: int | None = None) -> AbstractContextManager[Surrounding]:
    """Give plan and comm to every layer of this thread that has none, until the block ends. Blocks nest.

    seed: the layers of `seqpar.nn` derive their dropout seeds from it; equal on all ranks, different for each step; by
    default the number of earlier blocks with this comm object.

    The backward pass may run anywhere if it repeats no layer. A layer that it repeats, as checkpoints do, uses the plan
    that surrounded its forward: the block may have ended, as long as the plan still exists, the thread is the same and
    no more than 1,023 blocks ended later. Otherwise it raises RuntimeError: give the layer its plan, or
    ``seqpar.bind(plan, comm)``.

    A block after one that ended with an error begins with an agreement of all ranks: a rank that goes on alone, as in a
    loop that catches a batch's errors, would otherwise meet the others in the middle of their forward.

    Raises: ValueError if the plan and the comm differ in ranks; and on all ranks if only some go on after an error.
    RuntimeError at the end of a block that computed something on a comm of several ranks, and used no plan: neither a
    verb, nor attention that was rerouted, nor the forward of a model given to `parallelize`. Not inside ``local()``.
    """
    return surround(plan, comm, seed=seed, idle=False, met=False)


@contextmanager
def surround(
    plan: Plan, comm: Comm, *, seed: int | None = None, idle: bool = True, met: bool = True
) -> Iterator[Surrounding]:
    """A block of `parallel`.

    idle: whether nothing in it need use the plan. met: whether ranks have told each other of it, as of a forward.
    """
    if not isinstance(plan, Plan) or plan.ranks != getattr(comm, "size", None):
        raise _unfit(plan, comm)
    before = _blocks.get(comm, 0)
    _blocks[comm] = before + 1
    if not before:
        warn_alone(comm, "parallel", stacklevel=4)
    if comm in _left:
        if comm.size > 1 and not met:
            # the same number of blocks on all ranks, so that none is a batch ahead from here on
            comm.agree(AFTER, {"blocks before": before})
        _left.discard(comm)
    around = Surrounding(plan, comm, bind(plan, comm), before if seed is None else seed)
    block = OpenBlock(around)
    own = _own.blocks
    own.open.append(block)
    if block.within < 0:
        _threads[threading.current_thread()] = own
    calls = layer_calls.verbs, on_one_rank.begun
    idle = idle or comm.size == 1 or on_one_rank.open > 0 or block.within >= 0
    try:
        yield around
        unused = not (idle or block.used or block.above) and calls == (layer_calls.verbs, on_one_rank.begun)
        if unused and (next_node() > block.first or not is_grad_enabled()):
            raise RuntimeError(
                "parallel: nothing in this block used its plan, so that PyTorch's operations saw this rank's rows "
                "alone; call a model made parallel by seqpar.parallelize(model, comm, sdpa=True), for one of "
                "transformers without sdpa=True, the whole model and not its parts, or enter seqpar.sdpa(plan, comm) "
                "around the call"
            )
    except BaseException:
        _left.add(comm)
        raise
    finally:
        own.open.remove(block)
        if block.used:
            own.ended.append(EndedBlock(block))
        if own.open and (block.used or block.above):
            own.open[-1].first, own.open[-1].above = next_node(), True


def _unfit(plan: object, comm: object) -> Exception:
    """The error for other arguments than a plan and a comm of as many ranks."""
    if isinstance(plan, Comm) and isinstance(comm, Plan):
        return TypeError("parallel: got a comm and a plan; give the plan first, parallel(plan, comm)")
    if not isinstance(comm, Comm):
        return TypeError(f"parallel: expected a plan and a comm, got {comm!r:.200} for its comm")
    return ValueError(f"parallel: expected a plan for the comm's {comm.size} ranks, got {plan!r:.200}")


def surrounded() -> bool:
    """Whether a block is open on this thread, or a backward pass is under way, which may repeat what was inside one."""
    return bool(_own.blocks.open) or node_under_way() >= 0


def surrounding() -> Surrounding:
    """The innermost plan and comm of this thread; in an autograd thread, those of the only thread that ever had any.

    In a backward pass that repeats a layer, those that surrounded its forward.

    Raises: RuntimeError outside every block, and if the surrounding of the forward is unknown.
    """
    node, own = node_under_way(), _own.blocks
    if node < 0:
        if not own.open:
            raise RuntimeError("no plan surrounds this call; call it inside `with seqpar.parallel(plan, comm):`")
        own.open[-1].used, own.repeated = True, None
        return own.open[-1].surrounding
    if not own.open and threading.current_thread() not in _threads:  # an autograd thread
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
    """63 bits from a seed and a number: a step's seed and a layer, or a training's seed and a forward."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {number}".encode(), digest_size=8).digest(), "little") >> 1
