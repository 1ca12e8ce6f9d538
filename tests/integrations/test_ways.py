"""Every fact of a plan, by every way in: computed as one process computes it, or refused by name. None is ignored."""

from __future__ import annotations

import copy
import re
import threading
from collections.abc import Callable
from functools import cache, partial, wraps
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import seqpar
from seqpar import Comm, Layout, Mask, Plan
from seqpar.testing import dense_attention, dense_linear_attention, run_threads, seen_pairs

for package in ("transformers", "diffusers", "einops"):
    pytest.importorskip(package)

import seqpar.integrations.transformers  # noqa: E402, F401  registers attn_implementation="seqpar"
from tests.dsp.models import WEATHER, Weather, made  # noqa: E402
from tests.integrations import diffusers_models  # noqa: E402
from tests.integrations.hf.models import build  # noqa: E402

LENGTHS = [20, 20]  # also of Flux: 2 samples of 5 tokens of text and 15 of an image
S = sum(LENGTHS)
AT = np.arange(S)
NODES = [5, 7, 3, 2, 3, 13, 7], [-1, 0, 1, 1, 0, -1, 5]


_making = threading.Lock()  # the generator is one for all ranks, which are threads


def once(make: Callable[..., Any]) -> Callable[..., Any]:
    """What a function made when it was first called with such arguments."""
    kept = cache(make)

    @wraps(make)
    def locked(*args: Any) -> Any:
        with _making:
            return kept(*args)

    return locked


class Fact(NamedTuple):
    """What a plan has besides plain causal documents in one layout."""

    mask: Mask = Mask(LENGTHS)
    keys: Layout | None = None
    ulysses: Any = 1

    def plan(self, layout: Layout) -> Plan:
        return Plan(self.mask, layout, kv_layout=self.keys, ulysses=self.ulysses)


FACTS = {
    "documents": Fact(),
    "kv_layout": Fact(keys=Layout.striped(S, 2)),
    "more keys": Fact(Mask(LENGTHS, kv_lengths=[26, 20]), Layout.contiguous(46, 2)),
    "ulysses": Fact(ulysses=[2, 1]),
    "ends": Fact(Mask.from_bounds([0] * S, AT + 1, until=np.minimum(AT + 6, S))),
    "bands": Fact(Mask.from_bounds(AT // 10 * 10, AT + 1) | Mask.from_bounds([0] * S, np.minimum(AT + 1, 4))),
    "sinks": Fact(Mask(LENGTHS, window=(5, 0), sink_tokens=2)),
    "window": Fact(Mask(LENGTHS, window=(5, 0))),
    "full": Fact(Mask(LENGTHS, causal=False)),
    "bounds": Fact(Mask.from_bounds([0] * S, np.maximum(AT + 1, 13))),  # a prefix that sees itself
    "slices": Fact(Mask.from_slices([[0, 30], [30, S]], [[0, 30], [10, S]], ["causal", "full"])),
    "tree": Fact(Mask.tree(*NODES)),
    "windowed tree": Fact(Mask.tree(*NODES, window=(4, None))),
    "union": Fact(Mask(LENGTHS, window=(3, 0)) | Mask.from_bounds(AT, np.minimum(AT + 3, S), lengths=LENGTHS)),
}


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def rows_of(fact: Fact) -> tuple[Tensor, Tensor, Tensor]:
    """q [S, 4, 8], k and v [keys, 2, 8]."""
    return random(S, 4, 8, seed=1), random(fact.mask.kv_tokens, 2, 8, seed=2), random(fact.mask.kv_tokens, 2, 8, seed=3)


def own_rows(fact: Fact, plan: Plan, rank: int) -> list[Tensor]:
    return [seqpar.shard(x, plan, rank, side=side) for x, side in zip(rows_of(fact), ("q", "kv", "kv"))]


def zigzag(fact: Fact) -> Plan:
    return fact.plan(Layout.zigzag(LENGTHS, 2))


class Way(NamedTuple):
    """ranks: what a rank has, whole, of a fact. expected: the same of one process."""

    ranks: Callable[[Fact, Comm], Tensor]
    expected: Callable[[Fact], Tensor]


def dense(fact: Fact) -> Tensor:
    return dense_attention(*rows_of(fact), fact.mask)[0]


def attention(fact: Fact, comm: Comm) -> Tensor:
    plan = zigzag(fact)
    return seqpar.unshard(seqpar.attention(*own_rows(fact, plan, comm.rank), plan, comm), plan, comm)


def of_layer(fact: Fact, comm: Comm) -> Tensor:
    plan = zigzag(fact)
    with seqpar.parallel(plan, comm):
        return seqpar.unshard(seqpar.nn.Attention()(*own_rows(fact, plan, comm.rank)), plan, comm)


NEAR = 3  # keys before a query's own that a layer with a window sees


def of_window(fact: Fact, comm: Comm) -> Tensor:
    plan = zigzag(fact)
    layer = seqpar.nn.Attention(window=(NEAR, None))
    return seqpar.unshard(layer(*own_rows(fact, plan, comm.rank), plan, comm), plan, comm)


def dense_window(fact: Fact) -> Tensor:
    """In a tree a window counts along the path, with unequal lengths from the aligned ends on."""
    q, k, v = rows_of(fact)
    at, keys = fact.mask.key_positions(AT), np.arange(len(k))
    if fact.mask.paths is not None:
        at = keys = fact.mask.depths(AT)
    seen = torch.from_numpy(seen_pairs(fact.mask) & (at[:, None] - keys <= NEAR))
    return F.scaled_dot_product_attention(*(x.transpose(0, 1) for x in (q, k, v)), seen, enable_gqa=True).transpose(
        0, 1
    )


def of_recurrence(fact: Fact, comm: Comm) -> Tensor:
    plan = zigzag(fact)
    v, k, q = own_rows(fact, plan, comm.rank)
    return seqpar.unshard(seqpar.recurrent.linear_attention(q, k, v, plan, comm), plan, comm)


def by_documents(fact: Fact) -> Tensor:
    v, k, q = rows_of(fact)
    return dense_linear_attention(q, k, v, fact.mask)[0]


def of_share(fact: Fact, comm: Comm) -> Tensor:
    """Rows that `seqpar.data.share` moves, under the plan that its planner made."""
    batch = {"input_ids": torch.arange(S)[None], "cu_seqlens": [0, *np.cumsum(fact.mask.lengths).tolist()]}
    plan = zigzag(fact)
    share = seqpar.data.share(batch, comm, source="replicated", plan=lambda *_: plan)
    rows = [x[share.tensors["input_ids"]] for x in rows_of(fact)]
    return seqpar.unshard(seqpar.attention(*rows, share.plan, comm), share.plan, comm)


@once
def multihead(kind: type[nn.MultiheadAttention]) -> nn.MultiheadAttention:
    made = kind(32, 4)
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(0))
    return made.double()


def wide(fact: Fact) -> tuple[Tensor, Tensor]:
    """Queries [S, 32] and keys [keys, 32]."""
    return random(S, 32, seed=1), random(fact.mask.kv_tokens, 32, seed=2)


def of_multihead(fact: Fact, comm: Comm) -> Tensor:
    plan = zigzag(fact)
    x, y = (seqpar.shard(each, plan, comm.rank, side=side) for each, side in zip(wide(fact), ("q", "kv")))
    layer = copy.deepcopy(multihead(seqpar.nn.MultiheadAttention))
    with seqpar.parallel(plan, comm):
        return seqpar.unshard(layer(x, y, y, need_weights=False)[0], plan, comm)


def dense_multihead(fact: Fact) -> Tensor:
    x, y = wide(fact)
    hidden = torch.from_numpy(~seen_pairs(fact.mask))
    return multihead(nn.MultiheadAttention)(x, y, y, attn_mask=hidden, need_weights=False)[0]


def of_sdpa(fact: Fact, comm: Comm, *, is_causal: bool) -> Tensor:
    plan = zigzag(fact)
    q, k, v = (x.transpose(0, 1)[None] for x in own_rows(fact, plan, comm.rank))
    with seqpar.sdpa(plan, comm):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)
    return seqpar.unshard(out[0].transpose(0, 1), plan, comm)


def of_sdpa_with_mask(fact: Fact, comm: Comm) -> Tensor:
    """The call's own mask, here that of the plan, takes the place of the plan's."""
    plan = zigzag(fact)
    q, k, v = (x.transpose(0, 1)[None] for x in own_rows(fact, plan, comm.rank))
    mask = seqpar.shard(torch.from_numpy(seen_pairs(fact.mask)), plan, comm.rank)
    with seqpar.sdpa(plan, comm):
        out = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
    return seqpar.unshard(out[0].transpose(0, 1), plan, comm)


class Plain(nn.Module):
    """A layer of attention of queries over keys that calls PyTorch's function."""

    def __init__(self, is_causal: bool) -> None:
        super().__init__()
        self.q, self.kv, self.is_causal = nn.Linear(32, 32), nn.Linear(32, 64), is_causal

    def forward(self, x: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (z.unflatten(-1, (4, 8)).transpose(1, 2) for z in (self.q(x), *self.kv(y).chunk(2, -1)))
        causal = self.is_causal and mask is None
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal).transpose(1, 2).flatten(2)


@once
def plain(is_causal: bool) -> nn.Module:
    torch.manual_seed(0)
    return Plain(is_causal).double()


def of_plain(fact: Fact, comm: Comm, *, is_causal: bool) -> Tensor:
    plan, own = zigzag(fact), copy.deepcopy(plain(is_causal))
    x, y = (seqpar.shard(each, plan, comm.rank, side=side)[None] for each, side in zip(wide(fact), ("q", "kv")))
    with seqpar.parallelize(own, comm, sdpa=True, plan=plan):
        return seqpar.unshard(own(x, y)[0], plan, comm)


def dense_plain(fact: Fact, *, is_causal: bool) -> Tensor:
    return plain(is_causal)(*(x[None] for x in wide(fact)), torch.from_numpy(seen_pairs(fact.mask)))[0]


IDS = torch.randint(1, 60, (1, S), generator=torch.Generator().manual_seed(3))


@once
def transformer(name: str) -> Any:
    model = build(name).double().eval()
    model.set_attn_implementation("sdpa")  # whose softmax is in the model's dtype
    return model


def registered(fact: Fact, comm: Comm, *, name: str) -> Tensor:
    own, plan = copy.deepcopy(transformer(name)), zigzag(fact)
    own.set_attn_implementation("seqpar")
    more = {} if name == "bert" else {"use_cache": False}
    with seqpar.parallel(plan, comm):
        at = torch.from_numpy(plan.rope_positions(comm.rank))[None]
        rows = seqpar.shard(IDS[0], plan, comm.rank)[None]
        return seqpar.unshard(own(input_ids=rows, position_ids=at, **more).logits[0], plan, comm)


def planned(fact: Fact, comm: Comm, *, name: str) -> Tensor:
    own, plan = copy.deepcopy(transformer(name)), zigzag(fact)
    starts = torch.tensor([0, *np.cumsum(fact.mask.lengths).tolist()], dtype=torch.int32)
    at = torch.from_numpy(fact.mask.depths(AT))[None]
    with seqpar.parallelize(own, comm, source="replicated", plan=lambda *_: plan):
        return own(input_ids=IDS, position_ids=at, cu_seq_lens_q=starts, cu_seq_lens_k=starts).logits[0]


def by_transformers(fact: Fact, *, name: str) -> Tensor:
    """By the model's own code, with the mask of each kind of layer; of documents, the kind's own."""
    seen, far = torch.from_numpy(seen_pairs(fact.mask)), torch.from_numpy(AT[:, None] - AT)
    depths = torch.from_numpy(fact.mask.depths(AT))
    if name == "bert":
        seen = torch.from_numpy(seen_pairs(Mask(fact.mask.lengths, causal=False)))
    if fact.mask.paths is not None:
        far = depths[:, None] - depths
    mask, near = seen, seen & (far < 4)
    both = {"full_attention": mask[None, None], "sliding_attention": near[None, None]}
    given = both if name == "gemma3" else mask[None, None]
    return transformer(name)(input_ids=IDS, position_ids=depths[None], attention_mask=given).logits[0]


def diffused(fact: Fact, comm: Comm) -> Tensor:
    """The plan of a fact, with the mask that the planner got in place of plain documents."""
    model, given = flux()

    def plan(mask: Mask, layout: Layout) -> Plan:
        return (fact._replace(mask=mask) if fact.mask == Mask(LENGTHS) else fact).plan(layout)

    with seqpar.parallelize(copy.deepcopy(model), comm, plan=plan) as handle:
        return handle.model(**given, return_dict=False)[0]


@once
def flux() -> tuple[Any, dict[str, Tensor]]:
    return diffusers_models.made("flux")


def of_stages(fact: Fact, comm: Comm) -> Tensor:
    x = random(1, 5, 7, 3, seed=0)
    with seqpar.parallelize(made(Weather), comm, spec=WEATHER, plan=lambda *_, **__: zigzag(fact)) as handle:
        return handle.model(x)


WAYS = {
    "attention": Way(attention, dense),
    "nn.Attention": Way(of_layer, dense),
    "nn.Attention, window": Way(of_window, dense_window),
    "nn.MultiheadAttention": Way(of_multihead, dense_multihead),
    "linear_attention": Way(of_recurrence, by_documents),
    "share": Way(of_share, dense),
    "sdpa": Way(partial(of_sdpa, is_causal=True), dense),
    "sdpa, no mask": Way(partial(of_sdpa, is_causal=False), dense),
    "sdpa, attn_mask": Way(of_sdpa_with_mask, dense),
    "parallelize(sdpa=True)": Way(partial(of_plain, is_causal=True), partial(dense_plain, is_causal=True)),
    "the same, no mask": Way(partial(of_plain, is_causal=False), partial(dense_plain, is_causal=False)),
    "registered Llama": Way(partial(registered, name="llama"), partial(by_transformers, name="llama")),
    "registered Gemma 3": Way(partial(registered, name="gemma3"), partial(by_transformers, name="gemma3")),
    "registered BERT": Way(partial(registered, name="bert"), partial(by_transformers, name="bert")),
    "parallelize(Llama)": Way(partial(planned, name="llama"), partial(by_transformers, name="llama")),
    "parallelize(Gemma 3)": Way(partial(planned, name="gemma3"), partial(by_transformers, name="gemma3")),
    "parallelize(BERT)": Way(partial(planned, name="bert"), partial(by_transformers, name="bert")),
    "parallelize(Flux)": Way(diffused, lambda fact: flux()[0](**flux()[1], return_dict=False)[0]),
    "stages": Way(of_stages, lambda fact: torch.zeros(0)),
}

# Computed facts are +, refused ones are -. A recurrence runs over documents, whatever window limits their keys.
TABLE = """
                        docs kvlay more ulys ends band sink wind full boun slic tree wtre union
attention                 +    +    +    +    +    +    +    +    +    +    +    +    +    +
nn.Attention              +    +    +    +    +    +    +    +    +    +    +    +    +    +
nn.Attention, window      +    +    +    +    -    +    +    +    +    +    +    +    +    +
nn.MultiheadAttention     +    +    +    +    +    +    +    +    +    +    +    +    +    +
linear_attention          +    -    -    +    -    -    -    +    -    -    -    -    -    -
share                     +    -    -    +    +    +    +    +    +    +    +    +    +    +
sdpa                      +    +    -    +    -    -    -    -    -    -    -    -    -    -
sdpa, no mask             -    -    -    -    -    -    -    -    +    -    -    -    -    -
sdpa, attn_mask           +    +    +    +    +    -    -    +    +    +    +    -    -    +
parallelize(sdpa=True)    +    +    -    +    -    -    -    -    -    -    -    -    -    -
the same, no mask         -    -    -    -    -    -    -    -    +    -    -    -    -    -
registered Llama          +    -    -    +    +    +    +    +    +    +    +    +    +    +
registered Gemma 3        +    -    -    +    -    -    -    -    -    -    -    +    +    -
registered BERT           +    -    -    +    -    -    -    -    +    -    -    -    -    -
parallelize(Llama)        +    -    -    +    +    +    +    +    +    +    +    +    +    +
parallelize(Gemma 3)      +    -    -    +    -    -    -    -    -    -    -    +    +    -
parallelize(BERT)         +    -    -    +    -    -    -    -    +    -    -    -    -    -
parallelize(Flux)         +    -    -    +    -    -    -    -    +    -    -    -    -    -
stages                    -    -    -    -    -    -    -    -    -    -    -    -    -    -
"""
NAMED = r"Mask\(|a kv_layout|rows, as the plan gives it|another layout|is_causal=True aligns|of attn_mask sees"
LINES = {line[:24].strip(): line[24:].split() for line in TABLE.strip("\n").splitlines()[1:]}


def test_the_table_has_every_way_and_fact() -> None:
    assert LINES.keys() == WAYS.keys() and all(len(line) == len(FACTS) for line in LINES.values())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("fact", FACTS)
@pytest.mark.parametrize("way", WAYS)
def test_a_fact_is_computed_or_refused(way: str, fact: str) -> None:
    ranks, expected = WAYS[way]
    verdict = LINES[way][[*FACTS].index(fact)]

    @torch.no_grad()
    def rank(comm: Comm) -> Tensor | Exception:
        try:
            return ranks(FACTS[fact], comm)
        except (NotImplementedError, ValueError, TypeError) as error:
            return error

    with torch.no_grad():
        for found in run_threads(2, rank):
            if verdict == "-":
                assert isinstance(found, Exception) and re.search(NAMED, str(found)), found
            else:
                assert isinstance(found, Tensor), found
                torch.testing.assert_close(found, expected(FACTS[fact]), rtol=1e-8, atol=1e-8)
