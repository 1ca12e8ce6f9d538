"""Tiny models of transformers and diffusers, and of plain PyTorch, made parallel by one call and trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import seqpar
from seqpar import Comm, Layout, Mask, Plan
from seqpar.testing import run_processes, run_threads
from seqpar.train import sync_gradients

from .groups import Cases


def drawn(make: Callable[[], nn.Module], dtype: torch.dtype = torch.float32) -> nn.Module:
    """A model with the same weights on every rank, none of them zero."""
    model = make()
    g = torch.Generator().manual_seed(0)  # a generator of its own: ranks are threads, and share the default one
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0.0, 0.1, generator=g)
    return model.to(dtype).train()


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [p.grad for p in model.parameters()]


def ring(lengths: Any, ranks: int) -> Plan:
    return Plan(Mask(lengths), Layout.zigzag(lengths, ranks), transport="ring")


def wide(lengths: Any, ranks: int) -> Plan:
    width = 2 if ranks % 2 == 0 else ranks
    return Plan(Mask(lengths), Layout.striped(sum(lengths), ranks), ulysses=width)


PLANS = {"ring": ring, "wide": wide}


SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "GptOss": {
        "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"], "num_local_experts": 4,
        "num_experts_per_tok": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
}  # fmt: skip


def language_model(name: str) -> nn.Module:
    import transformers

    config = getattr(transformers, f"{name}Config")(**SIZES | MODELS[name])
    made: nn.Module = getattr(transformers, f"{name}ForCausalLM")._from_config(config, attn_implementation="eager")
    return made


def padded(rank: int, step: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(10 * rank + step)
    lengths = torch.tensor([9 + rank, 4, 17 - step])
    ids = torch.randint(1, 61, (3, int(lengths.max())), generator=g)
    keep = torch.arange(ids.shape[1]) < lengths[:, None]
    labels = ids.masked_fill(~keep, -100)
    return {"input_ids": ids * keep, "attention_mask": keep.long(), "labels": labels}


def packed(rank: int, step: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(10 * rank + step)
    at = torch.cat([torch.arange(n) for n in (7 + step, 3 + rank, 11)])
    ids = torch.randint(1, 61, (1, len(at)), generator=g)
    return {"input_ids": ids, "labels": ids.masked_fill(at == 0, -100), "position_ids": at[None]}


BATCHES = {"padded": padded, "packed": packed}


def trained(comm: Comm, name: str, plan: str, batch: str, dtype: torch.dtype, steps: int = 2) -> Any:
    """Losses and gradients of some steps, and the logits and parameters after them."""
    model = drawn(partial(language_model, name), dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    results: list[Any] = []
    with seqpar.parallelize(model, comm, plan=PLANS[plan]):
        for step in range(steps):
            optimizer.zero_grad()
            loss = model(**BATCHES[batch](comm.rank, step)).loss
            loss.backward()
            sync_gradients(model.parameters(), comm)
            results += [loss.detach(), [None if g is None else g.clone() for g in gradients(model)]]
            optimizer.step()
        model.eval()
        inputs = {key: x for key, x in BATCHES[batch](comm.rank, 0).items() if key != "labels"}
        with torch.no_grad():
            results.append(model(**inputs).logits)
    return [*results, list(model.parameters())]


def transformers() -> Cases:
    calls: Cases = {}
    for name in MODELS:
        for ranks, plan, batch, dtype in (
            (1, "ring", "padded", torch.float32), (2, "ring", "padded", torch.float32),
            (2, "wide", "packed", torch.bfloat16),
            (3, "ring", "packed", torch.float32), (4, "wide", "padded", torch.float32),
        ):  # fmt: skip
            arguments = (trained, name, plan, batch, dtype)
            calls[f"{name} {ranks} ranks {plan} {batch} {dtype}"] = partial(run_threads, ranks, *arguments)
    for comm in ("gloo", "shm"):
        arguments = (trained, "Llama", "ring", "padded", torch.float32)
        calls[f"{comm} Llama"] = partial(run_processes, 2, *arguments, comm=comm)
    return calls


def flux_model() -> nn.Module:
    from diffusers import FluxTransformer2DModel

    return FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=2, attention_head_dim=12, num_attention_heads=3,
        joint_attention_dim=8, pooled_projection_dim=8, axes_dims_rope=(4, 4, 4), guidance_embeds=True,
    )  # fmt: skip


def flux_inputs(dtype: torch.dtype) -> dict[str, Tensor]:
    grid = torch.zeros(3, 5, 3, dtype=dtype)
    grid[..., 1], grid[..., 2] = torch.arange(3)[:, None], torch.arange(5)
    return {
        "hidden_states": normal(2, 15, 4, seed=1, dtype=dtype).requires_grad_(),
        "encoder_hidden_states": normal(2, 5, 8, seed=2, dtype=dtype),
        "pooled_projections": normal(2, 8, seed=3, dtype=dtype), "timestep": torch.tensor([0.3, 0.7], dtype=dtype),
        "guidance": torch.full((2,), 3.5, dtype=dtype), "img_ids": grid.reshape(15, 3),
        "txt_ids": torch.zeros(5, 3, dtype=dtype),
    }  # fmt: skip


def latte_model() -> nn.Module:
    from diffusers import LatteTransformer3DModel

    return LatteTransformer3DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=3, out_channels=3, num_layers=2,
        cross_attention_dim=16, attention_bias=True, sample_size=6, patch_size=2, activation_fn="gelu-approximate",
        norm_type="ada_norm_single", norm_elementwise_affine=False, caption_channels=7, video_length=5,
    )  # fmt: skip


def latte_inputs(dtype: torch.dtype) -> dict[str, Tensor]:
    return {
        "hidden_states": normal(2, 3, 5, 6, 6, seed=1, dtype=dtype).requires_grad_(),
        "timestep": torch.tensor([3, 13]), "encoder_hidden_states": normal(2, 4, 7, seed=2, dtype=dtype),
    }  # fmt: skip


Inputs = Callable[[torch.dtype], dict[str, Tensor]]


def denoised(
    comm: Comm, make: Callable[[], nn.Module], inputs: Inputs, options: Mapping[str, Any], dtype: torch.dtype
) -> Any:
    """The whole output, this rank's gradients, and the sums of all ranks' gradients."""
    model, given = drawn(make, dtype), inputs(dtype)
    seqpar.parallelize(model, comm, **options)
    out = model(**given, return_dict=False)[0]
    out.square().mean().backward()
    shares = [None if g is None else g.clone() for g in gradients(model)]
    latents = given["hidden_states"]
    sync_gradients([*model.parameters(), latents], comm)
    return [out.detach(), shares, gradients(model), latents.grad]


def diffusers() -> Cases:
    options = {"plan": Plan, "ring": partial(Plan, transport="ring")}
    return {
        f"flux {ranks} ranks {name} {dtype}": partial(
            run_threads, ranks, denoised, flux_model, flux_inputs, {"plan": options[name]}, dtype
        )
        for name in options
        for ranks in (1, 2, 3, 4)
        for dtype in (torch.float32, torch.bfloat16)
    }


def latte() -> Cases:
    return {
        f"latte {ranks} ranks {dtype}": partial(run_threads, ranks, denoised, latte_model, latte_inputs, {}, dtype)
        for ranks in (1, 2, 3, 4, 8)
        for dtype in (torch.float32, torch.float64)
    }


class Block(nn.Module):
    """A layer after PyTorch's attention."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(24, 72), nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 6)).unbind(-3)
        y = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


def block_of(comm: Comm, layout: str, transport: str, dtype: torch.dtype) -> Any:
    model = drawn(Block, dtype)
    lengths = [41]
    where = Layout.zigzag(lengths, comm.size) if layout == "zigzag" else Layout.contiguous(41, comm.size)
    plan = Plan(Mask(lengths), where, transport=transport)
    x = seqpar.shard(normal(1, 41, 24, seed=6, dtype=dtype), plan, comm.rank, dim=1).requires_grad_()
    with seqpar.parallelize(model, comm, sdpa=True, plan=plan):
        y = model(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, gradients(model)]


def sdpa() -> Cases:
    return {
        f"{layout} {transport} {ranks} ranks {dtype}": partial(run_threads, ranks, block_of, layout, transport, dtype)
        for layout in ("zigzag", "contiguous")
        for transport in ("fetch", "ring")
        for ranks in (1, 2, 4)
        for dtype in (torch.float32, torch.bfloat16)
    }
