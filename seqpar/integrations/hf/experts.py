"""Routers of mixtures of experts: their logits and the balance loss, over the tokens of all ranks.

The loss of Switch Transformers, as transformers' models have it, is a product of two means over all layers' tokens: of
the experts that a token chose (a fraction for each), and of its router's probabilities::

    loss = experts * sum over experts e of  fraction_e * probability_e

A mean over ranks of such products would be another number. So ranks add up both sums, once for all layers. Fractions
have no gradient, hence the loss is linear in what does: a rank's share, with its own sum of probabilities and all
ranks' fractions, adds up to the loss, and its backward needs no other rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from seqpar.comm import Comm
from seqpar.integrations.hf.config import ASKED, takes_any
from seqpar.kernels import acc_dtype
from seqpar.plan import Plan
from seqpar.private.torch import forward_hooks
from seqpar.private.transformers import RECORDING
from seqpar.train.sums import sum_under

LOGITS, LOSS = "router_logits", "aux_loss"
WEIGHTS = ("router_aux_loss_coef", "aux_loss_coef")


class Balance(NamedTuple):
    """A balance loss: this rank's share, with its gradient, and the whole, equal on every rank."""

    share: Tensor
    whole: Tensor


def asks(model: PreTrainedModel) -> bool:
    """Whether a call without `output_router_logits` returns router logits, by the config."""
    return bool(getattr(model.config.get_text_config(), ASKED, False))


def can_ask(model: PreTrainedModel) -> bool:
    """Whether a model takes `output_router_logits`."""
    takes = takes_any(type(model)) or ASKED in signature(type(model).forward).parameters
    return takes and hasattr(model.config.get_text_config(), ASKED)


@contextmanager
def without_hooks(model: PreTrainedModel) -> Iterator[None]:
    """A block that leaves none of the hooks by which transformers records router logits; compiled layers know none."""
    hooks = {module: set(forward_hooks(module)) for module in model.modules()}
    flagged = {module for module in hooks if RECORDING in module.__dict__}
    try:
        yield
    finally:
        for module, before in hooks.items():
            for key in forward_hooks(module).keys() - before:
                del forward_hooks(module)[key]
            if module not in flagged:
                module.__dict__.pop(RECORDING, None)


def balance(logits: Sequence[Tensor], model: PreTrainedModel, plan: Plan, comm: Comm) -> Balance:
    """The balance loss of the tokens of all ranks, from the router logits of this rank's rows. A collective."""
    tokens = plan.layout.tokens(comm.rank)
    top = int(getattr(model, "num_experts_per_tok", 0) or model.config.get_text_config().num_experts_per_tok)
    chosen, chances = _sums([x.reshape(-1, x.shape[-1])[:tokens] for x in logits], top)
    # in fp64, as fp32 counts no more than 2^24
    own = torch.stack([chosen, chances.detach()]).double()
    chosen, every = sum_under(own, comm, f"{type(model).__name__}.forward: routers", {"plan": plan.digest()})
    rows = plan.mask.tokens * len(logits)
    scale = len(chosen) / rows**2
    share = (chosen.to(chances.dtype) * chances).sum() * scale
    return Balance(share, ((chosen * every).sum() * scale).to(chances.dtype))


def weight_of(model: PreTrainedModel) -> float:
    """The factor of a model's balance loss in its loss."""
    config = model.config.get_text_config()
    return float(next(getattr(x, name) for x in (model, config) for name in WEIGHTS if hasattr(x, name)))


def _sums(logits: Sequence[Tensor], top: int) -> tuple[Tensor, Tensor]:
    """How often each expert is chosen, and its sum of probabilities, over the rows [tokens, experts] of all layers."""
    wide = acc_dtype(logits[0].dtype)
    chosen = torch.zeros(logits[0].shape[-1], dtype=wide, device=logits[0].device)
    chances: Any = torch.zeros_like(chosen)
    for layer in logits:
        probabilities = layer.to(chosen.device).softmax(-1)
        at = probabilities.detach().topk(top, -1).indices.reshape(-1)
        chosen = chosen.index_add(0, at, torch.ones_like(at, dtype=wide))
        chances = chances + probabilities.to(wide).sum(0)
    return chosen, chances
