"""The bytes of a rank: what every device has, and what NCCL and its third stage of keys add."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from seqpar import latent_attention
from seqpar.planner import Hardware, ModelShape, Training, plan_batch, plan_step
from seqpar.planner.memory import EXPANDED, Memory
from seqpar.planner.shape import POLICIES
from tests.programs import Programs

ROOT = Path(__file__).resolve().parents[2]

SHAPE = ModelShape.preset("llama-8b")
STAGE = 64 << 20


def test_nccl_takes_buffers_and_a_third_stage_of_keys() -> None:
    machine = Hardware.preset("h100")
    alone = replace(machine, inside=replace(machine.inside, channels=None))
    buffers = 7 * 32 * (4 << 20)  # 7 peers of a node, 32 channels to each, 4 MiB a channel
    more = Memory.of(SHAPE, machine, STAGE).fixed - Memory.of(SHAPE, alone, STAGE).fixed
    assert more == buffers + STAGE
    one = replace(machine, node=1)
    assert Memory.of(SHAPE, machine, STAGE).fixed - Memory.of(SHAPE, one, STAGE).fixed == buffers
    assert Memory.of(SHAPE, machine, STAGE).rows < Memory.of(SHAPE, alone, STAGE).rows


def test_a_stage_has_keys_and_the_gradients_of_two() -> None:
    """On the CPU two of keys in bfloat16 and two of gradients in float32."""
    machine = Hardware.preset("cpu")
    assert Memory.of(SHAPE, machine, 2 * STAGE).fixed - Memory.of(SHAPE, machine, STAGE).fixed == 6 * STAGE
    machine = Hardware.preset("h100")
    assert Memory.of(SHAPE, machine, 2 * STAGE).fixed - Memory.of(SHAPE, machine, STAGE).fixed == 7 * STAGE


def test_keys_on_their_way_are_no_more_than_all_other_ranks_have() -> None:
    shape = replace(SHAPE, layers=2, hidden=256, heads=4, kv_heads=4, dim=32, ffn=512, vocab=1000, dtype="float32")
    row = shape.row_bytes * 2  # and its gradient
    for size in (400_000_000, 8_000_000_000):
        machine = replace(Hardware.preset("cpu"), memory=size)
        wide, narrow, alone = (
            Memory.of(shape, machine, stage, Training(), n) for stage, n in ((STAGE, 4), (1, 4), (1, 1))
        )
        assert 0 < wide.rows < narrow.rows and wide.bytes(wide.rows) <= wide.usable < wide.bytes(wide.rows + 1)
        for rows in (1, wide.rows):
            assert wide.most(rows).kinds(rows)["exchanges"] in (0, min(4 * STAGE, 3 * row * rows))
        assert alone.most(100).kinds(100)["exchanges"] == 0


def test_keys_of_latents_are_made_for_some_heads_with_their_gradients() -> None:
    """Of DeepSeek-V3 a row is 128 heads of 192 + 128, in bfloat16, and the gradients in float32."""
    latents, machine = ModelShape.preset("deepseek-v3"), replace(Hardware.preset("h100"), node=1)
    keys = replace(latents, latents=False)
    most, row = EXPANDED * 3 // 2, 128 * 320 * (2 + 4)
    assert inspect.signature(latent_attention).parameters["expand_bytes"].default == EXPANDED
    rows, held = 100_000, latents.activation_bytes - keys.activation_bytes
    without, made = (Memory.of(shape, machine, STAGE).bytes for shape in (keys, latents))
    assert made(10) - without(10) == 10 * (held + row)
    assert made(rows) - without(rows) == rows * held + most
    for ranks, rows in ((1, 10), (1, 100_000), (4, 10)):
        memory = Memory.of(latents, machine, STAGE, Training(), ranks)
        exchanged = next(m for m in memory.moments if m.name == "last").kinds(rows)["exchanges"]
        sent = (ranks - 1) * 576 * (2 + 4)
        assert exchanged == min(most, row * rows) if ranks == 1 else exchanged == rows * (3 * row + sent)


def compared(programs: Programs, folder: Path, module: str, cases: str) -> list[float]:
    """By how much the planner's bytes differ from the truth, in cases of a program.

    In a process of its own, since torch's tracker hooks into all modules of a process.
    """
    script = folder / "compared.py"
    script.write_text(
        f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n"
        f"from bench.planner.{module} import *\nif __name__ == '__main__':\n"
        f"    for case in ({cases}):\n        print('bytes', *compared(case))\n"
    )
    pairs = re.findall(r"^bytes (\d+) (\d+)$", programs.alone(script, folder), re.MULTILINE)
    assert pairs
    return [int(planned) / int(truth) - 1 for truth, planned in pairs]


def test_training_needs_what_torch_tracks(programs: Programs, tmp_path: Path) -> None:
    cases = "CASES[0], CASES[17], MIXED[1], OF_BLOCKS[14]"
    assert max(map(abs, compared(programs, tmp_path, "memory", cases))) < 0.05


def test_training_takes_the_memory_of_processes(programs: Programs, tmp_path: Path) -> None:
    cases = "Case(2, 'full', 'none', True, hidden=128), Case(2, 'none', 'none', True, True, hidden=128)"
    alone, spread = compared(programs, tmp_path, "resident", cases)
    assert abs(alone) < 0.02 and abs(spread) < 0.05


def test_what_training_needs_decides_what_is_recomputed() -> None:
    for tokens in (65_536, 98_304):
        without = plan_batch([tokens], 8)
        assert without.forecast.model.recompute == "none" and "without the model's state: 16.1 GB" in without.describe()
        counted = plan_batch([tokens], 8, training=Training())
        assert counted.forecast.model.recompute != "none"
        assert counted.forecast.bytes <= counted.forecast.memory.usable
        assert "of which 16.1 GB are state" in counted.describe()
    with pytest.raises(ValueError, match=r"needs 153.7 GB for 141.1 GB of state, .* and has 71.7 GB"):
        plan_batch([131_072], 8, model="llama-70b", training=Training())
    with pytest.raises(ValueError, match="GB of state"):
        plan_step([5000] * 9, 1, training=Training())


@pytest.mark.parametrize("change", [{"reshard": False}, {"state_bytes": 18}, {"shards": 4}, {"weights": "float32"}])
def test_more_state_leaves_room_for_fewer_rows(change: dict[str, object]) -> None:
    machine = Hardware.preset("h100")
    plain, more = (Memory.of(SHAPE, machine, STAGE, each, 8) for each in (Training(), Training(**change)))
    assert more.rows < plain.rows
    assert Memory.of(SHAPE, machine, STAGE, Training(fused_norms=True), 8).rows > plain.rows
    between = Memory.of(SHAPE, machine, STAGE, Training(reshard=2), 8).rows
    assert Memory.of(SHAPE, machine, STAGE, Training(reshard=False), 8).rows < between < plain.rows


@pytest.mark.parametrize("rows", [1, 1000, 20_000])
@pytest.mark.parametrize("recompute", POLICIES)
def test_the_rows_that_fit_are_the_most(rows: int, recompute: str) -> None:
    training = Training(host_bytes=1 << 50)
    memory = Memory.of(replace(SHAPE, recompute=recompute), Hardware.preset("h100"), STAGE, training, 8)
    memory = replace(memory, usable=memory.bytes(rows))
    assert memory.rows == rows
    assert replace(memory, usable=memory.usable - 1).rows == rows - 1


def test_each_layer_on_the_policy_below_leaves_room_for_more_rows() -> None:
    machine, training = Hardware.preset("h100"), Training(host_bytes=1 << 50)

    def rows(policy: str, first: tuple[int, str] = (0, "none")) -> int:
        return Memory.of(replace(SHAPE, recompute=policy), machine, STAGE, training, 8, first=first).rows

    ladder = ("none", "keep-attention", "full", "tiled", "offload")
    for dear, cheap in pairwise(ladder):
        mixed = [rows(dear, (n, cheap)) for n in range(SHAPE.layers + 1)]
        assert mixed == sorted(mixed) and mixed[0] == rows(dear) < mixed[-1] == rows(cheap)
    # layers that keep all they have hold it until their own backward begins, so they come last
    assert rows("none", (16, "full")) > rows("full", (16, "none"))


def test_the_host_is_a_limit_too() -> None:
    machine, offload = Hardware.preset("h100"), replace(SHAPE, recompute="offload")
    inputs = 2 * SHAPE.hidden * SHAPE.layers  # bytes a row
    memory = Memory.of(offload, machine, STAGE, Training(host_bytes=1000 * inputs), 8)
    assert memory.rows == 1000 and memory.host is not None and memory.host.bytes(10) == 10 * inputs
    state = -(-16 * SHAPE.parameters // 8)
    kept = Training(host_bytes=state + 7 * inputs, state_on_host=True)
    memory = Memory.of(offload, machine, STAGE, kept, 8)
    assert memory.rows == 7 and memory.state == 0 and memory.most(0).state == 0
    assert Memory.of(offload, machine, STAGE, replace(kept, host_bytes=state - 1), 8).rows == 0
    for shape, training in ((offload, Training()), (SHAPE, Training(state_on_host=True))):
        with pytest.raises(ValueError, match="on the host need bytes there"):
            Memory.of(shape, machine, STAGE, training, 8)


@pytest.mark.parametrize("rows", [0, 5000])
def test_the_kinds_of_bytes_add_up(rows: int) -> None:
    memory = Memory.of(SHAPE, Hardware.preset("h100"), STAGE, Training(), 8, first=(3, "full"), own_loss=False)
    for moment in memory.moments:
        assert sum(moment.kinds(rows).values()) == moment.bytes(rows) <= memory.bytes(rows)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Training(state_bytes=3), "state_bytes"),
        (lambda: Training(state_bytes=2.5), "state_bytes"),
        (lambda: Training(shards=0), "shards"),
        (lambda: Training(host_bytes=-1), "host_bytes"),
        (lambda: Training(state_on_host=1), "state_on_host must be True or False"),
        (lambda: Training(fused_norms=3), "fused_norms must be True or False"),
        (lambda: Training(reshard=0), "reshard"),
        (lambda: Training(shards=8, reshard=3), "reshard=3 is no divisor of the 8 shards"),
        (lambda: Training(weights="int3"), "weights must be one of"),
        (lambda: plan_batch([90], 6, training=Training(shards=4)), "shards=4 does not divide the 6 ranks"),
        (lambda: plan_batch([90], 6, training=Training(reshard=4)), "reshard=4 is no divisor of the 6 shards"),
        (lambda: plan_batch([90], 6, training=16), "training must be a Training or None"),
    ],
)
def test_a_training_that_is_not_one_is_refused(make: Callable[[], object], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make()


def test_gradients_of_another_micro_batch_are_there_from_the_start() -> None:
    machine = Hardware.preset("h100")
    one, several = (Memory.of(SHAPE, machine, 2 * STAGE, Training(accumulates=a), 8) for a in (False, True))
    gradients = 4 * SHAPE.parameters // 8
    for moment, more in zip(one.moments, several.moments):
        assert moment.state <= more.state <= moment.state + gradients
    assert all(0 <= several.state - m.state <= 1 for m in several.moments)
    parts = plan_step([one.rows * 4] * 4, 8, model=SHAPE, training=Training())
    assert len(parts) > 2 and all(part.plan.forecast.memory.rows == several.rows for part in parts)
