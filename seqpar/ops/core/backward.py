"""Where a call stands in autograd: in a forward pass, or in a backward pass that makes it again, as a checkpoint does.

Nodes of a graph are numbered as a thread records them, so that what a backward pass makes again can be told from what
was recorded before something, or after it. The names are private to torch: here is all that knows them.
"""

from __future__ import annotations

import torch


def next_node() -> int:
    """The number that this thread's next node gets."""
    return torch._C._autograd._get_sequence_nr()


def backward_pass() -> int:
    """The number of the backward pass that runs in this thread, -1 outside of all."""
    return torch._C._current_graph_task_id()


def node_under_way() -> int:
    """The number of the node whose backward runs in this thread, -1 outside of all."""
    node = torch._C._current_autograd_node() if backward_pass() >= 0 else None
    return -1 if node is None else node._sequence_nr()
