"""What errors of diffusers models say to do, done: outputs and gradients are those of one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers the backend "fake"
from torch.utils.checkpoint import checkpoint

import seqpar
from seqpar import Comm, Layout, LocalComm, Mask, Plan
from seqpar.integrations.diffusers import parallelize
from seqpar.testing import run_threads
from seqpar.train import all_sum, sync_gradients
from tests.advice.remedies import advised, default_group
from tests.dsp.cases import clip, latte
from tests.dsp.models import SHARDED

diffusers = pytest.importorskip("diffusers")
transformer_flux = pytest.importorskip("diffusers.models.transformers.transformer_flux")

from diffusers import hooks  # noqa: E402
from diffusers.hooks import smoothed_energy_guidance_utils  # noqa: E402
from diffusers.models.attention_dispatch import attention_backend  # noqa: E402

from tests.integrations.diffusers_models import ids, made, random  # noqa: E402

MODEL, INPUTS = made("flux", samples=1)
with torch.no_grad():
    OUT = MODEL(**INPUTS).sample
TARGET = random(*OUT.shape, seed=9)


def is_right(model: nn.Module) -> bool:
    """Whether the output is that of one process."""
    with torch.no_grad():
        return torch.allclose(model(**INPUTS).sample, OUT, atol=1e-10)


def right_after(mistake: Callable[[Comm, nn.Module], None]) -> bool:
    """Whether the parallel model is right on two ranks after each has made a mistake with it."""

    def rank(comm: Comm) -> bool:
        model = copy.deepcopy(MODEL)
        seqpar.parallelize(model, comm)
        mistake(comm, model)
        return is_right(model)

    return run_threads(2, rank) == [True, True]


def test_a_plan_is_told_where_the_keys_of_audio_are() -> None:
    model, inputs = made("ltx2", samples=1)
    with torch.no_grad():
        expected = model(**inputs).sample

    def rank(comm: Comm) -> Tensor:
        own = copy.deepcopy(model)
        with advised(TypeError, "give a function of (mask, layout, *, kv_layout=)"):
            seqpar.parallelize(own, comm, plan=lambda mask, layout: Plan(mask, layout, ulysses=2))
        seqpar.parallelize(own, comm, plan=lambda mask, layout, **keys: Plan(mask, layout, ulysses=2, **keys))
        with torch.no_grad():
            return own(**inputs).sample

    for got in run_threads(2, rank):
        assert torch.allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_a_model_of_stages_is_made_parallel_by_stages() -> None:
    model, given = latte(4, 2, 1), clip(4, 2, 1)
    with advised(NotImplementedError, "call seqpar.dsp.parallelize(model, comm)"):
        parallelize(model, LocalComm())
    with torch.no_grad():
        expected = model(**given).sample

    def rank(comm: Comm) -> Tensor:
        own = copy.deepcopy(model)
        seqpar.dsp.parallelize(own, comm, plan=SHARDED)
        with torch.no_grad():
            return own(**given).sample  # type: ignore[no-any-return]

    assert all(torch.allclose(out, expected, atol=1e-10) for out in run_threads(2, rank))


def chroma(image: int, text: int) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = diffusers.ChromaTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=12, num_attention_heads=3,
        joint_attention_dim=8, axes_dims_rope=(4, 4, 4), approximator_num_channels=8, approximator_hidden_dim=8,
        approximator_layers=1,
    )  # fmt: skip
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model.double(), {
        "hidden_states": random(1, image, 4, seed=1), "encoder_hidden_states": random(1, text, 8, seed=2),
        "timestep": torch.tensor([0.5]).double(), "img_ids": ids(1, image, 3), "txt_ids": torch.zeros(text, 3).double(),
    }  # fmt: skip


def test_rows_of_a_model_without_a_recipe_are_shared_out_by_hand() -> None:
    image, text = 10, 4
    model, given = chroma(image, text)
    with advised(
        NotImplementedError,
        "if its arguments are rows of tokens and their positions, and only attention mixes rows, share them out "
        "yourself and call it inside `seqpar.sdpa`",
    ):
        seqpar.parallelize(model, LocalComm())
    images, texts = np.arange(image).reshape(2, -1), np.arange(text).reshape(2, -1)
    layout = Layout([np.concatenate([t, text + i]) for t, i in zip(texts, images)])
    plan = Plan(Mask([text + image], causal=False), layout)

    def rank(comm: Comm) -> Tensor:
        i, t = images[comm.rank], texts[comm.rank]
        with torch.no_grad(), seqpar.sdpa(plan, comm):
            return model(  # type: ignore[no-any-return]
                hidden_states=given["hidden_states"][:, i], encoder_hidden_states=given["encoder_hidden_states"][:, t],
                timestep=given["timestep"], img_ids=given["img_ids"][i], txt_ids=given["txt_ids"][t],
            ).sample  # fmt: skip

    with torch.no_grad():
        expected = model(**given).sample
    assert torch.allclose(torch.cat(run_threads(2, rank), 1), expected, atol=1e-10)


def test_a_model_under_parallelism_of_diffusers_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    model = copy.deepcopy(MODEL)
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=2)
    try:
        model.enable_parallelism(config=diffusers.ContextParallelConfig(ulysses_degree=2))
    finally:
        dist.destroy_process_group()
    with advised(NotImplementedError, "create it without that"):
        seqpar.parallelize(model, LocalComm())
    assert right_after(lambda comm, model: None)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_cache_is_disabled(when: str) -> None:
    """Its hooks take the place of a module's forward, and put back what was there."""
    cache = diffusers.PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2, current_timestep_callback=lambda: 500
    )

    def rank(comm: Comm) -> bool:
        model = copy.deepcopy(MODEL)
        if when == "before":
            model.enable_cache(cache)
            with advised(NotImplementedError, "call its disable_cache() first"):
                seqpar.parallelize(model, comm)
            model.disable_cache()
        handle = seqpar.parallelize(model, comm)
        if when == "after":
            model.enable_cache(cache)
            with advised((NotImplementedError, ValueError), "call its disable_cache() first"):
                is_right(model)
            model.disable_cache()
        right = is_right(model)
        handle.undo()
        return right and is_right(model)

    assert run_threads(2, rank) == [True, True]


@pytest.mark.parametrize("how", ["blur", "dropout", "cache"])
def test_a_hook_that_sees_a_share_is_removed(how: str) -> None:
    def put(model: nn.Module) -> str:
        if how == "blur":
            queries = model.transformer_blocks[0].attn.to_q  # type: ignore[union-attr, index]
            registry = hooks.HookRegistry.check_if_exists_or_initialize(queries)
            registry.register_hook(smoothed_energy_guidance_utils.SmoothedEnergyGuidanceHook(), "blur")
            return "blur"
        if how == "dropout":
            hooks.apply_layer_skip(model, diffusers.LayerSkipConfig(indices=[0], fqn="transformer_blocks", dropout=0.3))
            return hooks.layer_skip._LAYER_SKIP_HOOK
        hooks.apply_pyramid_attention_broadcast(model, diffusers.PyramidAttentionBroadcastConfig(
            spatial_attention_block_skip_range=2, current_timestep_callback=lambda: 500))  # fmt: skip
        return hooks.pyramid_attention_broadcast._PYRAMID_ATTENTION_BROADCAST_HOOK

    def mistake(comm: Comm, model: nn.Module) -> None:
        key = put(model)
        with advised(
            (NotImplementedError, ValueError),
            "remove it, by the model's disable_cache() if it is a cache, or by "
            "HookRegistry.check_if_exists_or_initialize(model).remove_hook({})",
        ):
            is_right(model)
        hooks.HookRegistry.check_if_exists_or_initialize(model).remove_hook(key)

    assert right_after(mistake)


def adapted(model: nn.Module, **config: Any) -> nn.Module:
    """The model with an adapter that does something."""
    peft = pytest.importorskip("peft")
    model.add_adapter(peft.LoraConfig(r=2, init_lora_weights=False, **config))  # type: ignore[operator]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.linspace(-0.3, 0.3, parameter.numel()).view(parameter.shape))
    return model


@pytest.mark.parametrize("size", [(3, 5), (1, 2)])
def test_an_adapter_on_a_module_that_gathers_comes_first(size: tuple[int, int]) -> None:
    """With a token on each rank its share would be spread over all tokens, without an error."""
    own, given = made("flux", samples=1, grid=size)
    with torch.no_grad():
        expected = adapted(copy.deepcopy(own), target_modules=["to_q", "proj_out"])(**given).sample

    def rank(comm: Comm) -> bool:
        model = copy.deepcopy(own)
        handle = seqpar.parallelize(model, comm)
        adapted(model, target_modules=["to_q", "proj_out"])
        with (
            torch.no_grad(),
            advised((NotImplementedError, ValueError), "call undo() of the handle and parallelize the model again"),
        ):
            model(**given)
        handle.undo()
        seqpar.parallelize(model, comm)
        with torch.no_grad():
            return torch.allclose(model(**given).sample, expected, atol=1e-8)

    assert run_threads(2, rank) == [True, True]


def test_dropout_is_off() -> None:
    def mistake(comm: Comm, model: nn.Module) -> None:
        dropout = next(m for m in model.modules() if isinstance(m, nn.Dropout))
        model.train()
        dropout.p = 0.5
        with advised((NotImplementedError, ValueError), "set its p to 0"):
            is_right(model)
        dropout.p = 0

    assert right_after(mistake)


@pytest.mark.filterwarnings("ignore:.*of your own:UserWarning")
def test_random_numbers_are_drawn_outside() -> None:
    """As a callback or an adapter may, which is no module of dropout."""

    def mistake(comm: Comm, model: nn.Module) -> None:
        feed = model.transformer_blocks[0].ff  # type: ignore[union-attr, index]
        hook = feed.register_forward_hook(lambda module, given, out: nn.functional.dropout(out, 0.3))  # type: ignore[union-attr, operator]
        with advised((NotImplementedError, ValueError), "draw them before the forward, or do without"):
            is_right(model)
        hook.remove()

    assert right_after(mistake)


@pytest.mark.parametrize("way", ["its own", "in force"])
def test_attention_is_that_of_pytorch(way: str) -> None:
    def mistake(comm: Comm, model: nn.Module) -> None:
        if way == "its own":
            model.set_attention_backend("flex")  # type: ignore[operator]
        with advised((NotImplementedError, ValueError), "call set_attention_backend('native')"):
            is_right(model)
        model.set_attention_backend("native")  # type: ignore[operator]

    with attention_backend("native" if way == "its own" else "flex"):
        assert right_after(mistake)


@pytest.mark.filterwarnings("ignore:.*of your own:UserWarning")
def test_processors_are_those_of_diffusers() -> None:
    other = type("FluxAttnProcessor", (), {"__call__": lambda self, attn, x, *_, **__: (x, x)})

    def rank(comm: Comm) -> bool:
        model = copy.deepcopy(MODEL)
        attention = model.transformer_blocks[0].attn
        with seqpar.parallelize(model, comm):
            attention.set_processor(other())
            with advised(NotImplementedError, "give it a processor of diffusers as it is"):
                is_right(model)
            attention.set_processor(transformer_flux.FluxAttnProcessor())
            return is_right(model)

    assert run_threads(2, rank) == [True, True]


@pytest.mark.filterwarnings("ignore:.*of your own:UserWarning")
def test_attention_is_given_no_mask() -> None:
    def masked(module: nn.Module, args: Any, given: dict[str, Any]) -> Any:
        return args, given | {"attention_mask": torch.ones(1, 1, 20, 20).bool()}

    def mistake(comm: Comm, model: nn.Module) -> None:
        attention = model.transformer_blocks[0].attn  # type: ignore[union-attr, index]
        hook = attention.register_forward_pre_hook(masked, with_kwargs=True)  # type: ignore[union-attr, operator]
        with advised(NotImplementedError, "leave it out"):
            is_right(model)
        hook.remove()

    assert right_after(mistake)


def test_parts_of_a_model_run_inside_it_also_when_they_are_recomputed() -> None:
    def mistake(comm: Comm, model: nn.Module) -> None:
        with advised(
            RuntimeError,
            "call the model, checkpoint with torch.utils.checkpoint, and run such a backward inside local() too",
        ):
            model.transformer_blocks[0].attn(INPUTS["hidden_states"])  # type: ignore[union-attr, index, operator]

    assert right_after(mistake)
    plain = copy.deepcopy(MODEL)
    (plain(**INPUTS).sample - TARGET).square().mean().backward()

    def is_plain(model: nn.Module) -> bool:
        return torch.allclose(model.x_embedder.weight.grad, plain.x_embedder.weight.grad, atol=1e-10)  # type: ignore[union-attr, arg-type]

    def rank(comm: Comm) -> bool:
        model = copy.deepcopy(MODEL)
        handle = seqpar.parallelize(model, comm)
        model.enable_gradient_checkpointing(lambda block, *args: checkpoint(block, *args, use_reentrant=False))
        (model(**INPUTS).sample - TARGET).square().mean().backward()
        sync_gradients(model.parameters(), comm)
        assert is_plain(model)
        model.zero_grad()
        with handle.local():
            loss = (model(**INPUTS).sample - TARGET).square().mean()
        with pytest.raises(RuntimeError, match=r"the backward of a forward inside local\(\)"):
            loss.backward()
        model.zero_grad()
        with handle.local():
            (model(**INPUTS).sample - TARGET).square().mean().backward()
        return is_plain(model)

    assert run_threads(2, rank) == [True, True]


def test_noise_is_drawn_with_one_seed() -> None:
    def drawn(seed: int) -> dict[str, Any]:
        return INPUTS | {"hidden_states": random(1, 15, 4, seed=seed)}

    def mistake(comm: Comm, model: nn.Module) -> None:
        with (
            torch.no_grad(),
            advised(ValueError, "pass the same whole tensors on every rank, drawn with the same seed"),
        ):
            model(**drawn(comm.rank))
        with torch.no_grad():
            assert torch.allclose(model(**drawn(3)).sample, MODEL(**drawn(3)).sample, atol=1e-10)

    assert right_after(mistake)


def test_adapters_are_added_on_every_rank() -> None:
    peft = pytest.importorskip("peft")

    def add(model: Any) -> None:
        model.add_adapter(peft.LoraConfig(r=2, target_modules=["to_q"]))  # whose last matrices are zero

    def mistake(comm: Comm, model: nn.Module) -> None:
        if comm.rank:
            add(model)
        with torch.no_grad(), advised(ValueError, "add the same adapters on every rank"):
            model(**INPUTS)
        if not comm.rank:
            add(model)
        for name, p in model.named_parameters():
            if "lora_A" in name:  # drawn by each rank
                p.data.fill_(0.1)

    assert right_after(mistake)


def test_weights_are_drawn_or_loaded_alike() -> None:
    def drawn(model: nn.Module, seed: int) -> None:
        nn.init.normal_(model.proj_out.bias, generator=torch.Generator().manual_seed(seed))  # type: ignore[union-attr, arg-type]

    def rank(comm: Comm) -> bool:
        model, plain = copy.deepcopy(MODEL), copy.deepcopy(MODEL)
        seqpar.parallelize(model, comm)
        drawn(model, comm.rank)
        with torch.no_grad():
            with advised(ValueError, "load the same ones on every rank, or draw them with the same seed"):
                model(**INPUTS)
            for each in (model, plain):
                drawn(each, 0)
            return torch.allclose(model(**INPUTS).sample, plain(**INPUTS).sample, atol=1e-10)

    assert run_threads(2, rank) == [True, True]


def test_a_wrapper_that_averages_is_told_to_the_model_alike() -> None:
    plain = copy.deepcopy(MODEL)
    (plain(**INPUTS).sample - TARGET).square().mean().backward()

    def rank(comm: Comm) -> bool:
        model = copy.deepcopy(MODEL)
        other = seqpar.parallelize(model, comm, average_over=1 + comm.rank)
        with advised(ValueError, "give every rank the same one"):
            model(**INPUTS)
        other.undo()
        seqpar.parallelize(model, comm, average_over=2)
        (model(**INPUTS).sample - TARGET).square().mean().backward()
        average = all_sum(model.x_embedder.weight.grad, comm) / 2  # as a wrapper does
        return torch.allclose(average, plain.x_embedder.weight.grad, atol=1e-10)

    assert run_threads(2, rank) == [True, True]

    def step(average_over: int) -> Tensor:
        model = copy.deepcopy(MODEL)
        with seqpar.parallelize(model, LocalComm(), average_over=average_over):
            (DistributedDataParallel(model)(**INPUTS).sample - TARGET).square().mean().backward()
        return model.x_embedder.weight.grad  # type: ignore[union-attr, return-value]

    with default_group():
        with advised(UserWarning, "give seqpar.parallelize(..., average_over={}), and leave the loss as it is"):
            step(2)
        assert torch.allclose(step(1), plain.x_embedder.weight.grad, atol=1e-10)


def test_gradients_are_summed_before_a_step() -> None:
    def trained(model: nn.Module, sums: Callable[[], object], steps: int = 2) -> Tensor:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(steps):
            optimizer.zero_grad()
            (model(**INPUTS).sample - TARGET).square().mean().backward()
            sums()
            optimizer.step()
        return model.x_embedder.weight.detach()  # type: ignore[union-attr, return-value]

    expected = trained(copy.deepcopy(MODEL), lambda: None)

    def rank(comm: Comm) -> bool:
        model = copy.deepcopy(MODEL)
        seqpar.parallelize(model, comm)
        with advised(
            ValueError,
            "start again from equal weights, and call seqpar.train.sync_gradients(model.parameters(), comm) before "
            "every step of the optimizer",
        ):
            trained(model, lambda: None)
        model = copy.deepcopy(MODEL)
        seqpar.parallelize(model, comm)
        return torch.allclose(trained(model, lambda: sync_gradients(model.parameters(), comm)), expected, atol=1e-10)

    assert run_threads(2, rank) == [True, True]


def test_the_loss_is_computed_alike() -> None:
    plain = copy.deepcopy(MODEL)
    (plain(**INPUTS).sample - TARGET).square().mean().backward()

    def rank(comm: Comm) -> bool:
        model = copy.deepcopy(MODEL)
        seqpar.parallelize(model, comm)
        with advised(ValueError, "compute the whole loss on every rank, from the same target{}"):
            (model(**INPUTS).sample - TARGET * comm.rank).square().mean().backward()
        model.zero_grad()
        (model(**INPUTS).sample - TARGET).square().mean().backward()
        sync_gradients(model.parameters(), comm)
        return torch.allclose(model.x_embedder.weight.grad, plain.x_embedder.weight.grad, atol=1e-10)

    assert run_threads(2, rank) == [True, True]


@pytest.mark.parametrize("way", ["none", "of samples"])
def test_feed_forward_layers_run_in_parts_along_samples(way: str) -> None:
    own, given = made("sd3")
    with torch.no_grad():
        expected = own(**given).sample

    def rank(comm: Comm) -> bool:
        model = copy.deepcopy(own)
        seqpar.parallelize(model, comm)
        model.enable_forward_chunking(chunk_size=5, dim=1)
        with advised(
            NotImplementedError,
            "call disable_forward_chunking(), or enable_forward_chunking(dim=0) for parts along samples",
        ):
            model(**given)
        if way == "none":
            model.disable_forward_chunking()
        else:
            model.enable_forward_chunking(dim=0)
        with torch.no_grad():
            return torch.allclose(model(**given).sample, expected, atol=1e-8)

    assert run_threads(2, rank) == [True, True]


def test_a_class_gets_another_forward_before_its_model_is_made_parallel(monkeypatch: pytest.MonkeyPatch) -> None:
    model, kind = copy.deepcopy(MODEL), type(MODEL)
    former = kind.forward
    handle = parallelize(model, LocalComm())

    def halved(self: nn.Module, hidden_states: Tensor, **named: Any) -> Any:
        return former(self, hidden_states / 2, **named)

    monkeypatch.setattr(kind, "forward", halved)
    with advised(NotImplementedError, "call undo() of the handle and make the model parallel again"):
        model(**INPUTS)
    handle.undo()
    with torch.no_grad():
        expected = model(**INPUTS).sample
        with parallelize(model, LocalComm()):
            assert torch.allclose(model(**INPUTS).sample, expected, atol=1e-10)
    assert not torch.allclose(expected, OUT)
