"""What a batch is: which keys a query sees, where tokens live, and what both mean for the tiles of a kernel."""

from seqpar.facts.layout import Layout
from seqpar.facts.mask import Mask
from seqpar.facts.tiles import Kind, Segments, Tiles

__all__ = ["Kind", "Layout", "Mask", "Segments", "Tiles"]
