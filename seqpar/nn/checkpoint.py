"""`save_attention`: checkpoints that recompute all but attention."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch.utils.checkpoint import create_selective_checkpoint_contexts


def save_attention() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """What makes a checkpoint keep the results of attention, so that its exchanges are not made again; the rest is.

        checkpoint(layer, x, use_reentrant=False, context_fn=seqpar.nn.save_attention)

    It costs the memory of ``out`` and ``lse``, and where heads are traded that of the traded q, k, v; results and
    gradients are those without a checkpoint. As for every selective checkpoint of torch, one backward pass.
    """
    return create_selective_checkpoint_contexts([torch.ops.seqpar.attention.default])  # type: ignore[no-any-return]
