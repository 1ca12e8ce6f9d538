"""A transformers model that takes ordinary batches and computes them on all ranks: its forward, replaced.

    read      the arguments of the call are a batch                          reading.py, request.py
    agree     ranks compare the call and exchange the lengths of documents   data/union.py
    share     the batch becomes this rank's rows under a plan                plans.py, data/share.py
    run       the model's own forward computes them                          forward.py, attention.py, recurrent/
    home      output rows return to the rank that supplied the batch         data/share.py
    loss      of the union of all ranks' batches                             experts.py, heads.py

Labels never reach the model, whose own loss would be the mean over a rank's rows. The instance's ``forward`` is
replaced, inside anything that wraps it or hooks into the model's calls (autocast, DDP, FSDP2, adapters): at that point
parameters are whole, and losses are visible.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import fields
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from seqpar.comm.entry import refuse_transforms, uncompiled
from seqpar.data import Share, back
from seqpar.data.share import choose, take
from seqpar.data.union import announce
from seqpar.facts.value import Ints
from seqpar.foreign.wrap import PARALLEL, replaced
from seqpar.integrations.hf.cache import ShardedCache
from seqpar.integrations.hf.experts import LOGITS, LOSS, Balance, balance, weight_of
from seqpar.integrations.hf.forward import Forward, during
from seqpar.integrations.hf.handle import TransformerHandle
from seqpar.integrations.hf.heads import POOLER, HeadCall, LocalHead, pooled_of
from seqpar.integrations.hf.mask import UnsupportedMask
from seqpar.integrations.hf.positions import SHARES, length_of
from seqpar.integrations.hf.reading import UNREAD, BatchCall, check_count, named_arguments, with_effect
from seqpar.integrations.hf.recurrent.mixers import of_documents
from seqpar.integrations.hf.trial.runs import PER_TOKEN, SHIFTS, mean_of_rows
from seqpar.ops.core.agreement import plan_key, remember
from seqpar.parallel import derived_seed, surround
from seqpar.plan import Plan
from seqpar.private.torch import forward_hooks, tree_leaves
from seqpar.train.loss import cross_entropy, linear_loss
from seqpar.train.sums import reported, sum_under


class ParallelTransformer(TransformerHandle):
    """The handle of a transformers model that takes ordinary batches and computes them on all ranks. A collective.

    A forward pass is a collective and computes the union of the ranks' batches: ``input_ids`` [B, S] (or
    ``inputs_embeds``) with ``attention_mask`` [B, S], ``position_ids``, ``token_type_ids`` and ``labels``, or one
    packed row with ``cu_seq_lens_q``, as in `seqpar.data.share`.

    The loss is that of one process with all batches, equal on every rank. Its gradient is that of this rank's share:
    sum the gradients over ranks (`seqpar.train.sync_gradients`), or let a wrapper average them over ``average_over``
    ranks (DDP, FSDP2, accelerate). With ``num_items_in_batch`` the loss is this rank's share, the sum over its tokens /
    ``num_items_in_batch``, and the caller scales it for wrappers, as transformers' Trainer does. It counts the labels
    of every rank's batch, also if all ranks supply the same one.

    Outputs per token (logits, last_hidden_state, hidden_states) are returned for the rank's own batch, in its shape. In
    training with labels ``out.logits``, and hidden states that a class returns with it, are None: the loss is
    computed in chunks, without ``[T, vocabulary]`` logits. Calls of ``model.base_model``, as other libraries' heads
    make them, are parallel too.

    model, comm: as given to `seqpar.parallelize`. plan: ``(lengths, ranks) -> Plan``; by default `plan_batch` with the
    model's shape, except that each rank computes its own documents where spreading them gains less time than it costs.
    source: "sharded", every rank supplies its own batch, or "replicated", all supply the same: then every rank computes
    the whole of a loss that you compute from outputs, so divide it by ``comm.size``. logits: True, always returned;
    False, left out whenever labels are given; None, returned without labels and in evaluation, unless Trainer
    evaluates with ``prediction_loss_only=True``. May be changed at any time, equally on all ranks. accuracy,
    deterministic: as in `seqpar.attention`.

    Raises: NotImplementedError naming every part of the model, or of a batch, that several ranks cannot compute;
    TypeError for a plan that is not a function.
    """

    def _replace(self, module: PreTrainedModel, more: dict[str, Any]) -> None:
        before, whole = module.forward, module is self.model
        headed = "forward" in module.__dict__  # a head of another library wraps it already, and calls the base model

        @wraps(before)
        def forward(*args: Any, **named: Any) -> Any:
            if args and args[0] is module:  # bound to it once more, as by accelerate's unwrap_model
                args = args[1:]
            if not self._running:
                self._configs.follow()
            if self.inactive or (self._running and not whole) or (headed and named.get("fused_lm_head")):
                return before(*args, **named)
            given, error = named_arguments(type(module), args, named)
            if whole:
                self._guard.note_passed()
                if isinstance(cache := given.get("cache"), ShardedCache):
                    return self._cached_forward(cache, before, given)
                if self.fit.local_head is not None:
                    return self._local_head_forward(self.fit.local_head, before, given, error)
            return self._forward(module, before, given, error)

        self._guard.note_forward(module, forward)
        # copying looks up the last two on the instance before anything else
        copies = {"__deepcopy__": self.__deepcopy__, "__reduce_ex__": self._reduce}
        self._undone.enter_context(replaced(module, {"forward": forward, PARALLEL: self, **more, **copies}))

    @partial(torch.compiler.disable, recursive=False)
    def _forward(
        self, module: PreTrainedModel, before: Callable[..., Any], given: dict[str, Any], error: Exception | None
    ) -> Any:
        """A call of the model, or of its base model: read, agree, share; run; home, loss."""
        refuse_transforms(f"parallelize({type(self.model).__name__})")
        call, own, rows = self._share(module, given, error)
        hidden: list[Tensor] | None = [] if call.chunked else None
        self._hidden, kept = hidden, self._hidden
        try:
            out = self._run(before, own, rows)
            return self._home(module, call, own, out, hidden)
        except BaseException as error:  # Ctrl-C too
            self._fail(error)
            raise
        finally:
            self._hidden = kept

    @uncompiled
    def _cached_forward(self, cache: ShardedCache, before: Callable[..., Any], given: dict[str, Any]) -> Any:
        """A call with a cache that is split over the ranks."""
        refuse_transforms(f"parallelize({type(self.model).__name__})")
        from seqpar.integrations.hf.generation import cached_forward

        def check() -> None:
            if cache.comm is not self.comm:
                raise ValueError(f"{type(self.model).__name__} got the cache of another handle; give it its own")
            if cache.past is None and self.comm.size > 1:
                self._guard.check(self.model, passed=True)
                self._guard.check_modules()

        def plans(lengths: Ints) -> Plan:
            return self._plans(lengths, self.comm.size, brought=None)

        running, self._running = self._running, True
        try:
            arguments = {name: x for name, x in given.items() if name != "cache"}
            how = check, plans, self._checks.gather
            return cached_forward(self.model, self._last, before, cache, arguments, *how)
        except BaseException as error:  # Ctrl-C too
            if cache.step is not None:
                self._fail(error)
            raise
        finally:
            self._running, cache.step = running, None

    @uncompiled
    def _share(
        self, module: PreTrainedModel, given: dict[str, Any], error: Exception | None
    ) -> tuple[BatchCall, Share, dict[str, Any]]:
        """The call, this rank's share of the batch, and the arguments with which the module computes it.

        error: why the call is not served, if that is known.
        """
        call = self._reader.read(module, with_effect(given), self._head, logits=self.logits, refused=error)
        known = announce(
            call.batch, self.comm, self.source, call.how, error=call.error, gather=partial(self._gather, call)
        )
        assert known is not None
        if call.training:
            self._checks.wrapper()
            if call.averaged:  # else the caller scales the loss
                self._checks.check_average(call.what)
        chosen = choose(known, self.comm.size, partial(self._plans, brought=known.brought))
        (own,) = take(known, self.comm, call.how, chosen, alike=self._plans.repeats)
        if self._head is None and call.count is not None:
            check_count(call.count, own.valid * self._copies)
        self._count += 1
        return call, own, self._reader.rows(call, own)

    def _gather(self, call: BatchCall, value: Any, error: Exception | None) -> list[Any]:
        """Every rank's announcement of its batch: one round for all that ranks exchange before they know documents.

        The batches' lengths are in it where rotary embeddings need them.
        """
        facts = {**call.facts, "the masks of the forward before": self._layers.rules}
        if not self._rotaries:
            return self._checks.gather(call.what, value, error, facts=facts)
        every = self._checks.gather(call.what, (value, 0 if error else length_of(call.batch)), error, facts=facts)
        self._longest = max(length for _, length in every)
        return [announced for announced, _ in every]

    @partial(torch.compiler.disable, recursive=False)
    def _run(self, before: Callable[..., Any], own: Share, rows: Mapping[str, Any]) -> Any:
        """The output of a module's own forward for this rank's rows."""
        around = self._surround(own)
        running, self._running = self._running, True
        try:
            out = before(**rows)
        finally:
            _leave(around)
            self._running = running
        return out

    @uncompiled
    def _surround(self, own: Share) -> ExitStack:
        """The contexts around the model's own forward, entered."""
        if self.fit.head is not None:  # after other hooks, which may change the base model's output
            forward_hooks(self._last).move_to_end(self._keeping.id)
        if self.fit.recurrent:  # ranks with the same model and share have the same plan for its mixers
            remember(self.comm, plan_key(of_documents(own.plan)))
        around = ExitStack()
        around.enter_context(surround(own.plan, self.comm, seed=derived_seed(self._seed, self._count)))
        state = Forward(self._layers.of(own), longest=self._longest, masks=own.tensors.get(SHARES))
        around.enter_context(during(state))
        return around

    @uncompiled
    def _home(self, module: PreTrainedModel, call: BatchCall, own: Share, out: Any, hidden: list[Tensor] | None) -> Any:
        """The model's output for this rank's own batch, with the loss of all batches. A collective.

        out: of this rank's rows. hidden: the base model's, where the loss is computed without logits.
        """
        if self._head is not None:
            self._head.share = own
        results = self._returned(module, call, own, out, hidden)
        graphs = [x for x in tree_leaves(results) if isinstance(x, Tensor) and x.grad_fn is not None]
        self._checks.note_results(own.plan.layout.tokens(self.comm.rank), graphs)
        for x in graphs:
            if self._replaced:  # mixers look their plan up again if a checkpoint repeats them: it stays with the graph
                x.grad_fn.metadata["seqpar"] = own.plan  # type: ignore[union-attr]
            if call.recomputed:
                x.register_hook(self._check_awake)
        whole = type(out)(**results)
        return whole if call.return_dict else whole.to_tuple()

    def _returned(
        self, module: PreTrainedModel, call: BatchCall, own: Share, out: Any, hidden: list[Tensor] | None
    ) -> dict[str, Any]:
        """The entries of that output."""
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
        return results

    def _loss(
        self, call: BatchCall, own: Share, logits: Tensor | None, hidden: list[Tensor] | None, even: Balance | None
    ) -> Tensor:
        """The loss of the union of all ranks' batches, with the gradient of this rank's share."""
        scale: dict[str, Any] = {"valid": own.valid, "average_over": self.average_over}
        if call.items is not None:  # whose giver also scales for wrappers
            scale = {"valid": own.valid}
            if self.fit.by_items:  # a mean over more than this batch
                scale = {"valid": call.items.reshape(()) if isinstance(call.items, Tensor) else int(call.items)}
                scale["average_over"] = self._copies
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

    @partial(torch.compiler.disable, recursive=False)
    def _local_head_forward(
        self, fit: LocalHead, before: Callable[..., Any], arguments: dict[str, Any], error: Exception | None
    ) -> Any:
        """A call of a model whose head pools: its base model on all ranks, its head on this rank's own batch."""
        call = HeadCall(fit, self.model, self.comm, arguments, replaced=self._guard.loss_replaced)
        call.error = call.error or error
        whole = arguments.pop("return_dict", None) is not False
        given = {n: x for n, x in arguments.items() if n not in (*UNREAD, "num_items_in_batch")} | {"return_dict": True}
        kept, self._head = self._head, call
        try:
            out, count = call.output(lambda: before(**given), self.average_over)
        except BaseException as error:
            if call.share is not None:  # after the base model; before, all ranks raise alike
                self._fail(error)
            raise
        finally:
            self._head = kept
        if count is not None and call.items is not None:
            check_count(call.items, int(count))
        return out if whole else out.to_tuple()

    @uncompiled
    def _fail(self, error: BaseException) -> None:
        """Tell the other ranks why this one leaves, so that they do not wait for the timeout.

        Layers have already announced a mask that no plan has.
        """
        if self.comm.size > 1 and not isinstance(error, UnsupportedMask):
            self.comm.abort(f"{type(self.model).__name__}.forward: {type(error).__name__}: {error}")

    def _check_awake(self, grad: Tensor) -> None:
        """Raise RuntimeError in a backward whose checkpoints would compute layers again on this rank alone."""
        if self.inactive:
            raise RuntimeError(
                f"backward of a parallel {type(self.model).__name__} with activation checkpoints, after its undo() or "
                "inside its local(): its layers would be computed again without the other ranks' rows; call backward "
                "before undo() and outside local()"
            )


_leave = uncompiled(ExitStack.close)
