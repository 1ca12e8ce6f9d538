"""Whether spreading batches over ranks pays: reported once, to the logger "seqpar.integrations"."""

from __future__ import annotations

import logging

from seqpar.data import Share
from seqpar.integrations.hf.planning import forecast_apart
from seqpar.planner import Forecast

log = logging.getLogger("seqpar.integrations")

TRIED = 8  # batches of training to compare
AS_FAST = 1.01


class Worth:
    """Compares the forecasts of the first batches with those of ranks that compute their own documents alone.

    who: the model in the message.
    """

    def __init__(self, who: str) -> None:
        self._who, self._left, self._most = who, TRIED, 0.0

    def note(self, share: Share) -> None:
        """Compare a batch; after the last one, report if none gains."""
        forecast = share.plan.forecast
        if not self._left or share.source is None or not isinstance(forecast, Forecast):
            return
        self._left -= 1
        apart = forecast_apart(share.plan.mask, share.source, forecast.model, forecast.hardware)
        part = apart.seconds / forecast.seconds
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
