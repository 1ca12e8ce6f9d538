"""The device memory of all ranks, as one of them maps it."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from seqpar.comm.protocol import Comm

PROCESS = secrets.token_hex(8)  # process numbers may repeat on other machines


@contextmanager
def agreed(control: Comm) -> Iterator[None]:
    """A block of a constructor; its error is raised on this rank, and quoted on every other one. A collective."""
    error: Exception | None = None
    try:
        yield
    except (RuntimeError, ValueError) as raised:
        error = raised
    control.agree("PeerComm", {}, error)


class PeerMemory:
    """`size` bytes of each rank's device, mapped by all ranks: `bases` are this process's addresses, by rank.

    words, value: the number of first words of the own memory, and their value. mail: this rank's mailbox address, which
    the others get: `mails` by rank. A collective, over the control comm of the hosts.

    Raises: NotImplementedError on every rank if one cannot map another's memory, or where `Cuda.order` does; an
    allocation error on its rank, and ValueError on the others.
    """

    def __init__(self, control: Comm, cuda: Any, size: int, words: int, value: int, mail: list[int]) -> None:
        self._control, self._cuda, self._others = control, cuda, dict[int, int]()
        own: dict[str, Any] = {"process": f"{os.getpid()} {PROCESS}", "device": cuda.index, "name": cuda.name}
        own |= {"bus": cuda.bus, "mail": mail}
        address = 0
        failed: Exception | None = None
        try:
            address = cuda.allocate(size, words, value)
            own |= {"at": address, "handle": cuda.export(address)}
        except (RuntimeError, ValueError) as error:
            failed = error
        try:
            hellos = control.gather("PeerComm", own, failed)
        except (RuntimeError, ValueError):
            if address:
                cuda.free(address)
            raise
        self.mails = [hello["mail"] for hello in hellos]
        self.bases, why = [address] * control.size, ""
        for peer, hello in enumerate(hellos):
            if peer != control.rank and not why:
                try:
                    self.bases[peer] = self._map(peer, hello, own["process"])
                except RuntimeError as error:
                    what = f"{cuda.name} of rank {control.rank} cannot map {hello['name']} of rank {peer}"
                    why = f"{what}: {str(error).splitlines()[0]}; use GroupComm, which over NCCL needs no mapping"
        try:
            cuda.order([hello["bus"] for hello in hellos])
        except NotImplementedError as error:
            why = why or str(error)
        obstacles = [text for text in control.gather("PeerComm", why) if text]
        if obstacles:
            self.close()
            raise NotImplementedError(f"PeerComm: {obstacles[0]}")

    def close(self) -> None:
        """Free the memory. A collective."""
        for at in self._others.values():
            self._cuda.unmap(at)
        self._control.agree("PeerComm", {})  # no rank frees memory that another maps
        self._cuda.free(self.bases[self._control.rank])

    def _map(self, peer: int, hello: Mapping[str, Any], process: str) -> int:
        if hello["process"] == process:
            self._cuda.reach(hello["device"])
            return int(hello["at"])
        self._others[peer] = int(self._cuda.map(hello["handle"]))
        return self._others[peer]
