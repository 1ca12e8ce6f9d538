"""The handle of a parallel transformers model: how a model becomes parallel, and all methods except the forward.

With a parallel model each rank generates for its own prompts with its own cache, as under DDP::

    rank 0   its prompts ──► its cache ──► its tokens, as many as they are
    rank 1   its prompts ──► its cache ──► its tokens

Nothing is sent, and ranks may call it at different times or not at all. Given ``cache=handle.cache()`` they generate
together for the same prompts (`generation`). Where weights are sharded, a forward gathers
them from all ranks, so there every rank must call it, and continues with the others until the last one is done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial, update_wrapper
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from seqpar.comm import Comm
from seqpar.comm.entry import uncompiled
from seqpar.data.batch import Reading, read
from seqpar.facts.value import Ints
from seqpar.foreign.wrap import ParallelModel, check_makes_plans, refuse_unready, replaced, unpicklable
from seqpar.integrations.hf import indexed
from seqpar.integrations.hf.attention import KEY, LAYER, NUMERICS, implementation, left_out, numbered, register
from seqpar.integrations.hf.cache import TOGETHER, ShardedCache, check_generation, unsplit
from seqpar.integrations.hf.config import text_of
from seqpar.integrations.hf.forward import LayerPlans, planned
from seqpar.integrations.hf.guard import ModelGuard
from seqpar.integrations.hf.heads import HeadCall
from seqpar.integrations.hf.latents import EXPAND, Latents, decide, described, layers
from seqpar.integrations.hf.mask import Blocks, Rule
from seqpar.integrations.hf.own_configs import OwnConfigs
from seqpar.integrations.hf.plans import Planner, Plans, prefetched
from seqpar.integrations.hf.positions import forgotten, lengths_kept, lengthy, turn
from seqpar.integrations.hf.reading import DOCUMENTS, OF_LOSS, ROWS, Reader, loss_alone
from seqpar.integrations.hf.recurrent.mixers import of_documents
from seqpar.integrations.hf.rewritten_attention import MIXER, replacements
from seqpar.integrations.hf.trial.fit import fitting
from seqpar.integrations.hf.trial.runs import ModelFit
from seqpar.integrations.hf.trial.twin import elsewhere, twin_of
from seqpar.ops.attention.signature import Accuracy, Numerics
from seqpar.ops.core.agreement import agreement, gathering
from seqpar.ops.core.precompute import recent_attention, recent_recurrent
from seqpar.plan import Plan
from seqpar.private.transformers import attention_of
from seqpar.train.checks import StepChecks
from seqpar.train.wrappers import by_fsdp, sharded_modules


class TransformerHandle(ParallelModel):
    """See `seqpar.integrations.hf.model.ParallelTransformer`, which has the forward.

    fit: the findings on the model. text: the module whose rows are shared: the model, or the text model inside it.
    entries: those of a batch with a value per token; optional: of these, those that a rank may lack. returned: outputs
    other than those with a row per token.
    """

    entries: tuple[str, ...] = ROWS
    optional: tuple[str, ...] = ()
    returned: tuple[str, ...] = ("hidden_states",)

    def __init__(
        self, model: PreTrainedModel, comm: Comm, *, plan: Planner | None = None, source: str = "sharded",
        average_over: int = 1, logits: bool | None = None, accuracy: Accuracy = "exact", deterministic: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(model, comm)
        self.model: PreTrainedModel = model
        self.text = text_of(model)
        self._last = model.base_model if self.text is model else self.text  # the last module before the head
        self.source, self.average_over, self.logits = source, average_over, logits
        self._hidden: list[Tensor] | None = None  # collects the base model's last hidden states, if needed
        self._running = False
        self._head: HeadCall | None = None  # the call of a head that pools, which this thread is in
        self._count = 0  # of forwards
        self._longest = 0  # positions of the longest row of all ranks' batches, if rotary embeddings depend on it
        self._seed = comm.gather(f"parallelize({type(model).__name__})", torch.initial_seed())[0]
        self._before = attention_of(self.text.config)
        try:
            with agreement("parallelize", comm, every=True) as call:
                numerics = Numerics.checked(accuracy, deterministic)
                if not average_over >= 1:
                    raise ValueError(f"average_over={average_over}, expected the ranks that a wrapper averages over")
                refuse_unready(model)
                if plan is not None:
                    check_makes_plans(model, plan, "(lengths, ranks)")
                self.fit = self._tried(numerics)
                call.facts = {
                    "model": type(model).__name__, "source": source, "average_over": average_over, "logits": logits,
                    "lengths that rotary embeddings have met": lengths_kept(lengthy(model)), 
                    "what layers with latents exchange": described(model), **numerics._asdict(),
                }  # fmt: skip
        except BaseException:
            self._undone.close()
            raise
        for module, number in numbered(model, self.fit.callers, self.fit.calls).items():
            self._undone.enter_context(replaced(module, {LAYER: number}))
        self._rotaries = lengthy(model)
        for rotary in self._rotaries:
            self.put_around(rotary, turn)
        self._plans = Plans(model, causal=self.fit.causal, plan=plan, derive=self._derive)
        self._layers = LayerPlans(type(model).__name__, comm, self._blocks, stated=self._plans.repeats)
        self._guard = ModelGuard(model, KEY)
        replicated = source == "replicated"
        self._reader = Reader(
            model, comm, self.fit, self._plans, self._guard, entries=self.entries, optional=self.optional,
            average_over=average_over, replicated=replicated,
        )  # fmt: skip
        self._copies = comm.size if replicated else 1  # how often num_items_in_batch counts a label
        self._checks = StepChecks(model, comm, average_over=average_over)
        self._undone.callback(self._checks.close)
        self._install()
        loss_alone()

    def _tried(self, numerics: Numerics) -> ModelFit:
        """The findings on the model, with seqpar's attention and mixers in place."""
        model = self.model
        register()  # it may have been undone
        self._configs = OwnConfigs(model, self.text, KEY)
        self._undone.callback(self._configs.undo)
        if numerics != Numerics():
            for module in model.modules():
                self._undone.enter_context(replaced(module, {NUMERICS: numerics}))
        self._replaced = replacements(model)
        for module, written in self._replaced:
            self.put_around(module, written.replacement, written.method)
        for layer in layers(model):
            self.put_around(layer, Latents(), EXPAND)
        fit = fitting(model)
        if layers(model):
            where = elsewhere(model)
            with twin_of(model, where) if where else nullcontext() as twin:
                decide(model, twin)
        for rule in fit.rules if self.text is model else ():
            if error := left_out(rule, model.config):
                raise error
        return fit

    def describe(self) -> str:
        """What the layers exchange: keys and values, or latents of multi-head latent attention; and else why not."""
        found = [*described(self.model), *indexed.described(self.model)]
        found = found or ["all layers of attention exchange keys and values"]
        return "\n".join([f"{type(self.model).__name__} on {self.comm.size} ranks", *found])

    def prefetch(
        self, batches: Iterable[Any], *, depth: int = 1, device: torch.device | str | None = None
    ) -> Iterator[Any]:
        """A loader's batches, unchanged; while one is computed, a thread plans the next `depth`.

        device: where the tensors of the batches go, by transfers for which the host does not wait. They are read before
        and not again in the forward, which would wait for all work of the device.

        Each step of the iterator is a collective of the calling thread, in which ranks exchange the lengths of a later
        batch; the planning thread uses no comm. A batch that is changed on its way to the model is planned when it
        arrives. The thread ends with the iterator: at the last batch, at an error, and on ``close``. A loop that begins
        after that is another epoch over the same loader; one that begins in mid-epoch continues it.

        Raises: at the batch's turn, the error of a rank's loader, on that rank, and ValueError on the others;
        ValueError on all ranks if some loaders have ended and others have not, and after a loader has written to a
        batch that it gave before: it must yield new tensors, as a DataLoader does.
        """
        return prefetched(
            batches, self.comm, self._plans, self._lengths, depth=depth, device=device,
            replicated=self.source == "replicated",
        )  # fmt: skip

    def _lengths(self, batch: Mapping[str, Any]) -> Ints:
        return read(self._read_ahead(batch), Reading(self.fit.shift)).lengths

    def _read_ahead(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The entries of a loader's batch that determine its documents."""
        unread = OF_LOSS if self.fit.local_head is not None else ()
        return {name: batch[name] for name in (*ROWS, *DOCUMENTS) if name in batch and name not in unread}

    def _derive(self, plan: Any) -> None:
        """Derive from a plan made ahead what the layers derive; a plan that is refused later is left alone."""
        if isinstance(plan, Plan) and plan.ranks == self.comm.size and plan.kv_layout is plan.layout:
            for rule in tuple(self._layers.known):
                recent_attention.derive(planned(plan.padded(), rule, stated=self._plans.repeats), self.comm)
            recent_recurrent.derive(of_documents(plan.padded()), self.comm)

    def __deepcopy__(self, memo: dict[int, Any]) -> TransformerHandle:
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

        Afterwards rotary embeddings forget the lengths from inside, which other ranks have not seen.
        """
        attention = self._before if self._before != KEY else "eager"
        with super().local(), implementation(self.text, attention), forgotten(self._rotaries):
            yield

    def cache(self, capacity: int | None = None) -> ShardedCache:
        """A cache that is split over the ranks, for ``model.generate(ids, cache=handle.cache())``.

        It makes the call a collective: all ranks give the same ids, and get the same tokens. Each rank keeps the keys
        that it computes from a prompt, and its share of those that come later. The cache can be used again for the next
        turn, with all ids so far. capacity: tokens of a sequence to allocate memory for; None grows by doubling.

        Raises: NotImplementedError naming what of the model it does not serve, and for transformers before 5.24.
        """
        rewritten = any(written is not MIXER for _, written in self._replaced)
        if reasons := unsplit(self.model, self.fit, alone=self.text is self.model, rewritten=rewritten):
            raise NotImplementedError(
                f"{type(self.model).__name__} with a cache that is split over ranks: {', and '.join(reasons)}; "
                "generate on each rank, without cache=handle.cache()"
            )
        return ShardedCache(self.comm, capacity, [layer.layer_idx for layer in layers(self.model)])

    def _generate(self, name: str, generate: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """What a model's own method generates for the prompts of this rank alone, or of all with a split cache.

        Raises: NotImplementedError for ``generate_batch`` on sharded weights, where ranks cannot stay in step.
        """
        sharded = by_fsdp(self.model)
        cache = next((each for each in named.values() if isinstance(each, ShardedCache)), None)
        if cache is not None and not self.inactive:
            what = f"{type(self.model).__name__}.{name} with a cache"
            with gathering(what, self.comm, partial(self.comm.gather, what, hint=TOGETHER)):
                check_generation(self.model, name, args, named)
                if sharded is not None and len(sharded.ranks) not in (1, self.comm.size):
                    raise NotImplementedError(
                        f"{sharded.who} shards weights over {len(sharded.ranks)} ranks, and the cache is split over "
                        f"{self.comm.size}; split it over the same ranks"
                    )
            try:
                with cache.generating(keeps=sharded is None):
                    return generate(*args, **named)
            finally:
                self._reshard()
        if sharded is None or len(sharded.ranks) == 1:
            with self.local():
                return generate(*args, **named)
        if name != "generate":
            raise NotImplementedError(
                f"{name} on weights that {sharded.who} shards over {len(sharded.ranks)} ranks: each forward gathers "
                "weights from all ranks, and ranks make different numbers of them; call generate, which keeps ranks in "
                "step"
            )
        try:
            with self.local():
                return generate(*args, **named | {"synced_gpus": True})  # transformers itself does not see fully_shard
        finally:
            self._reshard()

    def _reshard(self) -> None:
        """Give back the weights that the last forward of generation has left whole."""
        for module in sharded_modules(self.model):
            module.reshard()

    def _install(self) -> None:
        model, undone = self.model, self._undone
        own = {name: getattr(model, name) for name in ("generate", "generate_batch") if hasattr(model, name)}
        self._replace(model, {name: update_wrapper(partial(self._generate, name, f), f) for name, f in own.items()})
        if model.base_model is not model:  # heads of other libraries call the base model
            self._replace(model.base_model, {})
        if self.fit.head is not None:
            self._keeping = self._last.register_forward_hook(uncompiled(self._keep_hidden))
            undone.callback(self._keeping.remove)

    def _replace(self, module: PreTrainedModel, more: dict[str, Any]) -> None:
        """Make the forward of a module, the model or its base, run on all ranks."""
        raise NotImplementedError

    def _blocks(self, rule: Rule) -> tuple[Rule, Blocks | None]:
        """The blocks of tokens that see each other whole under a rule, and the rule with them."""
        return rule, None

    def _keep_hidden(self, module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        if self._hidden is not None:
            self._hidden.append(out[0])
