"""Fused attention of PyTorch and of others, which must not attend to a shard alone: `sdpa` refuses or disables it."""

from __future__ import annotations

import sys
import threading
from types import TracebackType
from typing import Any

import torch

from seqpar.private import torch as torch_private

# Fused functions and operators, PyTorch's and others', that compute attention and must not be overlooked.
_OPERATORS = (torch_private.OpOverload, torch_private.OpOverloadPacket, torch_private.HigherOrderOperator)
_FUSED = {
    torch_private.native_multi_head_attention, torch_private.transformer_encoder_layer_fwd,
    torch_private.scaled_dot_product_attention_math, torch_private.scaled_dot_product_flash_attention,
    torch_private.scaled_dot_product_efficient_attention, torch_private.torch_cudnn_attention,
    torch_private.torch_cpu_attention,
}  # fmt: skip


def attends(function: Any) -> bool:
    """Whether a function of torch is fused attention, operators by their name, seqpar's own aside."""
    if function in _FUSED:
        return True
    name = str(function) if isinstance(function, _OPERATORS) else ""
    return ("attention" in name or "attn" in name) and not name.startswith("seqpar.")


def in_flex_attention(trace: TracebackType | None) -> bool:
    """Whether an error comes from flex_attention, which traces its operator: what refuses that is dynamo's error."""
    module = sys.modules.get("torch.nn.attention.flex_attention")
    while module is not None and trace is not None:
        if trace.tb_frame.f_code is module.flex_attention.__code__:
            return True
        trace = trace.tb_next
    return False


class _FusedPaths:
    """``with FUSED_PATHS:`` PyTorch's own switch for them is off while any thread is inside; it is one for all."""

    def __init__(self) -> None:
        self._lock, self._inside, self._before = threading.Lock(), 0, True

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._before = torch.backends.mha.get_fastpath_enabled()
                torch.backends.mha.set_fastpath_enabled(False)
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside and not torch.backends.mha.get_fastpath_enabled():
                torch.backends.mha.set_fastpath_enabled(self._before)


FUSED_PATHS = _FusedPaths()
