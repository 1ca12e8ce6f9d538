"""An attention call as plain values: its options, and the signature on which ranks agree and kernels are chosen."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from seqpar.facts.value import Ints, integer
from seqpar.kernels import CallSpec
from seqpar.plan import Plan

Accuracy = Literal["exact", "fast"]
ACCURACIES = ("exact", "fast")
SINGLE = torch.finfo(torch.float32)
LATENTS = "expected q [T, H, D_n + E], latent [T_kv, R], rotated [T_kv, E] or None, w_k [H, D_n, R], w_v [H, D_v, R]"
ROUND = 128  # programs choose lengths that are multiples of it, and those of data rarely are


class Options(NamedTuple):
    """The given options of a call, in the order of the op's arguments."""

    scale: float | None
    softcap: float
    dropout_p: float
    dropout_seed: int | None
    deterministic: bool
    kernel: str
    accuracy: str
    return_lse: bool
    return_max_logit: bool = False


class Expansion(NamedTuple):
    """How latent attention makes keys: w_k [H, D_n, R], w_v [H, D_v, R], and the bytes of an expanded buffer."""

    w_k: Tensor
    w_v: Tensor
    most: int

    @property
    def weights(self) -> dict[str, Tensor]:
        """The tensors by name."""
        return {"w_k": self.w_k, "w_v": self.w_v}


class Numerics(NamedTuple):
    """What kernels may do to the bits of results, as in `seqpar.attention`."""

    accuracy: Accuracy = "exact"
    deterministic: bool = True

    @classmethod
    def checked(cls, accuracy: Accuracy, deterministic: bool) -> Numerics:
        """These, of an integration's arguments. Raises: ValueError for other values than there are."""
        check_accuracy(accuracy)
        if not isinstance(deterministic, bool):
            raise ValueError(f"deterministic must be True or False, got {deterministic!r:.200}")
        return cls(accuracy, deterministic)


class Signature(NamedTuple):
    """A call without its plan, its tensors' values and its dropout seed. Calls of one signature are treated alike.

    kv_heads, latent: of latent attention 1, and the dims of a latent and of a rotated part; else latent is None.
    kernel: the requested one. accuracy: "exact" or "fast". kv_grads: whether k or v require a gradient.
    """

    device: torch.device
    dtype: torch.dtype
    heads: int
    kv_heads: int
    dim: int
    v_dim: int
    scale: float
    softcap: float
    dropout_p: float
    slopes: bool
    sinks: bool
    return_lse: bool
    deterministic: bool
    kernel: str
    accuracy: str
    q_grads: bool
    kv_grads: bool
    sink_grads: bool
    return_max_logit: bool = False
    latent: tuple[int, int] | None = None
    weight_grads: bool = False
    expand_bytes: int = 0

    @property
    def verb(self) -> str:
        """The name of the call in messages."""
        return "attention" if self.latent is None else "latent_attention"

    @property
    def wire(self) -> tuple[int, int]:
        """Elements of a key and of a value of one key head as they travel."""
        return (self.dim, self.v_dim) if self.latent is None else self.latent

    def facts(self, kernel: str) -> dict[str, object]:
        """Facts that must be equal on all ranks, named as in messages. kernel: the chosen one."""
        latents = {} if self.latent is None else {
            "dims of latent and rotated": self.latent, "w_k or w_v requires grad": self.weight_grads,
        }  # fmt: skip
        return {
            **latents,
            "dtype": self.dtype, "heads": self.heads, "kv_heads": self.kv_heads, "dim": self.dim, "v_dim": self.v_dim,
            "scale": self.scale, "softcap": self.softcap, "dropout_p": self.dropout_p, "sinks": self.sinks,
            "alibi_slopes": self.slopes, "return_lse": self.return_lse,
            "return_max_logit": self.return_max_logit, "deterministic": self.deterministic,
            "kernel": kernel, "accuracy": self.accuracy, "q requires grad": self.q_grads,
            "k or v requires grad": self.kv_grads, "sinks require grad": self.sink_grads, "device": self.device.type,
        }  # fmt: skip

    def function(self) -> tuple[object, ...]:
        """What results depend on: all but the choice of the kernel and what requires a gradient."""
        return *self[: self._fields.index("return_lse")], self.latent

    def spec(self, plan: Plan) -> CallSpec:
        """The kernel's view of the call under a plan."""
        on_cuda = self.device.type == "cuda"
        major, minor = torch.cuda.get_device_capability(self.device) if on_cuda else (0, 0)
        kv_heads = self.kv_heads if self.latent is None else self.heads
        sums = (self.kv_grads or self.weight_grads) and plan.sums_key_gradients(self.heads, kv_heads)
        lengths = plan.mask.lengths, plan.mask.kv_lengths
        return CallSpec(
            self.device.type, 10 * major + minor, self.dtype, self.heads, kv_heads, self.dim, self.v_dim,
            softcap=self.softcap != 0.0, alibi=self.slopes, dropout=self.dropout_p != 0.0,
            grads=self.q_grads or self.kv_grads or self.sink_grads or self.weight_grads,
            deterministic=self.deterministic, merges=plan.merges or self.sinks or sums,
            few_shapes=all(lengths_repeat(x) for x in lengths), fast=self.accuracy == "fast", until=plan.mask.has_until,
        )  # fmt: skip


def lengths_repeat(lengths: Ints) -> bool:
    """Whether other batches are likely to have documents of these lengths: equal ones, as a program chooses them."""
    return int(lengths[0]) % ROUND == 0 and bool((lengths == lengths[0]).all())


def signature_of(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, slopes: Tensor | None, options: Options,
    grads: Sequence[bool], expansion: Expansion | None = None,
) -> Signature:  # fmt: skip
    """The signature of a call whose tensors `check_tensors` has checked. grads: which of them require a gradient.

    expansion: of latent attention, whose latents are k and whose rotated parts are v.

    Raises: TypeError, ValueError or NotImplementedError for invalid options.
    """
    heads, dim = q.shape[1:]
    for name, x in (("sinks", sinks), ("alibi_slopes", slopes)):
        if x is not None and (x.shape != (heads,) or x.device != q.device or not x.dtype.is_floating_point):
            raise ValueError(
                f"{name} must be floating point [{heads}], one per query head, on {q.device}, got "
                f"{x.dtype}{list(x.shape)} on {x.device}"
            )
    if grads[4]:
        raise NotImplementedError("alibi_slopes have no gradient; detach them")
    if isinstance(options.scale, Tensor) and options.scale.requires_grad:
        raise NotImplementedError("scale has no gradient; multiply q by it, and give scale=1.0")
    if isinstance(options.softcap, Tensor) and options.softcap.requires_grad:
        raise NotImplementedError("softcap has no gradient; detach it")
    if options.dropout_seed is not None and not isinstance(options.dropout_seed, Integral):
        raise ValueError(f"dropout_seed must be an integer, got {options.dropout_seed!r}")
    scale = dim**-0.5 if options.scale is None else _number("scale", options.scale)
    softcap, dropout_p = _number("softcap", options.softcap), _number("dropout_p", options.dropout_p)
    # scores are computed in single precision, or in double precision of fp64
    least, most = (0.0, sys.float_info.max) if q.dtype is torch.float64 else (SINGLE.tiny, SINGLE.max)
    if not abs(scale) <= most:
        raise ValueError(f"scale must be finite in the precision of scores, got {scale} for {q.dtype}")
    if not (0 <= softcap <= most) or 0 < softcap < least:
        raise ValueError(
            "softcap must be finite and at least 0, and neither too large nor too small for the precision of scores, "
            f"got {softcap} for {q.dtype}"
        )
    if not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p must be in [0, 1), got {dropout_p}")
    if dropout_p and options.dropout_seed is None:
        raise ValueError(f"dropout_p={dropout_p} needs a dropout_seed, equal on all ranks and different for each layer")
    if options.accuracy != "exact":
        check_accuracy(options.accuracy)
        if options.kernel != "auto":
            raise ValueError(
                "accuracy='fast' lets kernel='auto' take kernels that round each step's result, and "
                f"kernel={options.kernel!r} is chosen by name already; leave out one of them"
            )
    signature = Signature(
        q.device, q.dtype, heads, k.shape[1], dim, v.shape[2], scale, softcap, dropout_p, slopes is not None,
        sinks is not None, bool(options.return_lse), bool(options.deterministic), str(options.kernel),
        options.accuracy, grads[0], grads[1] or grads[2], grads[3], bool(options.return_max_logit),
    )  # fmt: skip
    if expansion is None:
        return signature
    return signature._replace(
        v_dim=expansion.w_v.shape[1], latent=(k.shape[2], v.shape[2]), weight_grads=any(grads[5:]),
        expand_bytes=integer("expand_bytes", expansion.most, 1),
    )  # fmt: skip


def check_accuracy(accuracy: object) -> None:
    """Raise ValueError unless it is "exact" or "fast"."""
    if accuracy not in ACCURACIES:
        raise ValueError(f"accuracy must be 'exact' or 'fast', got {accuracy!r:.200}")


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise TypeError(f"{name} must be a number, got {value!r:.200}") from None


def check_tensors(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, slopes: Tensor | None, expansion: Expansion | None
) -> None:
    """Raise TypeError, ValueError or NotImplementedError for tensors that cannot be computed with each other."""
    given = (q, k, v) if expansion is None else (q, k, v, expansion.w_k, expansion.w_v)
    for x in given:
        if not isinstance(x, Tensor) or x.dim() != 3 or x.dtype != q.dtype or x.device != q.device or x.is_meta:
            raise _differing(_named(q, k, v, expansion), latents=expansion is not None)
    for name, extra in (("sinks", sinks), ("alibi_slopes", slopes)):
        if extra is not None and not isinstance(extra, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(extra).__name__} {extra!r:.200}")
    if expansion is not None:
        _check_latents(_named(q, k, v, expansion))
    else:
        (_, heads, dim), (_, kv_heads, v_dim) = q.shape, v.shape
        if k.shape[:2] != v.shape[:2] or k.shape[2] != dim or 0 in (heads, kv_heads, dim, v_dim):
            shapes = _shapes(_named(q, k, v, expansion))
            raise ValueError(f"expected q [T, H, D], k [T_kv, H_kv, D], v [T_kv, H_kv, D_v], got {shapes}")
        if heads % kv_heads:
            raise ValueError(f"query heads must be a multiple of key heads, got {heads} and {kv_heads}")
    for x in (q, k, v):
        if x.stride(2) != 1 and x.shape[2] > 1 and x.numel():
            first = ", ".join(list(_named(q, k, v, expansion))[:3])
            raise ValueError(f"the last dimension of {first} must be dense (stride 1); call .contiguous()")


def _named(q: Tensor, k: Tensor, v: Tensor, expansion: Expansion | None) -> dict[str, Tensor]:
    """A call's tensors by the names that messages give them."""
    return {"q": q, "k": k, "v": v} if expansion is None else {"q": q, "latent": k, "rotated": v, **expansion.weights}


def _differing(named: Mapping[str, object], *, latents: bool) -> Exception:
    """Why a call's tensors cannot be computed with each other."""
    names, tensors = ", ".join(named), {name: x for name, x in named.items() if isinstance(x, Tensor)}
    if wrong := next((name for name in named if name not in tensors), None):
        return TypeError(f"{wrong} must be a tensor, got {type(named[wrong]).__name__} {named[wrong]!r:.200}")
    if not all(x.dim() == 3 for x in tensors.values()):
        expected = LATENTS if latents else "q, k, v must be packed [rows, heads, dim]"
        return ValueError(f"{expected}, got {_shapes(tensors)}; drop or fold the batch dimension")
    if len({x.dtype for x in tensors.values()}) > 1:
        return ValueError(f"{names} must have one dtype, got {', '.join(str(x.dtype) for x in tensors.values())}")
    if len({x.device for x in tensors.values()}) > 1:
        return ValueError(f"{names} must be on one device, got {', '.join(str(x.device) for x in tensors.values())}")
    return NotImplementedError(
        f"{names} are on the meta device, which holds no values to attend to; load the weights first"
    )


def _check_latents(named: dict[str, Tensor]) -> None:
    """Raise ValueError for tensors of latent attention whose shapes contradict each other."""
    if not named["latent"].shape[1] == named["rotated"].shape[1] == 1:
        raise ValueError(f"{LATENTS}, got {_shapes(named)}; drop or fold the batch dimension")
    (_, heads, dim), (rows, _, rank), (others, _, rotated), w_k, w_v = (x.shape for x in named.values())
    as_said = rows == others and w_k == (heads, dim - rotated, rank) and w_v == (heads, w_v[1], rank)
    if not as_said or 0 in (heads, dim - rotated, rank, w_v[1]):
        raise ValueError(f"{LATENTS}, got {_shapes(named)}")


def _shapes(named: Mapping[str, Tensor]) -> str:
    """Tensors with their shapes, as the caller gave them: latents and rotated parts have no heads."""
    shown = {
        name: [*x.shape[:1], *x.shape[2:]] if name in ("latent", "rotated") else [*x.shape] for name, x in named.items()
    }
    return ", ".join(f"{name} {shape}" for name, shape in shown.items())
