"""`Mean`: the loss of an evaluation over batches and ranks."""

from __future__ import annotations

import math

from torch import Tensor

from seqpar.comm import Comm


class Mean:
    """The mean over all tokens of several batches, from sums and counts; never a mean of means.

    For example:

        mean = seqpar.train.Mean()
        for share in batches:
            mean.add(cross_entropy(model(...), share.tensors["labels"], valid=share.valid), share.valid)
        loss = mean.result(comm)
    """

    def __init__(self) -> None:
        self._total: Tensor | float = 0.0  # of this rank's rows
        self._count: Tensor | int = 0  # of all ranks' labels

    def add(self, loss: Tensor, valid: int | Tensor) -> None:
        """Add a batch: this rank's share of its loss, without `average_over`, and the divisor in it.

        valid: the batch's labels that count on all ranks, as given to the loss. Nothing is sent, and nothing waits for
        the device.
        """
        total = loss.detach().double() * valid
        if isinstance(valid, Tensor):
            total = total.masked_fill(valid == 0, 0.0)  # a batch without labels: its share is 0 / 0
        elif not valid:
            return
        self._total = self._total + total
        self._count = self._count + valid

    def result(self, comm: Comm) -> float:
        """The mean so far, equal on every rank; NaN if no label counted. A collective of the losses' ranks.

        Raises: ValueError if ranks have counted different labels.
        """
        found = comm.gather("Mean.result", (float(self._total), int(self._count)))
        counts = [count for _, count in found]
        if len(set(counts)) > 1:
            raise ValueError(
                f"Mean.result: ranks counted {counts} labels; add every batch on every rank, with the valid of all "
                "ranks"
            )
        return sum(total for total, _ in found) / counts[0] if counts[0] else math.nan
