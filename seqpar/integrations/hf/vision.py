"""transformers models of images, video or sound: towers run on their rank's batch, then rows of tokens are shared.

    this rank's batch ─► towers, embeddings, positions   the model's own code
                          │  share     rows of all ranks' batches move to who computes them
                          ▼
                         text model    under a plan, as any model of tokens
                          ▼
                         head, loss    of these rows
                          │  back      requested results return to the rank that supplied the batch
                          ▼
                         logits of this rank's batch

The inputs of the text model are moved between ranks: embeddings with the features of images in them, positions in three
dimensions, features that are added between layers. Masks in which the tokens of an image see each other are read from
the mask functions that the model composes, and ranks exchange where images are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from seqpar.comm.entry import uncompiled
from seqpar.data import Share
from seqpar.data.rows import LABELS
from seqpar.integrations.hf.attention import left_out
from seqpar.integrations.hf.config import ASKED, MEDIA, caching
from seqpar.integrations.hf.experts import asks, can_ask
from seqpar.integrations.hf.forward import Forward, MaskPlaceholder, during, padding_of
from seqpar.integrations.hf.mask import (
    Blocks,
    MaskSummary,
    Rule,
    UnsupportedMask,
    blocks_of,
    rule_of,
    stretches,
    united,
)
from seqpar.integrations.hf.model import ParallelTransformer
from seqpar.integrations.hf.reading import DOCUMENTS, OF_LOSS, OPTIONS, REFUSED, ROWS, UNSEEN, BatchCall, with_effect
from seqpar.integrations.hf.towers import Towers, zero_of

# Other inputs of the text model with a value per token: offsets of positions, features between layers.
GRID, DEEP, SEEN, PER_LAYER = "position_grid", "deepstack_visual_embeds", "visual_pos_masks", "per_layer_inputs"
EXPERTS = "moe_mm_token_type_ids"  # which tokens go to the experts of images, in ERNIE 4.5 VL; 0 for text


class VisionForward:
    """One forward on the way to the rows of its text model.

    module: the model that was called. given: the names of its arguments. asked: those of them that the text model does
    not get from the model's own code. blank: runs of towers on blank inputs. rules, ids: of the masks that were made on
    the way: each without blocks and how it has them, and the number of each token's block, [B, S]. blocks: of the
    union. call, own: the call as read, and the share. refused: whether all ranks refused the batch. keep: the rows that
    the head gets, last ones or by their numbers; None for all.
    """

    def __init__(
        self, module: PreTrainedModel, given: Collection[str], asked: dict[str, Any], blank: list[Callable[[], Any]],
        keep: int | Tensor | None,
    ) -> None:  # fmt: skip
        self.module, self.given, self.asked, self.blank, self.keep = module, given, asked, blank, keep
        self.rules: dict[Rule, str] = {}
        self.ids: Tensor | None = None
        self.padding: Tensor | None = None
        self.blocks: Blocks | None = None
        self.error: Exception | None = None
        self.call: Any = None
        self.own: Share | None = None
        self.refused = False

    def note(self, function: Callable[..., Any], padding: Tensor | None, config: Any) -> MaskPlaceholder:
        """Keep what a mask function says until rows are shared."""
        rule, ids = rule_of(function), blocks_of(function)
        self.error = self.error or left_out(rule, config)
        same = self.ids is None or ids is None or self.ids.equal(ids)
        if not same or self.rules.setdefault(rule._replace(block=""), rule.block) != rule.block:
            raise NotImplementedError("the layers disagree on which tokens attend to each other in both directions")
        self.ids = self.ids if ids is None else ids
        return MaskPlaceholder(padding)

    def summary(self) -> MaskSummary:
        """Where blocks are among this rank's tokens."""
        if self.ids is None:
            return MaskSummary(self.rules, *[np.zeros(0, np.int64)] * 3)
        ids = self.ids.detach().cpu().numpy().astype(np.int64)
        row = np.broadcast_to(np.arange(len(ids))[:, None], ids.shape)
        kept = np.ones(ids.shape, bool) if self.padding is None else self.padding.detach().cpu().numpy() != 0
        return MaskSummary(self.rules, *stretches(ids[kept], row[kept]))


class ParallelVision(ParallelTransformer):
    """A model of images, video or sound and text whose text model runs on all ranks."""

    entries = (*ROWS, GRID, DEEP, SEEN, PER_LAYER, EXPERTS)
    optional = (GRID, DEEP, SEEN, EXPERTS)
    returned = (
        "hidden_states", "rope_deltas", "attention_mask",
        *(f"{kind}_{what}" for kind in MEDIA for what in ("hidden_states", "pooler_output", "features", "outputs")),
    )  # fmt: skip

    _vision: VisionForward | None = None

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
        self, module: PreTrainedModel, before: Callable[..., Any], given: dict[str, Any], error: Exception | None
    ) -> Any:
        if module is not self.text:
            return before(**given) if self._vision else self._whole_forward(module, before, given, error)
        if self._vision is None:  # the text model alone
            return super()._forward(module, before, given, error)
        state = self._vision
        rows = self._rows(state, given)
        return self._run(before, state.own, rows)

    def _keep_hidden(self, module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        super()._keep_hidden(module, args, out)
        keep = None if self._vision is None else self._vision.keep
        if keep is not None:  # Gemma 4's own code cuts rows only where they are as many as the batch is wide
            out.last_hidden_state = out.last_hidden_state[:, slice(-keep, None) if isinstance(keep, int) else keep]

    @partial(torch.compiler.disable, recursive=False)
    def _whole_forward(
        self, module: PreTrainedModel, before: Callable[..., Any], given: dict[str, Any], error: Exception | None
    ) -> Any:
        state, own, chunked = self._asked(module, given, error)
        hidden: list[Tensor] | None = [] if chunked else None
        self._hidden, kept, self._vision = hidden, self._hidden, state
        try:
            with during(Forward(note=state.note)):
                out = before(**own)
            if state.own is None:
                raise NotImplementedError(f"{type(module).__name__} did not call its {type(self.text).__name__}")
            return self._home(module, state.call, state.own, out, hidden)
        except BaseException as error:  # Ctrl-C too
            if not state.refused:
                self._fail(error)
            raise
        finally:
            self._hidden, self._vision = kept, None

    @uncompiled
    def _asked(
        self, module: PreTrainedModel, given: dict[str, Any], error: Exception | None
    ) -> tuple[VisionForward, dict[str, Any], bool]:
        """The forward to come, the arguments of the model's own code, and whether its loss needs no logits."""
        own, who = with_effect(given), type(module).__name__
        names = frozenset(own)
        asking = can_ask(self.model) and asks(self.model)
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
        blank = Towers(self.model, self.text, self.comm).blank_runs(f"{who}.forward", own, error)
        labels = any(name in asked for name in LABELS)
        _, chunked = self._reader.output_of(self.logits, labels=labels)
        own |= {"return_dict": True} | caching(self.model) | ({ASKED: False} if asking else {})
        if chunked:
            own["logits_to_keep"] = torch.zeros(0, dtype=torch.int64, device=self.model.device)
        return VisionForward(module, names, asked, blank, own.get("logits_to_keep")), own, chunked

    @uncompiled
    def _rows(self, state: VisionForward, given: dict[str, Any]) -> dict[str, Any]:
        """The arguments with which the text model computes this rank's rows."""
        if state.call is not None:
            raise NotImplementedError(f"{type(state.module).__name__} calls its text model more than once")
        given = with_effect(given)
        given.pop("logits_to_keep", None)  # of the head, which some hand on
        if "inputs_embeds" not in given and "input_ids" in given:
            given["inputs_embeds"] = self.text.get_input_embeddings()(given.pop("input_ids"))
        for run in self._taken_blank():  # the embeddings came from outside
            given["inputs_embeds"] = given["inputs_embeds"] + zero_of(run()).to(given["inputs_embeds"])
        known = {*self.entries, *DOCUMENTS, *OPTIONS, *UNSEEN, *state.given}
        if made := sorted(given.keys() - known):
            state.error = NotImplementedError(
                f"{type(state.module).__name__} passes {', '.join(made)} to its {type(self.text).__name__}, which "
                "seqpar cannot split over ranks; train it with data parallelism, whole sequences on "
                "each rank"
            )
        try:
            given = _with_rows(given)
        except NotImplementedError as error:
            state.error = state.error or error
        state.padding = given.get("attention_mask")
        try:
            with during(None):
                state.call, state.own, rows = self._share(state.module, given | state.asked, state.error)
        except BaseException:
            state.refused = True
            raise
        rows.pop("logits_to_keep", None)
        source = state.own.source
        if source is not None and not source.tokens(self.comm.rank):  # its embeddings and towers have gradients of 0
            rows["inputs_embeds"] = rows["inputs_embeds"] + zero_of([given[n] for n in self.entries if n in given])
        return _without_rows(rows)

    def _gather(self, call: BatchCall, value: Any, error: Exception | None) -> list[Any]:
        state = self._vision
        if state is None:
            return super()._gather(call, value, error)
        every = super()._gather(call, (value, None if error else state.summary()), error)
        ranks = every[:1] if self.source == "replicated" else every
        lengths = [np.frombuffer(announced[0], np.int64) for announced, _ in ranks]
        state.rules, state.blocks = united([summary for _, summary in ranks], lengths)
        return [announced for announced, _ in every]

    def _blocks(self, rule: Rule) -> tuple[Rule, Blocks | None]:
        state = self._vision
        if state is None or not state.rules:
            return rule, None
        if rule not in state.rules:  # of layers that a config may have and this one has not
            raise UnsupportedMask(
                f"{type(self.model).__name__} makes masks for {list(state.rules)}, and a layer of its text model "
                f"uses {rule}; train it with data parallelism, whole sequences on each rank"
            )
        block, blocks = state.rules[rule], state.blocks
        if not block or blocks is None or not blocks.starts.size:
            return rule, None
        return rule._replace(block=block), blocks

    def _taken_blank(self) -> list[Callable[[], Any]]:
        if self._vision is None:
            return []
        taken, self._vision.blank = self._vision.blank, []
        return taken

    def _add_blank(self, module: nn.Module, args: tuple[Any, ...], out: Tensor) -> Tensor:
        """Embeddings, plus 0 of blank images: at the place of others' images in the order of modules."""
        for run in self._taken_blank():
            out = out + zero_of(run()).to(out)
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
    if EXPERTS in given:
        given[EXPERTS] = given[EXPERTS].long()  # one dtype on all ranks
    return given


def _without_rows(rows: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a text model, in the form that it takes."""
    if GRID in rows:
        rows["position_ids"] = rows["position_ids"] + rows.pop(GRID).permute(2, 0, 1)
    if DEEP in rows:
        seen = rows[SEEN] = rows[SEEN].bool()
        rows[DEEP] = [x[seen] for x in rows[DEEP].split(rows["inputs_embeds"].shape[-1], -1)]
    return rows
