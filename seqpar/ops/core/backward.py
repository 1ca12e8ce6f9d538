"""The state of autograd at a call: in a forward pass, or in a backward pass that repeats it, as a checkpoint does.

Nodes are numbered as a thread records them, so a repeated call can be ordered before or after other recorded nodes.
The names are private to torch, and only this file uses them.
"""

from __future__ import annotations

import torch


def next_node() -> int:
    """The number of this thread's next node."""
    return torch._C._autograd._get_sequence_nr()


def backward_pass() -> int:
    """The number of the backward pass running in this thread, or -1."""
    return torch._C._current_graph_task_id()


def node_under_way() -> int:
    """The number of the node whose backward is running in this thread, or -1."""
    node = torch._C._current_autograd_node() if backward_pass() >= 0 else None
    return -1 if node is None else node._sequence_nr()
