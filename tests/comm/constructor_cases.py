"""What a rank does in the tests of constructors: module-level functions, so that processes find them by name."""

import contextlib
import os
import resource
import time
from unittest import mock

from seqpar import native
from seqpar.comm import PeerError, group_channel, rendezvous
from seqpar.comm.rendezvous import Rendezvous
from seqpar.comm.shm import comm as shm
from tests.comm import cases

ARGUMENTS = {
    "no memory": {"pool_bytes": 1 << 62},
    "no pool": {"pool_bytes": 0},
    "no such pool": {"pool_bytes": 1 << 70},
    "no timeout": {"timeout": 0},
    "a text": {"timeout": "5"},
    "no check": {"check": "never"},
    "another check": {"check": "call"},
    "no channels": {"min_ctas": 0},
    "channels of another": {"min_ctas": 8, "private": False},
    "another number of channels": {"min_ctas": 8},
}


@contextlib.contextmanager
def no_descriptors():
    """This process can open no file: a limit bounds numbers, and the first three stay taken whatever is closed."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def around(how):
    """What is wrong with the machine of a rank, as a context."""
    if how == "another machine":
        return mock.patch.object(shm, "machine", lambda: ["other", "pid:[1]", "elsewhere"])
    if how == "no extension":
        return mock.patch.object(native, "missing", lambda: "seqpar._C was not built")
    return no_descriptors() if how == "no descriptors" else contextlib.nullcontext()


def made(comm, how):
    """The error of a comm that rank 1 cannot make: (type, message), and whether the next one works."""
    make, bad = type(comm), comm.rank == 1
    try:
        with around(how) if bad else contextlib.nullcontext():
            make(**{"timeout": 120.0, **(ARGUMENTS.get(how, {}) if bad else {})})
        found = None
    except Exception as error:
        found = type(error).__name__, str(error)
    comm.agree("afterwards", {})
    return found, cases.bits(make(timeout=120.0), 0, 2).tolist()


def comes_not(comm):
    """Rank 1 does not come to a constructor that the others are in."""
    if comm.rank != 1:
        type(comm)(timeout=1.0)


def dies(comm):
    """Rank 1 dies in a constructor, when the ranks have met."""

    def die(*args):
        os._exit(5)

    comm.agree("before", {})  # so that they come together
    with mock.patch.object(Rendezvous, "connect", die) if comm.rank == 1 else contextlib.nullcontext():
        type(comm)(timeout=2.0)


def connects_late(comm, seconds):
    """Rank 1 is held up when it has connected: the error of the others, which wait for so many seconds."""
    connected = group_channel._twin

    def late(*args):
        twin = connected(*args)
        time.sleep(1.0)
        return twin

    with (
        mock.patch.object(group_channel, "_twin", late if comm.rank == 1 else connected),
        mock.patch.object(rendezvous, "LEAVING", seconds),
    ):
        try:
            return cases.bits(type(comm)(timeout=120.0), 0, 2).tolist()
        except PeerError as error:
            return str(error)


def missed(comm, absent):
    """A constructor that one rank does not come to, and then one that all come to: what the others say, and that."""
    found, make = None, type(comm)
    comm.agree("before", {})
    if comm.rank != absent:
        try:
            make(timeout=4.0)  # not of the other one that came
        except PeerError as error:
            found = str(error)
    comm.agree("afterwards", {})
    return found, cases.bits(make(timeout=120.0), 0, 2).tolist()
