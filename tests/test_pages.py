"""What pages of docs/ say of the package and of its records is true."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from bench.cpu import architectures_page
from seqpar import Layout, Mask, Plan
from seqpar.comm.arguments import PATIENCE
from seqpar.kernels.triton.config import Descriptor, configure

ROOT = Path(__file__).parent.parent
DOCS, RESULTS = ROOT / "docs", ROOT / "bench" / "results"


def test_the_page_of_architectures_is_that_of_the_record() -> None:
    record = json.loads((RESULTS / "architectures.json").read_text())
    page = architectures_page.page(record)
    assert (DOCS / "architectures.md").read_text() == page
    exact = re.search(r"comm\)` (\d+)\s+cases are exact", page)
    assert exact and f"[{exact[1]} of {len(record['rows'])}](architectures.md)" in (DOCS / "comparison.md").read_text()
    kinds = len({row["kind"] for row in record["rows"].values()})
    told = " ".join((DOCS / "transformers.md").read_text().split())
    assert f"{len(record['rows'])} cases of {kinds} model types" in told


TROUBLES = (DOCS / "troubleshooting.md").read_text()


@cache
def trees() -> list[ast.Module]:
    """The files of the package."""
    return [ast.parse(path.read_text()) for path in sorted((ROOT / "seqpar").rglob("*.py"))]


def messages(node: ast.AST) -> Iterator[tuple[int, str]]:
    """The strings below a node, docstrings aside, with their lines."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
            continue
        if isinstance(child, ast.expr) and (text := _template(child)) is not None:
            yield child.lineno, text
            for part in _holes(child):
                yield from messages(part)
        else:
            yield from messages(child)


def _template(node: ast.expr) -> str | None:
    """The text of a string expression, with a hole for everything that is computed; None of another expression."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join("{}" if (text := _template(part)) is None else text for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        both = [_template(part) for part in (node.left, node.right)]
        return None if both == [None, None] else "".join("{}" if text is None else text for text in both)
    return None


def _holes(node: ast.expr) -> Iterator[ast.expr]:
    """What is computed in a string expression."""
    for part in ast.iter_child_nodes(node):
        if isinstance(part, ast.expr):
            if _template(part) is None:
                yield part
            else:
                yield from _holes(part)


@cache
def texts() -> set[str]:
    """What the package can say."""
    return {" ".join(text.split()) for tree in trees() for _, text in messages(tree)}


def rows(page: str, first: str) -> list[list[str]]:
    """The rows of the tables of a page whose first column has that name."""
    tables = re.findall(rf"^\| {re.escape(first)} \|.*\n\|[-|]+\n((?:\|.*\n)+)", page, re.MULTILINE)
    return [re.split(r" *\| *", line.strip("|").strip()) for table in tables for line in table.strip().splitlines()]


@pytest.mark.parametrize("quoted", [row[0] for row in rows(TROUBLES, "message")])
def test_a_quoted_message_is_one_of_the_package(quoted: str) -> None:
    text = re.fullmatch(r"`([^`]+)`(?: \(a warning\))?", quoted)
    assert text, quoted
    pattern = re.compile(".*".join(re.escape(part.strip()) for part in text[1].split("…")))
    assert any(pattern.search(message) for message in texts())


def test_the_timeout_of_a_comm_is_the_one_that_the_page_says() -> None:
    assert f"after `timeout` seconds, {PATIENCE:,.0f} by default" in " ".join(TROUBLES.split())


def test_every_class_of_error_is_explained() -> None:
    classes = [node for tree in trees() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    own = {node.name for node in classes if any(re.search("Error$|^Exception$", ast.unparse(b)) for b in node.bases)}
    explained = {name for row in rows(TROUBLES, "class") for name in re.findall(r"`(\w+)`", row[0])}
    assert len(own) >= 3 and own <= explained, own - explained


HEADS = ("", ", frozen weight")
CELLS = [row for row in rows((DOCS / "results.md").read_text(), "what") if len(row) == 6]


def record(name: str) -> Any:
    return json.loads((RESULTS / name).read_text())


def ends(values: Iterable[float], digits: int = 2) -> str:
    """The least and the largest of values."""
    several = sorted(values)
    least, most = (f"{value:.{digits}f}" for value in (several[0], several[-1]))
    return least if least == most else f"{least} to {most}"


def test_the_table_of_masks_is_its_record() -> None:
    found = {(r["mask"], r["policy"]): r for r in record("masks.json")["rows"] if r["setting"] == "step"}
    policies = ("ring", "dynamic groups", "dispatch", "bytes first", "seqpar")
    table = rows((DOCS / "results.md").read_text(), "mask")
    assert {row[0] for row in table} == {mask for mask, _ in found}
    for mask, *cells in table:
        ring = found[mask, "ring"]["seconds"]
        for policy, cell in zip(policies, cells, strict=True):
            at = found[mask, policy]
            figures = [f"{at['over']:.2f}", f"{at['moved'] / 1e9:.2f} GB", f"{ring / at['seconds']:.2f}"]
            assert re.sub(r" \(.*\)|\*", "", cell) == ", ".join(figures[: 3 - (policy == "ring")])
        assert min(found[mask, policy]["over"] for policy in policies) == found[mask, "seqpar"]["over"]


def of_attention(name: str, of_peak: bool = False) -> list[str]:
    """Beside torch, or beside the peak, for each dtype and direction."""
    by: dict[tuple[str, str], list[float]] = {}
    for row in record(name)["rows"]:
        part = row["seqpar"] / row["peak"] if of_peak else row["ratio"]
        by.setdefault((row["dtype"], row["direction"]), []).append(part)
    return [ends(several) for several in by.values()]


def figures() -> Iterator[tuple[str, str, list[str]]]:
    """(record, how its row begins, the figures in bold) of the rows whose figures can be computed of a record."""
    steps = record("cpu.json")
    speed, one = steps["speed"], steps["median_seconds"]["one_rank"]
    named = ("1 process, 2 threads, torch flash", *(name for name in speed if name.startswith("2 processes")))
    yield "cpu.json", "speed of a causal step", [f"{speed[name]:.2f}" for name in named]
    yield "cpu.json", "call overhead", [f"{1e3 * one[k]:.2f}" for k in ("attention, one rank", "kernel alone")]
    planning = steps["median_seconds"]["planning"]
    kinds = [max(s for name, s in planning.items() if name.startswith(k)) for k in ("contiguous", "zigzag")]
    kinds.append(planning["striped, rank 0"])
    yield "cpu.json", "deriving everything", [f"{1e3 * seconds:.0f}" for seconds in kinds]
    for name in ("", "_intel", "_avx512", "_avx2"):
        yield f"cpu_attention{name}.json", "attention in one process", of_attention(f"cpu_attention{name}.json")
    yield "cpu_attention.json", "the same as a fraction", of_attention("cpu_attention.json", of_peak=True)
    for name, begins in (
        ("recurrent.json", "a step of a recurrence"),
        ("recurrent_avx2.json", "the same on a processor"),
    ):
        recurrences = [row for row in record(name)["rows"] if row["direction"] == "step"]
        ratio = {row["fallback"]: row["ratio"] for row in recurrences if "ratio" in row}
        shares = ends(row["of_products"] for row in recurrences)
        yield name, begins, [*(f"{ratio[n]:.2f}" for n in ("qwen3_next", "mamba2")), shares]
    passed = [row["ratios"] for row in record("states.json")["rows"] if row["ranks"] == 4]  # loopback, then held
    both = [(f"{row['ulysses, exchanging'][0]:.1f}", f"{row['ulysses, seconds'][0]:.2f}") for row in passed]
    yield "states.json", "passing states", [x for at in (0, 2) for pair in zip(both[at], both[at + 1]) for x in pair]
    over = record("comm.json")["over_gloo"]
    yield "comm.json", "bandwidth of `ShmComm`", [f"{over[k]:.1f}" for k in ("ring", "all-to-all")]
    yield "copies.json", "packing and unpacking", [ends(row["ratio"] for row in record("copies.json")["rows"])]
    growing = {row["ranks"]: row for row in record("sequence.json")["growing"]}
    fitting = [f"{row['tokens']:,}" for row in record("sequence.json")["fitting"]]
    yield "sequence.json", "a causal decoder's step", [*of_a_step(growing[4]), *of_a_step(growing[16]), *fitting]
    ran = record("soak.json")["ranks"][0]["ran"]
    verbs = sum(count for name, count in ran.items() if name != "comms")
    yield "soak.json", "ten minutes", [f"{verbs:,}", f"{ran['comms']:,}"]
    # of several runs the last one
    short = {(r["same"], r["hidden"], r["comm"]): r["part"] for r in record("short_batches.json")["rows"]}
    parts = [short[same, hidden, comm] for same in (False, True) for hidden in (256, 64) for comm in ("gloo", "shm")]
    yield "short_batches.json", "a step of short batches", [f"{part + 1e-9:.2f}" for part in parts]
    trees = record("shared_prefix.json")["rows"]
    speeds = [f"{row[kind][0]:.2f}" for kind in ("speedup", "predicted") for row in trees]
    yield "shared_prefix.json", "a decoder's step on 8 answers", speeds
    large = [row for row in record("sums.json")["rows"] if row["dtype"] == "float32" and row["bytes"] == 1 << 25]
    kinds = [(over, what) for over in ("gloo", "shm") for what in ("sync_gradients", "all_sum")]
    several = [ends(row["ratio"] for row in large if (row["over"], row["what"]) == kind) for kind in kinds]
    yield "sums.json", "sums of fp32", several
    beside = {row["case"]: f"{row['ratio']:.2f}" for row in record("log_probs.json")["rows"]}
    cases = ["forward", *(f"step{head}{entropy}" for entropy in ("", ", entropy in the loss") for head in HEADS)]
    yield "log_probs.json", "log-probabilities of", [beside[case] for case in cases]
    cases: dict[tuple[int, str], list[float]] = {}
    for row in record("peers.json")["rows"]:
        if not row["method"].startswith("seqpar") and not row["refusal"]:
            cases.setdefault((row["ranks"], row["case"]), []).append(row["both"][0])
    fastest = [[min(v) for (_, case), v in cases.items() if ("bf16" in case) == bf16] for bf16 in (False, True)]
    yield "peers.json", "attention on 2 and 4 processes", [ends(several) for several in fastest]
    agreed = {(r["ranks"], r["way"]): r for r in record("agreement.json")["rows"] if r["kind"] == "agree"}
    doubling, to_all = agreed[64, "doubling"], agreed[64, "to all"]
    several = [doubling["messages"], doubling["bytes"], to_all["messages"]]
    yield "agreement.json", "messages that a rank sends", [str(count) for count in several]
    planned = record("planned.json")["ranks"].values()
    beside = [ends(cell["ratio"] for cell in each["beside_best"].values()) for each in planned]
    faster = ends((each["speedup_over_worst"] for each in planned), 1)
    yield "planned.json", "measured time of the plan", [*beside, faster]
    means: dict[int, list[float]] = {}
    for row in record("simulate.json")["rows"]:
        if row["policy"] == "seqpar" and row["hardware"] == "h100" and not row["variant"]:
            means.setdefault(row["ranks"], []).append(row["lockstep_mean"])
    yield "simulate.json", "time of the slowest rank", [ends(several, 3) for several in means.values()]
    tried = record("architectures.json")["rows"].values()
    exact = sum(all(row["float64"].get(way, "exact") == "exact" for way in ("padded", "packed")) for row in tried)
    yield "architectures.json", "architectures of transformers", [str(len(tried)), str(exact)]
    yield "dsp.json", "a step of diffusers' Latte", [str(len(record("dsp.json")["latte"]))]
    cases = re.search(r"([\d,]+) in all", (RESULTS / "exhaustive.txt").read_text())
    yield "exhaustive.txt", "layouts, transports", [cases[1] if cases else ""]


def of_a_step(row: dict[str, Any]) -> list[str]:
    """CPU seconds and MiB of a rank, and of one process."""
    shown = []
    for step in (row["sharded"], row["whole"]):
        digits = 2 if step["cpu_seconds"] < 1 else 1 if step["cpu_seconds"] < 10 else 0
        shown += [f"{step['cpu_seconds']:.{digits}f}", f"{step['peak_bytes'] / 2**20:,.0f}"]
    return shown


def figures_of_a_gpu() -> Iterator[tuple[str, list[str]]]:
    """How a row begins, and its figures in bold."""
    found = [json.loads(line) for line in (RESULTS / "gpu.jsonl").read_text().splitlines()]
    judged = [row["ok"] for row in found if row["slice"] == "correct" and "ok" in row]
    beside = [row["ratio"] for row in found if (row["kernel"], row.get("baseline")) == ("triton", "aten_flash")]
    yield "every kernel that runs", [str(sum(judged)), str(len(judged) - sum(judged)), f"{1.05 * max(beside):.2f}"]
    alone = [row for row in found if row["slice"] in ("forward", "backward") and row.get("tflops")]
    rates = {(row["case"], row["kernel"], row["mode"]): row["tflops"] for row in alone}
    fixed = "backward, deterministic"
    for begins, case in (
        ("one launch, causal", "causal 16384, 16 heads of 128, bf16"),
        ("the same with 32 heads", "causal 16384, 32 heads of 64, bf16"),
    ):
        launch = [rates[case, "triton", "forward"], *[rates[case, "triton", fixed]] * 2]
        launch += [rates[case, kernel, mode] for kernel in ("cudnn", "aten_flash") for mode in ("forward", "backward")]
        yield begins, [f"{rate:.0f}" for rate in (*launch, rates[case, "sdpa_flash", fixed])]
    case = "magi 32768, 16 heads of 128, bf16"
    modes = {"triton": fixed, "cudnn": "backward", "aten_flash": "backward"}
    yield "16 heads on 32,768", [f"{rates[case, k, m]:.0f}" for k, back in modes.items() for m in ("forward", back)]
    trees = [row for row in found if "window and sinks" in row["case"] and row.get("tflops")]
    by_kernel = {(row["kernel"], row["mode"].split(",")[0]): row["tflops"] for row in trees}
    both = [(kernel, mode) for kernel in ("triton", "aten_flash") for mode in ("forward", "backward")]
    yield "a window of 4,096", [f"{by_kernel[each]:.0f}" for each in both]
    taxes = {(row["case"], row["mode"]): row["ratio"] for row in found if row["slice"] == "ring"}
    ways = ("ring, 8 ranks", "fetch, 8 ranks", "fetch, 8 ranks, stages of 256 MiB")
    yield (
        "the kernels of 8 ranks",
        [f"{taxes[f'zigzag, {way}', mode]:.2f}" for way in ways for mode in ("forward", "backward")],
    )
    steps = {row["case"]: row["ratio"] for row in found if row["slice"] == "step" and row["mode"] != "forward"}
    cases = (("ring, exact", 65536), ("fetch, exact", 65536), ("Ulysses, exact", 65536), ("ring, fast", 65536))
    shares = [steps[f"{how}, causal {n}, 32/8 heads of 128, bf16"] for how, n in (*cases, ("ring, exact", 16384))]
    yield "whole calls", [f"{share:.2f}" for share in shares]
    yield "speed-up of the tiles", [f"{ratio:.2f}" for ratio in of_tiles(found)]
    models = [row["ratio"] for row in found if row["slice"] == "model"]
    yield "a step of a Qwen3", [f"{ratio:.2f}" for ratio in models]
    yield "kernels that move", [ends(row["ratio"] for row in found if row["slice"] == "small")]


def of_tiles(found: list[dict[str, Any]]) -> Iterator[float]:
    """Time with the tiles before over time with those that are shipped, on an H200."""
    for direction, dims in (("forward", (64, 256)), ("dq", (64, 96, (192, 128), 256)), ("dkdv", (64, (192, 128)))):
        for dim, v_dim in (each if isinstance(each, tuple) else (each, each) for each in dims):
            chosen = asdict(configure(Descriptor(direction, dim, v_dim, 2, 90)))
            name = f"{direction} {dim}{'' if dim == v_dim else f'/{v_dim}'}, "
            (ratio,) = [row["ratio"] for row in found if row["case"].startswith(name) and row.get("config") == chosen]
            yield ratio


@pytest.mark.parametrize(("begins", "expected"), list(figures_of_a_gpu()))
def test_a_figure_in_bold_of_a_gpu_is_that_of_the_record(begins: str, expected: list[str]) -> None:
    test_a_figure_in_bold_is_that_of_the_record("gpu.jsonl", begins, expected)


@pytest.mark.parametrize(("name", "begins", "expected"), list(figures()), ids=lambda x: x if isinstance(x, str) else "")
def test_a_figure_in_bold_is_that_of_the_record(name: str, begins: str, expected: list[str]) -> None:
    (cells,) = [row for row in CELLS if row[0].startswith(begins) and f"`{name}`" in row[-1]]
    assert re.findall(r"\*\*([^*]+)\*\*", f"{cells[0]} {cells[1]}") == expected


def test_every_row_says_processor_and_commit_of_its_record() -> None:
    assert len(CELLS) > 20
    for what, _, _, processor, commit, name in CELLS:
        if commit != "-":
            text = (RESULTS / name.strip("`")).read_text()
            assert commit in text, what
            maker = processor.split()[0]
            assert maker in ("a", "2") or maker in text, (what, maker)


def test_figures_of_the_page_on_choosing_are_those_of_records() -> None:
    page = " ".join((DOCS / "choose.md").read_text().split())
    over = record("comm.json")["over_gloo"]
    said = [f"{over['ring']:.1f} times the bandwidth of gloo for ring hops, {over['all-to-all']:.1f} for all-to-alls"]
    planned = {int(ranks): each["cells"] for ranks, each in record("planned.json")["ranks"].items()}
    for batch, ranks, digits in (("many short", (4, 8), 2), ("long and short", (2, 4, 8), 2)):
        said.append(beside_planned(planned, batch, ranks, digits))
    said.append(beside_planned(planned, "one long document", (2, 4, 8), 1))
    short = {(r["same"], r["hidden"], r["comm"]): r["part"] for r in record("short_batches.json")["rows"]}
    small, large = ([f"{short[False, hidden, comm] + 1e-9:.2f}" for comm in ("gloo", "shm")] for hidden in (64, 256))
    said.append(f"{small[0]} times that of DDP over gloo, {small[1]} over `ShmComm`")
    said.append(f"{large[0]} times, and {large[1]}")
    cells = [row for row in record("simulate.json")["rows"] if row.get("hardware") == "h100" and not row["variant"]]
    for ranks in (8, 64, 512):
        several = []
        for policy, digits in (("static ring", 2), ("static ulysses", 2), ("seqpar", 3)):
            ours = [row for row in cells if (row["ranks"], row["policy"]) == (ranks, policy)]
            several.append(ends((row["lockstep_mean"] for row in ours if row["distribution"] != "megatron"), digits))
        said.append(f"| {ranks} | {' | '.join(several)} |")
    for sentence in said:
        assert sentence in page, sentence


def beside_planned(planned: dict[int, Any], batch: str, ranks: tuple[int, ...], digits: int) -> str:
    """How plain data parallelism compares with the plan on so many ranks: '1.1 and 1.3 times as long as the plan'."""
    cells = [planned[count][batch] for count in ranks]
    parts = [f"{cell['data parallel']['median'] / cell['auto']['median']:.{digits}f}" for cell in cells]
    return f"{', '.join(parts[:-1])} and {parts[-1]} times as long as the plan"


def test_lines_of_a_plan_and_of_the_log_are_those_of_the_package() -> None:
    lengths = [4096, 900, 60]
    shown = Plan(Mask(lengths), Layout.zigzag(lengths, 4)).describe()
    for line, _ in rows(TROUBLES, "line")[:-2]:  # the last two are of forecasts
        for label in re.findall("`([^`]+)`", line)[:1]:
            assert label.removesuffix(" …") in shown, label
