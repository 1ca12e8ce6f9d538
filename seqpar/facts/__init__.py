"""The facts of a batch: which keys a query sees, which rank holds which token, and the tiles that follow."""

from seqpar.facts.layout import Layout
from seqpar.facts.mask import Mask
from seqpar.facts.segments import Kind, Segments
from seqpar.facts.stretches import Stretches
from seqpar.facts.tiles import Tiles

__all__ = ["Kind", "Layout", "Mask", "Segments", "Stretches", "Tiles"]
