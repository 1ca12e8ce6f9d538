"""The command line: what each command prints, what it returns, and that it leaves no process behind."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import seqpar
from seqpar.cli import calibrate, doctor, main, output, plan, programs
from seqpar.cli.lengths import lengths_of
from seqpar.cli.output import CommandError, print_table
from seqpar.comm import shm
from seqpar.planner import Hardware, Training, plan_batch

ROOT = Path(__file__).parent.parent
POSIX = pytest.mark.skipif(os.name != "posix", reason="signals of a process group are POSIX")


def planned(capsys: pytest.CaptureFixture[str], *flags: str) -> dict:
    """What `seqpar plan --json` says."""
    assert main(["plan", *flags, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_plan_prints_the_plan_and_the_bytes_of_every_rank(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--lengths", "1024,300,77", "--ranks", "4", "--layout", "zigzag"]) == 0
    out = capsys.readouterr().out
    assert "causal, 3 documents, 1401 tokens" in out
    assert "transport fetch" in out
    assert "bytes sent in one layer (32 heads on 8 of 128, bfloat16)" in out
    table, _, legend = out.partition("to ranks\n")[2].partition("\n\n")
    assert [line.split()[0] for line in table.splitlines()] == ["0", "1", "2", "3"]
    columns = re.findall(r"^rank .*|^ +rank .*|^of a rank.*", out, re.MULTILINE)
    assert len(columns) == 3 and legend.startswith("legend:\n  rows ")
    for name in ("max/mean", "rows", "tokens", "area", "of mean", "keys in", "from", "steps", "forward", "backward"):
        assert any(name in line for line in columns) or name in out
        assert name in legend
    assert out.startswith(
        "4 ranks: attention at most 4.0 times as fast as on one rank, other layers at most 4.0 times; "
    )


def test_the_first_line_compares_the_plan_with_one_rank(capsys: pytest.CaptureFixture[str]) -> None:
    def first(*flags: str) -> str:
        assert main(["plan", *flags]) == 0
        return capsys.readouterr().out.partition("\n")[0]

    assert re.fullmatch(
        r"8 ranks: [\d.]+ s a step, 7\.\d times as fast as one rank \([\d.]+ s, if it had \d+ GB instead of 72\); "
        r"limited by attention, 7\d% of the time of rank \d",
        first("--lengths", "131072,30000", "--no-training"),
    )
    small = ("--model", "tiny", "--hardware", "cpu")
    assert re.fullmatch(
        r"2 ranks: [\d.]+ ms a step, 0\.\d times as fast as one rank \([\d.]+ ms\); "
        r"limited by exposed transfers, \d\d% of the time of rank \d",
        first("--lengths", "40,30", "--ranks", "2", "--model", "tiny"),
    )
    assert first("--lengths", "500", "--ranks", "1", *small).startswith("1 rank: ")
    uneven = first("--lengths", "500,20", "--ranks", "2", "--layout", "contiguous")
    assert uneven.endswith("limited by the attended pairs of rank 1")
    facts = planned(capsys, "--lengths", "500", "--ranks", "2", *small)
    alone = plan_batch([500], 1, model="tiny", hardware="cpu", training=Training()).forecast
    assert facts["one_rank"] == {"seconds": alone.seconds, "memory_bytes": alone.bytes}


@pytest.mark.parametrize(("layout", "transport"), [("contiguous", "fetch"), ("zigzag", "ring"), ("striped", "gather")])
def test_areas_and_rows_of_the_ranks_sum_to_the_batch(
    capsys: pytest.CaptureFixture[str], layout: str, transport: str
) -> None:
    facts = planned(
        capsys, "--random", "9", "--seed", "3", "--ranks", "6", "--layout", layout, "--transport", transport
    )
    assert len(facts["lengths"]) == 9
    assert sum(r["rows"] for r in facts["ranks"]) == sum(facts["lengths"]) == facts["tokens"]
    assert sum(r["area"] for r in facts["ranks"]) == facts["area"] > 0
    for rank in facts["ranks"]:
        assert sum(rank["sends_to"].values()) == rank["forward_bytes"] + rank["backward_bytes"]
        assert str(rank["rank"]) not in rank["sends_to"]


def test_a_window_moves_only_the_halo(capsys: pytest.CaptureFixture[str]) -> None:
    shape = ("--kv-heads", "2", "--heads", "4", "--dim", "16", "--dtype", "float32")
    facts = planned(capsys, "--lengths", "4096", "--ranks", "4", "--layout", "contiguous", "--window", "100", *shape)
    row = 2 * (16 + 16) * 4
    assert [r["forward_bytes"] for r in facts["ranks"]] == [100 * row, 100 * row, 100 * row, 0]


@pytest.mark.parametrize(
    ("flags", "area"),
    [
        ((), 10),
        (("--full",), 16),
        (("--window", "1"), 7),
        (("--full", "--window", "1"), 10),
        (("--full", "--window", "1,0"), 7),
    ],
)
def test_mask_flags_reach_the_mask(capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], area: int) -> None:
    for layout in (("--layout", "zigzag"), ("--model", "tiny")):
        assert planned(capsys, "--lengths", "4", "--ranks", "1", *layout, *flags)["area"] == area


def test_the_planner_is_the_default_and_its_forecast_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--lengths", "9000,700,50,4000,20", "--ranks", "4", "--model", "qwen3-8b", "--hardware", "a100")
    facts = planned(capsys, *flags)
    plan = plan_batch([9000, 700, 50, 4000, 20], 4, model="qwen3-8b", hardware="a100", training=Training())
    assert facts["layout"] == "planned" and facts["digest"] == plan.digest()
    assert facts["forecast"]["gap"] == plan.forecast.gap and facts["forecast"]["seconds"] == plan.forecast.seconds
    assert [len(values) for values in facts["forecast"]["phases"].values()] == [4] * 4
    assert facts["shape"]["kv_heads"] == 8
    assert main(["plan", *flags]) == 0
    out = capsys.readouterr().out
    assert str(plan.forecast) in out and "bytes sent in one layer (32 heads on 8 of 128, bfloat16)" in out
    assert "GB are state" in out
    assert main(["plan", *flags, "--no-training"]) == 0
    assert "without the model's state" in capsys.readouterr().out


def test_limits_nodes_and_recompute_reach_the_planner(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--lengths", ",".join(["64"] * 30 + ["5000"]), "--ranks", "4", "--node", "2", "--token-slack", "0.2")
    facts = planned(capsys, *flags, "--recompute", "attention", "--max-tokens-per-rank", "1800")
    assert facts["forecast"]["node"] == 2 and facts["forecast"]["recompute"] == "attention"
    assert max(r["rows"] for r in facts["ranks"]) <= 1800
    assert main(["plan", *flags, "--max-tokens-per-rank", "1000"]) == 2
    assert "a rank holds at most 1,000" in capsys.readouterr().err


def test_lengths_come_from_files_and_standard_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text("30\n5, 12\n\n8 9\n", encoding="utf-8")
    assert planned(capsys, "--lengths", str(path), "--model", "tiny")["lengths"] == [30, 5, 12, 8, 9]
    monkeypatch.setattr(sys, "stdin", io.StringIO("7,\n8\n"))
    assert planned(capsys, "--lengths", "-", "--model", "tiny")["lengths"] == [7, 8]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"7\n\xff"), encoding="utf-8"))
    assert main(["plan", "--lengths", "-"]) == 2
    assert "standard input is not text: 'utf-8' codec can't decode byte 0xff" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["plan", "--lengths", "-"]) == 2
    assert "cannot read standard input: it is closed" in capsys.readouterr().err
    path.write_text("5\n7\n", encoding="utf-8-sig")  # as editors on Windows write
    assert planned(capsys, "--lengths", str(path), "--model", "tiny")["lengths"] == [5, 7]
    for text, message in (
        ("3\n4.5\n", "lengths.txt, line 2: expected an integer of at most 18 digits, got 4.5"),
        ("\n", "no lengths"),
    ):
        path.write_text(text, encoding="utf-8")
        assert main(["plan", "--lengths", str(path)]) == 2
        assert message in capsys.readouterr().err


FILES = {
    "a.csv": "id,length\nx,30\ny,5\n",
    "semicolons.csv": "length;text\n30;a,b\n5;c\n",
    "a.json": "[30, 5]",
    "objects.json": '[{"length": 30}, {"length": 5}]',
    "columns.json": '{"length": [30, 5], "other": [1, 2]}',
    "a.jsonl": '{"length": 30}\n\n{"length": 5}\n',
    "numbers.txt": "30\n5\n",
}


@pytest.mark.parametrize("name", FILES)
def test_lengths_come_from_a_column(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / name
    path.write_text(FILES[name])
    assert lengths_of(str(path)) == [30, 5]
    monkeypatch.setattr(sys, "stdin", io.StringIO(FILES[name]))
    assert lengths_of("-") == [30, 5]
    if "length" in FILES[name]:
        path.write_text(FILES[name].replace("length", "my tokens"))
        assert lengths_of(str(path), "my tokens") == [30, 5]
        with pytest.raises(CommandError, match=r"has no column 'length', its columns are .*; give --column NAME"):
            lengths_of(str(path))


def test_lengths_come_from_parquet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"length": [30, 5], "more": [1.5, 2.5]}), path)
    assert planned(capsys, "--lengths", str(path), "--model", "tiny")["lengths"] == [30, 5]
    for flags, message in (
        (("--column", "n"), "a.parquet has no column 'n', its columns are length, more; give --column NAME"),
        (("--column", "more"), "a.parquet, row 1: expected an integer of at most 18 digits, got 1.5"),
    ):
        assert main(["plan", "--lengths", str(path), *flags]) == 2
        assert message in capsys.readouterr().err
    path.write_text("length\n5\n")
    assert main(["plan", "--lengths", str(path)]) == 2
    assert f"seqpar plan: cannot read {path}: " in capsys.readouterr().err
    missing(monkeypatch, "pyarrow")
    assert main(["plan", "--lengths", str(path)]) == 2
    said = "a Parquet file needs pyarrow, which is not installed: pip install 'pyarrow'"
    assert capsys.readouterr().err == f"seqpar plan: {said}\n"


@pytest.mark.parametrize(
    ("text", "column", "message"),
    [
        ("length\n5\nx\n", None, "row 2: expected an integer of at most 18 digits, got x"),
        ("length,n\n5,1\n,2\n", None, "row 2: expected an integer of at most 18 digits, got ''"),
        ("length\n", None, "holds no lengths"),
        ("[1, true]", None, "entry 2: expected an integer of at most 18 digits, got True"),
        ("[1, 2", None, "is neither JSON nor JSONL: Expecting ',' delimiter"),
        pytest.param("[" * 100_000, None, "is neither JSON nor JSONL: maximum recursion depth exceeded", id="deep"),
        ('{"length": 5}\n[6]', None, "entry 2: expected an integer of at most 18 digits, got [6]"),
        ("[]", None, "holds no lengths"),
        ("5\n7\n", "n", "--column n is for CSV, JSON, JSONL and Parquet; "),
    ],
)
def test_a_file_without_lengths_is_refused(text: str, column: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "lengths"
    path.write_text(text)
    with pytest.raises(CommandError, match=re.escape(message)):
        lengths_of(str(path), column)


def test_hardware_comes_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.json"
    dataclasses.replace(Hardware.preset("cpu"), name="mine").save(path)
    facts = planned(capsys, "--lengths", "500,20", "--ranks", "2", "--model", "tiny", "--hardware", str(path))
    assert facts["forecast"]["hardware"] == "mine"
    path.write_text(path.read_text(encoding="utf-8"), encoding="utf-8-sig")
    assert Hardware.load(path).name == "mine"
    path.write_text("{}", encoding="utf-8")
    assert main(["plan", "--lengths", "5", "--hardware", str(path)]) == 2
    assert f"{path} is not a hardware file" in capsys.readouterr().err
    path.write_text("[" * 100_000, encoding="utf-8")
    assert main(["plan", "--lengths", "5", "--hardware", str(path)]) == 2
    assert f"{path} is not a hardware file: maximum recursion depth" in capsys.readouterr().err


def test_fit_prints_the_ladder_the_choice_and_lines_to_paste(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", "--lengths", "131072,9000", "--host-gb", "200"]) == 0
    said = capsys.readouterr().out
    assert "131,072, llama-8b on h100: 8 ranks" in said and "seqpar.train.recompute(layer" in said
    assert all(name in said for name in ("own-loss", "state-on-host", "activations GB"))
    config = tmp_path / "config.json"
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    config.write_text(json.dumps({"model_type": "llama", "vocab_size": 99, **sizes}))
    flags = ["--reshard", "false", "--shards", "4", "--fused-norms", "--rungs", "own-loss,full", "--no-training"]
    assert main(["fit", "--lengths", "3000", "--ranks", "4", "--model", str(config), "--json", *flags]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["model"] == str(config) and [rung["rung"] for rung in facts["rungs"]] == ["own-loss", "full"]


def test_fit_traces_the_layers_of_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    config = tmp_path / "config.json"
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    more = {"vocab_size": 99, "num_key_value_heads": 2, "head_dim": 16}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    config.write_text(json.dumps({"model_type": "gemma3_text", **sizes, **more}))
    longest = []
    for flags in ((), ("--trace",)):
        assert main(["fit", "--lengths", "3000", "--ranks", "2", "--model", str(config), "--json", *flags]) == 0
        longest.append({rung["rung"]: rung["longest"] for rung in json.loads(capsys.readouterr().out)["rungs"]})
    counted, traced = longest
    assert traced["own-loss"] < 0.9 * counted["own-loss"]  # of the four norms of a layer the config says nothing
    assert traced["own-loss"] < traced["keep-attention"] < traced["full"] < traced["tiled"]
    config.write_text(json.dumps({"model_type": "gemma2", **sizes, **more}))
    assert main(["fit", "--lengths", "9", "--model", str(config), "--trace"]) == 2
    assert "transformers has no Gemma2ForCausalLM with F.scaled_dot_product_attention" in capsys.readouterr().err
    config.write_text(json.dumps({"model_type": "mixtral", **sizes, **more, **experts}))  # grouped in bfloat16
    flags = ("--lengths", "9", "--model", str(config), "--weights", "float32", "--trace")
    assert main(["fit", *flags]) == 2 and "seqpar fit: --trace: Expected inputs of BF16" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--lengths", "9", "--trace"), "--trace needs --model FILE, a config.json of transformers, got llama-8b"),
        (("--lengths", "4000000"), "give 32 ranks, documents of at most 1,212,000 tokens, or 148 GB of the host's"),
        (("--lengths", "9", "--rungs", "tile"), "rungs must be some of plain"),
        (("--lengths", "9", "--reshard", "3"), "reshard=3 is no divisor of the 8 shards"),
        (("--lengths", "9", "--state-bytes", "8", "--no-training"), "--state-bytes is not for --no-training"),
        (("--lengths", "9", "--model", "gpt-9"), "no model is called 'gpt-9'"),
    ],
)
def test_fit_refuses_in_one_line(capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], message: str) -> None:
    assert main(["fit", *flags]) == 2
    said = capsys.readouterr().err
    assert said.startswith("seqpar fit: ") and message in said and said.count("\n") == 1


def test_ulysses_takes_a_width_or_one_per_document(capsys: pytest.CaptureFixture[str]) -> None:
    fixed = ("--lengths", "64,64", "--ranks", "4", "--layout", "zigzag", "--transport", "ring")
    one, each, mixed = (planned(capsys, *fixed, "--ulysses", widths) for widths in ("2", "2,2", "1,4"))
    assert one["ranks"] == each["ranks"]
    assert one["ranks"] != mixed["ranks"]


FIXED = ("--lengths", "5", "--layout", "zigzag")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--lengths", "5,-1"), "lengths must be at least 0, got -1 for document 1"),
        (("--lengths", "1,x"), "--lengths 1,x is neither integers separated by commas nor a file of them"),
        (("--lengths", ""), "--lengths '' is neither integers"),
        (("--lengths", "5,,2"), "expected a number between commas, got '5,,2'"),
        (("--lengths", "1" * 30), "expected an integer of at most 18 digits, got 1111"),
        (("--lengths", "1," * 50_000 + "x"), "1,1,1,1,1,... is neither integers"),
        (("--lengths", "/"), "cannot read /: Is a directory"),
        (("--lengths", "/dev/zero"), "/dev/zero is longer than 64 MiB"),
        ((*FIXED, "--ulysses", "3"), "Ulysses width must divide the 8 ranks, got 3"),
        ((*FIXED, "--heads", "4", "--kv-heads", "3"), "--kv-heads 3 must divide --heads 4"),
        ((*FIXED, "--dim", "0"), "--dim must be at least 1, got 0"),
        ((*FIXED, "--model", "tiny"), "--model is for the planner; leave --layout out"),
        (("--lengths", "5", "--window", "3,4"), "give --full or LEFT,0"),
        (("--lengths", "5", "--window", "1,2,3"), "--window is W or LEFT,RIGHT, got 1,2,3"),
        (("--lengths", "99", "--max-tokens-per-rank", "3"), "at most 24 tokens, or a larger --max-tokens-per-rank"),
        (("--lengths", "80000", "--ranks", "1", "--recompute", "none", "--no-training"), "tokens, or --recompute full"),
        (
            ("--lengths", "5", "--ranks", "1"),
            "needs 129.4 GB for 128.5 GB of state (--no-training leaves it out), buffers",
        ),
        (("--lengths", "5", "--kv-heads", "3"), "--kv-heads is chosen by the planner or given by --model"),
        (("--lengths", "5", "--transport", "ring"), "--transport is chosen by the planner"),
        (("--lengths", "5", "--model", "nope"), "no model is called 'nope'; known: llama-8b"),
        (("--lengths", "5", "--hardware", "nope"), "--hardware nope is neither a preset (h100, "),
        (("--lengths", "5", "--hardware", "/dev/zero"), "--hardware /dev/zero is neither a preset"),
        (("--lengths", "5", "--ranks", "65537"), "--ranks must be 1 to 65,536, got 65537"),
        (("--lengths", "5", "--token-slack", "nan"), "token_slack must be a finite number of at least 0, got nan"),
        (("--random", "3", "--column", "n"), "--column is for --lengths"),
        (("--random", "0"), "--random must be at least 1 and below 134,217,728, got 0"),
        (("--random", "3", "--seed", "-1"), "--seed must be at least 0, got -1"),
    ],
)
def test_plan_refuses_in_one_line(capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], message: str) -> None:
    assert main(["plan", *flags]) == 2
    err = capsys.readouterr().err
    assert err.startswith("seqpar plan: ") and err.count("\n") == 1 and "Errno" not in err
    assert message in err


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["nonsense"],
        ["plan"],
        ["plan", "--lengths", "1", "--window", "9" * 30],
        ["doctor", "--wrong"],
    ],
)
def test_a_wrong_call_shows_the_usage(capsys: pytest.CaptureFixture[str], argv: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(argv)
    assert stopped.value.code == 2
    assert "usage: seqpar" in capsys.readouterr().err


def test_the_longest_documents_are_planned_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    longest = str(2**31 - 1)
    for layout in ("contiguous", "zigzag"):
        facts = planned(capsys, "--lengths", longest, "--layout", layout)
        assert "sends_to" not in facts["ranks"][0] and sum(rank["rows"] for rank in facts["ranks"]) == 2**31 - 1
    assert main(["plan", "--lengths", longest, "--layout", "striped"]) == 2
    said = "--layout striped deals tokens out one by one, here at most 16,777,216, got 2,147,483,647; take zigzag"
    assert capsys.readouterr().err == f"seqpar plan: {said}\n"


@pytest.mark.parametrize("command", ["doctor", "plan", "calibrate"])
def test_the_examples_of_help_run(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    lines = capsys.readouterr().out.partition("examples:")[2].splitlines()
    examples = [line.partition("#")[0].split()[1:] for line in lines if line.startswith("  seqpar ")]
    assert len(examples) >= 2 and any(argv[0] == command for argv in examples)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(calibrate, "measured", lambda *args, **options: Hardware.preset("cpu").to_dict())
    monkeypatch.setattr(calibrate, "show", lambda data: None)
    Path("lengths.csv").write_text("tokens\n3000\n500\n")
    for argv in examples:
        assert main(argv) == 0
    if command == "plan":
        assert Path("plan.png").is_file()


def test_plot_writes_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    target = tmp_path / "new" / "plan.png"
    assert main(["plan", "--random", "30", "--ranks", "5", "--layout", "striped", "--plot", str(target)]) == 0
    assert target.read_bytes().startswith(b"\x89PNG")
    assert f"picture: {target}" in capsys.readouterr().out
    upper = tmp_path / "PLAN.SVG"
    assert main(["plan", "--lengths", "3", "--ranks", "2", "--plot", str(upper)]) == 0
    assert b"<svg" in upper.read_bytes()


@pytest.mark.parametrize("where", ["", "x.", "a.nonsense", "/dev/full", "file/x.png", "no.png"])
def test_a_picture_that_cannot_be_written_is_refused_before_planning(
    where: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plan, "planned", None)
    Path("file").touch()
    Path("no.png").mkdir()
    assert main(["plan", "--lengths", "3", "--plot", where]) == 2
    assert re.match(rf"seqpar plan: cannot write {re.escape(where or repr(where))}: ", capsys.readouterr().err)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "no.png"]
    with pytest.raises((ValueError, OSError)):
        plan_batch([3], 1, model="tiny").plot(where)


def test_what_calibrate_cannot_write_is_refused_before_measuring(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate, "measured", lambda *args, **options: {})
    for where, message in (
        ("", "is a directory"),
        (str(tmp_path), "is a directory"),
        ("no/x", "no is not a directory"),
    ):
        assert main(["calibrate", "--device", "cpu", "--out", where]) == 2
        assert message in capsys.readouterr().err
    assert main(["calibrate", "--device", "cpu", "--out", "/dev/full"]) == 2
    assert "cannot write /dev/full: No space left" in capsys.readouterr().err


def missing(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Let modules be as if they were not installed."""
    find = output.importlib.util.find_spec
    monkeypatch.setattr(output.importlib.util, "find_spec", lambda n, *a: None if n in names else find(n, *a))


def test_a_missing_extra_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    missing(monkeypatch, "matplotlib")
    for argv in (["plan", "--lengths", "9", "--plot", "x.png"], ["demo"]):
        assert main(argv) == 2
        assert "needs matplotlib, which is not installed: pip install 'seqpar[plot]'" in capsys.readouterr().err


def test_a_table_is_plain_unless_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    print_table("kernels", ("name", "why not"), [("triton", "pip install 'seqpar[triton]'"), ("blockwise", "")])
    assert capsys.readouterr().out == (
        "kernels\n  name       why not\n  triton     pip install 'seqpar[triton]'\n  blockwise\n\n"
    )
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "100")
    missing(monkeypatch, "rich")
    print_table("kernels", ("name",), [("triton",)])
    assert capsys.readouterr().out == "kernels\n  name\n  triton\n\n"


def test_doctor_says_what_works_and_why_the_rest_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is True
    assert found["versions"]["seqpar"] == seqpar.__version__
    assert torch.__version__.startswith(found["versions"]["torch"])  # which may go on with the build, +cu132
    assert found["devices"]["cpu"] is None
    assert found["kernels"]["reference"] is None
    assert found["transports"]["LocalComm (threads)"] is None
    assert found["transports"]["ShmComm (processes of this machine)"] == shm.missing()
    for part in ("devices", "kernels", "transports"):
        assert all(why is None or len(why) > 5 for why in found[part].values()), part
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in [*found["kernels"], *found["transports"], "attention on this CPU"])


def test_doctor_says_that_an_extension_for_cuda_needs_such_a_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seqpar.native, "without_cuda", lambda: None)
    for cuda, why in (("12.8", None), (None, "compiled for CUDA; this torch has no CUDA")):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        assert doctor.extension()["seqpar._C for CUDA"] == why


def test_doctor_fails_where_attention_does(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "attention_runs", lambda: "RuntimeError: no such instruction")
    assert main(["doctor"]) == 1
    assert "RuntimeError: no such instruction" in capsys.readouterr().out


def test_doctor_names_a_folder_that_hides_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.hidden(ROOT) is None
    folder = tmp_path / "seqpar"
    folder.mkdir()
    # the installed package is found along the path, also behind a folder without an __init__.py
    monkeypatch.setattr(sys, "path", ["", str(ROOT)])
    assert doctor.hidden(tmp_path) is None
    monkeypatch.setattr(sys, "path", [""])  # by a finder of an editable install
    assert doctor.hidden(tmp_path).startswith(f"Python takes the folder {folder} for a namespace package")
    (folder / "__init__.py").touch()
    assert doctor.hidden(tmp_path).startswith(f"it would import {folder / '__init__.py'}, and this is ")
    folder.rename(tmp_path / "other")
    assert doctor.hidden(tmp_path) is None


def test_doctor_refuses_rocm_by_name(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    # A ROCm build calls its devices CUDA.
    monkeypatch.setattr(torch.version, "hip", "6.4.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    found = doctor.devices()
    assert "ROCm is not supported" in found["rocm"]
    assert "6.4.0" in found["rocm"]
    assert found["cpu"] is None
    assert not any(name.startswith("cuda") for name in found)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    for name in ("GroupComm over nccl", "PeerComm (GPUs of this machine)"):
        assert doctor.transports()[name] == "ROCm is not supported"
    monkeypatch.setattr(doctor, "attention_runs", lambda: None)
    monkeypatch.setattr(doctor, "kernels", dict)
    assert main(["doctor"]) == 0
    assert "ROCm is not supported" in capsys.readouterr().out


def command(*argv: str, **options: object) -> subprocess.Popen[str]:
    """A script on two ranks that the demo starts, in a process group of its own, as a shell starts it."""
    env = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"} | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-c", LAUNCH, *argv], text=True, start_new_session=True, env=env,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options,
    )  # fmt: skip


LAUNCH = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(ROOT / "examples")!r})
from demo import launch
sys.exit(launch(2, Path(sys.argv[1]), sys.argv[2:]))
"""


@pytest.mark.parametrize(
    ("ending", "code", "how"),
    [
        ("sys.exit(7)", 7, "exited with 7"),
        ("os.kill(os.getpid(), 9)", 137, "was ended by SIGKILL"),
        ("os.kill(os.getpid(), 36)", 164, "was ended by signal 36"),  # a real-time signal has no name
    ],
    ids=["exit", "signal", "real-time signal"],
)
@pytest.mark.sampled(2)
def test_the_demo_returns_the_code_of_the_rank_that_failed_and_ends_the_others(
    tmp_path: Path, ending: str, code: int, how: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        f"import os, sys, time\nif os.environ['RANK'] == '1': {ending}\ntime.sleep(2000)\n", encoding="utf-8"
    )
    process = command(str(script))
    _, err = process.communicate(timeout=600)
    assert process.returncode == code, err
    assert f"rank 1 failed first: it {how}" in err


def alive(pid: int) -> bool:
    """Whether a process exists."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


BLOCKED = """
import os, pathlib, sys, time
import torch.distributed as dist
dist.init_process_group("gloo")
pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(str(os.getpid()))
if os.environ["RANK"] == "0":
    dist.barrier()
time.sleep(2000)
"""


def wait_for(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether a condition came true in time."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


@POSIX
@pytest.mark.parametrize(
    ("sent", "times", "code"),
    [(signal.SIGINT, 1, 130), (signal.SIGINT, 3, 130), (signal.SIGTERM, 1, 143)],
    ids=["ctrl-c", "ctrl-c-thrice", "terminate"],
)
@pytest.mark.sampled(3)
def test_an_interruption_leaves_no_process_behind(tmp_path: Path, sent: int, times: int, code: int) -> None:
    # Rank 0 sits inside a collective that never completes, where Python's own SIGINT handler would not run.
    (tmp_path / "script.py").write_text(BLOCKED, encoding="utf-8")
    process = command(str(tmp_path / "script.py"), str(tmp_path))
    try:
        files = [tmp_path / "0", tmp_path / "1"]
        assert wait_for(lambda: all(f.exists() and f.read_text() for f in files), 300)
        pids = [int(f.read_text()) for f in files]
        assert all(alive(pid) for pid in pids)
        for _ in range(times):
            os.killpg(process.pid, sent)
            time.sleep(0.1)
        out, err = process.communicate(timeout=600)
    finally:
        process.kill()
    assert process.returncode == code, out + err
    assert "Traceback" not in err
    assert wait_for(lambda: not any(alive(pid) for pid in pids), 60)


def test_run_prints_the_line_of_torchrun_that_does_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "-n", "2", "my script.py", "--json", "-n", "7"]) == 2
    line = "torchrun --standalone --nproc-per-node 2 'my script.py' --json -n 7"
    assert capsys.readouterr().err.splitlines() == [f"seqpar run: use {line}"]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """What would have been launched, with exit code 5."""
    calls: list[tuple[object, ...]] = []
    load = programs.load

    def loaded(script: Path) -> object:
        module = load(script)
        module.launch = lambda *args: calls.append(args) or 5
        return module

    monkeypatch.setattr(programs, "load", loaded)
    return calls


def test_the_demo_gets_its_flags_and_its_ranks(
    monkeypatch: pytest.MonkeyPatch, launched: list[tuple[object, ...]]
) -> None:
    monkeypatch.setattr(programs, "need", lambda *names: None)
    assert main(["demo", "--ranks", "3", "--layout", "striped", "--steps", "2"]) == 5
    assert main(["demo"]) == 5
    script = ROOT / "examples" / "demo.py"
    assert launched == [(3, script, ["--ranks", "3", "--layout", "striped", "--steps", "2"]), (4, script, [])]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--layout", "x"), "invalid choice: 'x'"),
        (("--steps", "-1"), "--steps -1 is too small; it must be at least 1"),
        (("--hardware", __file__), "test_cli.py is not a hardware file"),
        (("--out", "picture"), "the ending of 'picture' is not a picture format"),
        (("--unknown",), "unrecognized arguments: --unknown"),
    ],
)
def test_the_demo_refuses_before_a_rank_starts(
    capsys: pytest.CaptureFixture[str], launched: list[tuple[object, ...]], flags: tuple[str, ...], message: str
) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(SystemExit) as stopped:
        main(["demo", *flags])
    assert stopped.value.code == 2 and not launched
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_an_installed_package_has_the_examples_inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "PACKAGE", tmp_path / "seqpar")
    with pytest.raises(CommandError, match=r"demo\.py is neither at .* nor at .*; reinstall seqpar"):
        programs.find_example("demo.py")
    for place in (tmp_path / "examples", tmp_path / "seqpar" / "examples"):
        place.mkdir(parents=True)
        (place / "demo.py").touch()
        assert programs.find_example("demo.py") == place / "demo.py"
