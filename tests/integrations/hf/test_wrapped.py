"""Parallel models inside what wraps them: FSDP2 and DDP on processes, autocast, and adapters that call forward."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from contextlib import nullcontext
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.utils.checkpoint import checkpoint

import seqpar
from seqpar import Comm, LocalComm
from seqpar.testing import run_processes, run_threads
from seqpar.train import token_log_probs
from tests.integrations.hf.models import batches, build, largest, one_process
from tests.ranks import in_wrapper, whole_gradients

RANKS = 2


def prompt_of(rank: int) -> dict[str, Any]:
    """A prompt of each rank's own, and another number of tokens to make of it."""
    ids = torch.arange(1, 6 + 3 * rank)[None]
    return {"input_ids": ids, "max_new_tokens": 3 + 4 * rank, "do_sample": False, "pad_token_id": 0}


def log_probs_of(model: Any, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
    """Of the labels of a rank's own batch; a method, as policies of reinforcement learning need it."""
    hidden = model.base_model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
    rows, weight = hidden[:, :-1].flatten(0, 1), model.get_output_embeddings().weight
    return token_log_probs(rows, weight, labels[:, 1:].flatten(), temperature=0.9)


def policy(comm: Comm) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probabilities and the gradients of their sum over ranks, by a method of a model that is sharded."""
    model = build("llama")
    seqpar.parallelize(model, comm)
    in_wrapper(model, "fsdp", model.model.layers)
    model.log_probs_of = MethodType(log_probs_of, model)
    register_fsdp_forward_method(model, "log_probs_of")
    found = model.log_probs_of(**batches("right", comm.size)[comm.rank])
    model.generate(**prompt_of(comm.rank))
    (found.sum() * comm.size).backward()
    return found.detach(), whole_gradients(model)


def test_a_method_of_a_sharded_model_has_log_probabilities() -> None:
    model = build("llama")
    expected = [log_probs_of(model, **batch) for batch in batches("right", RANKS)]
    sum(x.sum() for x in expected).backward()
    for (found, grads), whole in zip(run_processes(RANKS, policy), expected, strict=True):
        torch.testing.assert_close(found, whole.detach(), rtol=1e-5, atol=1e-5)
        for name, p in model.named_parameters():
            assert float((grads[name] - p.grad).abs().max()) <= 1e-5 * float(p.grad.abs().max()), name


def wrapped(comm: Comm, how: str) -> tuple[float, dict[str, Tensor], list[Tensor]]:
    """The loss, the averaged gradients and what is generated, of a model in a wrapper."""
    model = build("llama", tie_word_embeddings=how == "fsdp tied")
    seqpar.parallelize(model, comm, average_over=comm.size)
    whole = in_wrapper(model, how, model.model.layers)
    made = [model.generate(**prompt_of(comm.rank))]
    for _ in range(2):  # the second pass finds what the first one left sharded
        model.zero_grad()
        loss = whole(**batches("right", comm.size)[comm.rank]).loss
        loss.backward()
        made.append(model.generate(**prompt_of(comm.rank), synced_gpus=False))  # as Seq2SeqTrainer asks for
    return float(loss.detach()), whole_gradients(model), made


@pytest.mark.parametrize("how", ["ddp", "fsdp", "fsdp tied"])
@pytest.mark.sampled(3)
def test_wrappers_that_average(how: str) -> None:
    model = build("llama", tie_word_embeddings=how == "fsdp tied")
    whole = one_process(model, batches("right", RANKS), True)
    expected = [model.generate(**prompt_of(rank)) for rank in range(RANKS)]
    for (loss, grads, made), tokens in zip(run_processes(RANKS, wrapped, how), expected, strict=True):
        assert all(torch.equal(ids, tokens) for ids in made)
        assert abs(loss - float(whole.loss)) <= 1e-6 * float(whole.loss)
        assert grads.keys() == whole.grads.keys()
        for name, grad in grads.items():
            most = max(float(whole.grads[name].abs().max()), 1e-6 * largest(whole.grads))
            assert float((grad - whole.grads[name]).abs().max()) <= 1e-5 * most, name


class Adapter(nn.Module):
    """Calls the forward of a model, and not the model, as adapters do."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **named: Any) -> Any:
        return self.model.forward(**named)


def test_a_forward_that_is_called_directly_is_parallel_too() -> None:
    model, batch = build("llama"), batches("left", 1)[0]
    expected = float(model(**batch).loss)
    with seqpar.parallelize(model, LocalComm()):
        out = Adapter(model)(**batch)
    assert out.logits is None and float(out.loss) == pytest.approx(expected, rel=1e-6)


def _halved_by_a_hook(model: torch.nn.Module) -> None:
    model.model.register_forward_hook(lambda _, args, out: type(out)(last_hidden_state=out.last_hidden_state / 2))


def test_a_hook_before_the_head_that_comes_later_is_in_the_loss() -> None:
    model, every = build("llama"), batches("right", 2)

    def rank(comm: Comm) -> Tensor:
        own = copy.deepcopy(model)
        with seqpar.parallelize(own, comm):
            _halved_by_a_hook(own)
            return own(**every[comm.rank]).loss.detach()

    whole = copy.deepcopy(model)
    _halved_by_a_hook(whole)
    expected = one_process(whole, every, causal=True).loss
    torch.testing.assert_close(run_threads(2, rank), [expected, expected])


def _doubled(module: nn.Module, grads: tuple[Tensor, ...], *_: object) -> tuple[Tensor, ...]:
    return tuple(2 * grad for grad in grads)


LISTENERS: dict[str, Callable[[nn.Module], Any]] = {
    "backward": lambda head: head.register_full_backward_hook(lambda module, grads, _: _doubled(module, grads)),
    "before backward": lambda head: head.register_full_backward_pre_hook(_doubled),
    "of every module": lambda head: nn.modules.module.register_module_forward_hook(
        lambda module, _, out: out / 2 if module is head else None
    ),
}


@pytest.mark.parametrize("kind", LISTENERS)
def test_hooks_of_the_head_are_called(kind: str) -> None:
    batch = batches("right", 1)[0]

    def gradients(*, parallel: bool) -> list[Tensor]:
        model = build("llama")
        handle = LISTENERS[kind](model.lm_head)
        try:
            with seqpar.parallelize(model, LocalComm()) if parallel else nullcontext():
                model(**batch).loss.backward()
        finally:
            handle.remove()
        return [p.grad for p in model.parameters()]

    for got, expected in zip(gradients(parallel=True), gradients(parallel=False), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)


def test_a_forward_that_is_bound_to_the_model_once_more_gets_its_arguments() -> None:
    model, batch = build("llama"), batches("right", 1)[0]
    with seqpar.parallelize(model, LocalComm()):
        expected = model(**batch).loss
        model.forward = types.MethodType(model.forward, model)
        ids = batch.pop("input_ids")
        assert torch.equal(model(ids, **batch).loss, expected)


def test_a_loss_function_that_is_replaced_later_is_refused_and_not_left_out() -> None:
    model, batch = build("llama"), batches("right", 1)[0]
    with seqpar.parallelize(model, LocalComm()):
        model.loss_function = lambda logits, labels, vocab_size, **named: logits.sum()
        with pytest.raises(NotImplementedError, match="loss_function was replaced"):
            model(**batch)


def _fused(model: torch.nn.Module) -> None:
    """A head that computes the loss itself, from what the base model returns, as TRL puts on models."""
    before = model.forward

    def forward(*args: Any, fused_lm_head: bool = False, labels: Any = None, **named: Any) -> Any:
        if not fused_lm_head:
            return before(*args, labels=labels, **named)
        hidden = model.base_model(*args, use_cache=False, **named).last_hidden_state[:, :-1]
        return torch.nn.functional.cross_entropy(
            model.lm_head(hidden).flatten(0, 1), labels[:, 1:].flatten(), reduction="sum"
        )

    model.forward = forward


@pytest.mark.parametrize("first", ["head", "parallelize"])
def test_a_head_of_others_finds_its_base_model_parallel(first: str) -> None:
    model, every = build("llama"), batches("cu", 2)
    for batch in every:
        batch["seq_idx"] = torch.zeros_like(batch["input_ids"])  # says nothing to attention
    whole = one_process(model, every, causal=True)
    valid = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in every)

    def rank(comm: Comm) -> Any:
        own, batch = copy.deepcopy(model), every[comm.rank]
        if first == "head":
            _fused(own)
        with seqpar.parallelize(own, comm) as handle:
            if first != "head":
                _fused(own)
            before = comm.stats.bytes_sent
            loss = own(**batch, fused_lm_head=True) / valid
            loss.backward()
            sent = comm.stats.bytes_sent - before
            plain = float(own(**batch, fused_lm_head=False).loss.detach())
            with pytest.raises(
                NotImplementedError, match="LlamaModel on several ranks got labels, supported are input_ids"
            ):
                own.model(**batch)
            with handle.local():
                alone = own.model(input_ids=batch["input_ids"]).last_hidden_state
        assert torch.equal(own.model(input_ids=batch["input_ids"]).last_hidden_state, alone)
        return float(loss.detach()), plain, sent, {name: p.grad for name, p in own.named_parameters()}

    (loss, plain, sent, grads), (other_loss, other_plain, _, others) = run_threads(2, rank)
    assert sent > 0 and loss + other_loss == pytest.approx(float(whole.loss), rel=1e-6)
    assert plain == other_plain == pytest.approx(float(whole.loss), rel=1e-6)
    for name, grad in whole.grads.items():
        assert float((grads[name] + others[name] - grad).abs().max()) <= 1e-5 * largest(whole.grads), name


def test_a_base_model_that_is_computed_again_as_a_whole_is_refused() -> None:
    model, batch = build("llama"), batches("right", 1)[0]
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    with seqpar.parallelize(model, LocalComm()):
        out = checkpoint(lambda: model.model(**inputs).last_hidden_state, use_reentrant=False)
        with pytest.raises(NotImplementedError, match="recomputed in backward as a whole.* checkpoint its layers"):
            out.sum().backward()


def test_a_model_in_a_model_is_parallel_once() -> None:
    model, batch, comm = build("llama"), batches("right", 1)[0], LocalComm()
    with seqpar.parallelize(model.model, comm), pytest.raises(ValueError, match="LlamaModel in LlamaForCausalLM"):
        seqpar.parallelize(model, comm)
    with seqpar.parallelize(model, comm), pytest.raises(ValueError, match="LlamaModel is parallel already"):
        seqpar.parallelize(model.model, comm)
    model(**batch)
