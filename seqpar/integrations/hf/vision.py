"""transformers models of images, video or sound: towers see what their rank brings, then rows of tokens are shared.

    this rank's batch ─► towers, embeddings, positions   the model's own code
                          │  share     rows of all ranks' batches move to who computes them
                          ▼
                         text model    under a plan, as any model of tokens
                          ▼
                         head, loss    of these rows
                          │  back      results, if any are asked for, go home
                          ▼
                         logits of this rank's batch

What the model hands to its text model is what moves: embeddings with the features of images in them, positions in three
dimensions, features that are added between layers. Masks in which images see themselves whole are read from the mask
functions that the model composes, and all ranks learn where images lie.

A rank without images, where others have some, runs the towers on a blank image of a shape that another rank has, and
adds 0 of it. So its towers have gradients, and take part in collectives of DDP and FSDP2.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from seqpar.comm.entry import uncompiled
from seqpar.data import Share
from seqpar.integrations.hf.config import ASKED, caching
from seqpar.integrations.hf.experts import asks, can_ask
from seqpar.integrations.hf.forward import Forward, Noted, Unmade, during, padding_of
from seqpar.integrations.hf.mask import Blocks, Rule, Told, blocks_of, rule_of, stretches, united
from seqpar.integrations.hf.model import ParallelTransformer
from seqpar.integrations.hf.outputs import TOLD
from seqpar.integrations.hf.request import DOCUMENTS, LABELS, OF_LOSS, ROWS, arguments_of
from seqpar.plan import Plan

# The inputs that the towers of each kind take, under these names in most models; with others beside them, by the
# signature of get_*_features.
MEDIA = {"image": "pixel_values", "video": "pixel_values_videos", "audio": "input_features"}
# What the text model is given besides, with a value per token: offsets of positions, features between layers.
GRID, DEEP, SEEN, PER_LAYER = "position_grid", "deepstack_visual_embeds", "visual_pos_masks", "per_layer_inputs"
# Keywords of the whole model that would make its output another one.
REFUSED = ("past_key_values", "use_cache", "output_attentions", "output_router_logits", "logits_to_keep")
EXACT = 4096  # values of a media input that ranks tell each other; of larger ones only the shape


class Bringing:
    """One forward on the way to the rows of its text model.

    module: the model that was called. asked: its arguments that the text model does not get from the model's own code.
    blank: runs of towers on blank inputs. rules, ids: of the masks that were made on the way: each without blocks and
    how it has them, and the number of each token's block, [B, S]. blocks: of the union. call, own: the request and the
    share. refused: whether all ranks refused the batch.
    """

    def __init__(self, module: PreTrainedModel, asked: dict[str, Any], blank: list[Callable[[], Any]]) -> None:
        self.module, self.asked, self.blank = module, asked, blank
        self.rules: dict[Rule, str] = {}
        self.ids: Tensor | None = None
        self.padding: Tensor | None = None
        self.blocks: Blocks | None = None
        self.error: Exception | None = None
        self.call: Any = None
        self.own: Share | None = None
        self.refused = False

    def note(self, function: Callable[..., Any], padding: Tensor | None) -> Noted:
        """Keep what a mask function says until rows are shared."""
        rule, ids = rule_of(function), blocks_of(function)
        same = self.ids is None or ids is None or self.ids.equal(ids)
        if not same or self.rules.setdefault(rule._replace(block=""), rule.block) != rule.block:
            raise NotImplementedError("masks of layers have blocks of two kinds, or some of them none")
        self.ids = self.ids if ids is None else ids
        return Noted(padding)

    def told(self) -> Told:
        """Where blocks are among this rank's tokens."""
        if self.ids is None:
            return Told(self.rules, *[np.zeros(0, np.int64)] * 3)
        ids = self.ids.detach().cpu().numpy().astype(np.int64)
        row = np.broadcast_to(np.arange(len(ids))[:, None], ids.shape)
        kept = np.ones(ids.shape, bool) if self.padding is None else self.padding.detach().cpu().numpy() != 0
        return Told(self.rules, *stretches(ids[kept], row[kept]))


class ParallelVision(ParallelTransformer):
    """A model of images, video or sound and text whose text model runs on all ranks."""

    entries = (*ROWS, GRID, DEEP, SEEN, PER_LAYER)
    optional = (GRID, DEEP, SEEN)
    returned = (
        "hidden_states", "rope_deltas", "attention_mask",
        *(f"{kind}_{what}" for kind in MEDIA for what in ("hidden_states", "pooler_output", "features")),
    )  # fmt: skip

    _bringing: Bringing | None = None

    def _install(self) -> None:
        super()._install()
        self._replace(self.text, {})
        keep = self.model.get_input_embeddings().register_forward_hook(uncompiled(self._add_blank))
        self._undone.callback(keep.remove)

    def _read_ahead(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        found = super()._read_ahead(batch)
        at = found.get("position_ids")
        if isinstance(at, Tensor) and at.dim() == 3:
            found |= {"position_ids": at[0] if len(at) == 4 else None}
        return found

    @partial(torch.compiler.disable, recursive=False)
    def _forward(
        self, module: PreTrainedModel, before: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]
    ) -> Any:
        if module is not self.text:
            return before(*args, **named) if self._bringing else self._bring(module, before, args, named)
        if self._bringing is None:  # the text model by itself
            return super()._forward(module, before, args, named)
        return self._compute(self._bringing, before, args, named)

    @partial(torch.compiler.disable, recursive=False)
    def _bring(
        self, module: PreTrainedModel, before: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]
    ) -> Any:
        bringing, own, chunked = self._asked(module, args, named)
        hidden: list[Tensor] | None = [] if chunked else None
        self._hidden, kept, self._bringing = hidden, self._hidden, bringing
        try:
            with during(Forward(note=bringing.note, text=self.text.config)):
                out = before(**own)
            if bringing.own is None:
                raise NotImplementedError(f"{type(module).__name__} did not call its {type(self.text).__name__}")
            return self._home(module, bringing.call, bringing.own, out, hidden)
        except BaseException as error:  # Ctrl-C too
            if not bringing.refused:
                self._fail(error)
            raise
        finally:
            self._hidden, self._bringing = kept, None

    @uncompiled
    def _asked(
        self, module: PreTrainedModel, args: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[Bringing, dict[str, Any], bool]:
        """The forward to come, the arguments of the model's own code, and whether its loss needs no logits."""
        own = arguments_of(module, args, named)
        who = type(module).__name__
        error, asking = None, can_ask(self.model) and asks(self.model)
        off = not own.get(ASKED, True)
        if off:
            del own[ASKED]
        if refused := [name for name in REFUSED if name in own]:
            error = NotImplementedError(
                f"{who} on several ranks got {', '.join(refused)}; leave it out, or run the model on one rank, inside "
                "parallelize(...).local()"
            )
        elif asking and not off:
            error = NotImplementedError(
                f"{who} on several ranks returns no router logits, which its config asks for by {ASKED}=True; set it "
                "to False in the config of its text model"
            )
        asked = {name: own.pop(name) for name in (*OF_LOSS, *DOCUMENTS, "return_dict") if name in own}
        if own.get("output_hidden_states"):
            asked["output_hidden_states"] = True
        blank = self._blank(f"{who}.forward", own, error)
        _, chunked = self._output(any(name in asked for name in LABELS))
        own |= {"return_dict": True} | caching(self.model) | ({ASKED: False} if asking else {})
        if chunked:
            none = torch.zeros(0, dtype=torch.int64, device=self.model.device)
            own["logits_to_keep"] = TOLD if self._afterwards.scaled else none
        return Bringing(module, asked, blank), own, chunked

    @partial(torch.compiler.disable, recursive=False)
    def _compute(
        self, bringing: Bringing, before: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]
    ) -> Any:
        """The text model's output for this rank's rows."""
        rows = self._rows(bringing, args, named)
        return self._run(before, bringing.own, rows)

    @uncompiled
    def _rows(self, bringing: Bringing, args: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
        """The arguments with which the text model computes this rank's rows."""
        if bringing.call is not None:
            raise NotImplementedError(f"{type(bringing.module).__name__} calls its text model more than once")
        given = arguments_of(self.text, args, named)
        given.pop("logits_to_keep", None)  # of the head, which some hand on
        if "inputs_embeds" not in given and "input_ids" in given:
            given["inputs_embeds"] = self.text.get_input_embeddings()(given.pop("input_ids"))
        for run in self._taken_blank():  # the embeddings came from outside
            given["inputs_embeds"] = given["inputs_embeds"] + _nothing(run()).to(given["inputs_embeds"])
        try:
            given = _with_rows(given)
        except NotImplementedError as error:
            bringing.error = error
        bringing.padding = given.get("attention_mask")
        try:
            with during(None):
                bringing.call, bringing.own, rows = self._share(bringing.module, (), given | bringing.asked)
        except BaseException:
            bringing.refused = True
            raise
        rows.pop("logits_to_keep", None)
        source = bringing.own.source
        if source is not None and not source.tokens(self.comm.rank):  # its embeddings and towers have gradients of 0
            rows["inputs_embeds"] = rows["inputs_embeds"] + _nothing([given[n] for n in self.entries if n in given])
        return _without_rows(rows)

    def _check(self, module: PreTrainedModel, arguments: dict[str, Any]) -> None:
        super()._check(module, arguments)
        if self._bringing is not None and self._bringing.error is not None:
            raise self._bringing.error

    def _gather(
        self, what: str, facts: Mapping[str, object], batch: Mapping[str, Any], value: Any, error: Exception | None
    ) -> list[Any]:
        bringing = self._bringing
        if bringing is None:
            return super()._gather(what, facts, batch, value, error)
        every = super()._gather(what, facts, batch, (value, None if error else bringing.told()), error)
        ranks = every[:1] if self.source == "replicated" else every
        lengths = [np.frombuffer(announced[0], np.int64) for announced, _ in ranks]
        bringing.rules, bringing.blocks = united([told for _, told in ranks], lengths)
        return [announced for announced, _ in every]

    def _layer_plan(self, own: Share, plan: Plan, rule: Rule) -> Plan:
        bringing = self._bringing
        if bringing is None or not bringing.rules:
            return super()._layer_plan(own, plan, rule)
        if rule not in bringing.rules:  # of layers that a config may have and this one has not
            raise Unmade(
                f"{type(self.model).__name__} makes masks for {list(bringing.rules)}, and a layer of its text model "
                f"uses {rule}; train it with data parallelism, whole sequences on each rank"
            )
        block, blocks = bringing.rules[rule], bringing.blocks
        if not block or blocks is None or not blocks.starts.size:
            return super()._layer_plan(own, plan, rule)
        return self._blocked(own, plan, rule._replace(block=block), blocks)

    def _blank(self, what: str, own: Mapping[str, Any], error: Exception | None) -> list[Callable[[], Any]]:
        """Runs of towers on blank inputs, of each kind that another rank has and this one has not. A collective."""
        media = {kind: self._media(kind, own) for kind in MEDIA}
        sizes = {kind: x.numel() for kind, x in media.items() if x is not None}
        every = self.comm.gather(f"{what}: images", sizes, error)
        kinds = [kind for kind in MEDIA if 0 < sum(kind in each for each in every) < len(every)]
        if not kinds:
            return []
        lend, unlike, runs = {}, None, self._towers_run()
        for kind in kinds if runs else ():  # the smallest input is the cheapest
            lender = min((rank for rank, each in enumerate(every) if kind in each), key=lambda r: every[r][kind])
            if lender == self.comm.rank:
                if self._features(kind) is None:
                    unlike = NotImplementedError(
                        f"{type(self.model).__name__} has no get_{kind}_features, so a rank without {kind} cannot run "
                        f"its towers on a blank input; bring {kind} on every rank, or freeze all parameters outside "
                        "the text model"
                    )
                else:
                    lend[kind] = self._lent(kind, own)
        lent = self.comm.gather(f"{what}: shapes of images", (runs, lend), unlike)
        training = [rank for rank, (runs, _) in enumerate(lent) if runs]
        if 0 < len(training) < self.comm.size:
            raise ValueError(
                f"{what}: parameters outside the text model are trained on ranks {training} alone; freeze the "
                "same parameters on all ranks, and use torch.no_grad on all or none"
            )
        found = {kind: shapes for _, each in lent for kind, shapes in each.items() if kind not in sizes}
        return [
            partial(self._run_blank, kind, {n: _like(x, self.model.device) for n, x in found[kind].items()})
            for kind in MEDIA if kind in found
        ]  # fmt: skip

    def _towers_run(self) -> bool:
        """Whether a rank without images runs its towers: for gradients, and for collectives in their forward."""
        text, head = set(self.text.modules()), self.model.get_output_embeddings()
        apart = [m for m in self.model.modules() if m not in text and m is not head and self.text not in m.modules()]
        trained = torch.is_grad_enabled() and any(p.requires_grad for m in apart for p in m.parameters(recurse=False))
        return trained or any(isinstance(m, FSDPModule) for m in apart)

    def _media(self, kind: str, own: Mapping[str, Any]) -> Tensor | None:
        """The inputs of a kind: by `MEDIA`'s name, or by another that the model's function for their features takes."""
        if isinstance(x := own.get(MEDIA[kind]), Tensor):
            return x
        floats = [n for n, x in own.items() if isinstance(x, Tensor) and x.is_floating_point()]
        others, features = sorted({*floats} - {*MEDIA.values()}), self._features(kind)
        if not others or features is None:
            return None
        taken = inspect.signature(features).parameters
        return next((own[name] for name in others if name in taken), None)

    def _lent(self, kind: str, own: Mapping[str, Any]) -> dict[str, Any]:
        """What other ranks need of this one's inputs to run towers on blank ones, by names of `_features`."""
        features = self._features(kind)
        assert features is not None
        named = inspect.signature(features).parameters
        lent = {n: _shape(own[n]) for n in named if isinstance(own.get(n), Tensor)}
        needed = {n: None for n, p in named.items() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD}
        return needed | lent  # an input that the forward hands on even if it was not given is None

    def _run_blank(self, kind: str, given: dict[str, Any]) -> Any:
        features = self._features(kind)
        assert features is not None  # as on the rank that lent its shapes
        return features(**given)

    def _features(self, kind: str) -> Callable[..., Any] | None:
        """The function that makes features of a kind of inputs, up to what replaces embeddings of tokens, or None."""
        name = f"get_{kind}_features"
        owner = next((m for m in (self.model.base_model, self.model) if hasattr(m, name)), None)
        features: Callable[..., Any] | None = getattr(owner, name, None)
        if features is None or self.model.config.model_type != "llama4":
            return features

        def projected(pixel_values: Tensor) -> Any:  # which Llama 4 does outside of that function
            seen = features(pixel_values=pixel_values).last_hidden_state
            return self.model.multi_modal_projector(seen.flatten(0, -2))

        return projected

    def _taken_blank(self) -> list[Callable[[], Any]]:
        if self._bringing is None:
            return []
        taken, self._bringing.blank = self._bringing.blank, []
        return taken

    def _add_blank(self, module: nn.Module, args: tuple[Any, ...], out: Tensor) -> Tensor:
        """Embeddings, plus 0 of blank images: at the place of others' images in the order of modules."""
        for run in self._taken_blank():
            out = out + _nothing(run()).to(out)
        return out


def _with_rows(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a text model, each a value per token of this rank's batch.

    Raises: NotImplementedError for masks and positions of another form.
    """
    tokens = given["inputs_embeds"].shape[:2]
    mask, at = padding_of(given.pop("attention_mask", None)), given.get("position_ids")
    if mask is not None:
        given["attention_mask"] = mask
    if at is not None and at.dim() == 3:
        if len(at) not in (3, 4):
            raise NotImplementedError(f"position_ids {list(at.shape)} have {len(at)} rows, expected 1, 3 or 4")
        # of 4 rows the first tells documents; offsets from it are 0 where no image is
        plain = at[0] if len(at) == 4 else torch.arange(tokens[1], device=at.device).expand(tokens)
        given |= {"position_ids": plain, GRID: (at[-3:] - plain).permute(1, 2, 0)}
    if DEEP in given and not given[DEEP]:  # of a tower without DeepStack layers
        del given[DEEP], given[SEEN]
    if DEEP in given:
        seen, embeds = given[SEEN], given["inputs_embeds"]
        features = torch.cat([x.to(embeds.dtype) for x in given[DEEP]], -1)
        deep = features.new_zeros(*tokens, features.shape[-1])
        given |= {DEEP: deep.masked_scatter(seen[..., None], features), SEEN: seen.long()}
    return given


def _without_rows(rows: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a text model, in the form that it takes."""
    if GRID in rows:
        rows["position_ids"] = rows["position_ids"] + rows.pop(GRID).permute(2, 0, 1)
    if DEEP in rows:
        seen = rows[SEEN] = rows[SEEN].bool()
        rows[DEEP] = [x[seen] for x in rows[DEEP].split(rows["inputs_embeds"].shape[-1], -1)]
    return rows


def _shape(x: Tensor) -> Any:
    """A tensor as others can make one like it: itself, if towers read its values as sizes, or its shape."""
    large = x.is_floating_point() and x.numel() > EXACT
    return (x.dtype, tuple(x.shape)) if large else x.detach().cpu()


def _like(told: Any, device: torch.device) -> Tensor | None:
    """The tensor that `_shape` tells of, or one like it of numbers that no norm divides by 0 for; None stays None."""
    if told is None:
        return None
    if isinstance(told, Tensor):
        return told.to(device)
    dtype, shape = told
    return torch.linspace(-1, 1, int(np.prod(shape)), device=device).reshape(shape).to(dtype)


def _nothing(features: Any) -> Any:
    """0, depending on all features that reach the text model: not on hidden states that stand beside them."""
    if isinstance(features, ModelOutput):
        features = [features.get(name) for name in ("pooler_output", "deepstack_features")]
    return sum(0 * x.sum() for x in _tensors(features))


def _tensors(x: Any) -> Iterator[Tensor]:
    if isinstance(x, Tensor):
        if x.is_floating_point():
            yield x
    elif isinstance(x, (Mapping, list, tuple)):
        for each in x.values() if isinstance(x, Mapping) else x:
            yield from _tensors(each)
