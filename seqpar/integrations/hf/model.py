"""A transformers model that takes ordinary batches and computes them on all ranks: its forward, replaced.

Before: the batch becomes this rank's rows (`seqpar.data.share`), and a plan surrounds the forward pass. After: output
rows return to the batch they came from (`seqpar.data.back`), and the loss is that of the union of all ranks' batches.
Labels never reach the model, whose own loss would be the mean over a rank's rows.

The instance's ``forward`` is replaced, inside anything that wraps it or hooks into the model's calls (autocast, DDP,
FSDP2, adapters): at that point parameters are whole, and losses are visible.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from seqpar.comm import Comm
from seqpar.comm.entry import refuse_transforms, uncompiled
from seqpar.data import Share
from seqpar.data.batch import Reading, read
from seqpar.data.host import moved
from seqpar.data.prefetch import Epochs, Loader
from seqpar.data.rows import LABELS, MASK
from seqpar.data.share import choose, take
from seqpar.data.union import announce
from seqpar.facts.mask import Mask
from seqpar.facts.value import Ints, integer
from seqpar.foreign.wrap import PARALLEL, ParallelModel, check_makes_plans, refuse_unready, replaced, unpicklable
from seqpar.integrations.adapters import acting, acting_adapters, adapted, unfit_adapters, unfit_wrapper
from seqpar.integrations.hf.afterwards import Afterwards
from seqpar.integrations.hf.ahead import Plans, ahead
from seqpar.integrations.hf.attention import KEY, LAYER, NUMERICS, left_out, numbered
from seqpar.integrations.hf.config import ASKED, text_of
from seqpar.integrations.hf.forward import Forward, during, planned
from seqpar.integrations.hf.generation import generators
from seqpar.integrations.hf.heads import AtHome, HeadCall
from seqpar.integrations.hf.logits import ask_trainer, loss_alone, softcap_of, tokens_of
from seqpar.integrations.hf.mask import Blocks, Rule, Told, stretches, united
from seqpar.integrations.hf.outputs import TOLD, Outputs, graphs, reported
from seqpar.integrations.hf.own_configs import OwnConfigs
from seqpar.integrations.hf.planning import ModelPlanner
from seqpar.integrations.hf.positions import (
    BY_TOKENS,
    BY_WORDS,
    COUNTED,
    SHARES,
    counted,
    counted_pad,
    counts,
    dropping_tokens,
    shares,
)  # fmt: skip
from seqpar.integrations.hf.recurrent.mixers import begins_at_zero, of_documents
from seqpar.integrations.hf.recurrent.rglru import misread as misread_by_rglru
from seqpar.integrations.hf.registry import implementation, register
from seqpar.integrations.hf.request import (
    COUNT,
    DOCUMENTS,
    OF_LOSS,
    ROWS,
    UNREAD,
    ItemCounts,
    Request,
    Served,
    arguments_of,
    count_of,
    parameters,
    too_few,
)
from seqpar.integrations.hf.rotary import forgotten, length_of, lengths_kept, lengthy, turn
from seqpar.integrations.hf.trial.fit import fitting
from seqpar.integrations.hf.trial.runs import plain
from seqpar.integrations.hf.unlisted import rewritten, sees_places
from seqpar.ops.attention.signature import Accuracy, Numerics
from seqpar.ops.core.agreement import agreement, plan_key, remember
from seqpar.ops.core.ahead import attention_seen, recurrent_seen
from seqpar.ops.core.autocast import autocast_dtype
from seqpar.ops.core.collective_op import layer_calls
from seqpar.parallel import derived_seed, surround
from seqpar.plan import Plan
from seqpar.train.loop import Loop

Planner = Callable[[Ints, int], Plan]


class ParallelTransformer(ParallelModel):
    """The handle of a transformers model that takes ordinary batches and computes them on all ranks. A collective.

    A forward pass is a collective and computes the union of the ranks' batches: ``input_ids`` [B, S] (or
    ``inputs_embeds``) with ``attention_mask`` [B, S], ``position_ids``, ``token_type_ids`` and ``labels``, or one
    packed row with ``cu_seq_lens_q``, as in `seqpar.data.share`.

    The loss is that of one process with all batches, equal on every rank. Its gradient is that of this rank's share:
    sum the gradients over ranks (`seqpar.train.sync_gradients`), or let a wrapper average them over ``average_over``
    ranks (DDP, FSDP2, accelerate). With ``num_items_in_batch`` the loss is this rank's share, the sum over its tokens /
    ``num_items_in_batch``, and the caller scales it for wrappers, as transformers' Trainer does. It counts the labels
    of every rank's batch, also where all ranks bring the same one.

    Outputs per token (logits, last_hidden_state, hidden_states) come back for the rank's own batch, in its shape. In
    training with labels ``out.logits``, and hidden states that a class returns beside it, are None: the loss is
    computed in chunks, without ``[T, vocabulary]`` logits. Calls of ``model.base_model``, as other libraries' heads
    make them, are parallel too.

    model, comm: as given to `seqpar.parallelize`. plan: ``(lengths, ranks) -> Plan``; by default `plan_batch` with the
    model's shape, except that each rank computes its own documents where spreading them gains less time than it costs.
    source: "sharded", every rank brings its own batch, or "replicated", all bring the same; of a loss that you compute
    from outputs every rank then sends the whole gradient, so divide it by ``comm.size``. logits: True, they always come
    back; False, they are left out whenever labels are given; None, also in evaluation they come back, unless Trainer
    evaluates with ``prediction_loss_only=True``. May be changed at any time, equally on all ranks. accuracy,
    deterministic: as in `seqpar.attention`.

    fit: the findings on the model. text: the module whose rows are shared: the model, or the text model inside it.
    entries: those of a batch with a value per token; optional: of these, those that a rank may lack. returned: outputs
    besides those with a row per token.

    Raises: NotImplementedError naming every part of the model, or of a batch, that several ranks cannot compute;
    TypeError for a plan that is not a function.
    """

    entries: tuple[str, ...] = ROWS
    optional: tuple[str, ...] = ()
    returned: tuple[str, ...] = ("hidden_states",)

    def __init__(
        self, model: PreTrainedModel, comm: Comm, *, plan: Planner | None = None, source: str = "sharded",
        average_over: int = 1, logits: bool | None = None, accuracy: Accuracy = "exact",
        deterministic: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(model, comm)
        self.model: PreTrainedModel = model
        self.text = text_of(model)
        self._last = model.base_model if self.text is model else self.text  # the last module before the head
        self.source, self.average_over, self.logits = source, average_over, logits
        self._hidden: list[Tensor] | None = None  # collects the base model's last hidden states, if needed
        self._running = False
        self._head: HeadCall | None = None  # the call of a head that pools, which this thread is in
        self._count = 0
        self._items = ItemCounts(model)
        self._longest = 0  # positions of the longest row of all ranks' batches, if rotary embeddings depend on it
        self._known: set[Rule] = set()  # of the masks that all ranks used in an earlier forward
        self._rules: list[Rule] = []  # of the masks in the last forward
        self._seed = comm.gather(f"parallelize({type(model).__name__})", torch.initial_seed())[0]
        self._before = self.text.config._attn_implementation
        try:
            with agreement("parallelize", comm, every=True) as call:
                numerics = Numerics.checked(accuracy, deterministic)
                refuse_unready(model)
                if plan is not None:
                    check_makes_plans(model, plan, "(lengths, ranks)")
                register()  # it may have been undone
                self._configs = OwnConfigs(model, self.text, KEY)
                self._undone.callback(self._configs.undo)
                if numerics != Numerics():
                    for module in model.modules():
                        self._undone.enter_context(replaced(module, {NUMERICS: numerics}))
                for module, written in rewritten(model):
                    self.put_around(module, written.replacement, written.method)
                self.fit = fitting(model)
                for rule in self.fit.rules if self.text is model else ():
                    if error := left_out(rule, model.config):
                        raise error
                call.facts = {
                    "model": type(model).__name__, "source": source, "average_over": average_over, "logits": logits,
                    "lengths that rotary embeddings have met": lengths_kept(lengthy(model)),
                    **numerics._asdict(),
                }  # fmt: skip
        except BaseException:
            self._undone.close()
            raise
        for module, number in numbered(model, self.fit.callers, self.fit.calls).items():
            self._undone.enter_context(replaced(module, {LAYER: number}))
        self._afterwards = Afterwards(model, KEY, self.fit.calls)
        self._pad = counted_pad(model)
        self._tried = frozenset(acting(adapted(model)))
        self._served = Served(model, comm, self.fit, self.entries, average_over, self._afterwards)
        copies = comm.size if source == "replicated" else 1
        self._outputs = Outputs(model, comm, self.fit, average_over, copies, self.returned, self._afterwards)
        self._rotaries, self._at_zero, self._drops = lengthy(model), begins_at_zero(model), dropping_tokens(model)
        for rotary in self._rotaries:
            self.put_around(rotary, turn)
        self._planner = ModelPlanner(model, causal=self.fit.causal)
        self._plans = Plans(self._planner, self._planner.state)
        if plan is not None:
            self._plans = Plans(lambda lengths, ranks, *_: plan(lengths, ranks), None)
        self._loop = Loop(model, comm, average_over=average_over)
        self._undone.callback(self._loop.close)
        self._install()
        ask_trainer()
        self._afterwards.note_waypoints(self.fit.callers)

    def prefetch(
        self, batches: Iterable[Any], *, depth: int = 1, device: torch.device | str | None = None
    ) -> Iterator[Any]:
        """A loader's batches, unchanged; while one is computed, a thread plans the next `depth`.

        device: where the tensors of the batches go, by transfers for which the host does not wait. They are read before
        and not again in the forward, which would wait for all work of the device.

        Each step of the iterator is a collective of the calling thread, in which ranks exchange the lengths of a later
        batch; the planning thread uses no comm. A batch that is changed on its way to the model is planned when it
        arrives. The thread ends with the iterator: at the last batch, at an error, and on ``close``. A loop that begins
        after that is another epoch over the same loader; one that begins in mid-epoch goes on with it.

        Raises: at the batch's turn, the error of a rank's loader, on that rank, and ValueError on the others;
        ValueError on all ranks if some loaders have ended and others have not, and after a loader has written to a
        batch that it gave before: it must yield new tensors, as a DataLoader does.
        """
        how = Reading(self.fit.shift)

        def bring(batch: Mapping[str, Any]) -> tuple[Mapping[str, Any], Ints]:
            lengths = read(self._read_ahead(batch), how).lengths
            if device is None:
                return batch, lengths
            return {name: moved(x, device) if isinstance(x, Tensor) else x for name, x in batch.items()}, lengths

        depth, replicated = integer("depth", depth, 1), self.source == "replicated"
        return Epochs(
            lambda: ahead(
                Loader(batches), self.comm, self._plans, bring, self._derive, depth=depth, replicated=replicated
            )
        )

    def _read_ahead(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The entries of a loader's batch that tell its documents."""
        unread = OF_LOSS if self.fit.at_home is not None else ()
        return {name: batch[name] for name in (*ROWS, *DOCUMENTS) if name in batch and name not in unread}

    def _derive(self, plan: Any) -> None:
        """Derive from a plan made ahead what the layers derive; a plan that is refused later is left alone."""
        if isinstance(plan, Plan) and plan.ranks == self.comm.size and plan.kv_layout is plan.layout:
            for rule in tuple(self._known):
                attention_seen.derive(planned(plan.padded(), rule, stated=self._plans.repeats), self.comm)
            recurrent_seen.derive(of_documents(plan.padded()), self.comm)

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelTransformer:
        """Raise: a copy's forward would be the model's own, weights and all."""
        raise NotImplementedError(
            f"a copy of a parallel {type(self.model).__name__}: copy the model before seqpar.parallelize or after "
            "undo(), and make the copy parallel too"
        )

    def _reduce(self, protocol: Any) -> Any:
        """Raise: a pickled forward would hold a comm of this process."""
        raise unpicklable(type(self.model).__name__)

    @contextmanager
    def local(self) -> Iterator[None]:
        """Inside, the model is as before, on this rank alone.

        Rotary embeddings forget afterwards what lengths they met inside, as other ranks have not met them.
        """
        attention = self._before if self._before != KEY else "eager"
        with super().local(), implementation(self.text, attention), forgotten(self._rotaries):
            yield

    def _install(self) -> None:
        model, undone = self.model, self._undone
        self._replace(model, generators(self, model))
        if model.base_model is not model:  # heads of other libraries call the base model
            self._replace(model.base_model, {})
        if self.fit.head is not None:
            self._keeping = self._last.register_forward_hook(uncompiled(self._keep_hidden))
            undone.callback(self._keeping.remove)

    def _replace(self, module: PreTrainedModel, more: dict[str, Any]) -> None:
        """Make the forward of a module, the model or its base, run on all ranks."""
        before, whole = module.forward, module is self.model
        headed = "forward" in module.__dict__  # a head of another library wraps it already, and calls the base model

        @wraps(before)
        def forward(*args: Any, **named: Any) -> Any:
            if args and args[0] is module:  # bound to it once more, as by accelerate's unwrap_model
                args = args[1:]
            if not self._running:
                self._configs.follow()
            if self.asleep or (self._running and not whole) or (headed and named.get("fused_lm_head")):
                return before(*args, **named)
            if whole:
                self._afterwards.note_passed()
                if self.fit.at_home is not None:
                    return self._at_home(self.fit.at_home, before, args, named)
            return self._forward(module, before, args, named)

        self._afterwards.note_forward(module, forward)
        # copying looks up the last two on the instance before anything else
        copies = {"__deepcopy__": self.__deepcopy__, "__reduce_ex__": self._reduce}
        self._undone.enter_context(replaced(module, {"forward": forward, PARALLEL: self, **more, **copies}))

    @partial(torch.compiler.disable, recursive=False)
    def _forward(
        self, module: PreTrainedModel, before: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]
    ) -> Any:
        refuse_transforms(f"parallelize({type(self.model).__name__})")
        request, own, rows = self._share(module, args, named)
        hidden: list[Tensor] | None = [] if request.chunked else None
        self._hidden, kept = hidden, self._hidden
        try:
            out = self._run(before, own, rows)
            return self._home(module, request, own, out, hidden)
        except BaseException as error:  # Ctrl-C too
            self._fail(error)
            raise
        finally:
            self._hidden = kept

    @partial(torch.compiler.disable, recursive=False)
    def _run(self, before: Callable[..., Any], own: Share, rows: Mapping[str, Any]) -> Any:
        """The output of a module's own forward for this rank's rows."""
        around = self._surround(own)
        running, self._running = self._running, True
        first = layer_calls.run
        try:
            out = before(**rows)
        finally:
            _leave(around)
            self._running = running
        self._afterwards.check_calls(layer_calls.run - first)
        return out

    @partial(torch.compiler.disable, recursive=False)
    def _at_home(self, fit: AtHome, before: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """A call of a model whose head pools: its base model on all ranks, its head on this rank's own batch."""
        arguments = dict(zip(parameters(type(self.model)), args)) | named
        call = HeadCall(fit, self.model, self.comm, arguments, replaced=self._afterwards.loss_replaced)
        kept, count = self._head, None
        whole = arguments.pop("return_dict", None) is not False
        for name in (*UNREAD, "num_items_in_batch"):
            arguments.pop(name, None)
        self._head = call
        try:
            out = before(**arguments, return_dict=True)
            if out.get("loss") is not None:
                if call.labels is None:
                    raise NotImplementedError(
                        f"{type(self.model).__name__} returned a loss without labels, whose share is not known; leave "
                        "out what it was computed from, and compute the loss from what the model returns"
                    )
                part, mean, count = call.loss(out.loss, out.logits, self.average_over)
                out.loss = part if call.items is not None else reported(part, mean)
        except BaseException as error:
            if call.share is not None:  # after the base model; before, all ranks raise alike
                self._fail(error)
            raise
        finally:
            self._head = kept
        if count is not None and call.items is not None:
            if int(count) > int(call.items):  # on all ranks
                raise too_few(call.items, int(count))
            if self.model.training and torch.is_grad_enabled():
                self._items.note(call.items, int(call.items), int(count))
        return out if whole else out.to_tuple()

    @uncompiled
    def _fail(self, error: BaseException) -> None:
        """Tell the other ranks why this one leaves, so that they do not wait for the timeout."""
        if self.comm.size > 1:
            self.comm.abort(f"{type(self.model).__name__}.forward: {type(error).__name__}: {error}")

    @uncompiled
    def _surround(self, own: Share) -> ExitStack:
        """The contexts around the model's own forward, entered."""
        if self.fit.head is not None:  # after other hooks, which may change the base model's output
            self._last._forward_hooks.move_to_end(self._keeping.id)
        if self.fit.recurrent:  # ranks with the same model and share have the same plan for its mixers
            remember(self.comm, plan_key(of_documents(own.plan)))
        around = ExitStack()
        around.enter_context(surround(own.plan, self.comm, seed=derived_seed(self._seed, self._count)))
        masks = own.tensors.get(SHARES)
        state = Forward(self._maker(own), partial(self._gathered, own), longest=self._longest, masks=masks)
        around.enter_context(during(state))
        return around

    def _maker(self, own: Share) -> Callable[[Plan, Rule], Plan]:
        """The plan of a layer's rule for a share, including masked-out tokens between others.

        All ranks have the share's plan and had the same rules before, so they derive the same plan for the rule and
        need not compare it.
        """
        self._rules = []

        def make(plan: Plan, rule: Rule) -> Plan:
            layer_plan = self._layer_plan(own, plan, rule)
            if rule in self._known:
                remember(self.comm, plan_key(layer_plan))
            self._known.add(rule)
            self._rules.append(rule)
            return layer_plan

        return make

    def _layer_plan(self, own: Share, plan: Plan, rule: Rule) -> Plan:
        """The plan of a share with a layer's rule. The planner of models makes plans that state documents alone."""
        layer_plan = planned(plan, rule, stated=self._plans.repeats)
        if own.places is None or not rule.local:
            return layer_plan
        window = (rule.left, None if rule.causal else rule.right)
        return plan.with_mask(own.mask_for(causal=rule.causal, window=window))

    def _gathered(self, own: Share, plan: Plan, rule: Rule, ids: Tensor) -> Plan:
        """The plan of a share with a rule and the blocks of all ranks' rows. A collective. ids: as of `blocks_of`."""
        numbers = ids[0, : plan.layout.tokens(self.comm.rank)].cpu().numpy().astype(np.int64)
        every = np.concatenate(self.comm.gather(f"{type(self.model).__name__}.forward: blocks of tokens", numbers))
        at = np.concatenate([plan.layout.positions(rank) for rank in range(self.comm.size)])
        lengths = plan.mask.lengths
        told = Told({}, *stretches(every[np.argsort(at)], np.repeat(np.arange(lengths.size), lengths)))
        blocks = united([told], [lengths])[1]
        if not blocks.starts.size:
            return self._layer_plan(own, plan, rule._replace(block=""))
        layer_plan = self._blocked(own, plan, rule, blocks)
        remember(self.comm, plan_key(layer_plan))  # all ranks made it of the same numbers
        self._rules.append(rule)
        return layer_plan

    def _blocked(self, own: Share, plan: Plan, rule: Rule, blocks: Blocks) -> Plan:
        """The plan of a share with a rule and blocks."""
        if not self._plans.repeats and plan.mask != Mask(plan.mask.lengths):
            raise rule.unlike(plan.mask)
        if rule.chunk:
            raise NotImplementedError(
                f"a layer of {type(self.model).__name__} attends in chunks, and to whole images or prefixes"
            )
        sides = (own.mask_for(causal=causal, window=(rule.left, None)) for causal in (False, True))
        return plan.with_mask(blocks.mask(rule, *sides))

    @uncompiled
    def _share(
        self, module: PreTrainedModel, args: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[Request, Share, dict[str, Any]]:
        """The request, this rank's share of the batch, and the arguments with which the module computes it."""
        arguments = arguments_of(module, args, named)
        training = torch.is_grad_enabled() and self.model.training
        labels = any(name in arguments for name in LABELS)
        hidden_states, items = arguments.get("output_hidden_states"), arguments.get("num_items_in_batch")
        head, layers = self._head, adapted(self.model)
        labelled = labels or (head is not None and head.labels is not None)
        batch, count, error = dict[str, Any](), None, None
        try:
            batch, count = self._read(module, arguments, layers, labelled=labelled)
        except Exception as refused:  # all ranks raise it
            error = refused
        routers = bool(arguments.get(ASKED))
        logits, chunked = self._output(labels)
        state = self._planner.state()
        facts = {
            "training": training, "labels": labelled, "logits": logits, "adapters": acting_adapters(layers),
            "output_hidden_states": bool(hidden_states), ASKED: routers,
            COUNT: count, "dtype": self.model.dtype, "autocast": autocast_dtype(state.device),
            "gradient checkpointing": state.recomputed, "the masks of the forward before": self._rules,
        }  # fmt: skip
        what = f"{type(module).__name__}.forward"
        vocabulary = tokens_of(self.model) if labels and self.fit.of_tokens else None
        how = Reading(self.fit.shift, optional=self.optional, vocabulary=vocabulary)
        # one round for all that ranks must exchange before they know each other's documents
        gather = partial(self._gather, what, facts, batch)
        known = announce(batch, self.comm, self.source, how, error=error, gather=gather)
        assert known is not None
        if training:
            self._loop.note_wrapper(what, averaged=(labels and items is None) or (head is not None and head.averaged))
        chosen = choose(known, self.comm.size, partial(self._plans, brought=known.brought(self.comm.size)))
        (own,) = take(known, self.comm, how, chosen, alike=self._plans.repeats)
        if training and self.source == "sharded":
            tokens = arguments.get("input_ids", arguments.get("inputs_embeds"))
            self._loop.note_batch(what, own.plan.mask.lengths, tokens)
        brought = own.valid * self._outputs.copies
        if count is not None and head is None and count < brought:
            raise too_few(count, brought)
        if own.places is not None:
            self._check_holes()
        self._count += 1
        by_hand = items is not None and (not self.fit.by_items or self.source == "replicated")
        if training and count is not None and by_hand:
            self._items.note(items, count, brought)
        return_dict = arguments.get("return_dict", getattr(module.config, "return_dict", True))
        tells = chunked and bool(len(own.positions)) and self._afterwards.scaled
        request = Request(labels, items, return_dict, logits, chunked, tells, routers, state.recomputed)
        rows: dict[str, Any] = {name: x[None] for name, x in own.tensors.items() if name not in ("labels", SHARES)}
        rows |= {"position_ids": rows.pop(COUNTED, own.positions[None]), "return_dict": True} | plain(self.model)
        if hidden_states is not None:  # else the configs of the model and its parts decide
            rows["output_hidden_states"] = bool(hidden_states)
        if routers:
            rows[ASKED] = True
        if chunked:
            rows["logits_to_keep"] = TOLD if tells else own.positions.new_zeros(0)
        return request, own, rows

    def _read(
        self, module: PreTrainedModel, arguments: dict[str, Any], layers: list[nn.Module], *, labelled: bool
    ) -> tuple[dict[str, Any], int | None]:
        """The batch among the arguments of a call, and its num_items_in_batch on the host.

        layers: with adapters. labelled: whether the call, or that of a head around it, has labels.

        Raises: NotImplementedError or ValueError for a call that is not served.
        """
        self._check(module, arguments)
        who = type(module).__name__
        if unfit := unfit_wrapper() or unfit_adapters(self.model, layers, self._tried, loss=labelled):
            raise NotImplementedError(f"{who}: {unfit}")
        batch = {name: arguments[name] for name in (*self.entries, *DOCUMENTS) if name in arguments}
        by_rows = self._drops or self._head or self._rotaries or self.fit.pooled or self.text is not self.model
        by_rows = by_rows or self.fit.counting in (BY_TOKENS, BY_WORDS)
        if by_rows and isinstance(mask := batch.get(MASK), Tensor) and bool((mask > 1).any()):
            raise NotImplementedError(
                f"attention_mask of {who} numbers the documents of a row, and a part of the model reads it as one; "
                "give each document a row of its own"
            )
        if counts(self.fit.counting, batch):
            batch[COUNTED] = counted(self.fit.counting, batch, self._pad)
        if self._drops and "input_ids" in batch:
            batch[SHARES] = shares(self._drops[0], batch)
        if self._at_zero and (reason := misread_by_rglru({n: x for n, x in batch.items() if n not in OF_LOSS})):
            raise NotImplementedError(f"a batch for {who}: {reason}")
        items = arguments.get("num_items_in_batch") if self._head is None else self._head.items
        return batch, count_of(items, batch, replicated=self.source == "replicated")

    def _check_holes(self) -> None:
        """Raise NotImplementedError if layers count the tokens that attention_mask leaves out between others."""
        if any(rule.chunk for rule in self.fit.rules):
            raise NotImplementedError("attention_mask leaves out tokens between others, and a layer attends in chunks")
        if self.fit.recurrent or sees_places(self.model):
            why = "would decay the states of recurrent" if self.fit.recurrent else "count as places in some attention"
            raise NotImplementedError(
                f"attention_mask leaves out tokens between others, which {why} layers; leave them out of the batch"
            )

    def _gather(
        self, what: str, facts: Mapping[str, object], batch: Mapping[str, Any], value: Any, error: Exception | None
    ) -> list[Any]:
        """Every rank's announcement of its batch, with the batches' lengths where rotary embeddings need them."""
        if not self._rotaries:
            return self._loop.gather(what, value, error, facts=facts)
        every = self._loop.gather(what, (value, 0 if error else length_of(batch)), error, facts=facts)
        self._longest = max(length for _, length in every)
        return [announced for announced, _ in every]

    def _output(self, labels: bool) -> tuple[bool, bool]:
        """Whether logits return, and whether the loss is computed without them."""
        ask_trainer()  # imported only now, perhaps
        unread = loss_alone() or (torch.is_grad_enabled() and self.model.training)
        logits = not labels or (not unread if self.logits is None else self.logits)
        return logits, not logits and self._has_head()

    def _check(self, module: PreTrainedModel, arguments: dict[str, Any]) -> None:
        """Settle the arguments of a call; raises as `Served.check`."""
        self._served.check(module, arguments, self._head)

    def _has_head(self) -> bool:
        """Whether the loss can be computed from hidden states: not if the head is sharded or wrapped."""
        head = self.fit.head
        return (
            head is not None
            and "logits_to_keep" in parameters(type(self.model))
            and self.model.get_output_embeddings() is head
            and type(head) is nn.Linear
            and not isinstance(head.weight, DTensor)
            and "forward" not in head.__dict__
            and self.fit.softcap == softcap_of(self.model)
            and not _has_hooks(head)
        )

    def _keep_hidden(self, module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        if self._hidden is not None:
            self._hidden.append(out[0])

    @uncompiled
    def _home(self, module: PreTrainedModel, asked: Request, own: Share, out: Any, hidden: list[Tensor] | None) -> Any:
        """The model's output for this rank's own batch, with the loss of all batches."""
        if self._head is not None:
            self._head.share = own
        results = self._outputs.home(module, asked, own, out, hidden)
        self._loop.note_results(own.plan.layout.tokens(self.comm.rank), graphs(results))
        if asked.recomputed:
            for x in graphs(results):
                x.register_hook(self._check_awake)
        return results

    def _check_awake(self, grad: Tensor) -> None:
        """Raise RuntimeError in a backward whose checkpoints would compute layers again on this rank alone."""
        if self.asleep:
            raise RuntimeError(
                f"backward of a parallel {type(self.model).__name__} with activation checkpoints, after its undo() or "
                "inside its local(): its layers would be computed again without the other ranks' rows; call backward "
                "before undo() and outside local()"
            )


def _has_hooks(module: nn.Module) -> bool:
    """Whether something listens to a module's calls or changes them, in backward too."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or nn.modules.module._has_any_global_hook()
    )


@uncompiled
def _leave(around: ExitStack) -> None:
    around.close()
