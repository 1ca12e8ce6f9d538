"""`fit`: rungs, the choice among them, how many ranks pay, and what is said of documents that do not fit."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from seqpar.planner import Hardware, ModelShape, Training, fit, plan_batch
from seqpar.planner.ladder import RUNGS, Batch, Machine, Mix

HOST = Training(host_bytes=400 * 10**9)
SHAPE = ModelShape.preset("llama-8b")
H100 = Hardware.preset("h100")


def test_every_rung_holds_a_longer_document_than_the_one_before() -> None:
    ladder = fit([131_072, 9_000], 8, training=HOST)
    longest = [rung.longest for rung in ladder.rungs]
    assert [rung.name for rung in ladder.rungs] == list(RUNGS)
    assert longest == sorted(longest) and longest[-1] > 60 * longest[0]
    for rung in ladder.rungs:
        assert (rung.seconds is None) == (rung.longest < 131_072) == (rung.micro_batches is None)
        assert rung.limit.bytes(rung.rows) > rung.memory.usable or rung.seconds is not None


def test_the_choice_fits_and_takes_no_longer_than_a_rung_that_fits() -> None:
    for lengths in ([65_536], [131_072, 9_000, 30_000, 4_000], [8_000] * 90, [600_000]):
        ladder = fit(lengths, 8, training=HOST)
        choice, seconds = ladder.choice, [rung.seconds for rung in ladder.rungs if rung.seconds is not None]
        assert choice.memory.bytes(choice.rows) <= choice.memory.usable
        assert choice.rows * choice.ranks >= max(lengths)
        assert choice.seconds <= min(seconds) * (1.15 if choice.ranks < 8 else 1.001)


def test_the_fewest_ranks_within_the_tolerance_are_taken() -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(7, 1.3, 256), 16, 131_072).astype(int).tolist()
    for tolerance in (0.0, 0.15, 2.0):
        ladder = fit(lengths, 256, tolerance=tolerance)
        best = min(seconds for _, seconds in ladder.by_ranks)
        within = [ranks for ranks, seconds in ladder.by_ranks if seconds <= best * (1 + tolerance)]
        assert ladder.choice.ranks == min(within)
    # weights that arrive late make more ranks slower than the plans alone say
    assert ladder.choice.ranks < 256


def test_what_a_step_waits_for() -> None:
    lengths = [4_096] * 32

    def exposed(ranks: int, **changes: object) -> float:
        at = Machine(SHAPE, replace(H100, node=8), Training(host_bytes=10**15, **changes), ranks)
        return at.waits(Mix(0, "none", "none"), 0.2, 0.4, 10_000)

    assert exposed(8) < exposed(64) and exposed(64, reshard=8) < exposed(64)
    assert exposed(64, reshard=False) < exposed(64, reshard=8)
    at = Machine(SHAPE, H100, HOST, 8)
    assert at.waits(Mix(0, "offload", "offload"), 1e-3, 2e-3, 10_000) > at.waits(
        Mix(0, "full", "full"), 1e-3, 2e-3, 10_000
    )
    on_host = Mix(0, "full", "full", state_on_host=True)
    assert at.step(on_host) == 16 * SHAPE.parameters / 8 / H100.host and at.step(Mix(0, "full", "full")) == 0
    batch = Batch(lengths, SHAPE, H100)
    seconds = [batch.alone(Mix(n, "full", "none")) for n in range(SHAPE.layers)]
    assert seconds == sorted(seconds)


def test_state_on_the_host_serves_where_the_state_fits_no_rank() -> None:
    with pytest.raises(ValueError, match=r"needs 15\d\.\d GB"):
        fit([131_072], 8, model="llama-70b")
    ladder = fit([131_072], 8, model="llama-70b", training=HOST)
    choice = ladder.choice
    assert choice.mix.state_on_host and choice.memory.host is not None
    assert choice.memory.host.bytes(choice.rows) <= HOST.host_bytes
    assert "CPUOffloadPolicy()" in ladder.lines and "GB of the host's memory" in ladder.reasons


@pytest.mark.parametrize("model", ["llama-8b", "llama-70b"])
@pytest.mark.parametrize("host", [0, 20 * 10**9])
def test_the_ways_out_of_a_refusal_fit(model: str, host: int) -> None:
    training, ways = Training(host_bytes=host), 0
    with pytest.raises(ValueError, match=r"[\d.]+ GB too little; give .*, .*, or ") as refused:
        fit([4_000_000], 8, model=model, training=training)
    said = str(refused.value)
    needed, has, missing = (float(x) for x in re.findall(r"([\d.]+) GB", said)[:3])
    assert needed - has == pytest.approx(missing, abs=0.11)
    if found := re.search(r"give (\d+) ranks", said):
        ways += fit([4_000_000], int(found[1]), model=model, training=training).choice.ranks <= int(found[1])
    with_host = re.search(r"Training\(host_bytes=(\d+)\)", said)
    roomy = Training(host_bytes=int(with_host[1])) if with_host else training
    if found := re.search(r"documents of at most ([\d,]+) tokens( with)?", said):
        tokens, given = int(found[1].replace(",", "")), roomy if found[2] else training
        ways += fit([tokens], 8, model=model, training=given).choice.ranks == 8
        with pytest.raises(ValueError, match="too little"):
            fit([tokens + 8], 8, model=model, training=given)
    if with_host and not (found and found[2]):
        ways += fit([4_000_000], 8, model=model, training=roomy).choice.ranks == 8
    if found := re.search(r"a machine with (\d+) GB", said):
        large = replace(H100, memory=int(found[1]) * 10**9)
        ways += fit([4_000_000], 8, model=model, hardware=large, training=training).choice.ranks == 8
        with pytest.raises(ValueError, match="too little"):
            fit([4_000_000], 8, model=model, hardware=replace(large, memory=large.memory - 10**9), training=training)
    assert ways == 3


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"ranks": 0}, "ranks must be an integer of at least 1"),
        ({"ranks": 2.5}, "ranks must be an integer"),
        ({"lengths": []}, "lengths must be a non-empty sequence"),
        ({"lengths": [0.5]}, "lengths must be a non-empty sequence of integers"),
        ({"training": Training(shards=3)}, "shards=3 does not divide the 8 ranks"),
        ({"training": Training(reshard=3)}, "reshard=3 is no divisor of the 8 shards"),
        ({"training": 16}, "training must be a Training or None"),
        ({"training": 0}, "training must be a Training or None"),
        ({"rungs": ["tile"]}, r"rungs must be some of plain, .*, got \['tile'\]"),
        ({"rungs": []}, "rungs must be some of"),
        ({"rungs": 5}, "rungs must be some of"),
        ({"rungs": [["full"]]}, "rungs must be some of"),
        ({"rungs": ["full", "offload"]}, r"the rung offload needs memory of the host; give Training\(host_bytes"),
        ({"tolerance": -0.1}, "tolerance must be a finite number of at least 0"),
        ({"model": "llama-9b"}, "no model is called"),
    ],
)
def test_what_fit_refuses(change: dict[str, object], match: str) -> None:
    given = {"lengths": [1000], "ranks": 8} | change
    with pytest.raises(ValueError, match=match):
        fit(given.pop("lengths"), given.pop("ranks"), **given)  # type: ignore[arg-type]


def test_named_rungs_are_the_ones_taken() -> None:
    assert fit([50_000], 8, rungs=["plain", "full"]).choice.mix.whole_logits
    ladder = fit([131_072], 8, rungs=["full", "own-loss"])
    assert [rung.name for rung in ladder.rungs] == ["own-loss", "full"]
    assert {ladder.choice.mix.first, ladder.choice.mix.rest} == {"none", "full"}


def test_the_only_rung_named_is_the_one_counted() -> None:
    ladder = fit([8192], 8, rungs=["plain"])
    assert ladder.choice.mix.whole_logits and ladder.rungs[0].longest == 55_008
    with pytest.raises(
        ValueError, match=r"at the loss .* give 16 ranks, documents of at most 55,008 tokens, or a mach"
    ):
        fit([57_000], 8, rungs=["plain"])
    assert fit([8192], 8, rungs=["state-on-host"], training=HOST).choice.mix.state_on_host


def test_the_lines_name_a_preset_only_where_it_is_the_machine() -> None:
    assert 'hardware="h100"' in fit([8192], 8).lines
    assert "hardware=hardware," in fit([8192], 8, hardware=replace(H100, memory=90 * 10**9)).lines


def test_the_facts_are_plain_data_and_a_plan_of_the_choice_is_the_one_counted() -> None:
    facts = fit([131_072], 8).facts()
    assert facts["bytes"] <= facts["usable"] and len(facts["rungs"]) == 5
    shape = replace(SHAPE, recompute=facts["first"] if facts["first_layers"] else facts["rest"])
    plan = plan_batch([131_072], facts["ranks"], model=shape, max_tokens_per_rank=facts["rows"])
    assert plan.forecast is not None and plan.forecast.rows.max() <= facts["rows"]


@pytest.mark.parametrize("name", ["describe", "headline"])
def test_every_preset_is_described(name: str) -> None:
    for model in ("qwen3-8b", "qwen3-30b-a3b", "qwen3-next-80b-a3b"):
        ladder = fit([30_000] * 8, 128, model=model, training=HOST)
        said = ladder.describe() if name == "describe" else ladder.headline
        assert ladder.model.name in said and str(ladder.choice.ranks) in said
