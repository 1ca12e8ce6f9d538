"""A model of a CUDA device on the CPU, for `PeerComm`: its methods are those of `seqpar.comm.peer.cuda.Cuda`.

A stream is a thread that does one thing after the other, each after a random delay; different streams know nothing of
each other but by events and words. Memory is memory of this process, or a file that processes map.

    at_once     what is put on a rank's own stream is done when the call returns, so that tests may look at results
    kernels     waits are kernels, which also end by the poison or set it when their time is over
    without     waits that the model leaves out: "event", or for a word, "arrival", "credit", "sent", "lane"

The model insists that the write that ends a wait was put on a stream before the wait was: see `PeerComm`.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import queue
import random
import threading
import time
import weakref

import torch
import torch.distributed as dist

from seqpar import native
from seqpar.comm.peer import PeerComm
from seqpar.comm.peer.cuda import copy_all
from seqpar.comm.peer.signals import LINE, reached

LIMIT = 120.0  # seconds after which a stream gives up, so that a test ends


class Event:
    """What a stream has reached when it is set."""

    def __init__(self):
        self._happened = threading.Event()
        self.set, self.query = self._happened.set, self._happened.is_set

    def synchronize(self):
        assert self._happened.wait(LIMIT), "an event that never happens"


class Stream:
    """A thread that runs functions in order. at_once: `put` returns when the function has run."""

    def __init__(self, model, *, at_once=False):
        self.model, self.at_once = model, at_once
        self._queue = queue.SimpleQueue()
        self._draw = random.Random(model.draw.random())
        threading.Thread(target=self._run, daemon=True).start()

    def put(self, function):
        self._queue.put(function)
        if self.at_once:
            self.synchronize()

    @property
    def cuda_stream(self):
        return self  # as a driver's functions are given it

    def event(self):
        event = Event()
        self._queue.put(event.set)
        return event

    def synchronize(self):
        self.event().synchronize()

    def _run(self):
        while (function := self._queue.get()) is not None:
            if self.model.delay and self._draw.random() < 0.5:
                time.sleep(self._draw.random() * self.model.delay)
            function()


class Model:
    """A device of one rank. delay: seconds at most before each thing a stream does."""

    device = torch.device("cpu")
    promised: dict[int, int] = {}  # word -> the last value that any rank of this process has put on a stream

    def __init__(self, rank=0, size=1, *, delay=0.0, seed=0, at_once=True, unreachable=(), without=(), kernels=False):
        self.index, self.name, self.bus, self.delay = rank, f"model:{rank}", f"0000:{rank:02x}:00.0", delay
        self.draw, self.without, self.unreachable = random.Random(f"{seed} {rank}"), without, unreachable
        self._at_once, self._streams, self._size = at_once, threading.local(), size
        self._ops, self._memory, self.base, self._mapped, self._kernels = native.ops(), {}, 0, False, kernels
        self.blanked = 0  # exchanges that were marked

    # memory

    def allocate(self, size, words, value):
        file = os.memfd_create("seqpar-model")  # of this process: none is left if it is killed
        self._close = weakref.finalize(self, os.close, file)
        os.truncate(file, size)
        at = self._open(f"/proc/{os.getpid()}/fd/{file}")
        for word in range(words):
            self._word(at + 4 * word).value = self.promised[at + 4 * word] = value
        self.base = at
        return at

    def _open(self, path):
        with open(path, "r+b") as file:
            memory = mmap.mmap(file.fileno(), 0)
        at = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._memory[at] = memory, path
        return at

    def free(self, at):
        # the mapping stays: tensors may look at it
        self._close()

    def export(self, at):
        return list(f"{self.index} {self._memory[at][1]}".encode())

    def map(self, handle):
        index, path = bytes(handle).decode().split()
        if int(index) in self.unreachable:
            raise RuntimeError("cudaIpcOpenMemHandle: CUDA error 217, peer access is not supported\nmore")
        self._mapped = True
        return self._open(path)

    def unmap(self, at):
        del at

    def reach(self, device):
        if device in self.unreachable:
            raise RuntimeError("cudaDeviceEnablePeerAccess: CUDA error 217, peer access is not supported\nmore")

    def order(self, others):
        assert self.bus in others

    def read(self, at, words, stream):
        stream.synchronize()
        return [self._word(at + 4 * word).value for word in range(words)]

    @staticmethod
    def _word(at):
        return ctypes.c_uint32.from_address(at)

    # streams

    def stream(self, priority):
        return Stream(self)

    def end(self, stream):
        stream.put(None)

    def current(self):
        if not hasattr(self._streams, "current"):
            self._streams.current = Stream(self, at_once=self._at_once)
        return self._streams.current

    def switch(self, stream):
        self._streams.current = stream

    def capturing(self):
        return False

    def record(self, stream):
        return stream.event()

    def follow(self, stream, event):
        if "event" not in self.without:
            stream.put(event.synchronize)

    def write(self, stream, words):
        for at, value in self.draw.sample(list(words.items()), len(words)):
            self.promised[at] = value

            def store(at=at, value=value):
                self._word(at).value = value

            stream.put(store)

    def wait(self, stream, words, seconds, poison, heeds_poison):
        for at, value in words.items():
            kind = ("arrival", "credit", "sent", "lane")[(at - self.base) // LINE // self._size]
            if not self._mapped:
                assert reached(self.promised[at], value), f"a wait for {kind} before its write is on a stream"

            def look(at=at, value=value):
                end = time.monotonic() + (seconds if self._kernels else LIMIT)
                while not reached(self._word(at).value, value):
                    if self._kernels and heeds_poison and self._word(poison).value:
                        return
                    if time.monotonic() >= end:
                        assert self._kernels, "a word that never comes"
                        self._word(poison).value = 1
                        return
                    time.sleep(1e-5)

            if kind not in self.without:
                stream.put(look)

    def _at(self, at, strides, like):
        return self._ops.peer_view(at, list(like.shape), list(strides), like.dtype, self.device)

    def _views(self, tensors):
        """The same memory, which these do not keep: see `used`."""
        return [self._at(x.data_ptr(), x.stride(), x) for x in tensors]

    def push(self, stream, at, strides, source):
        self.copy(stream, [self._at(at, strides, source)], [source])

    def copy(self, stream, targets, sources):
        targets, sources = self._views(targets), self._views(sources)
        stream.put(lambda: copy_all(targets, sources))

    def used(self, tensors, stream):
        stream.put(lambda: tensors)

    def blank(self, stream, poison, tensors):
        tensors = self._views(tensors)

        def mark():
            if self._word(poison).value:
                self.blanked += 1
                for tensor in tensors:
                    with torch.inference_mode():
                        # a byte tensor of the same elements: NaN in floating point
                        tensor.copy_(torch.full((tensor.element_size(),), 255, dtype=torch.uint8).view(tensor.dtype)[0])

        stream.put(mark)


def on_model(control, fn, args, timeout, options):
    """``fn(comm, *args)`` on a `PeerComm` over the control comm of a rank and a model of a device."""
    options = {"pool_bytes": 1 << 22, **options}
    pool_bytes = options.pop("pool_bytes")
    comm = PeerComm.over(control, Model(control.rank, control.size, **options), pool_bytes, timeout)
    if dist.is_initialized():
        dist.barrier()  # a rank that fails at once must not end the constructor of another
    # a failure of `fn` is the control comm's to tell
    return fn(comm, *args)
