"""Recurrent layers over the rows of a plan: linear attention, delta rules, state spaces and short convolutions.

They run next to attention with the same plan, for any layout. Softmax layers send keys; these send, at each cut
inside a document, a state and the few rows that a filter reads::

    y = recurrent.causal_conv1d(x, weight, bias, plan, comm, activation="silu")
    out = recurrent.linear_attention(q, k, v, plan, comm, decay=decay, beta=beta)

`describe` tells, and `plot` draws, who sends which states and rows under a plan. `shift` and `halo` are for kernels of
one's own, as is `state_scan`: it turns what each run of rows does to a state into the state that enters it.
"""

from seqpar.ops.recurrent.channels import channel_scan
from seqpar.ops.recurrent.computed import States
from seqpar.ops.recurrent.conv import causal_conv1d
from seqpar.ops.recurrent.linear import linear_attention
from seqpar.ops.recurrent.rows import halo, runs, shift
from seqpar.ops.recurrent.scan import state_scan
from seqpar.plan.recurrence import RecurrentLayer
from seqpar.plan.runs import RankRuns
from seqpar.plan.travel_plot import plot
from seqpar.plan.travel_report import describe

__all__ = [
    "RankRuns", "RecurrentLayer", "States", "causal_conv1d", "channel_scan", "describe", "halo", "linear_attention",
    "plot", "runs", "shift", "state_scan",
]  # fmt: skip
