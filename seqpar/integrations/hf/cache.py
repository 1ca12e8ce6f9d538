"""A transformers cache whose rows lie on several ranks, and attention of few new tokens with it.

A rank keeps the keys that it computed from a prompt, and never sends them away for good. With few new tokens every rank
computes these, one rank of each sequence keeps their keys, and each attends to its own keys::

    rank 0   q (all heads) ──► its keys ──► out, lse ─┐
    rank 1   q (all heads) ──► its keys ──► out, lse ─┼──► merge_ranks: the same bits on every rank
    rank 2   q (all heads) ──► its keys ──► out, lse ─┘

The heads of a group are rows of one key head there, so that each key is read once. So are all heads of a layer that
keeps latents: its queries take in the weights of keys, and its output those of values. Which rank holds which row is a
`seqpar.facts.past.Past`, equal on all ranks; the rows of a sequence are in position order on each of them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache

from seqpar.comm import Comm, LocalComm
from seqpar.facts.layout import Layout
from seqpar.facts.mask import Mask
from seqpar.facts.past import Past
from seqpar.facts.value import Ints, integer
from seqpar.integrations.hf import indexed
from seqpar.integrations.hf.latents import hands_on_latents, layers
from seqpar.integrations.hf.mask import Rule
from seqpar.integrations.hf.positions import COLUMNS, lengthy
from seqpar.integrations.hf.recurrent.mixers import unsplit_mixers
from seqpar.integrations.hf.recurrent.states import MixerStates, Stored
from seqpar.kernels import merge
from seqpar.ops.attention.merging import merge_ranks, part_of
from seqpar.ops.core.device import autocast, no_autocast
from seqpar.plan import Plan

# Options of generation that need rows of a cache to be taken back, or another cache.
REFUSED = (
    "assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp", "cache_implementation",
    "output_attentions", "output_hidden_states", "inputs_embeds", "custom_generate",
)  # fmt: skip
TOGETHER = (  # what to do where a rank does not come to a call
    "call generate on every rank with its cache=handle.cache(), the same ids and the same options, and if it samples, "
    "after the same torch.manual_seed"
)
ROOM = 64  # rows of a sequence on a rank to allocate beyond those that are needed


@dataclass(eq=False)
class CacheStep:
    """A forward with a cache, on this rank, until it has succeeded.

    past: with the new rows. before: rows of each sequence that this rank has kept so far. source: rows of the layers'
    input whose keys this rank keeps; sequence, row: where, on the host. seen: positions [B, S] of few new tokens, -1 of
    padding; None if the tokens are shared out. earlier: whether there were rows before. states: of recurrent layers.
    """

    past: Past
    states: MixerStates
    source: Tensor
    sequence: Tensor
    row: Tensor
    seen: Ints | None
    earlier: bool
    kept: set[int] = field(default_factory=set)  # layers that have updated the cache
    plans: dict[Any, Plan] = field(default_factory=dict)  # of a rank's own keys, by rule and rows of the memory

    @classmethod
    def of(cls, past: Past, states: MixerStates, earlier: Past, rank: int, owned: Ints, source: Ints, tokens: Ints,
           seen: Ints | None, device: torch.device) -> CacheStep:  # fmt: skip
        """The step after which `past` holds.

        owned: packed numbers of new tokens that this rank keeps, ascending. source: their rows in the layers' input.
        tokens: the new tokens of each sequence.
        """
        sequence = np.searchsorted(np.cumsum(tokens), owned, side="right")
        row = earlier.counts()[rank][sequence] + np.arange(owned.size) - np.searchsorted(sequence, sequence)
        on = [torch.from_numpy(np.ascontiguousarray(x)).to(device) for x in (source, sequence, row)]
        return cls(past, states, *on, seen, bool(earlier.lengths().any()))

    def local(self, rule: Rule, rank: int, memory: int, group: int) -> Plan:
        """The plan of few new tokens, in `group` rows each, over a rank's own keys. memory: rows of a sequence."""
        key = rule, memory, group
        if key not in self.plans:
            assert self.seen is not None
            last = self.past.before(rank, self.seen + 1)
            first = np.zeros_like(last) if rule.left is None else self.past.before(rank, self.seen - rule.left)
            start = np.arange(len(last))[:, None] * memory
            seen = self.seen >= 0
            lo, hi = (np.repeat(np.where(seen, start + x, 0).ravel(), group) for x in (first, last))
            keys = self.past.sequences * memory
            mask = Mask.from_bounds(lo, hi, kv_tokens=keys)
            self.plans[key] = Plan(mask, Layout.contiguous(lo.size, 1), kv_layout=Layout.contiguous(keys, 1))
        return self.plans[key]


class ShardedCache(Cache):
    """The keys and values of some sequences, split over the ranks of a comm; made by ``handle.cache()``.

    comm: of the parallel model. capacity: tokens of a sequence to allocate memory for; None grows by doubling. latents:
    numbers of the layers that keep latents, with their rotated parts in the same rows.
    """

    is_croppable = False
    is_linear = (False,)

    def __init__(self, comm: Comm, capacity: int | None = None, latents: Collection[int] = ()) -> None:
        capacity = None if capacity is None else integer("capacity", capacity, 1)
        super().__init__(layers=[])
        self.comm, self.capacity, self.latents = comm, capacity, latents
        self.step: CacheStep | None = None
        self.alone = LocalComm()  # of what every rank computes
        self._weights: dict[int, tuple[Tensor, Tensor]] | None = None  # of latents, by layer
        self.reset()

    def reset(self) -> None:
        """Forget all rows, for other prompts."""
        self.past: Past | None = None
        self.columns = 0  # of input_ids so far, padding included
        self._memory: dict[int, list[Tensor]] = {}  # by layer, [heads, sequences, rows, dim]; one of latents, or two
        self.states: Stored = {}  # of recurrent layers, whole on every rank

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The columns of ``input_ids`` so far, those of padding included."""
        return self.columns

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """The keys that come with a layer's queries, and 0: plans know of the others."""
        return query_length, 0

    @contextmanager
    def generating(self, *, keeps: bool) -> Iterator[None]:
        """A generation, in which weights do not change. keeps: whether the weights of latents may stay in memory."""
        self._weights = {} if keeps else None
        try:
            yield
        finally:
            self._weights = None

    def begin(self, step: CacheStep) -> None:
        """A forward begins on this rank; until `commit` the cache holds what it held."""
        if self.past is None:
            self._memory = {}  # of a forward that failed, perhaps with other sequences
        self.step = step

    def commit(self, columns: int) -> None:
        """The forward has succeeded with so many columns of tokens."""
        assert self.step is not None
        self.past, self.columns = self.step.past, self.columns + columns
        self.states |= self.step.states.after

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Keep the rows of a layer that are this rank's.

        key_states [B, H_kv, S, D], value_states [B, H_kv, S, D_v] (latents: [B, 1, S, R] and [B, 1, S, E]) ->
        themselves, or if shared-out tokens have earlier ones, all of this rank's rows [1, H_kv, N, D], sequence after
        sequence.
        """
        step = self.step
        if step is None:
            raise RuntimeError(
                "a layer uses the cache of a parallel model outside its forward: give it to generate or to the forward "
                "of the model of its handle, before undo() and outside local()"
            )
        if layer_idx in step.kept:
            raise NotImplementedError(f"layer {layer_idx} updates its cache twice in a forward, which is not supported")
        step.kept.add(layer_idx)
        given, own = [key_states, value_states], []
        if layer_idx in self.latents:
            given = [torch.cat(given, -1)]
        for n, x in enumerate(given):
            rows = autocast(x.detach()).transpose(0, 1).flatten(1, 2)
            memory = self._room(layer_idx, n, rows)
            memory[:, step.sequence, step.row] = rows[:, step.source]
            own.append(memory)
        self._memory[layer_idx] = own
        if step.seen is not None or not step.earlier:
            return key_states, value_states
        counts = step.past.counts()[self.comm.rank]
        held = [[x[:, b, : int(count)] for b, count in enumerate(counts)] for x in own]
        every = [(parts[0] if len(parts) == 1 else torch.cat(parts, 1))[None] for parts in held]
        if len(every) == 1:
            every = list(every[0].split([key_states.shape[-1], value_states.shape[-1]], -1))
        return every[0], every[1]

    def _room(self, layer: int, n: int, like: Tensor) -> Tensor:
        """The memory of a layer's keys (0) or values (1), with room for the step's rows.

        The keys of a head lie side by side, so that a query reads memory in order.
        """
        assert self.step is not None
        past = self.step.past
        need, before = int(past.counts()[self.comm.rank].max()), None
        if layer in self._memory:
            before = self._memory[layer][n]
            if before.shape[2] >= need:
                return before
        rows = need + ROOM if before is None else max(need, 2 * before.shape[2])
        if before is None and self.capacity is not None:
            rows = max(need, -(-self.capacity // self.comm.size))
        memory = like.new_zeros(like.shape[0], past.sequences, rows, like.shape[2])
        if before is not None:
            memory[:, :, : before.shape[2]] = before
        return memory

    def attend(
        self, module: nn.Module, q: Tensor, rule: Rule, *, scale: float | None, softcap: float, sinks: Tensor | None,
        made: Callable[[], tuple[Tensor, Tensor]] | None = None,
    ) -> Tensor:  # fmt: skip
        """Attention of few new tokens to all ranks' keys: q [B, H, S, D] -> [B, S, H, D_v]. A collective.

        made: makes the weights w_k [H, D_n, R] and w_v [H, D_v, R] of a layer that keeps latents.
        """
        step, layer = self.step, getattr(module, "layer_idx", None)
        if step is None or layer not in step.kept:
            raise NotImplementedError(
                f"{type(module).__name__} attends to keys that it has not given to its cache, as layers that share "
                "keys do; generate on each rank, without cache=handle.cache()"
            )
        keys, values = self._memory[layer][0], self._memory[layer][-1]
        if made is not None:
            kept = {} if self._weights is None else self._weights
            w_k, w_v = kept[layer] if layer in kept else kept.setdefault(layer, made())
            nope, rank = w_k.shape[1:]
            scale = q.shape[-1] ** -0.5 if scale is None else scale
            q = torch.cat([q[..., :nope] @ w_k, q[..., nope:]], -1)
            values = keys[..., :rank]
        (b, h, s, d), (h_kv, _, rows) = q.shape, keys.shape[:3]
        group = h // h_kv
        plan = step.local(rule, self.comm.rank, rows, group)
        grouped = autocast(q).view(b, h_kv, group, s, d).permute(0, 3, 2, 1, 4).reshape(b * s * group, h_kv, d)
        k, v = (x.flatten(1, 2).transpose(0, 1) for x in (keys, values))
        out, lse = part_of(grouped, k, v, plan, scale=scale, softcap=softcap)
        out = out.view(b * s, group, h_kv, -1).transpose(1, 2).reshape(b * s, h, -1)
        if made is not None:
            with no_autocast(out.device.type):  # not rounded before parts are merged
                out = torch.einsum("thr,hdr->thd", out, w_v.to(out.dtype))
        out, lse = merge_ranks(out, lse.view(b * s, group, h_kv).transpose(1, 2).reshape(b * s, h), self.comm)
        if sinks is not None:  # once, and not on every rank
            out, _ = merge(out, lse, torch.zeros_like(out), sinks.to(lse.dtype).expand_as(lse))
        return out.to(q.dtype).view(b, s, h, -1)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Sequence ``n`` becomes a copy of sequence ``beam_idx[n]``; each rank reorders its own rows."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the sequences with these numbers, in this order."""
        if self.past is not None:
            self.past = self.past.pick(indices.tolist())
            self.states = {key: x.index_select(0, indices.to(x.device)) for key, x in self.states.items()}
            self._memory = {
                layer: [x.index_select(1, indices.to(x.device)) for x in own] for layer, own in self._memory.items()
            }

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Make so many copies of every sequence."""
        if self.past is not None:
            self.batch_select_indices(torch.arange(self.past.sequences, device="cpu").repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Raise NotImplementedError: rows stay where they came to."""
        raise NotImplementedError(f"crop({tokens_to_remove}) of a cache that is split over ranks; reset() it instead")

    def describe(self) -> str:
        """The rows and bytes of each rank, as text."""
        if self.past is None:
            return f"an empty cache on {self.comm.size} ranks"
        row = sum(x[:, 0, 0].numel() * x.element_size() for own in self._memory.values() for x in own)
        lines = [f"{self.past.sequences} sequences of {', '.join(map(str, self.past.lengths()[:8]))} tokens"]
        for rank, rows in enumerate(self.past.counts().sum(1).tolist()):
            lines.append(f"rank {rank}: {rows} rows, {rows * row} bytes")
        if self.states:
            size = sum(x.numel() * x.element_size() for x in self.states.values())
            lines.append(f"every rank: states of recurrent layers, {size} bytes")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"ShardedCache({self.past!r}, {self.columns} columns)"


def unsplit(model: PreTrainedModel, fit: Any, *, alone: bool, rewritten: bool) -> list[str]:
    """Why the cache of a model cannot be split over ranks. fit: the findings on it."""
    taken = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    config = model.config.get_text_config()
    shared, expands = getattr(config, "num_kv_shared_layers", 0), bool(layers(model))
    chosen, recurrent = bool(indexed.layers(model)), unsplit_mixers(model)
    rules = [rule for rule in fit.rules if not rule.causal or rule.block or rule.chunk is not None]
    reasons = {
        f"transformers {transformers.__version__} takes no cache by that name, 5.24 does": "cache" not in taken,
        "it generates no tokens": not isinstance(model, GenerationMixin),
        "its logits are not those of a linear layer on its last hidden states": fit.head is None,
        "its text model is inside a model of images": not alone,
        f"it keeps no states of {', '.join(recurrent)}": bool(recurrent),
        "it computes attention outside transformers' interface": rewritten and not chosen,
        "its layers choose their keys by an indexer": chosen,
        f"{shared} of its layers share the keys of others": bool(shared),
        "its rotary embeddings depend on the length": bool(lengthy(model)),
        f"layers see keys by {rules[:1]}": bool(rules),
        "its layers have latents and exchange keys, as describe() says": expands and not hands_on_latents(model),
        "it counts positions itself": fit.counting != COLUMNS,
    }
    return [reason for reason, holds in reasons.items() if holds]


def check_generation(model: PreTrainedModel, name: str, args: Sequence[Any], named: Mapping[str, Any]) -> None:
    """Raise NotImplementedError for a call of a method that generates, with a split cache, that is not served."""
    config = named.get("generation_config") or (args[1] if len(args) > 1 else None) or model.generation_config
    wanted = {**{option: getattr(config, option, None) for option in REFUSED}, **named}
    refused = [f"{option}={wanted[option]!r:.60}" for option in REFUSED if wanted.get(option)]
    if name != "generate":
        refused.append(name)
    if refused:
        raise NotImplementedError(
            f"{type(model).__name__}.{name} with a cache that is split over ranks does not serve {', '.join(refused)}; "
            "leave it out, or generate on each rank, without cache=handle.cache()"
        )
