"""What a forward of a parallel transformers model returns: rows of its own batch, and the loss of all batches."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, NamedTuple

from torch import Tensor
from transformers import PreTrainedModel

from seqpar.comm import Comm
from seqpar.data import Share, back
from seqpar.integrations.hf.experts import LOGITS, LOSS, Balance, balance, weight_of
from seqpar.integrations.hf.heads import POOLER, pooled_of
from seqpar.integrations.hf.logits import mean_of_rows
from seqpar.integrations.hf.reading import BatchCall
from seqpar.integrations.hf.trial.runs import PER_TOKEN, SHIFTS, ModelFit
from seqpar.private.torch import tree_leaves
from seqpar.train.loss import cross_entropy, linear_loss
from seqpar.train.sums import reported, sum_under


class Outputs(NamedTuple):
    """The outputs of a parallel model.

    copies: how often num_items_in_batch counts a label. returned: names of outputs to return in
    addition to those with a row per token. looked_up: whether layers look up the plan of their forward.
    """

    model: PreTrainedModel
    comm: Comm
    fit: ModelFit
    average_over: int
    copies: int
    returned: tuple[str, ...]
    looked_up: bool

    def home(self, module: PreTrainedModel, call: BatchCall, own: Share, out: Any, hidden: list[Tensor] | None) -> Any:
        """The model's output for this rank's own batch, with the loss of all batches. A collective.

        out: of this rank's rows. hidden: the base model's, where the loss is computed without logits.
        """
        served = {*PER_TOKEN, *self.returned, *((LOGITS, LOSS) if call.routers else ()), *self.fit.pooled * (POOLER,)}
        # what else a class returns may be of one rank's rows, and is left out
        results = {field.name: getattr(out, field.name) if field.name in served else None for field in fields(out)}
        even = None
        if results.get(LOSS) is not None:
            even = balance(results[LOGITS], self.model, own.plan, self.comm)
            results[LOSS] = reported(even.share * self.average_over, even.whole)
        if call.labels:
            results["loss"] = self._loss(call, own, results.get("logits"), hidden, even)
        for name in PER_TOKEN:
            if results.get(name) is not None:
                results[name] = back(own, results[name][0]) if call.logits else None
        if results.get(POOLER) is not None:
            results[POOLER] = pooled_of(module, results["last_hidden_state"])
        if results.get("hidden_states") is not None:
            if odd := [list(x.shape) for x in results["hidden_states"] if x.shape[:-1] != (1, len(own.positions))]:
                raise NotImplementedError(
                    f"{type(module).__name__} returns hidden_states of shape {odd[0]}, expected a row for each of "
                    f"{len(own.positions)} tokens; leave output_hidden_states out"
                )
            results["hidden_states"] = tuple(back(own, x[0]) for x in results["hidden_states"])
        if results.get(LOGITS) is not None:
            home = [back(own, x.reshape(-1, x.shape[-1])) for x in results[LOGITS]] if call.logits else []
            # as models return them, [B * S, experts] of each layer
            results[LOGITS] = tuple(x.reshape(-1, x.shape[-1]) for x in home) if call.logits else None
        if self.looked_up:  # again if a checkpoint computes mixers again, so the plan is kept as long as the graph
            for x in graphs(results):
                x.grad_fn.metadata["seqpar"] = own.plan  # type: ignore[union-attr]
        whole = type(out)(**results)
        return whole if call.return_dict else whole.to_tuple()

    def _loss(
        self, call: BatchCall, own: Share, logits: Tensor | None, hidden: list[Tensor] | None, even: Balance | None
    ) -> Tensor:
        """The loss of the union of all ranks' batches, with the gradient of this rank's share."""
        scale: dict[str, Any] = {"valid": own.valid, "average_over": self.average_over}
        if call.items is not None:  # whose giver also scales for wrappers
            scale = {"valid": own.valid}
            if self.fit.by_items:  # a mean over more than this batch
                scale = {"valid": call.items.reshape(()) if isinstance(call.items, Tensor) else int(call.items)}
                scale["average_over"] = self.copies
        labels = own.tensors["labels"]
        if hidden is not None:
            assert self.fit.head is not None
            head, rows = self.fit.head, hidden[-1][0].to(self.fit.head.weight.dtype)
            part = linear_loss(rows, head.weight, head.bias, labels, softcap=self.fit.softcap, **scale)
        else:
            assert logits is not None
            if self.model.loss_function in SHIFTS:
                part = cross_entropy(logits[0], labels, **scale)
            else:
                count = int((labels != -100).sum())
                mean = mean_of_rows(self.model, logits[0], labels, self.fit.shift) if count else logits.sum() * 0.0
                part = mean * count / scale["valid"] * scale.get("average_over", 1)
        if even is not None:
            weight = weight_of(self.model) * (1 if call.items is not None else self.average_over)
            part = part + (weight * even.share).to(part)
        if call.items is not None:
            return part
        whole = sum_under(
            part, self.comm, f"{type(self.model).__name__}.forward: the loss", {"plan": own.plan.digest()}
        )
        return reported(part, whole / self.average_over)


def graphs(results: object) -> list[Tensor]:
    """The tensors of results that have a graph, of those inside other results too."""
    return [x for x in tree_leaves(results) if isinstance(x, Tensor) and x.grad_fn is not None]
