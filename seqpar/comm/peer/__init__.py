"""`PeerComm`: ranks on the GPUs of one node, whose streams write straight into each other's memory.

Every rank has a pool of device memory that all ranks map, preceded by 32-bit words. Messages of an ordered pair are
numbered; an epoch is a message's number. A rank's streams only wait on words of its own memory:

    credit     written by the receiver's stream at its posting: the buffer may be written from here on
    arrival    written by the sender's copy stream after the bytes
    sent       written at the same place, for the sender itself: the source may be overwritten from here on
    lane       written by the receiver once a piece is out of its buffer: the next piece but one may be written there

               rank 0, the sender                                  rank 1, the receiver
    exchange   event: the source is written         <- offer --    credit stream: event, write(credit of rank 0)
    copy       copy stream: event, wait(credit),
               copy, write(arrival of rank 1, sent) -- arrive ->
    wait       wait(sent)                                          wait(arrival), mark if poisoned

A message that does not fit in the pool is sent in pieces: see `pieces`. Each piece has an offer and an epoch of its
own. While it waits, the receiver's host makes its landing stream wait for a piece, copy it to the tensor, and write
`lane`.

Destinations go from host to host (`offer`, `arrive`: the shared-memory mailbox that `ShmComm` uses too). Hosts
communicate in `exchange` and `wait`, in the order of exchanges, and during an agreement (`progressing`); `wait` returns
once all hosts involved have launched their part. So the write that ends a wait is always launched before the wait.
Therefore nothing that blocks a host, such as freeing memory, and no two streams that share a hardware queue can stall a
device.

A comm dies by a cause that is published to all ranks, then by a word `poison` in every rank's memory. From then on
waits for arrivals are released, and received tensors are NaN; see `PeerChannel.poison` for the order of these steps.
"""

from seqpar.comm.peer.comm import PeerComm

__all__ = ["PeerComm"]
