"""Whether it pays to spread batches over ranks: said once, to who listens to the logger "seqpar"."""

from __future__ import annotations

import logging

import numpy as np

from seqpar.data import Share
from seqpar.facts.layout import Layout
from seqpar.facts.mask import Mask
from seqpar.planner import Forecast
from seqpar.planner.bound import document_ticks
from seqpar.planner.scale import weights_for

log = logging.getLogger("seqpar.integrations")

TRIED = 8  # batches of training that are compared
AS_FAST = 1.01


class Worth:
    """Compares the forecasts of the first batches with those of ranks that compute their own documents alone.

    who: what is trained, for the message.
    """

    def __init__(self, who: str) -> None:
        self._who, self._left, self._most = who, TRIED, 0.0

    def note(self, share: Share) -> None:
        """Compare a batch; after the last one say it if none of them gains."""
        forecast = share.plan.forecast
        if not self._left or share.source is None or not isinstance(forecast, Forecast):
            return
        self._left -= 1
        part = seconds_apart(share.plan.mask, share.source, forecast) / forecast.seconds
        self._most = max(self._most, part)
        if self._most > AS_FAST:
            self._left = 0
        elif not self._left and share.comm.rank == 0:
            log.info(
                "%s: plain data parallelism would be as fast as far as one can tell: of %d batches each is forecast to "
                "take at most %.2f times as long with every document on the rank that brings it (%s). It takes the "
                "memory of the longest batch of a rank",
                self._who, TRIED, self._most, forecast.what,
            )  # fmt: skip


def seconds_apart(mask: Mask, source: Layout, forecast: Forecast) -> float:
    """Seconds of the slowest rank if each computes the documents that `source` gives it, alone."""
    layers = [(mask, forecast.model.layers)]
    w = weights_for(layers, forecast.model, forecast.hardware)
    ticks = np.zeros(source.ranks, np.int64)
    np.add.at(ticks, source.holders().of(mask.offsets[:-1]), document_ticks(layers, w))
    return (int(ticks.max()) + (w.forward.stage + w.backward.stage) * forecast.model.layers) * w.second
