"""Transformers of diffusers under a plan: pipelines call them as before, and each rank computes its share of tokens.

A pipeline's inputs are whole on every rank, and so are the outputs. In between a rank has an equal part of the tokens
of the image or video and, if text takes part in joint attention, of the text::

    whole inputs -> this rank's rows -> blocks, joint attention under a plan -> proj_out -> gather -> whole output
                                          cross attention over the whole text stays on its rank

Joint attention is full, so its tokens may be numbered freely: a sample's valid text, its image, its masked text. The
keys that are seen are then one interval, whatever the text mask.

**Gradients.** Every rank computes the same loss from the whole output, with the gradient of one process. Each rank
takes its rows of that gradient; the gradients of parameters and inputs are shares, whose sum over ranks
(`seqpar.train.sync_gradients`) is that of one process. Ranks compare the inputs, the output's gradient, and once their
weights: different noise on different ranks would go unnoticed otherwise.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from seqpar.comm import Comm
from seqpar.dsp.moves import unshard_alike
from seqpar.dsp.specs import SPECS
from seqpar.facts.layout import Layout
from seqpar.facts.mask import Mask
from seqpar.integrations.sdpa.reroute import Rerouting
from seqpar.nn.fingerprint import fingerprint, leaves, weights_of
from seqpar.nn.wrap import ParallelModel, check_makes_plans, refuse_twice
from seqpar.ops.core.agreement import gathering
from seqpar.plan import Plan

MakePlan = Callable[[Mask, Layout], Plan]


@dataclass(frozen=True)
class TokenCounts:
    """Samples of a forward, and tokens of each: text in joint attention, and image. valid: the text that is seen."""

    samples: int
    text: int
    image: int
    valid: bytes | None = None


def parallelize(model: nn.Module, comm: Comm, *, plan: MakePlan = Plan) -> ParallelModel:
    """Share the tokens of every forward of a diffusers transformer among the ranks; returns a handle with ``undo()``.

    model: one of `RECIPES`. Calls stay as they are, with keywords for all but the first argument: all ranks pass the
    same whole tensors, of any size, and get the whole output. plan: ``(mask, layout) -> Plan``, such as
    ``functools.partial(seqpar.Plan, ulysses=2)``. Every rank computes the same loss; gradients are shares, to be summed
    by `seqpar.train.sync_gradients`. Checkpointing works wherever backward runs. State dict, processors and hooks stay
    as they are; a copy of the model is parallelized too.

    Raises: NotImplementedError, with its name, for another model, an attention processor or backend that is not the
    default, a model under diffusers' own parallelism or cache, and arguments that cannot be shared, such as controlnet
    residuals; TypeError for a plan that is not a function; ValueError on every rank if inputs, gradients, or weights at
    the first forward differ between ranks.
    """
    recipe = RECIPES.get(type(model).__name__)
    if recipe is None:
        raise NotImplementedError(_unknown(type(model).__name__))
    check_makes_plans(model, plan, "(mask, layout)")
    _check_alone(model)
    refuse_twice(model)
    handle = ParallelModel(model, comm)
    handle.put_around(model, partial(_forward, Sharing(recipe, comm, plan)))
    for name, function in recipe.modules.items():
        handle.put_around(model.get_submodule(name), function)
    for name, module in _attentions(model):
        handle.put_around(module, _cross if name.split(".")[-1] in recipe.cross else _joint)
    handle.put_around(model.get_submodule("proj_out"), _gathering)
    return handle


def _unknown(name: str) -> str:
    if name in SPECS:
        return f"diffusers: {name} is parallel by stages; call seqpar.dsp.parallelize(model, comm)"
    return (
        f"diffusers: {name} is not one of {', '.join([*RECIPES, *SPECS])}; if nothing but attention mixes its tokens, "
        "share out its rows yourself and call it inside `seqpar.sdpa`"
    )


def _check_alone(model: nn.Module) -> None:
    """Raise NotImplementedError for a model under another wrapper of diffusers, whose hooks would surround ours."""
    name = type(model).__name__
    if getattr(model, "_parallel_config", None) is not None:
        raise NotImplementedError(
            f"diffusers: {name} is under enable_parallelism, which shares its tokens too; create it without that"
        )
    if getattr(model, "is_cache_enabled", False):
        raise NotImplementedError(
            f"diffusers: {name} is under enable_cache, which skips attention; call its disable_cache() first"
        )


# --- a forward ------------------------------------------------------------------------------------------------------


@dataclass
class Sharing:
    """How a model's forwards are shared, with the plans of the latest sizes."""

    recipe: ModelRecipe
    comm: Comm
    make: MakePlan
    plans: dict[TokenCounts, tuple[Plan, Plan]] = field(default_factory=dict)

    def plans_of(self, sizes: TokenCounts) -> tuple[Plan, Plan]:
        """The plan of joint attention over all samples, and the plan of one sample's image, for the gather."""
        if sizes not in self.plans:
            if len(self.plans) >= 16:
                del self.plans[next(iter(self.plans))]
            image = [self.part(sizes.image, rank) for rank in range(self.comm.size)]
            alone = Plan(Mask([sizes.image], causal=False), Layout(image))
            self.plans[sizes] = self.make(*self._joint(sizes)), alone
        return self.plans[sizes]

    def part(self, count: int, rank: int) -> range:
        """A rank's range of ``count`` tokens."""
        return range(count * rank // self.comm.size, count * (rank + 1) // self.comm.size)

    def kept(self, s: TokenCounts) -> Tensor | None:
        """The rows of joint attention that are tokens, as a mask; None if all are."""
        counts = [(len(self.part(n, self.comm.rank)), n) for n in (s.text, s.image)]
        if all(own or not n for own, n in counts):
            return None
        flags = [flag for own, n in counts for flag in ([True] * own or [False] * bool(n))]
        return torch.tensor(flags * s.samples)

    def _joint(self, s: TokenCounts) -> tuple[Mask, Layout]:
        length = s.text + s.image
        valid = np.ones((s.samples, s.text), bool)
        if s.valid is not None:
            valid = np.frombuffer(s.valid, bool).reshape(valid.shape)
        start = length * np.arange(s.samples)[:, None]
        seen = valid.sum(1, keepdims=True)
        # a sample's valid text comes first, then its image, then the text that no token sees
        text = start + np.where(valid, valid.cumsum(1) - 1, seen + s.image + (~valid).cumsum(1) - 1)
        image = start + seen + np.arange(s.image)
        ranks = range(self.comm.size)
        parts = [(text[:, self.part(s.text, r)], image[:, self.part(s.image, r)]) for r in ranks]
        layout = Layout([np.concatenate(both, axis=1).ravel() for both in parts])
        if valid.all():
            return Mask([length] * s.samples, causal=False), layout
        lo, hi = (np.repeat(x, length) for x in (start, start + seen + s.image))
        return Mask.from_bounds(lo, hi, lengths=[length] * s.samples), layout


class SharedForward(Rerouting):
    """A forward in progress, or a checkpoint's recomputation of it."""

    def __init__(self, sharing: Sharing, sizes: TokenCounts, *, again: bool = False) -> None:
        joint, self.image_plan = sharing.plans_of(sizes)
        # its recipe knows the model: no trial
        super().__init__(joint, sharing.comm, lambda query, key: self.cross > 0, None, again=again, tries=False)
        self.sharing, self.sizes, self.cross = sharing, sizes, 0

    def __enter__(self) -> SharedForward:
        super().__enter__()
        _forwards().append(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        _forwards().pop()
        super().__exit__(kind, error, trace)

    def _again(self, first: int) -> Callable[[], SharedForward]:
        return lambda: SharedForward(self.sharing, self.sizes, again=True)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_p: float, is_causal: bool,
        scale: float | None,
    ) -> Tensor:  # fmt: skip
        kept = self.sharing.kept(self.sizes)
        if kept is None or not len(kept) == q.shape[0] == k.shape[0]:
            return super()._attend(q, k, v, mask, dropout_p, is_causal, scale)
        at = kept.nonzero()[:, 0].to(q.device)
        out = super()._attend(q[at], k[at], v[at], mask, dropout_p, is_causal, scale)
        return out.new_zeros(len(kept), *out.shape[1:]).index_copy(0, at, out)

    def _scaled_dot_product(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *rest: Any, **named: Any
    ) -> Tensor:
        with self._refusals():
            if attn_mask is not None:
                raise NotImplementedError(
                    f"diffusers: attention was given a mask of its own, {list(attn_mask.shape)}; leave it out"
                )
        return super()._scaled_dot_product(query, key, value, attn_mask, *rest, **named)

    def _check_meaning(self, is_causal: bool) -> None:
        if is_causal:
            raise NotImplementedError("diffusers: causal attention is not supported")

    def rows(self, x: Tensor, dim: int, stream: str = "image") -> Tensor:
        """This rank's rows of a whole tensor; one unused row if it has none, since models expect some."""
        count = getattr(self.sizes, stream)
        if x.shape[dim] != count:
            raise ValueError(f"diffusers: {list(x.shape)} at dim {dim}, expected {count} tokens of the {stream}")
        part = self.sharing.part(count, self.comm.rank)
        return x.narrow(dim, part.start, len(part)) if part or not count else x.narrow(dim, 0, 1)


_local = threading.local()


def _forwards() -> list[SharedForward]:
    if not hasattr(_local, "runs"):
        _local.runs = []
    return _local.runs  # type: ignore[no-any-return]


def _current() -> SharedForward:
    if not _forwards():
        raise RuntimeError(
            "diffusers: a part of a parallelized model runs outside its forward, where nothing says which tokens it "
            "has; call the model, and checkpoint with torch.utils.checkpoint"
        )
    return _forwards()[-1]


def _forward(sharing: Sharing, model: nn.Module, forward: Callable[..., Any], *args: Any, **arguments: Any) -> Any:
    """The model's forward: compare all ranks' inputs, share them out, run."""
    recipe, comm = sharing.recipe, sharing.comm
    with gathering("diffusers: forward", comm) as facts:
        if len(args) > 1:
            raise TypeError(f"diffusers: {type(model).__name__} takes one positional argument, got {len(args)}")
        if args:
            arguments["hidden_states"] = args[0]
        recipe.check(model, arguments)
        facts.own = {name: fingerprint(value) for name, value in leaves(arguments)}
        if not sharing.plans:
            facts.own["weights"] = weights_of(model)
        valid = arguments.pop(recipe.mask, None) if recipe.mask else None
        sizes = recipe.sizes(model, arguments, valid)
    _same_on_all(facts.every)
    with SharedForward(sharing, sizes) as run:
        for name, (dim, stream) in recipe.shared.items():
            if arguments.get(name) is not None:
                arguments[name] = run.rows(arguments[name], dim, stream)
        arguments.update(recipe.change(run, arguments))
        return forward(**arguments)


def _same_on_all(facts: Sequence[dict[str, Any]]) -> None:
    for rank, other in enumerate(facts):
        for name in facts[0] | other:
            if other.get(name) != facts[0].get(name):
                raise ValueError(
                    f"diffusers: {name} differs between rank 0 and rank {rank}: {facts[0].get(name)} and "
                    f"{other.get(name)} (shape, dtype, fingerprint); pass the same whole tensors on every "
                    "rank, drawn with the same seed"
                )


def _joint(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Attention over the tokens of all ranks."""
    run = _current()
    before = run.calls
    out = forward(*args, **kwargs)
    if run.calls != before + 1:
        raise NotImplementedError(
            f"diffusers: {type(module.processor).__name__} made {run.calls - before} calls of "  # type: ignore[union-attr]
            "F.scaled_dot_product_attention, expected one; give it a processor of diffusers as it is"
        )
    return out


def _cross(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Attention over tensors that every rank has whole."""
    run = _current()
    run.cross += 1
    try:
        return forward(*args, **kwargs)
    finally:
        run.cross -= 1


def _gathering(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Tensor:
    """The whole output, gathered from this rank's rows of the module's output."""
    run = _current()
    rows = forward(*args, **kwargs).narrow(1, 0, run.image_plan.rows(run.comm.rank))
    part = run.sharing.part(run.sizes.image, run.comm.rank)
    out = unshard_alike(rows, run.image_plan, run.comm, dim=1, start=part.start)
    if out.requires_grad:
        out.register_hook(partial(_compare_gradient, run.comm))
    return out


def _compare_gradient(comm: Comm, grad: Tensor) -> None:
    """Raise ValueError on every rank if the gradient of the whole output differs between ranks. A collective."""
    wide = grad.double()
    sums = torch.stack([wide.sum(), wide.square().sum()]).tolist()
    for rank, other in enumerate(every := comm.gather("diffusers: backward", sums)):
        scale = (grad.numel() * max(every[0][1], other[1])) ** 0.5
        if not (_near(other[0], every[0][0], scale) and _near(other[1], every[0][1], scale**2)):
            raise ValueError(
                f"diffusers: the gradient of the output differs between rank 0 and rank {rank}: sum and sum of "
                f"squares {every[0]} and {other}; compute the whole loss on every rank, from the same target"
            )


def _near(a: float, b: float, scale: float) -> bool:
    # an overflow happens on all ranks, and a gradient scaler will skip the step
    return a == b or (a != a and b != b) or abs(a - b) <= 1e-3 * scale


# --- models ---------------------------------------------------------------------------------------------------------


def _attentions(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(name, module) for name, module in model.named_modules() if hasattr(module, "processor")]


def _unchanged(run: SharedForward, arguments: dict[str, Any]) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class ModelRecipe:
    """Which arguments of a model have tokens, in which dim, and which modules see them.

    processors: of its attention, by class. shared: argument -> (dim of the tokens, their stream). whole: other
    arguments. mask: the argument with the valid text. text: the argument whose tokens take part in joint attention, if
    any. cross: names of the attention modules over the whole text. modules: wrappers for other modules. count: the
    tokens of an image. change: adjusts arguments that depend on the forward.
    """

    processors: tuple[str, ...]
    shared: Mapping[str, tuple[int, str]]
    whole: tuple[str, ...]
    mask: str | None = None
    text: str | None = None
    cross: tuple[str, ...] = ()
    modules: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    count: Callable[[nn.Module, Tensor], int] = lambda model, x: x.shape[1]
    change: Callable[[SharedForward, dict[str, Any]], dict[str, Any]] = _unchanged

    def check(self, model: nn.Module, arguments: Mapping[str, Any]) -> None:
        """Raise NotImplementedError for arguments and settings that cannot be shared."""
        known = {"hidden_states", "return_dict", *self.shared, *self.whole, *filter(None, [self.mask])}
        if missing := sorted(name for name, value in arguments.items() if name not in known and value is not None):
            raise NotImplementedError(f"diffusers: {type(model).__name__} with {', '.join(missing)} is not supported")
        for name in ("joint_attention_kwargs", "attention_kwargs"):
            if others := sorted(set(arguments.get(name) or {}) - {"scale"}):
                raise NotImplementedError(f"diffusers: {name} with {', '.join(others)} is not supported")
        for name, module in _attentions(model):
            if (kind := type(module.processor).__name__) not in self.processors:
                raise NotImplementedError(f"diffusers: the processor {kind} of {name}, expected {self.processors}")
            if (kind := _backend(module.processor)) not in BACKENDS:
                raise NotImplementedError(
                    f"diffusers: the attention backend {kind} of {name}, expected {BACKENDS}; call "
                    "set_attention_backend('native')"
                )
        _check_alone(model)
        if getattr(model, "zero_cond_t", False):
            raise NotImplementedError("diffusers: zero_cond_t modulates tokens one by one, which is not supported")

    def sizes(self, model: nn.Module, arguments: Mapping[str, Any], valid: Tensor | None) -> TokenCounts:
        """The tokens of a call.

        Raises: ValueError for inputs of another number of dims, or a mask whose shape differs from the text's.
        """
        x = arguments["hidden_states"]
        text = 0
        if self.text is not None:
            encoded = arguments[self.text]
            if encoded.dim() != 3 or encoded.shape[0] != x.shape[0]:
                raise ValueError(
                    f"diffusers: {self.text} {list(encoded.shape)} beside hidden_states {list(x.shape)}, expected "
                    "[samples, tokens, features]"
                )
            text = encoded.shape[1]
        seen = None
        if valid is not None:
            if tuple(valid.shape) != (x.shape[0], text):
                raise ValueError(f"diffusers: {self.mask} {list(valid.shape)}, expected {[x.shape[0], text]}")
            array = valid.detach().bool().cpu().numpy()
            seen = None if array.all() else array.tobytes()
        return TokenCounts(x.shape[0], text, self.count(model, x), seen)


def _sharing_tuple(dim: int, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    run = _current()
    return tuple(run.rows(x, dim) for x in forward(*args, **kwargs))


def _sharing_patches(module: nn.Module, forward: Callable[..., Any], x: Tensor) -> Tensor:
    return _current().rows(forward(x).flatten(2), 2)


def _sharing_rope(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    run = _current()
    # the model has only seen this rank's text
    image, text = forward(*args, **kwargs | {"max_txt_seq_len": run.sizes.text})
    return run.rows(image, 0), run.rows(text, 0, "text")


def _timesteps(run: SharedForward, arguments: dict[str, Any]) -> dict[str, Any]:
    """The timesteps: per sample, or per token of the image."""
    timestep = arguments["timestep"]
    return {"timestep": run.rows(timestep, 1)} if timestep.dim() == 2 and timestep.shape[1] != 1 else {}


def _patches(model: nn.Module, x: Tensor) -> int:
    counts = [n // p for n, p in zip(x.shape[2:], model.config.patch_size, strict=True)]  # type: ignore[union-attr]
    return int(np.prod(counts))


def _backend(processor: Any) -> str | None:
    """The attention backend of a processor, or the active one; None if diffusers does not tell."""
    backend = getattr(processor, "_attention_backend", None)
    if backend is None:
        module = sys.modules.get("diffusers.models.attention_dispatch")
        backend = getattr(getattr(module, "_AttentionBackendRegistry", None), "_active_backend", None)
    return getattr(backend, "value", backend)


# None: unknown, so its calls are counted.
BACKENDS = (None, "native", "_native_cudnn", "_native_efficient", "_native_flash", "_native_math")

_TEXT_AND_IMAGE = {"hidden_states": (1, "image"), "encoder_hidden_states": (1, "text")}
_IDS = {"img_ids": (-2, "image"), "txt_ids": (-2, "text")}

RECIPES = {
    "FluxTransformer2DModel": ModelRecipe(
        processors=("FluxAttnProcessor",), shared=_TEXT_AND_IMAGE | _IDS, text="encoder_hidden_states",
        whole=("pooled_projections", "timestep", "guidance", "joint_attention_kwargs"),
    ),
    "Flux2Transformer2DModel": ModelRecipe(
        processors=("Flux2AttnProcessor", "Flux2ParallelSelfAttnProcessor"), shared=_TEXT_AND_IMAGE | _IDS,
        text="encoder_hidden_states", whole=("timestep", "guidance", "joint_attention_kwargs"),
    ),
    "QwenImageTransformer2DModel": ModelRecipe(
        processors=("QwenDoubleStreamAttnProcessor2_0",), shared=_TEXT_AND_IMAGE, text="encoder_hidden_states",
        mask="encoder_hidden_states_mask", modules={"pos_embed": _sharing_rope},
        whole=("timestep", "img_shapes", "guidance", "attention_kwargs", "additional_t_cond"),
    ),
    "WanTransformer3DModel": ModelRecipe(
        processors=("WanAttnProcessor",), shared={}, cross=("attn2",), count=_patches, change=_timesteps,
        modules={"rope": partial(_sharing_tuple, 1), "patch_embedding": _sharing_patches},
        whole=("timestep", "encoder_hidden_states", "encoder_hidden_states_image", "attention_kwargs"),
    ),
    "LTXVideoTransformer3DModel": ModelRecipe(
        processors=("LTXVideoAttnProcessor",), shared={"hidden_states": (1, "image")}, cross=("attn2",),
        modules={"rope": partial(_sharing_tuple, 1)}, change=_timesteps,
        whole=(
            "timestep", "encoder_hidden_states", "encoder_attention_mask", "num_frames", "height", "width",
            "rope_interpolation_scale", "video_coords", "attention_kwargs",
        ),
    ),
}  # fmt: skip
