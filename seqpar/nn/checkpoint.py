"""`save_attention`: activation checkpoints that recompute everything but attention."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch.utils.checkpoint import create_selective_checkpoint_contexts


def save_attention() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Keep attention outputs (no repeated exchange) and recompute everything else in an activation checkpoint.

        checkpoint(layer, x, use_reentrant=False, context_fn=seqpar.nn.save_attention)

    It costs the memory of ``out`` and ``lse``, and of the exchanged q, k, v under Ulysses; results and gradients
    match a call without a checkpoint. As with every selective checkpoint of torch, only one backward pass is possible.
    """
    return create_selective_checkpoint_contexts([torch.ops.seqpar.attention.default])  # type: ignore[no-any-return]
