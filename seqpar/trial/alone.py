"""Whether a module works on each row alone, so that it may be called for some rows at a time, and again in backward.

Several calls differ from one where rows meet, where a call leaves something behind, as counters and lists of outputs,
and where others take what modules inside return, as transformers takes router logits.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, nullcontext

import numpy as np
import torch
from torch import Tensor, nn

from seqpar.private import torch as torch_private
from seqpar.trial.modules import dropping, recording, renorming
from seqpar.trial.protect import saved
from seqpar.trial.randomness import Deterministic
from seqpar.trial.rows import Positions, random_rows
from seqpar.trial.runs import try_model

ROWS = 13, 11  # of a trial: the first that is no other size


def never_alone(module: nn.Module) -> str:
    """Why a module cannot be called for some rows at a time, as far as classes show, or ""."""
    return ", and ".join(recording(module) + renorming(module))


def in_a_trial(module: nn.Module, forward: Callable[[Tensor], object], like: Tensor) -> str:
    """Why a module cannot be called for some rows at a time, as a few random rows show, or "".

    forward: of the module, for one tensor [..., rows, channels]. like: such a tensor.
    """
    if reasons := dropping(module):
        return ", and ".join(reasons)
    with ExitStack() as stack:
        while torch_private.len_torch_function_stack():  # modes around may refuse random numbers, and note what is read
            stack.enter_context(torch_private.pop_mode_temporarily())
        return _tried(module, forward, like)


def _tried(module: nn.Module, forward: Callable[[Tensor], object], like: Tensor) -> str:
    """Why a module cannot be called for some rows at a time, with no mode around."""
    count = next(n for n in ROWS if n != like.shape[-1])
    x = random_rows((*[1] * (like.dim() - 2), count, like.shape[-1]), like.detach(), seed=1)
    try:
        with torch.no_grad(), saved(module) as state, Deterministic():
            out, left = forward(given := x.clone()), state.left()
    except Exception as error:
        return f"it fails for {count} random rows: {type(error).__name__}: {error}"
    if not isinstance(out, Tensor) or out.shape[:-1] != x.shape[:-1]:
        what = f"a tensor {list(out.shape)}" if isinstance(out, Tensor) else f"a {type(out).__name__}"
        return f"it returns {what} for a tensor {list(x.shape)}, not one tensor with the same rows"
    if not torch.equal(given, x):
        return "it writes to its argument"
    if left:
        return f"a call changes {', '.join(left)}, and there would be several calls"
    verdict = try_model(module, forward, (x,), {}, [Positions(np.arange(count), count - 1)], nullcontext)
    return verdict.reason or verdict.error
