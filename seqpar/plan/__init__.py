"""A plan: the choice of how a batch is computed, and what every rank derives from it."""

from seqpar.facts.segments import Kind, Segments
from seqpar.facts.tiles import Tiles
from seqpar.plan.fetched import Fetched, FetchedBand
from seqpar.plan.parts import head_blocks, head_share, replicated
from seqpar.plan.plan import TRANSPORTS, Plan
from seqpar.plan.steps import Part, Rows, Step, StepBand, Trade

__all__ = [
    "TRANSPORTS", "Fetched", "FetchedBand", "Kind", "Part", "Plan", "Rows", "Segments", "Step", "StepBand", "Tiles",
    "Trade", "head_blocks", "head_share", "replicated",
]  # fmt: skip
