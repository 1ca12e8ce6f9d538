"""Positions that models count themselves, and rotary embeddings of the longest position: those of one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import seqpar
from seqpar import Comm, LocalComm
from seqpar.integrations.hf.positions import BY_TOKENS, BY_WORDS, counted
from seqpar.testing import run_threads
from tests.ecosystem.architectures import DYNAMIC, LONGROPE, Architecture
from tests.ecosystem.ways import islands
from tests.integrations.hf.hybrids import contiguous, gradients
from tests.integrations.hf.models import batches, packed
from tests.integrations.hf.unions import agree, build, check, one

COUNTING = {
    "opt": Architecture("opt", "dense"),
    "roberta": Architecture("roberta", "encoder", {"pad_token_id": 1}, head="ForMaskedLM"),
    "xlm-roberta": Architecture("xlm-roberta", "encoder", head="ForMaskedLM"),
}
MORE = {kind: Architecture(kind, group, head=head) for kind, group, head in [
    ("camembert", "encoder", "ForMaskedLM"), ("data2vec-text", "encoder", "ForMaskedLM"),
    ("xlm-roberta-xl", "encoder", "ForMaskedLM"), ("biogpt", "dense", "ForCausalLM"),
    ("roberta-prelayernorm", "encoder", "ForMaskedLM"),
]}  # fmt: skip
PHI3 = {"rope_parameters": LONGROPE, "original_max_position_embeddings": 16, "sliding_window": None}
YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "long_mscale": 1.2, "short_mscale": 1.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
ROTARY = {
    "phimoe yarn": Architecture("phimoe", "experts", {"rope_parameters": YARN}, training=False),
    "llama dynamic": Architecture("llama", "dense", {"rope_parameters": DYNAMIC, "max_position_embeddings": 8}),
    "phi3 longrope": Architecture("phi3", "dense", PHI3),
}


def given(row: Architecture, kind: str, ranks: int) -> list[dict[str, Tensor]]:
    """The batches, with the model's own padding token, and a masked language model's labels."""
    every, pad = batches("right" if kind == "holes" else kind, ranks), row.config.get("pad_token_id", 0)
    if kind == "holes":
        every[0] = batches("mixed", ranks)[0]
    for batch in every:
        mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
        ids = batch["input_ids"].where(batch["input_ids"] != pad, 2)
        batch["input_ids"] = ids.where(mask, pad)
        batch.pop("position_ids", None)
        if row.head == "ForMaskedLM":
            batch["labels"] = ids.masked_fill(~mask | (ids % 3 > 0), -100)
    return every


@pytest.mark.parametrize("name", [*COUNTING, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in MORE)])
@pytest.mark.sampled(3)
def test_positions_are_counted_as_on_one_process(name: str) -> None:
    row = (COUNTING | MORE)[name]
    model = build(row)
    for kind, ranks in (("left", 2), ("right", 3), ("cu", 2), *[("holes", 2)] * (name == "opt")):
        agree(model, given(row, kind, ranks), pad=row.config.get("pad_token_id", 0))


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("name", ["roberta", "xlm-roberta"])
def test_another_padding_token_in_the_config_is_not_counted(name: str, after: bool) -> None:
    """The embeddings go on with the one that they were built with, on one process too."""
    model, every = build(COUNTING[name]), given(COUNTING[name], "right", 2)
    ids = every[0]["input_ids"]
    ids[0, 3] = 5
    whole = copy.deepcopy(model)
    whole.config.pad_token_id = 5

    def rank(comm: Comm) -> tuple[float, dict[str, Tensor]]:
        own = copy.deepcopy(model)
        if not after:
            own.config.pad_token_id = 5
        with islands(torch.float64), seqpar.parallelize(own, comm, plan=contiguous):
            own.config.pad_token_id = 5
            loss = own(**every[comm.rank]).loss
            loss.backward()
        return float(loss.detach()), gradients(own)

    pad = COUNTING[name].config.get("pad_token_id", 0)
    check(run_threads(2, rank), one(whole, every, torch.float64, pad=pad), 1e-9)


def test_counting_by_hand() -> None:
    ids = torch.tensor([[1, 1, 5, 6, 1, 7]])
    batch = {"input_ids": ids, "attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1]])}
    assert counted(BY_WORDS, batch, 1).tolist() == [[1, 1, 2, 3, 1, 4]]
    assert counted(BY_TOKENS, batch, 1).tolist() == [[0, 0, 0, 1, 2, 3]]
    starts = {"input_ids": ids, "cu_seq_lens_q": torch.tensor([0, 3, 3, 6])}
    assert counted(BY_WORDS, starts, 1).tolist() == [[1, 1, 2, 2, 1, 3]]
    assert counted(BY_TOKENS, starts, 1).tolist() == [[0, 1, 2, 0, 1, 2]]


def test_positions_of_embeddings_without_words_must_be_given() -> None:
    model = build(COUNTING["roberta"], torch.float32)
    embeds = torch.randn(2, 5, 32)
    with seqpar.parallelize(model, LocalComm()):
        with pytest.raises(NotImplementedError, match="counts its positions itself .*; give position_ids"):
            model(inputs_embeds=embeds)
        assert model(inputs_embeds=embeds, position_ids=torch.arange(2, 7)[None].expand(2, -1)).logits.isfinite().all()


@pytest.mark.parametrize("name", ROTARY)
@pytest.mark.sampled(2)
def test_angles_depend_on_the_longest_position_of_all_ranks(name: str) -> None:
    """One rank has the longest row, which is cut between ranks; and the other rank's rows are short."""
    model = build(ROTARY[name])
    for kind, ranks in (("long", 2), ("left", 3), ("packed", 2)):
        agree(model, batches(kind, ranks))
    agree(model.float(), batches("long", 2), 2e-5, checkpoints=True)


def check_steps(model: Any, steps: Any, rank: Any) -> None:
    """Compare several forwards and one backward of two ranks with those of one process."""
    whole = copy.deepcopy(model)
    wholes = [one(whole, every, torch.float64, kept=True) for every in steps]
    found = run_threads(2, rank)
    for step, (loss, _) in enumerate(wholes):
        assert [each[0][step] for each in found] == pytest.approx([loss] * 2, rel=1e-9)
    check([(0.0, grads) for _, grads in found], (0.0, wholes[-1][1]), 1e-9)


@pytest.mark.parametrize("name", ROTARY)
def test_a_long_batch_then_short_ones(name: str) -> None:
    """``dynamic`` keeps the longest length that it has seen, until a batch is shorter than the pretraining's."""
    model = build(ROTARY[name])
    steps = [[packed(torch.Generator().manual_seed(i), [n, 3]) for n in lengths]
             for i, lengths in enumerate([(5, 7), (40, 6), (12, 11), (6, 5), (9, 13)])]  # fmt: skip

    def rank(comm: Comm) -> Any:
        own = copy.deepcopy(model)
        with islands(torch.float64), seqpar.parallelize(own, comm, plan=contiguous):
            losses = [own(**every[comm.rank]).loss for every in steps]
            sum(losses).backward()
        return [float(x) for x in losses], gradients(own)

    check_steps(model, steps, rank)


PER_LAYER = {"full_attention": DYNAMIC, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
GEMMA = {"rope_parameters": PER_LAYER, "max_position_embeddings": 8}
ALONE = {name: ROTARY[name] for name in ("llama dynamic", "phi3 longrope")} | {
    "gemma3 dynamic": Architecture("gemma3_text", "dense", GEMMA)
}


@pytest.mark.parametrize("name", ALONE)
def test_lengths_that_one_rank_met_alone_are_forgotten(name: str) -> None:
    """Longer ones, shorter ones, in blocks inside of others, in ones that end in an error, and of a generation."""
    model = build(ALONE[name])
    steps = [[packed(torch.Generator().manual_seed(i), [n, 3]) for n in lengths]
             for i, lengths in enumerate([(9, 12), (20, 6), (10, 13)])]  # fmt: skip
    long, short = (packed(torch.Generator().manual_seed(9), [n])["input_ids"] for n in (40, 3))

    def alone(own: Any, handle: Any) -> None:
        with handle.local(), torch.no_grad():
            own(input_ids=long)
            with handle.local():
                own(input_ids=short)
        with pytest.raises(ZeroDivisionError), handle.local(), torch.no_grad():
            own(input_ids=long)
            raise ZeroDivisionError
        own.generate(input_ids=long, max_new_tokens=2, do_sample=False, pad_token_id=0)

    def rank(comm: Comm) -> Any:
        own, losses = copy.deepcopy(model), []
        with islands(torch.float64), seqpar.parallelize(own, comm, plan=contiguous) as handle:
            for every in steps:
                if comm.rank == 0:
                    alone(own, handle)
                losses.append(own(**every[comm.rank]).loss)
            sum(losses).backward()
        return [float(x.detach()) for x in losses], gradients(own)

    check_steps(model, steps, rank)


def test_inside_local_lengths_grow_as_on_one_device() -> None:
    model = build(ALONE["llama dynamic"], torch.float32).eval()
    long, after = (packed(torch.Generator().manual_seed(n), [n])["input_ids"] for n in (40, 12))
    whole = copy.deepcopy(model)
    with torch.no_grad(), seqpar.parallelize(model, LocalComm()) as handle:
        expected = [whole(input_ids=ids).logits for ids in (after, long, after)]
        with handle.local():
            found = [model(input_ids=ids).logits for ids in (after, long, after)]
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert torch.allclose(model(input_ids=after).logits, expected[0], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(expected[0], expected[2], rtol=1e-2)


def test_ranks_that_met_other_lengths_before_are_refused() -> None:
    models = [build(ALONE["llama dynamic"], torch.float32) for _ in range(2)]
    with torch.no_grad():
        models[0](input_ids=packed(torch.Generator().manual_seed(0), [40])["input_ids"])

    def rank(comm: Comm) -> None:
        with pytest.raises(ValueError, match="ranks differ in lengths that rotary embeddings have met"):
            seqpar.parallelize(models[comm.rank], comm)

    run_threads(2, rank)


def test_a_rotary_embedding_by_itself_is_told_what_it_lacks() -> None:
    model = build(ROTARY["phi3 longrope"], torch.float32)
    at = torch.arange(5)[None]
    with seqpar.parallelize(model, LocalComm()) as handle:
        with pytest.raises(RuntimeError, match="outside the model's forward.*; checkpoint the layers"):
            model.model.rotary_emb(torch.randn(1, 5, 32), at)
        with handle.local():
            assert model.model.rotary_emb(torch.randn(1, 5, 32), at)[0].shape == (1, 5, 8)
