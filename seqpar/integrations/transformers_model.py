"""A transformers model that takes ordinary batches and computes them on all ranks: what happens around its forward.

Before: the batch becomes this rank's rows (`seqpar.data.share`), and the plan surrounds the forward pass. After: rows
of results go home to the batch that brought them (`seqpar.data.back`), and the loss is that of the union of all ranks'
batches. Labels never reach the model, whose own loss would be the mean of a rank's rows.

All of it takes the place of the instance's ``forward``, inside whatever wraps that or hooks into calls of the model
(autocast, DDP, FSDP2, adapters): there parameters are whole, and losses are seen.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from functools import partial, wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig, PreTrainedModel

from seqpar.comm import Comm
from seqpar.data import Share, back, share
from seqpar.integrations.transformers import KEY, Forward, enter, forward, implementation, inside, nested, planned
from seqpar.integrations.transformers_fit import PER_TOKEN, caching, fitting, softcap_of
from seqpar.integrations.transformers_mask import Rule
from seqpar.mask import Ints, Mask
from seqpar.ops.handles import uncompiled
from seqpar.parallel import parallel
from seqpar.plan import Plan
from seqpar.planner import Hardware, ModelShape, plan_batch
from seqpar.train import all_sum, cross_entropy, linear_cross_entropy

Planner = Callable[[Ints, int], Plan]

# What a batch may hold for every token, and what says where documents are.
ROWS = ("input_ids", "inputs_embeds", "attention_mask", "position_ids", "token_type_ids", "labels", "shift_labels")
DOCUMENTS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
OPTIONS = ("num_items_in_batch", "output_hidden_states", "return_dict")
# Keywords that may be given with a value that asks for nothing.
IDLE = {"use_cache": (False,), "output_attentions": (False,), "output_router_logits": (False,), "logits_to_keep": (0,)}


def parallelize(
    model: PreTrainedModel,
    comm: Comm,
    *,
    plan: Planner | None = None,
    source: str = "sharded",
    average_over: int = 1,
    logits: bool = False,
    in_place: bool = False,
) -> Parallel:
    """The handle of a transformers model that takes ordinary batches and computes them on all ranks. A collective.

    A forward pass is a collective too, and computes the union of the batches that the ranks give: ``input_ids`` [B, S]
    (or ``inputs_embeds``) with ``attention_mask`` [B, S], ``position_ids``, ``token_type_ids`` and ``labels``, or one
    packed row with ``cu_seq_lens_q``, as `seqpar.data.share` reads them.

    The loss is that of one process with all batches, equal on every rank; its gradient is that of this rank's share,
    so gradients are summed over ranks (`seqpar.train.sync_gradients`), or averaged by a wrapper over as many ranks as
    ``average_over`` says (DDP, FSDP2, accelerate). With ``num_items_in_batch`` the loss is this rank's share, the sum
    over its tokens / ``num_items_in_batch``, and the caller scales for wrappers, as transformers' Trainer does.

    Results for every token (logits, last_hidden_state, hidden_states) come back for the rank's own batch, in its
    shape. In training with labels that is left out, unless ``logits=True``: the loss is computed in chunks, and no
    ``[T, vocabulary]`` logits exist.

    plan: ``(lengths, ranks) -> Plan``; by default `plan_batch` with the model's shape. source: "sharded", every rank
    brings its own batch, or "replicated", all bring the same. in_place: keep the name of the model's implementation,
    for models that compare names: transformers' functions of that name then serve parallel models as well as others.

    Raises: NotImplementedError naming everything of the model, or of a batch, that cannot be computed on several ranks.
    """
    return Parallel(model, comm, plan=plan, source=source, average_over=average_over, logits=logits, in_place=in_place)


class Parallel:
    """A model that runs on all ranks, until `undo`. Also a context manager that undoes at its end.

    model, comm: as given to `seqpar.parallelize`. fit: what was found of the model.
    """

    def __init__(
        self, model: PreTrainedModel, comm: Comm, *, plan: Planner | None, source: str, average_over: int, logits: bool,
        in_place: bool,
    ) -> None:  # fmt: skip
        self.model, self.comm, self.source, self.average_over, self.logits = model, comm, source, average_over, logits
        self._plan = plan or self._planned
        self._hidden: list[Tensor] | None = None  # where the base model leaves its last hidden states, if asked to
        self._asleep = False
        self._count = 0
        self._undone = ExitStack()
        self._seed = comm.gather("parallelize: the seed of attention dropout", torch.initial_seed())[0]
        self._before = model.config._attn_implementation
        self._name = self._before if in_place else KEY
        self._loss_function = getattr(model, "loss_function", None)
        error: Exception | None = None
        try:
            if inner := [type(module).__name__ for module in model.modules() if "_seqpar" in module.__dict__]:
                raise ValueError(f"{', '.join(inner)} in {type(model).__name__} is parallel already; undo that first")
            self._undone.callback(enter(self._before) if in_place else enter(KEY))
            self._undone.callback(_with_own_configs(model, self._name))
            self.fit = fitting(model)
        except Exception as found:  # whatever it is, the others must hear of it
            error = found
        facts = {
            "model": type(model).__name__, "source": source, "average_over": average_over, "logits": logits,
            "in_place": in_place,
        }  # fmt: skip
        try:
            comm.agree("parallelize", facts, error)
        except BaseException:
            self._undone.close()
            raise
        self._install()

    def undo(self) -> None:
        """Leave the model as it was: its config objects, its attention and its methods. A second time does nothing.

        Where something else has wrapped the model's forward meanwhile, that stays, and calls what was there before.
        """
        self._asleep = True
        self._undone.close()

    def __enter__(self) -> Parallel:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()

    def __deepcopy__(self, memo: dict[int, Any]) -> Parallel:
        """Raise: a copy's forward would be the model's own, weights and all."""
        raise NotImplementedError(
            f"a copy of a parallel {type(self.model).__name__}: copy the model before seqpar.parallelize or after "
            "undo(), and make the copy parallel too"
        )

    def __reduce__(self) -> Any:
        """Raise, likewise."""
        return self.__deepcopy__({})

    @contextmanager
    def local(self) -> Iterator[None]:
        """Inside, the model is as before, on this rank alone."""
        asleep, self._asleep = self._asleep, True
        try:
            with implementation(self.model, self._before if self._before != KEY else "eager"):
                yield
        finally:
            self._asleep = asleep

    # --- installation -------------------------------------------------------------------------------------------------

    def _install(self) -> None:
        model, undone = self.model, self._undone
        before = model.forward

        @wraps(before)
        def forward(*args: Any, **named: Any) -> Any:
            return before(*args, **named) if self._asleep else self._forward(before, args, named)

        methods: dict[str, Any] = {"forward": forward, "_seqpar": self}
        if hasattr(model, "generate"):
            methods["generate"] = self._generate
        for name, method in methods.items():
            undone.callback(_restore, model, name, method, model.__dict__.get(name))
            object.__setattr__(model, name, method)
        if self.fit.head is not None:
            self._keeping = model.base_model.register_forward_hook(uncompiled(self._keep_hidden))
            undone.callback(self._keeping.remove)

    def _generate(self, *args: Any, **named: Any) -> Any:
        if self.comm.size > 1:
            raise NotImplementedError(
                f"generate on {self.comm.size} ranks: tokens are made one after another, and their cache is not "
                "spread; generate with the model of one rank, inside parallelize(...).local() or after undo()"
            )
        with self.local():
            return type(self.model).generate(self.model, *args, **named)

    def _planned(self, lengths: Ints, ranks: int) -> Plan:
        """The plan of a batch for a model of this shape."""
        mask = Mask(lengths, causal=self.fit.causal)
        recompute = "full" if self.model.is_gradient_checkpointing else "none"
        # what fits is for the device to say: nobody has told its memory, nor what else is in it
        machine = replace(Hardware.preset("cpu" if self.model.device.type == "cpu" else "h100"), memory=1 << 60)
        shape = replace(_shape(self.model.config.get_text_config()), recompute=recompute)
        return plan_batch(lengths, ranks, masks=mask, model=shape, hardware=machine)

    # --- a forward pass -----------------------------------------------------------------------------------------------

    @partial(torch.compiler.disable, recursive=False)
    def _forward(self, before: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        call, own, rows = self._share(args, named)
        hidden: list[Tensor] | None = [] if call.chunked else None
        self._hidden, kept = hidden, self._hidden
        around = self._surround(own)
        try:
            out = before(**rows)
        except Exception as error:
            self._fail(error)
            raise
        finally:
            _leave(around)
            self._hidden = kept
        return self._home(call, own, out, hidden)

    @uncompiled
    def _fail(self, error: Exception) -> None:
        """Tell the other ranks why this one leaves, so that they do not wait for it in the dark."""
        if self.comm.size > 1:
            self.comm.abort(f"{type(self.model).__name__}.forward: {type(error).__name__}: {error}")

    @uncompiled
    def _surround(self, own: Share) -> ExitStack:
        """What is around the model's own forward, entered."""
        if self.fit.head is not None:  # after hooks of others, which may return something else than the base model does
            self.model.base_model._forward_hooks.move_to_end(self._keeping.id)
        around = ExitStack()
        around.enter_context(parallel(own.plan, self.comm, seed=self._seed + self._count * 0x632BE59BD9B4E019))
        around.enter_context(forward(Forward(_maker(own))))
        return around

    @uncompiled
    def _share(self, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[_Call, Share, dict[str, Any]]:
        """What is asked for, this rank's share of the batch, and the arguments that make the model compute it."""
        given, error = self._given(args, named)
        training = torch.is_grad_enabled() and self.model.training
        labels = any(name in given for name in ("labels", "shift_labels"))
        hidden_states, items = bool(given.get("output_hidden_states")), given.get("num_items_in_batch")
        facts = {
            "labels": labels, "training": training, "output_hidden_states": hidden_states,
            "num_items_in_batch": None if items is None else int(items),
        }  # fmt: skip
        self.comm.agree(f"{type(self.model).__name__}.forward", facts, error)
        batch = {name: given[name] for name in (*ROWS, *DOCUMENTS) if name in given}
        own = share(batch, self.comm, source=self.source, plan=self._plan, shift=self.fit.shift)
        if items is not None and int(items) < own.valid:
            raise ValueError(
                f"num_items_in_batch is {int(items)}, but the batches of all ranks have {own.valid} labels that count; "
                "count those of all ranks, as Trainer does with average_tokens_across_devices=True"
            )
        if own.places is not None and any(rule.chunk for rule in self.fit.rules):
            raise NotImplementedError("attention_mask leaves out tokens between others, and a layer attends in chunks")
        self._count += 1
        logits = self.logits or not (labels and training)
        chunked = not logits and self._has_head()
        call = _Call(labels, items, given.get("return_dict", True), logits, chunked)
        rows: dict[str, Any] = {name: x[None] for name, x in own.tensors.items() if name != "labels"}
        rows |= {"position_ids": own.positions[None], "return_dict": True} | caching(self.model)
        if hidden_states:
            rows["output_hidden_states"] = True
        if chunked:
            rows["logits_to_keep"] = own.positions.new_zeros(0)
        return call, own, rows

    def _given(self, args: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[dict[str, Any], Exception | None]:
        """The arguments of a call by name, without those that say nothing, and what is wrong with them."""
        names = inspect.signature(type(self.model).forward).parameters
        given = {n: x for n, x in (dict(zip(list(names)[1:], args)) | dict(named)).items() if x is not None}
        for name, idle in IDLE.items():
            if name in given and not isinstance(given[name], Tensor) and given[name] in idle:
                del given[name]
        who = type(self.model).__name__
        if inside():
            return given, NotImplementedError(
                f"{who} is called inside the forward of another parallel model, whose rows are no batch; undo one"
            )
        if (now := self.model.config.get_text_config()._attn_implementation) != self._name:
            return given, NotImplementedError(
                f"{who} was given the attention {now!r} after parallelize, which sees one rank's rows; undo() first"
            )
        if unknown := sorted(given.keys() - {*ROWS, *DOCUMENTS, *OPTIONS}):
            return given, NotImplementedError(
                f"{who} on several ranks got {', '.join(unknown)}; built are "
                f"{', '.join((*ROWS, *DOCUMENTS, *OPTIONS))}. Leave it out, or run the model on one rank, inside "
                "parallelize(...).local()"
            )
        if not self.fit.columns and "position_ids" not in given:
            return given, NotImplementedError(
                f"{who} counts its positions itself (from attention_mask or input_ids), which ranks cannot; give "
                "position_ids"
            )
        labels = "labels" in given or "shift_labels" in given
        if labels and self.model.loss_function is not self._loss_function:
            return given, NotImplementedError(
                f"labels for {who}, whose loss_function was replaced after parallelize: the loss is computed here; "
                "leave labels out and compute the loss from what it returns"
            )
        if self.fit.loss and labels:
            return given, NotImplementedError(
                f"labels for {who}: {self.fit.loss}; leave them out and compute the loss from what it returns"
            )
        if self.average_over != 1 and "num_items_in_batch" in given:
            return given, ValueError(
                f"num_items_in_batch and average_over={self.average_over}: who counts the items scales the loss for "
                "wrappers too, as Trainer does; give parallelize no average_over"
            )
        return given, None

    def _has_head(self) -> bool:
        """Whether the loss can be computed from hidden states here: not if somebody else shards or wraps the head."""
        head = self.fit.head
        return (
            head is not None
            and "logits_to_keep" in inspect.signature(type(self.model).forward).parameters
            and self.model.get_output_embeddings() is head
            and type(head) is nn.Linear
            and not isinstance(head.weight, DTensor)
            and "forward" not in head.__dict__
            and self.fit.softcap == softcap_of(self.model)
            and not head._forward_hooks
            and not head._forward_pre_hooks
        )

    def _keep_hidden(self, module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        if self._hidden is not None:
            self._hidden.append(out[0])

    @uncompiled
    def _home(self, call: _Call, own: Share, out: Any, hidden: list[Tensor] | None) -> Any:
        """What the model returned, of this rank's own batch, and the loss of all."""
        found = {field.name: getattr(out, field.name) for field in fields(out)}
        if other := [n for n, x in found.items() if x is not None and n not in (*PER_TOKEN, "hidden_states")]:
            raise NotImplementedError(
                f"{type(self.model).__name__} returned {', '.join(other)}, which has no row per token and does not go "
                "home"
            )
        if call.labels:
            found["loss"] = self._loss(call, own, found.get("logits"), hidden)
        for name in PER_TOKEN:
            if found.get(name) is not None:
                found[name] = back(own, found[name][0]) if call.logits else None
        if found.get("hidden_states") is not None:
            found["hidden_states"] = tuple(back(own, x[0]) for x in found["hidden_states"])
        whole = type(out)(**found)
        return whole if call.return_dict else whole.to_tuple()

    def _loss(self, call: _Call, own: Share, logits: Tensor | None, hidden: list[Tensor] | None) -> Tensor:
        """The loss of the union of all ranks' batches, whose gradient here is that of this rank's share."""
        scale: dict[str, Any] = {"valid": own.valid, "average_over": self.average_over}
        if call.items is not None:  # a mean over more than this batch, which its caller also scales for wrappers
            scale = {"valid": call.items if isinstance(call.items, int) else call.items.reshape(())}
        labels = own.tensors["labels"]
        if hidden is not None:
            assert self.fit.head is not None
            head = self.fit.head
            part = linear_cross_entropy(
                hidden[-1][0], head.weight, labels, bias=head.bias, softcap=self.fit.softcap, **scale
            )
        else:
            assert logits is not None
            part = cross_entropy(logits[0], labels, **scale)
        if call.items is not None:
            return part
        return _Reported.apply(part, all_sum(part.detach(), self.comm) / self.average_over)  # type: ignore[no-any-return]


@uncompiled
def _leave(around: ExitStack) -> None:
    around.close()


class _Call(NamedTuple):
    """What a forward pass is asked for. items: num_items_in_batch. chunked: the loss without logits."""

    labels: bool
    items: Tensor | int | None
    return_dict: bool
    logits: bool
    chunked: bool


class _Reported(torch.autograd.Function):
    """The loss of all ranks, with the gradient of this rank's share of it."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, whole: Tensor) -> Tensor:
        return whole.to(part.dtype).clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _restore(model: nn.Module, name: str, ours: Any, before: Any) -> None:
    """Put back what an attribute of the instance was, if it is still ours."""
    if model.__dict__.get(name) is not ours:
        return
    if before is None:
        object.__delattr__(model, name)
    else:
        object.__setattr__(model, name, before)


def _maker(own: Share) -> Callable[[Plan, Rule], Plan]:
    """The plan of a layer's rule for a share, which knows of masked-out tokens between others."""

    def make(plan: Plan, rule: Rule) -> Plan:
        if own.places is None or not rule.local:
            return planned(plan, rule)
        window = (rule.left, None if rule.causal else rule.right)
        return plan.with_mask(own.mask_for(causal=rule.causal, window=window))

    return make


def _shape(config: PreTrainedConfig) -> ModelShape:
    """What the planner weighs: of a config it does not know, what all of them have."""
    try:
        return ModelShape.from_config(config)
    except ValueError:
        heads, hidden = config.num_attention_heads, config.hidden_size
        return ModelShape(
            name=config.model_type, hidden=hidden, layers=config.num_hidden_layers, heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            dim=getattr(config, "head_dim", None) or max(1, hidden // heads),
            ffn=getattr(config, "intermediate_size", None) or 4 * hidden, vocab=config.vocab_size, gated=False,
        )  # fmt: skip


# --- configs ----------------------------------------------------------------------------------------------------------


def _with_own_configs(model: PreTrainedModel, name: str) -> Callable[[], None]:
    """Give a model copies of its configs, which other models may share, with that attention; returns the undo.

    The undo puts the very objects back, with what has been changed in the copies meanwhile.
    """
    copies: dict[int, Any] = {}
    places: list[tuple[nn.Module, str, PreTrainedConfig]] = []
    for module in model.modules():
        own = [(key, value) for key, value in module.__dict__.items() if isinstance(value, PreTrainedConfig)]
        places += [(module, *each) for each in own]
    for module, key, value in places:
        module.__dict__[key] = copy.deepcopy(value, copies)
    pairs = [(value, module.__dict__[key]) for module, key, value in places]
    pairs = list({id(old): (old, new) for pair in pairs for old, new in nested(*pair)}.values())
    for _, new in pairs:
        new._attn_implementation_internal = name

    def undo() -> None:
        for module, key, value in places:
            module.__dict__[key] = value
        for old, new in pairs:
            for key, value in new.__dict__.items():
                if key != "_attn_implementation_internal" and not isinstance(value, PreTrainedConfig):
                    old.__dict__[key] = value

    return undo
