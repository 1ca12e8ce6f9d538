"""Ranks in two dimensions: some share the attention inside a stage, the others what the stage does not mix."""

from __future__ import annotations

from seqpar.comm import Comm


def grid(comm: Comm, *, core: int) -> tuple[Comm, Comm]:
    """(outer, inner) comms of this rank: `core` consecutive ranks share attention, ranks of equal place switch.

    ::

        core=2 of 6 ranks   inner  0 1 | 2 3 | 4 5      outer  0 2 4 | 1 3 5

    A dimension is first sharded over inner; for outer its global size is what this rank then has, and outer shards and
    switches as if there were nothing else. No group is made, nothing is sent.

    Raises: ValueError unless core divides the ranks.
    """
    if type(core) is not int or core < 1 or comm.size % core:
        raise ValueError(f"grid: core={core!r} does not divide {comm.size} ranks")
    place = comm.rank % core
    first = comm.rank - place
    return comm.sub(range(place, comm.size, core)), comm.sub(range(first, first + core))
