"""The machine in the planner's cost model: coefficients of attention, linear layers and transfers.

One attention call on one rank takes

    steps * stage + pieces * piece + flops / rate * (area + query_pairs * query rows + key_pairs * key rows)     seconds

and for each query row that a step merges ``flops / rate * merge_pairs`` in forward, a third of the pairs in backward.
``flops``: operations per attended pair, ``ModelShape.pair_flops`` in forward and 2.5 times that in backward. Steps are
the plan's, one if nothing is fetched; a step merges the rows that see keys of other ranks, whose sums it reads and
writes. A piece is a run of consecutive tokens of one document on the rank: a zigzag shard has two. Key rows are those
that arrive from other ranks; the rank's own keys are as many as its queries, so ``query_pairs`` includes them. An
exchange of ``b`` bytes, ``c`` of them with one peer, takes

    latency + max(b / bandwidth, c / hop)                                                                      seconds

NCCL gives each pair of ranks a few of its channels, so one peer cannot fill a GPU's links: see `p2p_channels`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from seqpar.facts.value import integer

SCHEMA = 1
HIDDEN = 0.5  # as measured by bench/cpu/timeline.py
COUNT = (1 << 62) - 1  # at most, for bytes of memory and ranks of a node
_RATE, _SECONDS, _PAIRS = (1.0, 1e30), (0.0, 1e6), (0.0, 1e12)
# Limits of figures: wide enough for any machine, and narrow enough to compute with.
RANGES = {
    "rate": _RATE, "backward_rate": _RATE, "linear_rate": _RATE, "bandwidth": _RATE, "latency": _SECONDS,
    "piece": _SECONDS, "stage": _SECONDS, "query_pairs": _PAIRS, "key_pairs": _PAIRS, "merge_pairs": _PAIRS,
    "hidden": (0.0, 1.0), "hop": _RATE, "host": _RATE,
}  # fmt: skip
BACKWARD = 2.5  # forwards per backward of attention: five products instead of two


@dataclass(frozen=True)
class Link:
    """One rank's share of a network. latency: seconds before the first byte. bandwidth: bytes per second and direction.

    hop: bytes per second with one peer; None if one peer can fill the link. channels: NCCL's for a pair of ranks; None
    without NCCL. All as achieved, not as advertised.

    Raises ValueError for a figure outside `RANGES`, and channels that are not a positive integer.
    """

    latency: float
    bandwidth: float
    hop: float | None = None
    channels: int | None = None

    def __post_init__(self) -> None:
        """Check the figures."""
        _check(self, "bandwidth", "latency", *([] if self.hop is None else ["hop"]))
        if self.channels is not None:
            object.__setattr__(self, "channels", integer("Link: channels", self.channels, 1, COUNT))

    @property
    def alone(self) -> float:
        """Bytes per second and direction with one peer."""
        return self.bandwidth if self.hop is None else min(self.hop, self.bandwidth)

    def seconds(self, size: float, *, peers: int = 1) -> float:
        """Seconds of an exchange of this many bytes, as many with each of the peers; 0 for none."""
        return self.latency + max(size / self.bandwidth, size / peers / self.alone) if size else 0.0


@dataclass(frozen=True)
class AttentionCost:
    """Seconds of a rank's kernels, by the formula in the header of this file.

    rate, backward_rate: asymptotic operations per second over attended pairs; a backward counts as 2.5 forwards.
    piece: seconds of one more piece of a document, in addition to its rows and pairs. query_pairs, key_pairs: cost of a
    query row, and of a fetched key row, in pairs; merge_pairs: of a query row in each step that merges it, None for
    ``query_pairs`` in every second step. stage: seconds of a step in addition to its pieces.

    Raises ValueError for a figure outside `RANGES`.
    """

    rate: float
    backward_rate: float
    piece: float
    query_pairs: float
    key_pairs: float
    stage: float
    merge_pairs: float | None = None

    def __post_init__(self) -> None:
        """Check the figures."""
        _check(self, *(f.name for f in fields(self) if getattr(self, f.name) is not None or f.name != "merge_pairs"))

    def seconds(
        self,
        flops: float,
        *,
        area: float,
        queries: float,
        keys: float = 0.0,
        pieces: float = 1.0,
        steps: float = 1.0,
        backward: bool = False,
    ) -> float:
        """Seconds of one call without merges. flops: per pair of a forward, even if `backward`. keys: fetched rows."""
        pairs = area + self.query_pairs * queries + self.key_pairs * keys
        rate = self.backward_rate / BACKWARD if backward else self.rate
        return steps * self.stage + pieces * self.piece + flops / rate * pairs


@dataclass(frozen=True)
class Hardware:
    """A machine of equal ranks; each `node` of them share the `inside` links.

    source: the origin of the figures, in words. kernel: whose rates `attention` has. assumed: figures that are
    unmeasured assumptions, in words; both "" if unknown. linear_rate: achieved operations per second of linear layers,
    including everything around them. memory: bytes that a rank can use. reserve: the part of memory not for activations
    and fetched keys: weights, gradients, optimiser and the like. hidden: the fraction of an exchange's time, 0 to 1,
    that overlaps with available computation. host: bytes per second and direction between a rank and its host's memory;
    the default is an assumption, less than the 31.5 GB/s of 16 lanes of PCIe 4.0.

    Raises ValueError unless sizes are integers and figures within `RANGES`.
    """

    name: str
    source: str
    attention: AttentionCost
    linear_rate: float
    inside: Link
    across: Link
    memory: int
    node: int = 8
    reserve: int = 0
    hidden: float = HIDDEN
    kernel: str = ""
    assumed: str = ""
    host: float = 25e9

    def __post_init__(self) -> None:
        """Check the fields."""
        _check(self, "linear_rate", "hidden", "host")
        for field, least in (("memory", 1), ("node", 1), ("reserve", 0)):
            object.__setattr__(self, field, integer(f"Hardware: {field}", getattr(self, field), least, COUNT))
        if self.reserve >= self.memory:
            raise ValueError(f"Hardware: reserve {self.reserve} leaves nothing of memory {self.memory}")
        for field, kind in (
            ("name", str),
            ("source", str),
            ("attention", AttentionCost),
            ("inside", Link),
            ("across", Link),
            ("kernel", str),
            ("assumed", str),
        ):
            value = getattr(self, field)
            if not isinstance(value, kind) or (value == "" and field in ("name", "source")):
                raise ValueError(f"Hardware: {field} must be a {kind.__name__}, got {value!r}")

    @classmethod
    def preset(cls, name: str) -> Hardware:
        """A machine by name. Raises ValueError, with the known names, for any other."""
        if name not in PRESETS:
            raise ValueError(
                f"no hardware is called {name!r}; known: {', '.join(PRESETS)}; or measure it: seqpar calibrate"
            )
        return PRESETS[name]()

    @classmethod
    def of(cls, hardware: str | Hardware) -> Hardware:
        """A machine by name, or the value itself. Raises ValueError for anything else."""
        if isinstance(hardware, str):
            return cls.preset(hardware)
        if not isinstance(hardware, cls):
            raise ValueError(f"hardware must be the name of a preset or a Hardware, got {hardware!r}")
        return hardware

    def among(self, ranks: int) -> Hardware:
        """The machine with the channels that a pair inside a node gets if a node has this many of the ranks."""
        link = self.inside
        if link.channels is None or (channels := p2p_channels(ranks)) == link.channels:
            return self
        least, most = RANGES["hop"]
        hop = min(max(link.alone / link.channels * channels, least), most)
        return replace(self, inside=replace(link, hop=hop, channels=channels))

    def to_dict(self) -> dict[str, Any]:
        """Plain data with a schema number, for `from_dict`."""
        return {"schema": SCHEMA} | asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Hardware:
        """The inverse of `to_dict`. Raises ValueError naming unknown or missing keys, or another schema."""
        schema = data.get("schema") if isinstance(data, Mapping) else None
        if type(schema) is not int or schema != SCHEMA:
            got = schema if isinstance(data, Mapping) else type(data).__name__
            raise ValueError(
                f"hardware must be a mapping of schema {SCHEMA}, got {got!r:.60}; measure it: seqpar calibrate"
            )
        entries = {key: value for key, value in data.items() if key != "schema"}
        parts: dict[str, type[AttentionCost] | type[Link]] = {
            "attention": AttentionCost,
            "inside": Link,
            "across": Link,
        }
        _check_keys(cls, entries, "hardware")
        for key, part in parts.items():
            _check_keys(part, entries[key], key)
            entries[key] = part(**entries[key])
        return cls(**entries)

    def save(self, path: str | Path) -> None:
        """Write the file that `load` reads."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Hardware:
        """The hardware in a file. Raises ValueError naming the file and its fault; OSError if it cannot be read.

        The key "measured", which `seqpar calibrate` adds for readers, is ignored.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8-sig"))
            if isinstance(data, dict):
                data.pop("measured", None)
            return cls.from_dict(data)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is not a hardware file: {error}") from None


def _check(part: object, *names: str) -> None:
    """Raise ValueError naming the field, unless its figure is within `RANGES`."""
    for field in names:
        value, (least, most) = getattr(part, field), RANGES[field]
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not least <= value <= most:
            raise ValueError(
                f"{type(part).__name__}: {field} must be a number from {least:g} to {most:g}, got {value!r:.60}"
            )


def _check_keys(cls: type[Any], data: object, what: str) -> None:
    """Raise ValueError unless a mapping has a class's fields; fields with defaults may be missing."""
    if not isinstance(data, Mapping):
        raise ValueError(f"{what} must be a mapping, got {data!r}")
    known = {field.name: field for field in fields(cls)}
    unknown = sorted(set(data) - set(known))
    optional = {"node", "reserve", "hidden", "kernel", "assumed", "hop", "channels", "host"}
    missing = sorted(set(known) - set(data) - optional)
    if unknown or missing:
        found = [f"unknown keys {', '.join(unknown)}"] * bool(unknown) + [f"no {', '.join(missing)}"] * bool(missing)
        raise ValueError(f"{what} has {' and '.join(found)}")


# DistCA's table of FlashAttention-2 on an H100 (64 query heads of 128, documents of 64 to 64k tokens on 1 to 8 ranks)
# is, within 13 %, 4.78e-8 L^2/p + (2.7e-5 + 2.65e-5/p) L + 0.02 milliseconds. That is 9.56e-11 seconds a pair, 559
# pairs per query row with the key row of its own token, 282 pairs for each of the other L (1 - 1/p) key rows, and a
# launch of 20 microseconds. The table has no packed calls, so a piece has no cost besides its rows. Later kernels have
# tiles of about this size, so the pairs serve them too.
_FA2_ROWS = {"piece": 0.0, "query_pairs": 559.0, "key_pairs": 282.0, "stage": 2e-5}
_ROWS_SOURCE = "rows and launch fitted to DistCA's profile of FlashAttention-2 on an H100 (compute-attn-H100.csv)"
# FlexSP's constants amount to 210 of 267.9 TFLOP/s, the fastest bf16 product of an A100: the linear part of a layer
# also has norms, activations and smaller products.
_OF_FASTEST = 210 / 267.9
_MATMUL_SOURCE = (
    "linear layers at 78 % of the fastest bf16 product in the table of maximum achievable matmul FLOPS of the Machine "
    "Learning Engineering book (Bekman), the share that FlexSP's constants have on an A100"
)
_GAP = 6_000_000_000  # kept free on every GPU for CUDA and NCCL by Hydraulis (Li et al. 2024)
_P2P_CHANNELS = 32  # of a communicator over NVLink, and of a pair of ranks if nothing else moves
_NODE = 8


def p2p_channels(ranks: int) -> int:
    """NCCL's channels between two ranks of a communicator of `ranks` ranks in one node, for up to 16 MiB a channel.

    They are halved until a rank could exchange with every other at once. Source: `ncclTopoComputeP2pChannels` and
    `scheduleP2pTasksToPlan` of NCCL 2.27 to 2.30 (``src/graph/paths.cc``, ``src/enqueue.cc``). On several nodes each
    one has a communicator of its own (`seqpar.comm.nccl`).
    """
    channels = _P2P_CHANNELS
    while channels * ranks > _P2P_CHANNELS and channels > 1:
        channels //= 2
    return channels


def _nvlink(latency: float, bandwidth: float, channel: float) -> Link:
    """The link of a GPU in a node of 8. channel: bytes per second of a channel."""
    channels = p2p_channels(_NODE)
    return Link(latency, bandwidth, hop=channels * channel, channels=channels)


# DistCA's nccl_perf.csv, all-gather on 8 H100, 8 MB to 8 GB: this line is within 15 % of the first size, 5 % elsewhere.
# The rate of a channel: NCCL's figure for one of the NVLinks (src/graph/topo.h: 20.0, 20.6 and 40.1 GB/s from Ampere,
# Hopper and Blackwell). Nobody has published what a pair of 8 ranks gets.
_NVLINK3 = _nvlink(40e-6, 195e9, 20.0e9)
_NVLINK4 = _nvlink(44e-6, 367e9, 20.6e9)
_NVLINK5 = _nvlink(44e-6, 726e9 * 7 / 8, 40.1e9)
_NVLINK4_SOURCE = "NVLink from DistCA's NCCL all-gather on 8 H100 (nccl_perf.csv)"
_HOP = "a hop inside a node: the rate that NCCL assumes for an NVLink (topo.h), for each NCCL channel"
_NDR_SOURCE = (
    "400 Gb/s InfiniBand at 47 GB/s (NVIDIA in nccl-tests#290: 46 to 48); no source gives the latency of an exchange "
    "between nodes, so the latency inside a node is used"
)
_GB = 1_000_000_000
_H200 = "; an H200 has the linear layers and links of an H100, and 141 GB"


class _Rates(NamedTuple):
    """Attention's operations per second at head dim 128, by the kernel that `seqpar.kernels.preference` takes."""

    kernel: str
    forward: float
    backward: float
    rows: dict[str, Any]
    source: str
    assumed: str = _HOP


# `bench.gpu.waves` fits all of these to the rows that are named, and is within 5 % of each.
_TRITON_ROWS = {"piece": 0.0, "query_pairs": 448.0, "key_pairs": 264.0, "stage": 2.5e-6, "merge_pairs": 651.0}
_TRITON = _Rates(
    "triton", 523e12, 413e12, _TRITON_ROWS,
    "Triton's kernels, rows apart, fitted to one H200 (bench/results/gpu.jsonl, bf16: slice accumulate; 16,384 tokens, "
    "causal and full, 16 heads, in slices forward and backward)",
)  # fmt: skip
_FLASH3 = _Rates(
    "flash3", 648e12, 561e12, _FA2_ROWS,
    f"FlashAttention-3, 648 forward and 561 backward (Shah et al. 2024, figures 5 and 6); {_ROWS_SOURCE}",
)  # fmt: skip
# NVIDIA's datasheets give both the same rate of dense bf16 products, 989 TFLOP/s
_TRITON_ON_H100 = _TRITON._replace(assumed=f"Triton's rates, copied from an H200; {_HOP}")


def _gpu(
    name: str, source: str, rates: _Rates, *, fastest: float, inside: Link, across: float, memory: int
) -> Hardware:
    """A node of GPUs. fastest: operations per second of the fastest bf16 product. memory: GB of a GPU."""
    return Hardware(
        name=name,
        source=source,
        kernel=rates.kernel,
        assumed=rates.assumed,
        attention=AttentionCost(rate=rates.forward, backward_rate=rates.backward, **rates.rows),
        linear_rate=_OF_FASTEST * fastest,
        inside=inside,
        across=Link(latency=inside.latency, bandwidth=across),
        memory=memory * _GB - _GAP,
    )


def _hopper(name: str, rates: _Rates, *, across: float = 47e9, memory: int = 80, note: str = "") -> Hardware:
    attention = f"attention at head dim 128 at the rates of {rates.source}"
    source = "; ".join([attention, _MATMUL_SOURCE, _NVLINK4_SOURCE, _NDR_SOURCE + note])
    return _gpu(name, source, rates, fastest=792.1e12, inside=_NVLINK4, across=across, memory=memory)


def _a100() -> Hardware:
    source = (
        "80 GB; attention from DistCA's profile of FlashAttention-2 on an A100 at 128k tokens (attn.csv: 32 heads of "
        f"128, 634.5 ms forward and 1764.4 backward); {_ROWS_SOURCE}; {_MATMUL_SOURCE}; NVLink from its all-to-all on "
        "4 A100 (alltoall.csv); 200 Gb/s InfiniBand at 24 GB/s (nccl-tests#119), its latency as inside a node"
    )
    assumed = f"Triton's rates, replaced by FlashAttention-2's; {_HOP}"
    rates = _Rates("triton", 221.8e12, 199.4e12, _FA2_ROWS, "FlashAttention-2", assumed)
    return _gpu("a100", source, rates, fastest=267.9e12, inside=_NVLINK3, across=24e9, memory=80)


def _a100_flexsp() -> Hardware:
    # FlexSP times forward and backward together: alpha1 = 5.128e-6 ms per squared length is 3.5 forwards of half as
    # many pairs over 32 layers of 4 * 4096 operations; alpha2 = 0.18396 ms per token is 3 forwards of the layers' 2 *
    # 12 * 32 * 4096^2. Its all-to-all of 64 ranks counts MiB, includes the own share, and has 8 ranks per node.
    attention = 3.5 * 0.5 * 32 * 4 * 4096 / 5.128e-9
    return Hardware(
        name="a100-flexsp",
        source=(
            "the constants of FlexSP (Wang et al. 2025) for a GPT of 7B on 64 A100 of 40 GB with two 200 Gb/s "
            "InfiniBand cards a node: alpha1, alpha2, all-to-all of 8 and 64 ranks, 28 GB of memory. Forward and "
            "backward get the rate they have together; rows have no cost and links no latency"
        ),
        attention=AttentionCost(
            rate=attention, backward_rate=attention, piece=0.0, query_pairs=0.0, key_pairs=0.0, stage=0.0
        ),
        linear_rate=3 * 2 * 12 * 32 * 4096**2 / 1.8396e-4,
        inside=Link(latency=0.0, bandwidth=96.5 * 2**20 * 1e3 * 7 / 8),
        across=Link(latency=0.0, bandwidth=4.87 * 2**20 * 1e3 * 56 / 64),
        memory=28 * _GB,
    )


def _b200() -> Hardware:
    source = (
        "attention at the best rates in MagiAttention's benchmark on B200, causal, head dim 128, transfers included "
        f"(1286 forward on 8 GPUs, 1067 backward on 64); {_ROWS_SOURCE}; {_MATMUL_SOURCE} (1745 TFLOP/s); NVLink from "
        f"DeepEP's dispatch on 8 GPUs (726 GB/s, 1/8 of it local), latency of an H100's; {_NDR_SOURCE}"
    )
    assumed = f"Triton's rates, replaced by the higher ones of MagiAttention's kernel; {_HOP}"
    rates = _Rates("triton", 1286e12, 1067e12, _FA2_ROWS, "MagiAttention", assumed)
    return _gpu("b200", source, rates, fastest=1745e12, inside=_NVLINK5, across=47e9, memory=180)


def _cpu() -> Hardware:
    return Hardware(
        name="cpu",
        source=(
            "measured by this project on one core of an AMD EPYC with AVX-512 bf16: attention and linear layers from "
            "bench/results/cpu_attention.json (1 thread, bfloat16, dim 128: its rows within 8 %), a fetched key row at "
            "half of a query row as in bench/results/calibrate.json (seqpar calibrate, dim 32), a step's cost from "
            "bench/results/cpu.json (one rank against the kernel alone), links from bench/results/comm.json (ring over "
            "shared memory and over gloo, a quarter of what 4 processes moved), latencies of small exchanges of 2 "
            "processes while the machine was busy. Memory is a choice"
        ),
        kernel="native",
        attention=AttentionCost(
            rate=441e9, backward_rate=412e9, piece=0.0, query_pairs=124.0, key_pairs=62.0, stage=9.4e-5
        ),
        linear_rate=435e9,
        inside=Link(latency=3e-4, bandwidth=14.04e9 / 4),
        across=Link(latency=3.5e-3, bandwidth=3.12e9 / 4),
        memory=4 * _GB,
    )


# Measured by this project: attention on "h200", which "h100" takes over; `seqpar calibrate` measures where it runs.
# "-fast": the kernel that attention(accuracy="fast") takes, which differs on Hopper alone.
PRESETS: dict[str, Callable[[], Hardware]] = {
    "h100": lambda: _hopper("h100", _TRITON_ON_H100),
    "h100-100g": lambda: _hopper(
        "h100-100g", _TRITON_ON_H100, across=47e9 / 4, note="; a quarter of that for 100 Gb/s"
    ),
    "h100-fast": lambda: _hopper("h100-fast", _FLASH3),
    "h200": lambda: _hopper("h200", _TRITON, memory=141, note=_H200),
    "h200-fast": lambda: _hopper("h200-fast", _FLASH3, memory=141, note=_H200),
    "a100": _a100,
    "a100-flexsp": _a100_flexsp,
    "b200": _b200,
    "cpu": _cpu,
}
