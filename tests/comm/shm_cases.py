"""What a rank does in the tests of shared memory: module-level functions, so that processes find them by name."""

import gc
import os
import random
import signal
import threading
import time

import torch

from seqpar.comm import PeerError, ShmComm
from tests.comm import cases
from tests.comm.cases import tag

CPU = torch.device("cpu")


class Before:
    """The operators of a comm's shared memory, with `act(name)` called before and after each of them."""

    def __init__(self, ops, act):
        self._ops, self._act = ops, act

    def __getattr__(self, name):
        op = getattr(self._ops, name)

        def call(*args):
            self._act(name)
            result = op(*args)
            self._act(name)
            return result

        return call


def delays(seed):
    """An action that mostly does nothing, now and then gives way, and sometimes sleeps."""
    draw = random.Random(seed)

    def act(name):
        roll = draw.random()
        if roll < 0.002:
            time.sleep(draw.random() * 0.005)
        elif roll < 0.1:
            time.sleep(0)

    return act


def ends_at(name, times):
    """An action that kills this process at the n-th time that it is called with a name."""
    left = [times]

    def act(called):
        if called == name:
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)

    return act


def model(comm, seed, steps, delayed):
    """Random exchanges in memory that is used again and again, up to four in flight.

    Message n of a pair says (sender, receiver, n, size) in every element, so that one that is lost, doubled, late or
    in another's place shows. Returns what was wrong, the messages received and the bytes that were staged.
    """
    if delayed:
        comm._channel.ops = Before(comm._channel.ops, delays(seed * 8 + comm.rank))
    draw, shared = random.Random(f"{seed} {comm.rank}"), random.Random(seed)
    buffers = {(peer, turn): comm.empty((4, 65), torch.int64, CPU) for peer in range(comm.size) for turn in range(4)}
    numbers = {(a, b): 0 for a in range(comm.size) for b in range(comm.size)}
    wrong, flying, taken = [], [], 0

    def land():
        work, recvs, expected, sent = flying.pop(0)
        work.wait()
        for x in sent:
            x.fill_(-1)  # the sender's memory is its own again
        for peer, several in recvs.items():
            for x, value in zip(several, expected[peer], strict=True):
                if not bool((x == value).all()):
                    wrong.append((peer, value, x.tolist()))
                x.fill_(-2)
        return sum(map(len, recvs.values()))

    def value_of(a, b):
        numbers[a, b] += 1
        return (a * comm.size + b) * 1_000_000 + numbers[a, b]

    for step in range(steps):
        sends, recvs, expected = {}, {}, {}
        for a in range(comm.size):
            for b in range(comm.size):
                if a == b or shared.random() < 0.4:
                    continue
                sizes = [(shared.randint(1, 3), shared.randint(0, 64)) for _ in range(shared.randint(1, 2))]
                values = [value_of(a, b) for _ in sizes]
                if a == comm.rank:
                    sends[b] = [torch.full(size, value) for size, value in zip(sizes, values)]
                if b == comm.rank:
                    rows = (buffers[a, step % 4][2 * i :] for i in range(len(sizes)))
                    # views of one block that is used again and again, or memory that was just given back
                    recvs[a] = [
                        block[:h, :w] if h < 3 else comm.empty((h, w), torch.int64, CPU)
                        for block, (h, w) in zip(rows, sizes)
                    ]
                    expected[a] = values
        sent = [x for several in sends.values() for x in several]
        flying.append((comm.exchange(sends, recvs, tag=tag(step)), recvs, expected, sent))
        while len(flying) >= 4 or (flying and draw.random() < 0.3):
            taken += land()
    while flying:
        taken += land()
    channel = comm._channel
    expected = channel.ops.shm_next(channel.end, (comm.rank + 1) % comm.size, True)[1]
    return wrong, taken, comm.stats.staged_bytes, expected


def strided(comm, seed):
    """Tensors of random strides to the next rank, in memory of random strides; returns what was wrong."""
    assert comm.empty((3, 0, 2), torch.float32, CPU).stride() == torch.empty(3, 0, 2).stride()
    draw, wrong = random.Random(seed), []
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size

    def strided_like(shape, dtype, inside):
        wide = [draw.randint(n, n + 3) for n in shape]
        order = draw.sample(range(len(shape)), len(shape))
        shape_in_memory = [wide[i] for i in order]
        block = comm.empty(shape_in_memory, dtype, CPU) if inside else torch.empty(shape_in_memory, dtype=dtype)
        block.zero_()
        whole = block.permute([order.index(i) for i in range(len(shape))])
        for dim, n in enumerate(shape):
            whole = whole.narrow(dim, draw.randint(0, whole.shape[dim] - n), n)
        return block, whole

    for step in range(60):
        shape = [draw.randint(1, 4) for _ in range(draw.randint(0, 6))]
        dtype = draw.choice([torch.float32, torch.bfloat16, torch.uint8, torch.complex128, torch.bool])
        generator = torch.Generator().manual_seed(step)
        values = torch.randint(0, 2, (comm.size, *shape), generator=generator).to(dtype)
        _, x = strided_like(shape, dtype, draw.random() < 0.5)
        block, y = strided_like(shape, dtype, draw.random() < 0.8)
        x.copy_(values[comm.rank])
        comm.exchange({after: [x]}, {before: [y]}, tag=tag(step)).wait()
        around = int((block != 0).sum()) - int((y != 0).sum())
        if not torch.equal(y, values[before]) or around:
            wrong.append((step, shape, dtype))
    return wrong


def staged(comm):
    """Bytes staged for a tensor of the pool, and then for one that is not."""
    peer = 1 - comm.rank
    found = []
    for y in (comm.empty((4, 4), torch.float32, CPU), torch.empty(4, 4)):
        comm.exchange({peer: [torch.full((4, 4), 3.0 + peer)]}, {peer: [y]}, tag=tag(len(found))).wait()
        assert bool((y == 3.0 + comm.rank).all())
        found.append(comm.stats.staged_bytes)
    return found


def full_pool(comm):
    """A pool of 64 KB: what does not fit is ordinary memory, received through what is kept for messages while it fits.

    Returns which tensors lie in the pool, what worked, the bytes staged, and the error where nothing is left.
    """
    small = ShmComm(timeout=120.0, pool_bytes=1 << 16)
    channel, peer = small._channel, 1 - comm.rank

    def swap(y, number):
        small.exchange({peer: [torch.full(y.shape, peer + 5, dtype=y.dtype)]}, {peer: [y]}, tag=tag(number)).wait()
        return bool((y == comm.rank + 5).all())

    kept = small.empty((1 << 16,), torch.uint8, CPU)
    outside = small.empty((40_000,), torch.uint8, CPU)
    inside = [channel.ops.shm_owns(channel.end, x) for x in (kept, outside)]
    worked = [swap(kept, 0), swap(outside, 1)]
    small.agree("with a full pool", {"of": 1 << 16})
    try:
        small.agree("with a full pool", {"rank": comm.rank})
    except ValueError as error:
        worked.append("ranks differ in rank" in str(error))
    staged = small.stats.staged_bytes
    comm.agree("all have come so far", {})  # a failure reaches also who is still inside an exchange that is complete
    try:
        if comm.rank == 0:
            swap(small.empty((70_000,), torch.uint8, CPU), 2)
        else:
            small.exchange({0: [torch.zeros(70_000, dtype=torch.uint8)]}, {}, tag=tag(2)).wait()
    except PeerError as error:
        return inside, worked, staged, str(error)


def ring(comm, steps, size):
    """Bytes that keep going round, the same two buffers for ever; the sum of what came."""
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    x, y = (comm.empty((size,), torch.uint8, CPU) for _ in range(2))
    x.fill_(comm.rank)
    for step in range(steps):
        comm.exchange({after: [x]}, {before: [y]}, tag=tag(step)).wait()
        x, y = y, x
    return int(x[0]), int(x[-1])


def outlive(comm):
    """Comms that come and go, a tensor of each of them kept: open files and mappings afterwards, and the tensors."""
    peer, kept = 1 - comm.rank, []

    def mappings():
        with open("/proc/self/maps") as lines:
            return sum("memfd:seqpar" in line for line in lines)

    gc.collect()  # a process has run other cases before, whose comms may still lie in cycles
    before = len(os.listdir("/proc/self/fd")), mappings()
    for n in range(12):
        other = ShmComm(timeout=120.0)
        x = other.empty((3,), torch.int64, CPU)
        other.exchange({peer: [torch.full((3,), 10 * n + peer)]}, {peer: [x]}, tag=tag(n)).wait()
        other.agree("together", {"n": n})
        kept.append(x)
        del other, x
    values, kept_mappings = [x.tolist() for x in kept], mappings()
    del kept
    after = len(os.listdir("/proc/self/fd")), mappings()
    return values, before, kept_mappings - before[1], after


def threads(comm):
    """Two threads that wait for different exchanges of one comm, and a third that computes meanwhile."""
    peer, turns, done = 1 - comm.rank, [0], threading.Event()

    def spin():
        while not done.is_set():
            turns[0] += 1

    ys = [comm.empty((2,), torch.float32, CPU) for _ in range(2)]
    if comm.rank == 0:
        works = [comm.exchange({}, {peer: [y]}, tag=tag(n)) for n, y in enumerate(ys)]
        running = [threading.Thread(target=work.wait) for work in works] + [threading.Thread(target=spin)]
        for thread in running:
            thread.start()
        time.sleep(0.2)
        while not turns[0] and running[0].is_alive():
            time.sleep(0.01)
        alive = [thread.is_alive() for thread in running]
        turned = turns[0]
        # until here the peer sends nothing
        comm.exchange({peer: [torch.ones(1)]}, {}, tag=tag(2)).wait()
        for thread in running[:2]:
            thread.join(60.0)
        done.set()
        return alive, turned, [y.tolist() for y in ys]
    comm.exchange({}, {peer: [torch.zeros(1)]}, tag=tag(2)).wait()
    for n in range(2):
        comm.exchange({peer: [torch.ones(2)]}, {}, tag=tag(n)).wait()
    return None


def forked(comm):
    """What a fork of each rank finds; the ranks themselves go on."""
    peer = 1 - comm.rank
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            comm.exchange({}, {peer: [torch.zeros(1)]}, tag=tag(0))
            text = "nothing"
        except PeerError as error:
            text = str(error)
        comm._channel.ops.shm_close(comm._channel.end)
        os.write(writing, text.encode())
        os._exit(0)
    os.waitpid(child, 0)
    text = os.read(reading, 1000).decode()
    y = comm.empty((1,), torch.float32, CPU)
    comm.exchange({peer: [torch.ones(1)]}, {peer: [y]}, tag=tag(0)).wait()
    comm.agree("both forks have ended", {})
    left = comm._channel.ops.shm_has_left(comm._channel.end, peer)
    comm.agree("afterwards", {})
    return text, float(y), left


def killed(comm, name, times):
    """Rank 1 is killed around the n-th call of an operator, in a ring that goes on for ever."""
    if comm.rank == 1:
        comm._channel.ops = Before(comm._channel.ops, ends_at(name, times))
    for call in range(1000):
        ring(comm, 20, 100)
        comm.agree("round", {"call": call})


def aborts_at_length(comm):
    """What each rank says of a comm that died for a reason longer than the shared memory keeps."""
    if comm.rank == 1:
        comm.abort("x" + "é" * 800)
    try:
        ring(comm, 1000, 100)
    except PeerError as error:
        return str(error)


def killed_while_moving(comm, seed):
    """Rank 1 is killed at a random moment, most likely while bytes move."""
    if comm.rank == 1:
        draw = random.Random(seed)
        timer = threading.Timer(0.05 + 0.1 * draw.random(), os.kill, (os.getpid(), signal.SIGKILL))
        timer.start()
    for _ in range(1000):
        ring(comm, 50, 4 << 20)


def killed_while_failing(comm):
    """Rank 1 is killed while it writes why it fails."""
    if comm.rank == 1:
        comm._channel.ops = Before(comm._channel.ops, ends_at("shm_fail", 2))
        comm.abort("for a reason")
    ring(comm, 1000, 100)


def closes(comm):
    """Rank 1 lets go of its comm and does something else; the others find out long before the timeout."""
    other = ShmComm(timeout=120.0)
    if comm.rank == 1:
        return
    other.exchange({}, {(comm.rank - 1) % comm.size: [torch.zeros(4)]}, tag=tag(9)).wait()


def waits_for_credit(comm):
    """Rank 0 sends what rank 1 never expects."""
    if comm.rank == 0:
        cases.impatient(comm, 1.0)
        comm.exchange({1: [torch.zeros(3)]}, {}, tag=tag(2)).wait()
    while True:
        comm.check()
        time.sleep(0.02)


def refused(comm):
    """The messages of tensors that cannot travel; the comm goes on."""
    peer, found = 1 - comm.rank, []
    sides = (
        ({peer: [torch.zeros(2, device="meta")]}, {}),
        ({}, {peer: [torch.zeros(1).expand(3)]}),
        ({peer: [torch.zeros(2, dtype=torch.complex64).conj()]}, {}),
    )
    for sends, recvs in sides:
        try:
            comm.exchange(sends, recvs, tag=tag(0))
        except ValueError as error:
            found.append(str(error))
    comm.agree("afterwards", {})
    return found


def corrupts_nothing(comm):
    """A rank gives up while it is given credit; the memory it was to write is not used again by its owner."""
    if comm.rank == 0:
        x = comm.empty((1 << 16,), torch.uint8, CPU)
        address = x.data_ptr()
        work = comm.exchange({}, {1: [x]}, tag=tag(0))
        del x
        comm.abort("on purpose")
        try:
            work.wait()
        except PeerError:
            del work
        return comm.empty((1 << 16,), torch.uint8, CPU).data_ptr() != address
    time.sleep(0.3)
    return True


def impossible(comm):
    """The messages of shapes that no memory has; the comm goes on."""
    found = []
    for shape in ((1 << 40, 1 << 40), (1 << 61, 2), (2, -1)):
        try:
            comm.empty(shape, torch.float64, torch.device("cpu"))
        except RuntimeError as error:
            found.append(str(error))
    comm.agree("afterwards", {})
    return found


def forks(comm):
    """What a fork writes to memory from `empty` of its own, and that its errors are its own."""
    mine = comm.empty((4,), torch.float64, torch.device("cpu")).fill_(7)
    child = os.fork()
    if not child:
        try:
            comm.empty((4,), torch.float64, torch.device("cpu")).fill_(99)
            comm.abort("a fork")
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    again = comm.empty((4,), torch.float64, torch.device("cpu"))
    untouched = not bool((again == 99).any())
    comm.agree("afterwards", {})
    return mine.tolist(), untouched
