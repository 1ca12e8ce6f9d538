"""The device memory of all ranks, as one of them maps it."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from seqpar.comm.protocol import Comm, Tag

OPENING = -3  # phase of the constructor's messages
HELLO_BYTES = 4096
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
        own, address = self._allocate(size, words, value)
        own |= {
            "process": f"{os.getpid()} {PROCESS}",
            "device": cuda.index,
            "name": cuda.name,
            "bus": cuda.bus,
            "at": address,
            "mail": mail,
        }
        hellos: list[dict[str, Any]] = [json.loads(text) for text in self._tell(json.dumps(own), 0)]
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
        obstacles = [text for text in self._tell(why, 1) if text]
        if obstacles:
            self._unmap(2)
            cuda.free(address)
            raise NotImplementedError(f"PeerComm: {obstacles[0]}")
        control.stats.reset()  # these messages are not payload

    def close(self) -> None:
        """Free the memory. A collective."""
        self._unmap(3)
        self._cuda.free(self.bases[self._control.rank])

    def _allocate(self, size: int, words: int, value: int) -> tuple[dict[str, Any], int]:
        address = 0
        hello: dict[str, Any] = {}
        try:
            with agreed(self._control):
                address = self._cuda.allocate(size, words, value)
                hello["handle"] = self._cuda.export(address)
        except (RuntimeError, ValueError):
            if address:
                self._cuda.free(address)
            raise
        return hello, address

    def _map(self, peer: int, hello: Mapping[str, Any], process: str) -> int:
        if hello["process"] == process:
            self._cuda.reach(hello["device"])
            return int(hello["at"])
        self._others[peer] = int(self._cuda.map(hello["handle"]))
        return self._others[peer]

    def _unmap(self, stage: int) -> None:
        for at in self._others.values():
            self._cuda.unmap(at)
        self._tell("", stage)  # no rank frees memory that another maps

    def _tell(self, text: str, stage: int) -> list[str]:
        """Every rank's text, by rank."""
        said = text.encode()[:HELLO_BYTES].ljust(HELLO_BYTES, b"\0")
        own = torch.frombuffer(bytearray(said), dtype=torch.uint8)
        control = self._control
        heard = {peer: torch.empty_like(own) for peer in range(control.size) if peer != control.rank}
        sends, recvs = {peer: [own] for peer in heard}, {peer: [x] for peer, x in heard.items()}
        control.exchange(sends, recvs, tag=Tag(0, 0, OPENING, stage)).wait()
        everyone = [heard.get(rank, own) for rank in range(control.size)]
        return [bytes(x.tolist()).rstrip(b"\0").decode(errors="replace") for x in everyone]
