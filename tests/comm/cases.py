"""What a rank does in the tests of communicators: module-level functions, so that processes find them by name."""

import copy
import gc
import math
import os
import pickle
import random
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from unittest import mock

import torch
import torch.distributed as dist

from seqpar.comm import GroupComm, LocalComm, PeerError, Tag, group
from seqpar.comm.nccl import Nccl
from tests.comm.over_gloo import NCCL_TYPES, OverGloo

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.float64)
SHAPES = ((3,), (2, 5), (), (0,), (4, 0, 2), (1, 2, 3))


def sent(seed, step, size, *, crowd=0.5, most=3):
    """{(sender, receiver): tensors} of a step, the same on every rank. crowd: the share of pairs that send."""
    draw = random.Random(f"{seed} {step} {size}")
    idle = {rank for rank in range(size) if draw.random() < 0.2}
    found = {}
    for sender in range(size):
        for receiver in range(size):
            if sender == receiver or {sender, receiver} & idle or draw.random() > crowd:
                continue
            generator = torch.Generator().manual_seed(draw.randrange(2**31))
            found[sender, receiver] = [
                torch.randint(0, 100, draw.choice(SHAPES), generator=generator).to(draw.choice(DTYPES))
                for _ in range(draw.randint(1, most))
            ]
    return found


def sides(messages, rank, comm):
    """What `rank` posts for the messages of a step: (sends, recvs with memory of its own)."""
    sends = {receiver: tensors for (sender, receiver), tensors in messages.items() if sender == rank}
    recvs = {
        sender: [comm.empty(t.shape, t.dtype, t.device).zero_() for t in tensors]
        for (sender, receiver), tensors in messages.items()
        if receiver == rank
    }
    return sends, recvs


def received(messages, rank):
    """The specification: recvs[r][p] == sends[p][r]."""
    return {sender: tensors for (sender, receiver), tensors in messages.items() if receiver == rank}


def size_of(side):
    """(bytes, messages) of one side of an exchange, empty tensors left out."""
    tensors = [t for several in side.values() for t in several if t.numel()]
    return sum(t.numel() * t.element_size() for t in tensors), len(tensors)


def same(found, expected):
    return found.keys() == expected.keys() and all(
        torch.equal(a, b) for peer in found for a, b in zip(found[peer], expected[peer], strict=True)
    )


def tag(call, phase=0, stage=0, digest=0x5EED):
    return Tag(digest, call, phase, stage)


def sparse(comm, seed, steps, crowd=0.5, most=3):
    """Random exchanges, two in flight; returns the messages that were wrong and (counted, predicted) of the stats."""
    wrong, flying = [], []
    predicted = {"bytes_sent": 0, "bytes_received": 0, "messages_sent": 0, "messages_received": 0, "exchanges": 0}

    def land():
        step, work, recvs, expected = flying.pop(0)
        work.wait()
        if not same(recvs, expected):
            wrong.append(step)

    for step in range(steps):
        messages = sent(seed, step, comm.size, crowd=crowd, most=most)
        sends, recvs = sides(messages, comm.rank, comm)
        if not sends and not recvs:
            continue
        for name, side in (("sent", sends), ("received", recvs)):
            size, count = size_of(side)
            predicted[f"bytes_{name}"] += size
            predicted[f"messages_{name}"] += count
        predicted["exchanges"] += bool(size_of(sends)[1] or size_of(recvs)[1])
        flying.append((step, comm.exchange(sends, recvs, tag=tag(step)), recvs, received(messages, comm.rank)))
        if len(flying) == 2:
            land()
    while flying:
        land()
    counted = {name: getattr(comm.stats, name) for name in predicted}
    return wrong, counted, predicted, comm.stats.bytes_sent == sum(comm.stats.sent_to.values())


def bits(comm, seed, steps):
    """A computation over exchanges, hidden behind compute as a ring is: every rank's final tensor."""
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    x = torch.rand(16, generator=torch.Generator().manual_seed(seed + comm.rank), dtype=torch.float64)
    total = torch.zeros_like(x)
    for step in range(steps):
        y = torch.empty_like(x)
        work = comm.exchange({after: [x]}, {before: [y]}, tag=tag(step))
        total += x.sin()
        work.wait()
        x = y + total
    return total


def adjoint(comm, seed):
    """This rank's shares of <exchange x, y> and <x, exchange^T y>."""
    messages = sent(seed, 0, comm.size, crowd=0.7)
    real = {pair: [t.to(torch.float64) for t in tensors] for pair, tensors in messages.items()}
    sends, recvs = sides(real, comm.rank, comm)
    comm.exchange(sends, recvs, tag=tag(0, phase=0)).wait()
    generator = torch.Generator().manual_seed(comm.rank)
    cotangents = {p: [torch.rand(t.shape, generator=generator).double() for t in ts] for p, ts in recvs.items()}
    returned = {p: [torch.zeros_like(t) for t in ts] for p, ts in sends.items()}
    comm.exchange(cotangents, returned, tag=tag(0, phase=1)).wait()

    def dot(a, b):
        return sum(float((x * y).sum()) for p in a for x, y in zip(a[p], b[p], strict=True))

    return dot(recvs, cotangents), dot(sends, returned)


def subs(comm):
    """Two disjoint subs in other orders than the comm's, exchanging and agreeing; then the whole comm again."""
    evens, odds = list(range(0, comm.size, 2))[::-1], list(range(1, comm.size, 2))
    mine = evens if comm.rank % 2 == 0 else odds
    sub = comm.sub(mine)
    wrong, *_ = sparse(sub, 3, 4, crowd=0.9)
    agreed = []
    if comm.rank % 2 == 0:
        # the odd ranks do not take part, and must not have to
        sub.agree("evens", {"ranks": mine})
        agreed.append("evens")
    again = comm.sub(mine)
    calls = [sub.next_call(), again.next_call(), comm.next_call()]
    x, y = torch.full((2,), float(comm.rank)), torch.empty(2)
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    comm.exchange({after: [x]}, {before: [y]}, tag=tag(0)).wait()
    comm.agree("all", {"size": comm.size})
    return mine[sub.rank], sub.size, wrong, agreed, calls, y.tolist(), comm.stats.bytes_sent


def gather(comm, sizes, errors):
    """What every rank gathers of values of different sizes, or the message of the error; then the same of a sub."""
    error = errors.get(comm.rank)
    try:
        found = comm.gather("lengths", list(range(sizes[comm.rank])), None if error is None else TypeError(error))
    except Exception as raised:
        found = f"{type(raised).__name__}: {raised}"
    mine = [r for r in reversed(range(comm.size)) if r % 2 == comm.rank % 2]
    return found, comm.sub(mine).gather("ranks", comm.rank), comm.stats.bytes_sent


class Unspeakable:
    """An object without a `repr`."""

    def __repr__(self):
        raise KeyError("no words")


class Wordless(Exception):
    """An error without a text."""

    def __str__(self):
        raise KeyError("no words")


def untold(comm):
    """What every rank raises if rank 1 gathers what does not pickle, or has a fact or an error without a text."""
    bad, found = comm.rank == 1, []
    for call in (
        lambda: comm.gather("lengths", (lambda: 0) if bad else 0),
        lambda: comm.gather("lengths", 0, facts={"heads": Unspeakable() if bad else 8}),
        lambda: comm.agree("attention", {"heads": Unspeakable() if bad else 8}),
        lambda: comm.agree("attention", {"heads": 8}, Wordless() if bad else None),
    ):
        try:
            call()
        except Exception as error:
            found.append(type(error).__name__ if isinstance(error, Wordless) else f"{type(error).__name__}: {error}")
    comm.agree("afterwards", {})
    return found


def gather_with_facts(comm):
    """What is gathered beside facts that all ranks have in common, and the message where the last rank has another."""
    found = comm.gather("a forward", comm.rank, facts={"heads": 8})
    try:
        comm.gather("a forward", comm.rank, facts={"heads": 4 if comm.rank == comm.size - 1 else 8})
    except ValueError as error:
        return found, str(error)


def messages_of_small_calls(comm):
    """Messages that gloo is given for an agreement, a gathering, and exchanges of few bytes and of more."""
    twin = comm._channel.twin

    class Counting:
        def __init__(self):
            self.count = 0

        def __getattr__(self, name):
            self.count += name in ("send", "recv")
            return getattr(twin, name)

    other = 1 - comm.rank
    few, many = [torch.full((8,), comm.rank + 0.5), torch.zeros(2, dtype=torch.int8)], [torch.zeros(8192)]
    arrived = [torch.empty_like(x) for x in few]
    calls = (
        lambda: comm.agree("x", {"heads": 8}),
        lambda: comm.gather("x", [comm.rank]),
        lambda: comm.exchange({other: few}, {other: arrived}, tag=tag(1)).wait(),
        lambda: comm.exchange({other: many}, {other: [torch.empty(8192)]}, tag=tag(2)).wait(),
    )
    counts = []
    for call in calls:
        counting = comm._channel._groups[1] = Counting()
        call()
        counts.append(counting.count)
    comm._channel._groups[1] = twin
    return counts, [x.tolist() for x in arrived]


def agrees_or_gathers(comm):
    """What `agree` beside `gather` raises, and that the comm lives; then that two calls of one name are told apart."""
    found = []
    for what in (("a forward", "a loss"), ("a step", "a step")):
        try:
            comm.gather(what[1], [1, 2, 3]) if comm.rank == 1 else comm.agree(what[0], {"heads": 8})
        except ValueError as error:
            found.append(str(error))
    comm.agree("afterwards", {})
    return found


def interrupted(comm):
    """Ctrl-C reaches rank 0 while it waits for rank 1: what both say."""
    comm.agree("before", {})
    if comm.rank == 1:
        until(lambda: _is_dead(comm))
    else:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        threading.Thread(target=_interrupt, args=(threading.main_thread().ident,)).start()
    try:
        comm.exchange({}, {1 - comm.rank: [torch.zeros(1)]}, tag=tag(4)).wait()
    except (KeyboardInterrupt, PeerError) as error:
        first = type(error).__name__
    try:
        comm.check()
    except PeerError as error:
        return first, str(error)


def _interrupt(thread):
    """Send this process Ctrl-C once a thread of it waits for an exchange: it is in `wait`, twice at the same place."""

    def place():
        time.sleep(0.05)
        frames = [frame for frame, _ in traceback.walk_stack(sys._current_frames()[thread])]
        return [(frame.f_code.co_name, frame.f_lasti) for frame in frames]

    until(lambda: (first := place()) == place() and "wait" in dict(first))
    os.kill(os.getpid(), signal.SIGINT)


def _is_dead(comm):
    channel = comm._channel
    return channel.look() if isinstance(comm, GroupComm) else channel.cause


def copied(comm):
    """Whether copies are the comm itself, and what pickling it raises."""
    model = torch.nn.Module()
    model.comm = comm
    same = copy.deepcopy(model).comm is comm and copy.copy(comm) is comm
    try:
        pickle.dumps(comm)
    except TypeError as error:
        return same, f"TypeError: {error}"
    return same, "was pickled"


def agree(comm, what, by_rank, errors):
    """The message of what `agree` raises, None if it returns; the comm must be alive in either case."""
    error = errors.get(comm.rank)
    try:
        comm.agree(what, {"heads": by_rank[comm.rank], "dim": 64}, None if error is None else TypeError(error))
        found = None
    except (ValueError, TypeError) as raised:
        found = f"{'ValueError' if isinstance(raised, ValueError) else 'TypeError'}: {raised}"
    comm.agree("afterwards", {"alive": True})
    comm.check()
    return found


def refused(comm):
    """The messages of arguments that are refused before anything moves."""
    x = torch.zeros(4, 4)
    peer = (comm.rank + 1) % comm.size
    found = []
    strided = x.t() if not comm.direct else torch.zeros(2, 2, 2, 2, 2, 2, 2).transpose(0, 1)
    zeros = torch._efficientzerotensor(9, device="cpu")  # without memory, like tensors that hold others
    for sends in ({comm.rank: [x]}, {comm.size: [x]}, {peer: [strided]}, {peer: [zeros]}, {peer: [zeros[3:]]}):
        try:
            comm.exchange(sends, {}, tag=tag(0))
        except ValueError as error:
            found.append(str(error))
    for ranks in ([peer], [comm.rank, comm.rank], [comm.rank, comm.size]):
        try:
            comm.sub(ranks)
        except ValueError as error:
            found.append(str(error))
    comm.exchange({}, {peer: [torch.empty(0)]}, tag=tag(1)).wait()
    comm.agree("afterwards", {})
    return found, comm.stats.exchanges


def by_itself(comm, check="batch"):
    """Asserts that a comm of one rank takes every call and sends nothing."""
    assert (comm.rank, comm.size, comm.check_every) == (0, 1, check)
    comm.exchange({}, {}, tag=tag(0)).wait()
    comm.agree("attention", {"heads": 8})
    try:
        comm.agree("attention", {}, TypeError("mine"))
    except TypeError as error:
        assert "mine" in str(error)
    else:
        raise AssertionError("its own error was not raised")
    comm.check()
    assert comm.sub([0]).size == 1
    assert comm.stats.exchanges == 0


def impatient(comm, seconds):
    """Let waits of this rank fail after so many seconds from now on; the constructor had all the time it needed."""
    for each in (comm, getattr(comm, "_control", None)):
        if each is not None:
            (each._world if isinstance(each, LocalComm) else each._channel).timeout = seconds


def until(condition, seconds=120.0):
    """Return when a condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.01)


def witness(comm, folder, fn, *args):
    """Runs a case that fails and leaves ``folder/rank`` with the seconds it took and the error."""
    start = time.monotonic()
    try:
        (globals()[fn] if isinstance(fn, str) else fn)(comm, *args)
    except Exception as error:
        (folder / str(comm.rank)).write_text(f"{time.monotonic() - start:.3f} {type(error).__name__}: {error}")
        if isinstance(error, PeerError):
            # the comm is dead and every verb says so
            for verb in (comm.check, lambda: comm.agree("x", {}), lambda: comm.exchange({}, {}, tag=tag(0))):
                try:
                    verb()
                except PeerError:
                    continue
                raise AssertionError("a verb did not say that the comm is dead") from error
        raise


def drops(comm):
    """Rank 0 drops a work; all others find out."""
    x = torch.zeros(2)
    if comm.rank == 0:
        comm.exchange({1: [x]}, {}, tag=tag(3, 1, 4))
    elif comm.rank == 1:
        comm.exchange({}, {0: [x]}, tag=tag(3, 1, 4)).wait()
    comm.agree("afterwards", {})


def collected(comm, make):
    """Errors that could not be raised while garbage collection took a comm with a work that nobody waited for."""
    unraisable, x, peer = [], torch.zeros(2), 1 - comm.rank
    cycle = {"comm": make(comm)}
    cycle["work"] = cycle["comm"].exchange({peer: [x]}, {peer: [x.clone()]}, tag=tag(0))
    cycle["itself"] = cycle
    with mock.patch.object(sys, "unraisablehook", lambda what: unraisable.append(str(what.exc_value))):
        del cycle
        gc.collect()
    comm.agree("afterwards", {})
    return unraisable


def other_tag(comm):
    """Rank 0 is in stage 2 when rank 1 is in stage 5; rank 2 waits for rank 1."""
    x = torch.zeros(3)
    if comm.rank == 0:
        comm.exchange({1: [x]}, {}, tag=tag(7, 0, 2)).wait()
    else:
        # rank 2 in a later stage: in rank 1's own it would not meet rank 1 either
        comm.exchange({}, {comm.rank - 1: [x]}, tag=tag(7, 0, 4 + comm.rank)).wait()


def other_scope(comm):
    """Rank 0 sends to rank 1 in the comm, rank 1 receives from it in a sub; rank 2 waits for rank 1."""
    x = torch.zeros(3)
    if comm.rank == 0:
        comm.exchange({1: [x]}, {}, tag=tag(7)).wait()
    elif comm.rank == 1:
        comm.sub([0, 1]).exchange({}, {0: [x]}, tag=tag(7)).wait()
    else:
        comm.exchange({}, {1: [x]}, tag=tag(8)).wait()


def other_shape(comm, shapes, dtypes):
    """Rank 0 sends what rank 1 does not expect."""
    x = torch.zeros(shapes[min(comm.rank, 1)], dtype=dtypes[min(comm.rank, 1)])
    if comm.rank == 0:
        comm.exchange({1: [x]}, {}, tag=tag(7)).wait()
    else:
        # rank 2 waits for rank 1 in a later stage
        comm.exchange({}, {comm.rank - 1: [x]}, tag=tag(7, 0, comm.rank - 1)).wait()


def never_sends(comm, folder, seconds):
    """Rank 0 waits for rank 1, which waits for rank 2, which does something else until both have given up."""
    if comm.rank == 2:
        until(lambda: all((folder / other).exists() for other in "01"))
        # it receives too: gloo may keep a rank that only sends to a lost one until the timeout
        return comm.exchange({0: [torch.zeros(1)]}, {0: [torch.zeros(1)]}, tag=tag(5)).wait()
    work = comm.exchange({}, {comm.rank + 1: [torch.zeros(1)]}, tag=tag(4, 0, comm.rank))
    if comm.rank == 1:
        impatient(comm, seconds)
    work.wait()


def never_agrees(comm, folder, seconds):
    """Rank 1 waits for rank 2 to agree, and rank 0 for both; rank 2 does something else until both have given up."""
    if comm.rank == 2:
        until(lambda: all((folder / other).exists() for other in "01"))
        # it receives too: gloo may keep a rank that only sends to a lost one until the timeout
        return comm.exchange({0: [torch.zeros(1)]}, {0: [torch.zeros(1)]}, tag=tag(5)).wait()
    if comm.rank == 1:
        comm = comm.sub([1, 2])  # so that it is not rank 0 that comes too late
        impatient(comm, seconds)
    comm.agree("attention", {"heads": 8})


def two_threads(comm, folder):
    """A second thread of rank 0 gathers while the first waits for the others to agree, who come when it was refused."""
    if comm.rank != 0:
        until(lambda: (folder / "0").exists())
        comm.agree("first", {})
        return comm.agree("next", {})

    def first():
        with suppress(PeerError):
            comm.agree("first", {})

    thread = threading.Thread(target=first, name="loader")
    thread.start()
    until(lambda: comm.entry.inside[0] == "first")
    try:
        comm.sub([0, 1]).gather("second", 1)
    finally:
        thread.join()


def gathers_beside(comm):
    """Rank 0 gathers where the others agree."""
    if comm.rank == 0:
        comm.gather("lengths", [3])
    else:
        comm.agree("attention", {"heads": 8})


def aborts(comm):
    """Rank 2 gives up for a reason of its own; rank 0 waits for rank 1, which waits for rank 2."""
    if comm.rank == 2:
        raise KeyError("no such layer")
    comm.exchange({}, {comm.rank + 1: [torch.zeros(1)]}, tag=tag(4, 0, comm.rank)).wait()


def dies(comm, how):
    """Rank 1 dies in mid-exchange; rank 2 waits for it and rank 0 for rank 2."""
    comm.agree("before", {})
    x = torch.zeros(4)
    if comm.rank == 1:
        work = comm.exchange({}, {0: [x]}, tag=tag(9))
        os._exit(3) if how == "exit" else os.kill(os.getpid(), signal.SIGKILL)
        work.wait()
    try:
        comm.exchange({}, {(comm.rank - 1) % comm.size: [x]}, tag=tag(9)).wait()
    except PeerError as error:  # a traceback shows it alone, without gloo's own
        assert error.__cause__ is None and (error.__context__ is None or error.__suppress_context__)
        raise


class NeverCompletes:
    """A work as NCCL gives it: `wait` only orders a stream, so it returns at once."""

    def is_completed(self):
        return False

    def wait(self):
        return True


def batched(comm, fn, *args):
    """Runs a case with its CPU tensors sent as CUDA tensors are: in rounds of batched point-to-point on the group."""
    comm._channel.nccl = Nccl(OverGloo(dist.group.WORLD._get_backend(torch.device("cpu"))), owned=False)
    return as_on_gpus(comm, fn, *args)


def as_on_gpus(comm, fn, *args):
    """Runs a case on a comm that has an `Nccl`, with its CPU tensors sent as CUDA tensors are."""
    over_gloo = group.GlooWork

    def work(channel, scope, tag, sends, recvs, stats):
        counted = stats is comm.stats  # control messages are not
        return comm._post_cuda(sends, recvs, tag) if counted else over_gloo(channel, scope, tag, sends, recvs, stats)

    # the module's name, as an exchange of CPU tensors finds it
    with mock.patch.object(group, "GlooWork", work):
        return fn(comm, *args)


OTHER_TYPES = (
    torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.complex64, torch.complex128, torch.float8_e8m0fnu,
    torch.float4_e2m1fn_x2,
)  # fmt: skip


def of_all_types(comm):
    """Neighbours exchange one tensor of every dtype; the dtypes that came with other bits."""
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    types = (*NCCL_TYPES, *OTHER_TYPES)

    def drawn(rank, dtype, n):
        # a scalar, a matrix and an empty tensor in turns
        shape = ((), (3, 2), (0, 4))[n % 3]
        count = dtype.itemsize * math.prod(shape)
        generator = torch.Generator().manual_seed(100 * rank + n)
        few = torch.randint(0, 2, (count,), dtype=torch.uint8, generator=generator)
        return few.view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)

    sent = [drawn(comm.rank, dtype, n) for dtype in types for n in range(3)]
    got = [torch.empty_like(x) for x in sent]
    comm.exchange({after: sent}, {before: got}, tag=tag(0)).wait()
    expected = [drawn(before, dtype, n) for dtype in types for n in range(3)]
    return [
        str(a.dtype)
        for a, b in zip(got, expected, strict=True)
        if not torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8))
    ]


def on_devices(comm):
    """The errors of exchanges of tensors on devices that the group has no backend for."""
    here, meta, peer = torch.empty(1), torch.empty(1, device="meta"), 1 - comm.rank
    said = []
    for sends, recvs, carries in (([meta], [], {"cpu"}), ([meta], [here], {"cpu"}), ([here], [], set())):
        comm._channel.carries, comm._channel.backends = carries, dict.fromkeys(carries, "gloo")
        try:
            comm.exchange({peer: sends}, {peer: recvs}, tag=tag(0))
        except ValueError as error:
            said.append(str(error))
    return said


def stuck_stream(comm, limit):
    """Every rank's batch never completes; only rank 0 is late enough to time out. Returns the error."""
    start = time.monotonic()
    if comm.rank == 0:
        comm._channel.monitor._timeout = 1.0
    comm._channel.nccl = mock.Mock(post=lambda sends, recvs, lane: NeverCompletes())
    work = comm._post_cuda({}, {(comm.rank + 1) % comm.size: [torch.zeros(1)]}, tag(6, 2, 1))
    work.wait()  # orders the stream, as on CUDA
    while time.monotonic() < start + limit:
        try:
            comm.check()
        except PeerError as error:
            try:
                comm.exchange({}, {}, tag=tag(7))
            except PeerError:
                return str(error)
        time.sleep(0.02)
    return "nothing was noticed"


def leaves(comm, code):
    if comm.rank == 1:
        os._exit(code)


def pid(comm):
    return os.getpid()


def two_comms(comm):
    """A second comm of the group dies; the first goes on."""
    other = GroupComm(timeout=60.0)
    failed = False
    if comm.rank == 0:
        other.abort("on purpose")
    try:
        other.exchange({}, {(comm.rank + 1) % comm.size: [torch.zeros(1)]}, tag=tag(0)).wait()
    except PeerError as error:
        failed = "rank 0: on purpose" in str(error)
    x = torch.ones(1)
    y = {peer: [torch.empty(1)] for peer in range(comm.size) if peer != comm.rank}
    comm.exchange({peer: [x] for peer in y}, y, tag=tag(0)).wait()
    return failed, float(x + sum(each[0] for each in y.values()))
