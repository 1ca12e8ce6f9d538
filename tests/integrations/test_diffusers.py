"""Transformers of diffusers on several ranks: equal to one process, or refused by name."""

from __future__ import annotations

import copy
import gc
import math
import re
import types
from collections.abc import Callable
from functools import partial
from typing import Any

import diffusers
import pytest
import torch
from diffusers import hooks
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import seqpar
from seqpar import Comm, Layout, LocalComm, Mask, Plan
from seqpar.integrations.diffusers import parallelize
from seqpar.testing import run_threads
from seqpar.train import sync_gradients
from tests.dsp.models import walks
from tests.integrations.diffusers_models import MODELS, TEXT, loss_of, made, random
from tests.ranks import errors_on_copies, on_copies
from tests.recompute import in_a_thread

Results = tuple[Tensor, dict[str, Tensor]]


def step(comm: Comm | None, model: nn.Module, inputs: dict[str, Any], plan: Any = Plan) -> Results:
    """Output, and gradients of parameters and latents summed over ranks, or of one process."""
    model = copy.deepcopy(model)
    handle = comm and parallelize(model, comm, plan=plan)  # noqa: F841
    latents = inputs["hidden_states"].clone().requires_grad_()
    out, loss = loss_of(model, inputs | {"hidden_states": latents})
    loss.backward()
    return out, summed(comm, model, latents)


def summed(comm: Comm | None, model: nn.Module, latents: Tensor) -> dict[str, Tensor]:
    """The gradients, summed over ranks."""
    if comm is not None:
        sync_gradients([*model.parameters(), latents], comm)
    return {name: p.grad for name, p in model.named_parameters()} | {"latents": latents.grad}


one = partial(step, None)


def check(ranks: int, model: nn.Module, inputs: dict[str, Any], plan: Any = Plan) -> None:
    """That any rank has the output and gradients of one process."""
    expected = one(model, inputs)
    for got in run_threads(ranks, step, model, inputs, plan):
        same(got, expected, 1e-10)


def outputs(
    model: nn.Module, inputs: dict[str, Any], change: Callable[[Any], object] = lambda own: None
) -> list[Tensor]:
    """What each of two ranks makes of a call of its parallel copy, after a change."""

    def call(own: Any, comm: Comm) -> Tensor:
        change(own)
        with torch.no_grad():
            return own(**inputs, return_dict=False)[0]

    return on_copies(model, call)


def plan_for_both(mask: Mask, layout: Layout, **options: Any) -> Plan:
    """A user's own function."""
    return Plan(mask, layout, transport="ring" if options else "fetch", **options)


def same(got: Results, expected: Results, bound: float, exact: Results | None = None) -> None:
    """Equal to a bound relative to each tensor's largest; beyond it only where one process is as far from exact."""
    largest = max(float(g.abs().max()) for g in expected[1].values() if g is not None)
    pairs = [("output", got[0], expected[0], exact and exact[0])]
    pairs += [(name, got[1][name], grad, exact and exact[1][name]) for name, grad in expected[1].items()]
    for name, mine, grad, true in pairs:
        if grad is None:
            assert mine is None or not mine.any(), name
        else:
            scale = max(float(grad.abs().max()), 1e-4 * largest)
            own = 0.0 if true is None else float((grad - true).abs().max())
            assert float((mine - grad).abs().max()) <= bound * scale + 4 * own, name


@pytest.fixture
def no_islands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models compute parts in float32 whatever their dtype; in float64 they would hide errors of 1e-8."""
    cast, to = Tensor.float, Tensor.to

    def kept(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if x.dtype == torch.float64:
            args = tuple(torch.float64 if each is torch.float32 else each for each in args)
            kwargs = {name: torch.float64 if each is torch.float32 else each for name, each in kwargs.items()}
        return to(x, *args, **kwargs)

    monkeypatch.setattr(Tensor, "float", lambda x: x if x.dtype == torch.float64 else cast(x))
    monkeypatch.setattr(Tensor, "to", kept)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sampled(2)
def test_outputs_and_gradients_are_those_of_one_process(name: str, no_islands: None) -> None:
    for ranks in (2, 3, 4):
        check(ranks, *made(name))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sampled(3)
def test_they_are_in_float32_too(name: str) -> None:
    model, inputs = made(name, torch.float32)
    expected, exact = one(model, inputs), one(*made(name))
    for got in run_threads(3, step, model, inputs):
        same(got, expected, 1e-5, exact)


RING, WIDE = partial(Plan, transport="ring"), partial(Plan, ulysses=3)
# name, ranks, numbers of tokens, plan: less text or audio than ranks, and any number of ranks for 15 or 30 tokens
SIZES: list[tuple[str, int, dict[str, int], Any]] = [
    *((name, 3, {"text": text, "samples": samples}, plan) for name, text, samples, plan in (
        ("flux", 1, 1, WIDE), ("flux", 2, 2, RING), ("flux2", 2, 2, Plan), ("qwen", 1, 1, RING),
        ("qwen masked", 2, 2, Plan), ("wan", 1, 1, WIDE), ("ltx", 2, 2, RING), ("hunyuan masked", 4, 2, RING),
        ("hunyuan", 1, 1, Plan), ("sd3", 2, 2, Plan), ("cogvideox", 1, 2, Plan), ("cogvideox 2b", 2, 1, Plan),
        ("ltx2", 1, 2, WIDE), ("helios", 2, 2, RING), ("minimax", 1, 2, WIDE),
    )),
    *((name, 4, {"audio": audio}, plan) for name in ("ltx2", "ltx2 newer", "minimax") for audio in (1, 3)
      for plan in (Plan, RING, partial(Plan, ulysses=2), plan_for_both)),
    *((name, ranks, {}, Plan) for name in ("wan", "flux", "sd3") for ranks in range(1, 9)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "ranks", "sizes", "plan"), SIZES, ids=lambda x: None if callable(x) else str(x))
@pytest.mark.sampled(3)
def test_ranks_may_be_any_number_and_more_than_words(
    name: str, ranks: int, sizes: dict[str, int], plan: Any, no_islands: None
) -> None:  # fmt: skip
    check(ranks, *made(name, **sizes), plan)


@pytest.mark.parametrize(
    "more",
    [
        {"isolate_modalities": True}, {"perturbation_mask": None}, {"perturbation_mask": torch.zeros(2, 1, 1).double()},
        {"use_cross_timestep": False}, {"audio_timestep": torch.tensor([90.0, 700.0]).double()},
        {"video_coords": random(2, 3, 30, 2, seed=8).abs(), "audio_coords": random(2, 1, 7, 2, seed=9).abs()},
        {"audio_encoder_attention_mask": torch.tensor([[1, 1, 0, 0, 0], [1, 1, 1, 1, 0]]), "fps": 12.0},
    ],
    ids=lambda more: ", ".join(more),
)  # fmt: skip
@pytest.mark.sampled(3)
def test_what_pipelines_ask_of_ltx_2(more: dict[str, Any], no_islands: None) -> None:
    model, inputs = made("ltx2 newer")
    check(3, model, inputs | more)


def _fails_on_one(comm: Comm) -> Callable[..., Plan]:
    def plan(mask: Mask, layout: Layout) -> Plan:
        if comm.rank:
            raise KeyError("no plan")
        return Plan(mask, layout)

    return plan


def _elsewhere(mask: Mask, layout: Layout, kv_layout: Layout | None = None) -> Plan:
    return Plan(mask, layout, kv_layout=None if kv_layout is None else Layout.striped(kv_layout.total, 2))


WRONG_PLANS: dict[str, tuple[Callable[[Comm], Any], type[Exception] | tuple[type[Exception], ...], str]] = {
    "another mask": (
        lambda _: lambda mask, layout: Plan(Mask(mask.lengths), layout), ValueError, "expected one of the mask"),
    "another layout": (
        lambda comm: lambda mask, _: Plan(mask, Layout.striped(mask.tokens, comm.size)), ValueError,
        "expected one of the mask"),
    "none": (lambda _: lambda mask, layout: None, TypeError, "plan= gave None, expected a Plan of the mask"),
    "an error on one rank": (_fails_on_one, (KeyError, ValueError), "no plan"),
    "other places of keys": (lambda _: _elsewhere, ValueError, "expected one of the mask and layout given"),
    "not told where keys are": (
        lambda _: lambda mask, layout: Plan(mask, layout), TypeError, "unexpected keyword argument 'kv_layout'"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_PLANS)
def test_a_plan_of_something_else_is_refused_on_every_rank(name: str) -> None:
    model, inputs = made("ltx2" if "keys" in name else "flux", samples=1)
    make, kind, message = WRONG_PLANS[name]

    def rank(comm: Comm) -> None:
        with parallelize(copy.deepcopy(model), comm, plan=make(comm)) as handle, pytest.raises(kind, match=message):
            handle.model(**inputs)

    run_threads(2, rank)


@pytest.mark.parametrize("where", ["model", "block"])
def test_another_forward_of_a_class_is_refused(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would not run: the one that the model had is inside the parallel one."""
    model, inputs = made("flux", samples=1)
    with parallelize(model, LocalComm()):
        part = {"model": model, "block": model.transformer_blocks[0]}[where]
        kind = type(part)
        former = kind.forward
        monkeypatch.setattr(kind, "forward", lambda self, *args, **named: former(self, *args, **named))
        with pytest.raises(NotImplementedError, match=f"{kind.__name__}, whose class has another forward than when"):
            model(**inputs)
    model(**inputs)


def strided(x: Any) -> Any:
    """The same tensor, of which no two elements are neighbours; one of one element as an expanded scalar."""
    if not isinstance(x, Tensor):
        return x
    return x.reshape(()).expand(x.shape) if x.numel() == 1 else torch.stack([x, x], -1)[..., 0]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sampled(3)
def test_tensors_may_lie_in_memory_as_they_like(name: str) -> None:
    model, inputs = made(name) if name == "qwen masked" else made(name, samples=1)
    expected = run_threads(2, step, model, inputs)
    for got, want in zip(run_threads(2, step, model, {k: strided(x) for k, x in inputs.items()}), expected):
        same(got, want, 1e-12)


@pytest.mark.parametrize("name", ["flux", "flux2", "sd3", "hunyuan masked", "bria"])
@pytest.mark.sampled(2)
def test_text_of_one_sample_is_that_of_all_as_in_one_process(name: str, no_islands: None) -> None:
    model, inputs = made(name)
    for name in inputs.keys() & {"encoder_hidden_states", "encoder_attention_mask"}:
        inputs[name] = inputs[name][:1]
    check(2, model, inputs)


def test_a_pipeline_makes_the_latents_of_one_process_of_one_prompt() -> None:
    model, _ = made("wan", torch.float32)
    text = random(1, TEXT, 8, seed=2).float()

    def rank(comm: Comm) -> Tensor:
        own = copy.deepcopy(model)
        if comm.size > 1:
            parallelize(own, comm)
        pipeline = diffusers.WanPipeline(
            tokenizer=None, text_encoder=None, vae=None, transformer=own, scheduler=diffusers.UniPCMultistepScheduler()
        )
        pipeline.set_progress_bar_config(disable=True)
        return pipeline(
            prompt_embeds=text, negative_prompt_embeds=-text, height=32, width=48, num_frames=9, num_inference_steps=2,
            output_type="latent", generator=torch.Generator().manual_seed(3),
        ).frames  # fmt: skip

    (expected,) = run_threads(1, rank)
    for got in run_threads(2, rank):
        assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize(("name", "count"), [("flux", 15), ("wan", 30)])
def test_no_whole_hidden_state_outlives_the_cut(name: str, count: int, width: int = 24) -> None:
    """By storages: those that backward keeps, and those of all objects at a later block and after the forward."""
    gc.collect()
    other = {id(x): x for x in gc.get_objects() if issubclass(type(x), Tensor)}  # of other tests
    model, inputs = made(name)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def large(tensors: list[Any]) -> list[torch.Size]:
        with torch._C.DisableTorchFunctionSubclass():
            storages = [(x.shape, x.untyped_storage()) for x in tensors if x.shape[-1:] == (width,)]
        return [shape for shape, x in storages if x.nbytes() >= 2 * count * width * 8 and x.data_ptr() not in weights]

    def rank(comm: Comm) -> list[torch.Size]:
        own, found = copy.deepcopy(model), list[torch.Size]()
        parallelize(own, comm)
        own(**inputs)
        weights.update(p.untyped_storage().data_ptr() for p in own.parameters())

        def look(*_: Any) -> None:
            comm.gather("test: all ranks are here", None)
            found.extend(large([x for x in gc.get_objects() if issubclass(type(x), Tensor) and id(x) not in other]))
            comm.gather("test: all ranks have looked", None)

        later = own.single_transformer_blocks[0] if name == "flux" else own.blocks[1]
        later.register_forward_pre_hook(look)
        with saved_tensors_hooks(lambda x: found.extend(large([x])) or x, lambda x: x):
            out = own(**inputs).sample
        look()
        assert out.requires_grad
        return found

    assert run_threads(2, rank) == [[], []]


@pytest.mark.parametrize("tokens", [1, 2])
def test_an_image_may_be_smaller_than_the_ranks(tokens: int, no_islands: None) -> None:
    model, inputs = made("flux")
    few = {"hidden_states": inputs["hidden_states"][:, :tokens], "img_ids": inputs["img_ids"][:tokens]}
    check(4, model, inputs | few)


@pytest.mark.parametrize(
    ("name", "reentrant", "where"),
    [
        *(("flux", reentrant, where) for reentrant in (True, False) for where in ("here", "thread", "another plan")),
        ("qwen masked", False, "thread"), ("wan", False, "another plan"), ("ltx", True, "here"),
        ("hunyuan masked", False, "thread"), ("cogvideox", True, "another plan"), ("sd3", False, "here"),
        ("ltx2", True, "thread"), ("ltx2 newer", False, "another plan"), ("helios", True, "thread"),
        ("helios amplified", False, "here"), ("minimax", True, "another plan"), ("minimax", False, "thread"),
        *((name, reentrant, "undone") for name in ("wan", "helios", "ltx2") for reentrant in (True, False)),
        ("ltx2", True, "local"),
        *(("flux", reentrant, where) for reentrant in (True, False) for where in ("around", "around, undone")),
    ],
)  # fmt: skip
@pytest.mark.sampled(3)
def test_checkpoints_recompute_the_same(name: str, reentrant: bool, where: str, no_islands: None) -> None:
    """where: of the backward; "around": the checkpoint is around the model, and not in it."""
    model, inputs = made(name)
    expected, around = one(model, inputs), "around" in where
    if not around:
        model.enable_gradient_checkpointing(partial(checkpoint, use_reentrant=reentrant))

    def rank(comm: Comm) -> Results:
        own = copy.deepcopy(model)
        handle = parallelize(own, comm)
        latents = inputs["hidden_states"].clone().requires_grad_()

        def forward(x: Tensor) -> tuple[Tensor, Tensor]:
            return loss_of(own, inputs | {"hidden_states": x})

        out, loss = checkpoint(forward, latents, use_reentrant=reentrant) if around else forward(latents)
        if where == "thread":
            in_a_thread(loss.backward)
        elif where == "local":
            with handle.local():
                loss.backward()
        elif "undone" in where:
            handle.undo()
            restored = copy.deepcopy(own)
            loss.backward()
            with torch.no_grad():  # not parallel any more
                assert torch.equal(own(**inputs, return_dict=False)[0], restored(**inputs, return_dict=False)[0])
        elif where in ("here", "around"):
            loss.backward()
        else:
            plan = Plan(Mask([3], causal=False), Layout.contiguous(3, comm.size))
            with seqpar.sdpa(plan, comm):
                loss.backward()
                q = torch.zeros(1, 1, plan.rows(comm.rank), 4)
                nn.functional.scaled_dot_product_attention(q, q, q)
        return out.detach(), summed(comm, own, latents)

    for got in run_threads(2, rank):
        same(got, expected, 1e-10)


def test_forwards_of_several_sizes_before_one_backward() -> None:
    model, inputs = made("flux")
    calls = [inputs, made("flux", text=3, samples=1)[1]]
    whole = copy.deepcopy(model)
    sum(loss_of(whole, each)[1] for each in calls).backward()  # type: ignore[union-attr]

    def step(own: Any, comm: Comm) -> nn.Module:
        sum(loss_of(own, each)[1] for each in calls).backward()  # type: ignore[union-attr]
        sync_gradients(own.parameters(), comm)
        return own

    for got in on_copies(model, step, ranks=3):
        for a, b in zip(got.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sampled(3)
def test_undo_is_exact_and_other_models_are_untouched(name: str) -> None:
    model, inputs = made(name)
    second = copy.deepcopy(model)
    before = [(id(m), m.__dict__.get("forward"), set(vars(m))) for m in model.modules()]
    with torch.no_grad():
        plain = model(**inputs, return_dict=False)[0]
        handle = parallelize(model, LocalComm())
        shared = model(**inputs, return_dict=False)[0]
        copied = copy.deepcopy(model)
        for parameter in copied.parameters():
            parameter.zero_()
        assert not torch.equal(copied(**inputs, return_dict=False)[0], shared), "the copy runs its own parameters"
        assert torch.equal(model(**inputs).sample, shared) and torch.equal(second(**inputs).sample, plain)
        with pytest.raises(ValueError, match="parallel already"):
            parallelize(model, LocalComm())
        handle.undo()
        assert [(id(m), m.__dict__.get("forward"), set(vars(m))) for m in model.modules()] == before
        assert torch.equal(model(**inputs).sample, plain)
        with parallelize(model, LocalComm()):
            assert torch.equal(model(**inputs).sample, shared)
        assert torch.equal(model(**inputs).sample, plain)
    assert list(model.state_dict()) == list(second.state_dict())


def test_a_later_forward_walks_over_the_modules_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = made("flux")
    parallelize(model, LocalComm())
    for _ in range(3):  # and weights are compared
        model(**inputs)
    assert walks(monkeypatch, lambda: model(**inputs)) == [model]


def test_a_copy_of_a_module_that_an_adapter_trains_is_parallel_as_long_as_the_model() -> None:
    peft = pytest.importorskip("peft")
    model, inputs = made("flux", torch.float32)
    with torch.no_grad():
        expected = model(**inputs).sample

    def rank(comm: Comm) -> list[Tensor]:
        own = copy.deepcopy(model)
        handle = parallelize(own, comm)
        own.add_adapter(peft.LoraConfig(r=2, target_modules=["to_q"], modules_to_save=["proj_out"]))
        for name, parameter in own.named_parameters():  # ranks that are threads draw others
            if "lora_" in name:
                nn.init.zeros_(parameter)
        with torch.no_grad():
            found = [own(**inputs).sample, copy.deepcopy(own)(**inputs).sample]
            with handle.local():
                found.append(own(**inputs).sample)
            copied = copy.deepcopy(own)
            handle.undo()
            return [*found, own(**inputs).sample, copied(**inputs).sample]

    for found in run_threads(2, rank):
        for got in found:
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_fused_projections_and_autocast_are_those_of_one_process() -> None:
    model, inputs = made("flux", torch.float32)
    model.fuse_qkv_projections()

    @torch.no_grad()
    @torch.autocast("cpu", torch.bfloat16)
    def call(own: Any, comm: Comm | None = None) -> Tensor:
        return own(**inputs).sample

    expected = call(model)
    for got in on_copies(model, call):
        assert got.dtype == expected.dtype
        assert float((got - expected).abs().max()) <= 0.05 * float(expected.abs().max())


def set_backend(model: Any, inputs: dict[str, Any]) -> None:
    model.transformer_blocks[0].attn.processor._attention_backend = "flex"


REFUSED: dict[str, tuple[str, str, Callable[[Any, dict[str, Any]], Any]]] = {
    "backend": ("flux", "attention backend flex of transformer_blocks.0.attn", set_backend),
    "enable_parallelism": (
        "flux", "enable_parallelism", lambda model, inputs: setattr(model, "_parallel_config", object())),
    "parts of tokens": (
        "sd3", "transformer_blocks.0 .* cannot be computed on a rank's rows",
        lambda model, inputs: model.enable_forward_chunking(chunk_size=5, dim=1)),
    "ids": (
        "flux", "transformer_blocks.0 .*size of tensor",
        lambda model, inputs: inputs.update(img_ids=random(14, 3, seed=8))),
}  # fmt: skip


@pytest.mark.parametrize("shape", [(2, 30), (60,), (2, 30, 1), (2, 1), (2,)])
def test_a_model_that_takes_timesteps_of_tokens_in_any_shape(shape: tuple[int, ...]) -> None:
    model, inputs = made("ltx")
    inputs["timestep"] = random(60, seed=4).abs()[: math.prod(shape)].reshape(shape) * 500
    with torch.no_grad():
        expected = model(**inputs).sample
    for got in outputs(model, inputs):
        torch.testing.assert_close(got, expected, rtol=1e-8, atol=1e-8)


@pytest.mark.filterwarnings("ignore:.*of your own:UserWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_shared_out_raises_by_name(name: str) -> None:
    kind, told, change = REFUSED[name]
    model, inputs = made(kind)
    parallelize(model, LocalComm())
    change(model, inputs)
    with pytest.raises(NotImplementedError, match=told), torch.no_grad():
        model(**inputs)


def test_models_and_modules_that_are_not_shared_out_raise_by_name() -> None:
    with pytest.raises(NotImplementedError, match="Linear has no list of blocks .*; if its arguments are rows"):
        parallelize(nn.Linear(2, 2), LocalComm())
    model, inputs = made("flux")
    parallelize(model, LocalComm())
    with pytest.raises(RuntimeError, match="outside its forward"):
        model.transformer_blocks[0](inputs["hidden_states"])
    model, inputs = made("flux")
    model.enable_cache(diffusers.FasterCacheConfig(current_timestep_callback=lambda: 1))
    with pytest.raises((NotImplementedError, ValueError), match="FasterCache"):
        parallelize(model, LocalComm()).model(**inputs)


@pytest.mark.parametrize("how", ["skipped", "cast", "cast to 8 bits", "offloaded"])
def test_hooks_that_do_not_look_at_tokens_may_stay(how: str) -> None:
    model, inputs = made("wan", torch.float32)

    def hook(own: nn.Module) -> None:
        if how == "skipped":
            hooks.apply_layer_skip(own, diffusers.LayerSkipConfig(indices=[0], fqn="blocks"))
        elif "cast" in how:
            storage = torch.bfloat16 if how == "cast" else torch.float8_e4m3fn
            own.enable_layerwise_casting(storage_dtype=storage, compute_dtype=torch.float32)  # type: ignore[operator]
        else:
            cpu = torch.device("cpu")
            hooks.apply_group_offloading(own, cpu, cpu, offload_type="block_level", num_blocks_per_group=1)

    one = copy.deepcopy(model)
    hook(one)  # first: its first hook fills a table of diffusers, which threads that ask meanwhile find half empty
    with torch.no_grad():
        expected = one(**inputs).sample
    for got in outputs(model, inputs, hook):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["leaf_level", "block_level", "of accelerate"])
def test_offloading_may_come_first_and_be_taken_off_and_put_on_again(kind: str) -> None:
    """As pipelines do after each call, and where they load an adapter."""
    model, inputs = made("flux", torch.float32)

    def put(own: nn.Module) -> None:
        if kind == "of accelerate":
            for module in [own, *(module for module in own.modules() if not [*module.children()])]:
                accelerate.add_hook_to_module(module, accelerate.AlignDevicesHook("cpu"))
        else:
            cpu = torch.device("cpu")
            hooks.apply_group_offloading(own, cpu, cpu, offload_type=kind, num_blocks_per_group=1)

    def take(own: nn.Module) -> None:
        if kind == "of accelerate":
            accelerate.remove_hook_from_module(own, recurse=True)
        for name in ("group_offloading", "lazy_prefetch_group_offloading", "layer_execution_tracker"):
            hooks.HookRegistry.check_if_exists_or_initialize(own).remove_hook(name, recurse=True)

    def rank(comm: Comm) -> list[Tensor]:
        own, found = copy.deepcopy(model), []
        put(own)
        handle = parallelize(own, comm)
        with torch.no_grad():
            for change in (None, take, put, lambda _: handle.undo()):
                if change is not None:
                    change(own)
                found.append(own(**inputs).sample)
        parallelize(own, comm)
        return found

    accelerate = pytest.importorskip("accelerate.hooks")
    with torch.no_grad():
        expected = model(**inputs).sample
    for found in run_threads(2, rank):
        for got in found:
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_a_module_whose_parallel_forward_was_dropped_raises_by_name() -> None:
    model, inputs = made("flux")

    def call(own: Any, comm: Comm) -> None:
        if comm.rank:
            block = own.transformer_blocks[0]
            block.forward = partial(type(block).forward, block)
        own(**inputs)

    assert all(
        "transformer_blocks.0 of FluxTransformer2DModel was put there" in said for said in errors_on_copies(model, call)
    )


def test_a_model_that_accelerate_unwraps_stays_parallel() -> None:
    accelerate = pytest.importorskip("accelerate")
    model, inputs = made("flux", torch.float32)
    with torch.no_grad():
        expected = model(**inputs).sample

    accelerator = accelerate.Accelerator(mixed_precision="bf16", cpu=True)  # its state is one for all threads

    def rank(comm: Comm) -> Tensor:
        own = copy.deepcopy(model)
        parallelize(own, comm)
        own = accelerator.unwrap_model(accelerator.prepare(own), keep_fp32_wrapper=False)
        with torch.no_grad():
            return own(**inputs).sample  # type: ignore[no-any-return]

    try:
        for got in run_threads(2, rank):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    finally:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


DIFFER = {
    "noise": "ranks differ in argument hidden_states: ", "scalar": "ranks differ in argument return_dict: not given on",
    "missing": "ranks differ in argument guidance: ", "weights": "weights differ between rank 0 and rank 1",
    "refused": "controlnet_block_samples",
}  # fmt: skip


@pytest.mark.parametrize("what", DIFFER)
def test_ranks_that_pass_different_inputs_raise_on_all(what: str) -> None:
    model, inputs = made("flux")

    def call(own: Any, comm: Comm) -> None:
        mine = dict(inputs)
        if comm.rank == 1:
            if what == "noise":
                mine["hidden_states"] = mine["hidden_states"].flip(1)
            elif what == "weights":
                own.proj_out.bias.data[0] += 1
            elif what == "scalar":
                mine["return_dict"] = False
            elif what == "missing":
                mine.pop("guidance")
            else:
                mine["controlnet_block_samples"] = [1]
        with torch.no_grad():
            own(**mine)

    assert all(DIFFER[what] in said for said in errors_on_copies(model, call))


@pytest.mark.parametrize("alike", [True, False])
def test_weights_that_accelerate_has_put_away_are_compared(alike: bool) -> None:
    accelerate = pytest.importorskip("accelerate")
    model, inputs = made("flux", torch.float32)
    with torch.no_grad():
        expected = model(**inputs).sample

    def rank(comm: Comm) -> None:
        own = copy.deepcopy(model)
        if not alike:
            nn.init.constant_(own.proj_out.bias, comm.rank)  # type: ignore[union-attr, arg-type]
        accelerate.cpu_offload(own, execution_device=torch.device("cpu"))
        parallelize(own, comm)
        with torch.no_grad():
            if alike:
                torch.testing.assert_close(own(**inputs).sample, expected, rtol=1e-4, atol=1e-4)
                return
            with pytest.raises(ValueError, match="weights differ between rank 0 and rank 1"):
                own(**inputs)

    run_threads(2, rank)


@pytest.mark.parametrize("alike", [True, False])
def test_weights_of_adapters_that_come_later_are_compared(alike: bool) -> None:
    peft = pytest.importorskip("peft")
    model, inputs = made("flux")

    @torch.no_grad()
    def calls(own: Any, comm: Comm) -> None:
        own(**inputs)
        own.add_adapter(peft.LoraConfig(r=2, target_modules=["to_q"]))
        for name, p in own.named_parameters():
            if "lora" in name:  # drawn by each rank
                p.fill_(0.1 if alike else 0.1 + comm.rank)
        own(**inputs)

    expected = "nothing" if alike else "weights differ between rank 0 and rank 1"
    assert all(expected in said for said in errors_on_copies(model, calls))


def test_a_step_without_a_sum_is_told_whatever_ran_before() -> None:
    model, inputs = made("flux")

    def steps(own: Any, comm: Comm) -> None:
        with torch.no_grad():
            own(**inputs)
        optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
        for _ in range(2):
            loss_of(own, inputs)[1].backward()
            optimizer.step()

    for said in errors_on_copies(model, steps):
        assert re.search("differ between rank 0 and rank 1, .* an optimizer stepped", said), said


def test_a_parameter_that_one_rank_freezes_is_named() -> None:
    model, inputs = made("flux")

    def calls(own: Any, comm: Comm) -> None:
        own(**inputs)
        own.x_embedder.bias.requires_grad_(bool(comm.rank))
        own(**inputs)

    for said in errors_on_copies(model, calls):
        assert "x_embedder.bias is frozen on rank 0 and not on rank 1" in said


def test_a_copy_that_calls_the_originals_forward_is_refused() -> None:
    model, inputs = made("flux")
    parallelize(model, LocalComm())
    other = copy.deepcopy(model)
    other.forward = types.MethodType(vars(model)["forward"], other)  # type: ignore[method-assign]
    with pytest.raises(NotImplementedError, match="calls the forward of the original"):
        other(**inputs)
    model.forward = types.MethodType(vars(model)["forward"], model)  # type: ignore[method-assign]
    assert model(**inputs)[0].shape


def test_ranks_that_compute_different_losses_raise_on_all() -> None:
    model, inputs = made("flux")

    def step(own: Any, comm: Comm) -> None:
        out = own(**inputs).sample
        (out - random(*out.shape, seed=comm.rank)).square().mean().backward()

    for said in errors_on_copies(model, step):
        assert "gradient of the output of FluxTransformer2DModel differs between rank 0 and rank 1" in said


@pytest.mark.parametrize("weight", [1.0, 1e-4])
def test_a_gradient_through_two_parallel_models_is_refused(weight: float) -> None:
    """An input has a share of the gradient, and the model that computed it needs the whole, however small a part."""
    model, inputs = made("flux")

    def call(own: Any, comm: Comm) -> None:
        first = copy.deepcopy(own)(**inputs).sample
        second = own(**inputs | {"hidden_states": first}).sample
        (first.square().mean() + weight * second.square().mean()).backward()

    for said in errors_on_copies(model, call):
        assert "of FluxTransformer2DModel, and the model that computed that input needs the whole gradient" in said


@pytest.mark.parametrize("factor", [float("inf"), float("nan")])
def test_a_gradient_that_overflowed_is_left_to_the_scaler(factor: float) -> None:
    model, inputs = made("flux")

    def step(own: Any, comm: Comm) -> bool:
        (loss_of(own, inputs)[1] * factor).backward()
        return bool(own.proj_out.weight.grad.isfinite().any())

    assert on_copies(model, step) == [False, False]
