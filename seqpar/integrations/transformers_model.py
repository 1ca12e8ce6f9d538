"""A transformers model that takes ordinary batches and computes them on all ranks: hooks before and after its forward.

Before: the batch becomes this rank's rows (`seqpar.data.share`), and the plan surrounds the forward pass. After: rows
of results go home to the batch that brought them (`seqpar.data.back`), and the loss is that of the union of all ranks'
batches. Labels never reach the model, whose own loss would be the mean of a rank's rows.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig, PreTrainedModel

from seqpar.comm import Comm
from seqpar.data import Share, back, share
from seqpar.integrations.transformers import KEY, Forward, forward, planned, register
from seqpar.integrations.transformers_fit import PER_TOKEN, caching, fitting
from seqpar.integrations.transformers_mask import Rule
from seqpar.mask import Ints, Mask
from seqpar.ops.handles import uncompiled
from seqpar.parallel import parallel
from seqpar.plan import Plan
from seqpar.planner import ModelShape, plan_batch
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
    brings its own batch, or "replicated", all bring the same.

    Raises: NotImplementedError naming everything of the model, or of a batch, that cannot be computed on several ranks.
    """
    return Parallel(model, comm, plan=plan, source=source, average_over=average_over, logits=logits)


@dataclass
class _Pass:
    """A forward pass between its two hooks. labels: whether some are given. chunked: whether no logits are made."""

    share: Share
    around: ExitStack
    labels: bool
    items: Tensor | int | None
    return_dict: bool
    logits: bool
    chunked: bool
    hidden: Tensor | None = None


class Parallel:
    """A model that runs on all ranks, until `undo`. Also a context manager that undoes at its end.

    model, comm: as given to `seqpar.parallelize`. fit: what was found of the model.
    """

    def __init__(
        self, model: PreTrainedModel, comm: Comm, *, plan: Planner | None, source: str, average_over: int, logits: bool
    ) -> None:
        self.model, self.comm, self.source, self.average_over, self.logits = model, comm, source, average_over, logits
        self._passes: list[_Pass] = []
        self._count = 0
        self._undone = ExitStack()
        self._seed = comm.gather("parallelize: the seed of attention dropout", torch.initial_seed())[0]
        before = model.config._attn_implementation
        error: Exception | None = None
        try:
            if hasattr(model, "_seqpar"):
                raise ValueError(f"{type(model).__name__} is parallel already; undo that first")
            register()
            self._undone.callback(_with_own_configs(model))
            self.fit = fitting(model)
        except Exception as found:  # whatever it is, the others must hear of it
            error = found
            self._undone.close()
        facts = {"model": type(model).__name__, "source": source, "average_over": average_over, "logits": logits}
        comm.agree("parallelize", facts, error)
        self._local = before if before != KEY else "eager"
        self._plan = plan or self._planned
        self._names = set(inspect.signature(model.forward).parameters)
        self._install()

    def undo(self) -> None:
        """Leave the model as it was: its config objects, attention, hooks and methods."""
        self._undone.close()

    def __enter__(self) -> Parallel:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()

    @contextmanager
    def local(self) -> Iterator[None]:
        """Inside, the model is as before on this rank alone: its own attention, and no hook."""
        with _implementation(self.model, self._local):
            self._passes.append(None)  # type: ignore[arg-type]
            try:
                yield
            finally:
                self._passes.pop()

    # --- installation -------------------------------------------------------------------------------------------------

    def _install(self) -> None:
        model, undone = self.model, self._undone
        hooks = [
            model.register_forward_pre_hook(uncompiled(self._before), with_kwargs=True),
            model.register_forward_hook(uncompiled(self._after), always_call=True),
        ]
        if self.fit.head is not None:
            hooks.append(model.base_model.register_forward_hook(uncompiled(self._keep_hidden)))
        for hook in hooks:
            undone.callback(hook.remove)
        object.__setattr__(model, "_seqpar", self)
        undone.callback(model.__dict__.pop, "_seqpar")
        if hasattr(model, "generate"):
            object.__setattr__(model, "generate", self._generate)
            undone.callback(model.__dict__.pop, "generate")

    def _generate(self, *arguments: Any, **named: Any) -> Any:
        if self.comm.size > 1:
            raise NotImplementedError(
                f"generate on {self.comm.size} ranks: tokens are made one after another, and their cache is not "
                "spread; generate with the model of one rank, after undo()"
            )
        with self.local():
            return type(self.model).generate(self.model, *arguments, **named)

    def _planned(self, lengths: Ints, ranks: int) -> Plan:
        """The plan of a batch for a model of this shape."""
        mask = Mask(lengths, causal=self.fit.causal)
        return plan_batch(lengths, ranks, masks=mask, model=_shape(self.model.config.get_text_config()))

    # --- before -------------------------------------------------------------------------------------------------------

    def _before(self, module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if self._passes:  # generating, or a model that calls itself
            return None
        given, error = self._given(args, named)
        training = torch.is_grad_enabled() and module.training
        labels = any(name in given for name in ("labels", "shift_labels"))
        facts = {
            "labels": labels, "training": training, "num_items_in_batch": "num_items_in_batch" in given,
            "output_hidden_states": bool(given.get("output_hidden_states")),
        }  # fmt: skip
        self.comm.agree(f"{type(module).__name__}.forward", facts, error)
        batch = {name: given[name] for name in (*ROWS, *DOCUMENTS) if name in given}
        own = share(batch, self.comm, source=self.source, plan=self._plan, shift=self.fit.shift)
        logits = self.logits or not (labels and training)
        chunked = not logits and self._has_head()
        state = _Pass(
            own, ExitStack(), labels, given.get("num_items_in_batch"), given.get("return_dict", True), logits, chunked
        )
        self._count += 1
        state.around.enter_context(parallel(own.plan, self.comm))
        state.around.enter_context(forward(Forward(self._seed + self._count * 0x632BE59BD9B4E019, _maker(own))))
        self._passes.append(state)
        rows: dict[str, Any] = {name: x[None] for name, x in own.tensors.items() if name != "labels"}
        rows |= {"position_ids": own.positions[None], "return_dict": True} | caching(self.model)
        if given.get("output_hidden_states"):
            rows["output_hidden_states"] = True
        if chunked:
            rows["logits_to_keep"] = own.positions.new_zeros(0)
        return (), rows

    def _given(self, args: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[dict[str, Any], Exception | None]:
        """The arguments of a call by name, without those that say nothing, and what is wrong with them."""
        names = list(inspect.signature(self.model.forward).parameters)
        given = {n: x for n, x in (dict(zip(names, args)) | dict(named)).items() if x is not None}
        for name, idle in IDLE.items():
            if name in given and not isinstance(given[name], Tensor) and given[name] in idle:
                del given[name]
        who = type(self.model).__name__
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
        if self.fit.loss and ("labels" in given or "shift_labels" in given):
            return given, NotImplementedError(
                f"labels for {who}: {self.fit.loss}; leave them out and compute the loss from what it returns"
            )
        return given, None

    def _has_head(self) -> bool:
        """Whether the loss can be computed from hidden states here: not if somebody else shards or wraps the head."""
        head = self.fit.head
        return (
            head is not None
            and "logits_to_keep" in self._names
            and self.model.get_output_embeddings() is head
            and type(head) is nn.Linear
            and not isinstance(head.weight, DTensor)
            and not head._forward_hooks
            and not head._forward_pre_hooks
        )

    def _keep_hidden(self, module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        if self._passes and self._passes[-1] is not None and self._passes[-1].chunked:
            self._passes[-1].hidden = out[0]

    # --- after --------------------------------------------------------------------------------------------------------

    def _after(self, module: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
        if not self._passes or self._passes[-1] is None:
            return None
        state = self._passes.pop()
        state.around.close()
        if out is None:  # the forward pass failed
            return None
        found = {field.name: getattr(out, field.name) for field in fields(out)}
        if other := [n for n, x in found.items() if x is not None and n not in (*PER_TOKEN, "hidden_states")]:
            raise NotImplementedError(
                f"{type(module).__name__} returned {', '.join(other)}, which has no row per token and does not go home"
            )
        if state.labels:
            found["loss"] = self._loss(state, found)
        for name in PER_TOKEN:
            if found.get(name) is not None:
                found[name] = back(state.share, found[name][0]) if state.logits else None
        if found.get("hidden_states") is not None:
            found["hidden_states"] = tuple(back(state.share, x[0]) for x in found["hidden_states"])
        whole = type(out)(**found)
        return whole if state.return_dict else whole.to_tuple()

    def _loss(self, state: _Pass, found: dict[str, Any]) -> Tensor:
        """The loss of the union of all ranks' batches, whose gradient here is that of this rank's share."""
        own = state.share
        scale: dict[str, Any] = {"valid": own.valid, "average_over": self.average_over}
        if state.items is not None:  # a mean over more than this batch, which its caller also scales for wrappers
            scale = {"valid": state.items if isinstance(state.items, int) else state.items.reshape(())}
        labels = own.tensors["labels"]
        if state.chunked:
            assert self.fit.head is not None and state.hidden is not None
            weight, bias = self.fit.head.weight, self.fit.head.bias
            part = linear_cross_entropy(
                state.hidden[0], weight, labels, bias=bias, softcap=self.fit.softcap, **scale
            )  # fmt: skip
        else:
            part = cross_entropy(found["logits"][0], labels, **scale)
        if state.items is not None:
            return part
        return _Reported.apply(part, all_sum(part.detach(), self.comm) / self.average_over)  # type: ignore[no-any-return]


class _Reported(torch.autograd.Function):
    """The loss of all ranks, with the gradient of this rank's share of it."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, whole: Tensor) -> Tensor:
        return whole.to(part.dtype).clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _maker(own: Share) -> Callable[[Plan, Rule], Plan]:
    """The plan of a layer's rule for a share, which knows of masked-out tokens between others."""

    def make(plan: Plan, rule: Rule) -> Plan:
        if own.places is None or not rule.local:
            return planned(plan, rule)
        if rule.chunk is not None:
            raise NotImplementedError("attention_mask leaves out tokens between others, and a layer attends in chunks")
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


def _with_own_configs(model: PreTrainedModel) -> Callable[[], None]:
    """Give a model copies of its configs, which other models may share, that name seqpar's attention; returns the undo.

    The undo puts the very objects back, with what has been changed in the copies meanwhile.
    """
    copies: dict[int, Any] = {}
    places: list[tuple[nn.Module, str, PreTrainedConfig]] = []
    for module in model.modules():
        for name, value in module.__dict__.items():
            if isinstance(value, PreTrainedConfig):
                places.append((module, name, value))
    for module, name, value in places:
        module.__dict__[name] = copy.deepcopy(value, copies)
    pairs = [(value, module.__dict__[name]) for module, name, value in places]
    pairs = list({id(old): (old, new) for pair in pairs for old, new in _nested(*pair)}.values())
    for _, new in pairs:
        new._attn_implementation_internal = KEY

    def undo() -> None:
        for module, name, value in places:
            module.__dict__[name] = value
        for old, new in pairs:
            for name, value in new.__dict__.items():
                if name != "_attn_implementation_internal" and not isinstance(value, PreTrainedConfig):
                    old.__dict__[name] = value

    return undo


def _nested(old: PreTrainedConfig, new: PreTrainedConfig) -> Iterator[tuple[PreTrainedConfig, PreTrainedConfig]]:
    """A config and those inside it, each with its copy."""
    yield old, new
    for name, value in old.__dict__.items():
        if isinstance(value, PreTrainedConfig):
            yield from _nested(value, new.__dict__[name])


@contextmanager
def _implementation(model: PreTrainedModel, name: str) -> Iterator[None]:
    """The model with the attention of another implementation."""
    found = {id(m.config): m.config for m in model.modules() if isinstance(m.__dict__.get("config"), PreTrainedConfig)}
    configs = {id(new): new for config in found.values() for _, new in _nested(config, config)}
    for config in configs.values():
        config._attn_implementation_internal = name
    try:
        yield
    finally:
        for config in configs.values():
            config._attn_implementation_internal = KEY
