"""Recurrent layers in plans: what they pass, what that costs, and the sizes of hybrid models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from seqpar import Layout, Mask, Plan, recurrent
from seqpar.comm import Comm, LocalComm
from seqpar.plan import travel
from seqpar.plan.recurrence import LayerBytes, RecurrentLayer
from seqpar.plan.runs import DocumentRuns
from seqpar.planner import Hardware, ModelShape, plan_batch, plan_step
from seqpar.planner.carried import LayerTraffic, RecurrentWeights, carried_of, traffic_of
from seqpar.planner.cost import Weights
from seqpar.planner.memory import Memory
from seqpar.planner.place import Pieces
from seqpar.testing import run_threads

H100 = Hardware.preset("h100")
GATHERED = LayerBytes(heads=1, state=1, map=1, row=1 << 30)  # of states so small that all are gathered
HYBRIDS = ["qwen3-next-80b-a3b", "kimi-linear-48b-a3b", "nemotron-h-8b", "granite-4.0-h-small"]


def carried_by(mask: Mask, layout: Layout, layer: LayerBytes, *, node: int) -> LayerTraffic:
    return traffic_of(DocumentRuns.of(Plan(mask, layout).residence), layer, node=node)


@given(st.data())
def test_pieces_in_any_order_are_counted_as_their_layout(data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, 6))
    node = data.draw(st.integers(1, ranks))
    mask = Mask(data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=5)))
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 30)))
    at = np.unique(np.concatenate([mask.offsets, rng.integers(0, mask.tokens, 8)]))
    count, rank, order = np.diff(at), rng.integers(0, ranks, at.size - 1), rng.permutation(at.size - 1)
    document, layout = mask.documents(at[:-1]), Layout.from_pieces(at[:-1], count, rank, ranks)
    layer = LayerBytes(4, *rng.integers(1, 1 << 20, 4).tolist(), None, reach=2, tap=8, tap_grad=16)
    columns = (x[order] for x in (document, at[:-1] - mask.offsets[document], count, rank))
    found = carried_of(mask, Pieces(*columns), layer, ranks=ranks, node=node)
    assert str(found) == str(carried_by(mask, layout, layer, node=node))
    if "row" not in found.items:
        runs = DocumentRuns.of(Plan(mask, layout).residence)
        leaving = np.bincount(runs.rank, weights=runs.count * ~runs.closes, minlength=ranks)
        np.testing.assert_array_equal(found.leaving, leaving)


def test_items_are_the_more_of_sent_and_received_by_node() -> None:
    carried = carried_by(Mask([5, 2]), Layout.striped(7, 2), GATHERED, node=2)
    # rank 0 has rows 0 2 4 | 6 and receives 1 3, rank 1 has 1 3 | 5 and receives 0 2, and sends 5's state to nobody
    assert [x.tolist() for x in carried.items["state"]] == [[3, 3], [0, 0]]
    assert carried.leaving.tolist() == [2, 3]
    apart = carried_by(Mask([5, 2]), Layout.striped(7, 2), GATHERED, node=1)
    assert [x.tolist() for x in apart.items["state"]] == [[0, 0], [3, 3]]
    assert apart.exchanges.far.tolist() == [1, 1] and not apart.exchanges.near.any()


FAMILIES = {
    "decay": RecurrentLayer(4, 8, 16, 2, taps=3, channels=24),
    "decay by channel": RecurrentLayer(4, 8, 16, decay="channel", taps=3, channels=24),
    "delta rule": RecurrentLayer(4, 8, 16, 2, delta=True, taps=3, channels=24),
    "states of channels": RecurrentLayer(16, 8, 1, 1, decay="rates", taps=3, channels=24),
}


def passed(comm: Comm, plan: Plan, layer: RecurrentLayer) -> list[int]:
    """The more of the bytes that a rank sends and receives: for states, and for the convolution in both directions."""
    rows, counts = plan.rows(comm.rank), []

    def note() -> None:
        counts.append(max(comm.stats.bytes_sent, comm.stats.bytes_received))
        comm.stats.reset()

    q, k = torch.randn(2, rows, layer.groups, layer.key_dim)
    v, decay, beta = torch.randn(rows, layer.heads, layer.value_dim), -torch.rand(rows, layer.heads), None
    if layer.decay == "channel":
        decay = -torch.rand(rows, layer.heads, layer.key_dim)
    if layer.delta:
        beta = torch.rand(rows, layer.heads)
    if layer.decay == "rates":
        rates = torch.ones(layer.heads, layer.key_dim)
        recurrent.channel_scan(v[..., 0], decay, plan, comm, rates=rates, keys=k[:, 0], queries=q[:, 0])
    else:
        recurrent.linear_attention(q, k, v, plan, comm, decay=decay, beta=beta)
    note()
    x = torch.randn(rows, layer.channels, dtype=torch.bfloat16).requires_grad_()
    filters = torch.randn(layer.channels, layer.taps, dtype=torch.bfloat16)
    y = recurrent.causal_conv1d(x, filters, None, plan, comm)
    note()
    y.sum().backward()
    note()
    return counts


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("layout", "latency", "kinds"),
    [
        ("contiguous", travel.LATENCY, {"state", "map"}),
        ("contiguous", 1, {"state"}),  # a chain
        ("striped", 1, {"row", "state"}),
    ],
)
def test_bytes_of_the_way_that_is_taken_are_counted(
    family: str, layout: str, latency: int, kinds: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(travel, "LATENCY", latency)
    layer, mask = FAMILIES[family], Mask([240])
    made = getattr(Layout, layout)(mask.tokens, 4)
    wide, half = layer.bytes("float32"), layer.bytes("bfloat16")
    carried = carried_by(mask, made, wide._replace(tap=half.tap, tap_grad=half.tap_grad), node=4)
    assert kinds <= set(carried.items) and ("map" in carried.items) == ("map" in kinds)
    sizes = {"state": wide.state, "map": wide.map, "row": wide.row + wide.out}
    states = sum(carried.items[kind].near * size for kind, size in sizes.items() if kind in carried.items)
    sizes = {"halo": half.reach * half.tap, "filtered": 2 * half.tap}
    there = sum(carried.items[kind].near * size for kind, size in sizes.items() if kind in carried.items)
    sizes["halo"] = half.reach * half.tap_grad
    back = sum(carried.items[kind].near * size for kind, size in sizes.items() if kind in carried.items)
    results = run_threads(4, passed, Plan(mask, made), layer)
    assert [list(column) for column in zip(*results)] == [x.tolist() for x in (states, there, back)]


@pytest.mark.parametrize("family", ["decay", "delta rule"])
def test_operations_are_those_of_the_chunked_kernel(family: str) -> None:
    layer, tokens = replace(FAMILIES[family], taps=0, channels=0), 256
    plan = Plan(Mask([tokens]), Layout.contiguous(tokens, 1))
    with FlopCounterMode(display=False) as counter:
        sent_alone(plan, layer)
    solved = layer.heads * 64 * (layer.key_dim + layer.value_dim) * layer.delta  # not counted by torch
    assert counter.get_total_flops() == pytest.approx((layer.flops - solved) * tokens, rel=0.1)


def sent_alone(plan: Plan, layer: RecurrentLayer) -> Tensor:
    rows = plan.rows(0)
    q, k = torch.randn(2, rows, layer.groups, layer.key_dim)
    v, decay = torch.randn(rows, layer.heads, layer.value_dim), -torch.rand(rows, layer.heads)
    beta = torch.rand(rows, layer.heads) if layer.delta else None
    out = recurrent.linear_attention(q, k, v, plan, LocalComm(), decay=decay, beta=beta, kernel="chunked")
    assert isinstance(out, Tensor)
    return out


def test_a_cut_document_costs_one_exchange_of_states_and_one_of_halos_in_each_direction() -> None:
    shape = ModelShape.preset("qwen3-next-80b-a3b")
    w = RecurrentWeights.of(shape, H100, 1e-12)
    layer, mask = shape.recurrent, Mask([4000])
    assert layer is not None
    computing, waiting = w.ticks(np.array([2000, 2000]), carried_by(mask, Layout.contiguous(4000, 2), w.layer, node=2))
    state, halo = 32 * 128 * 128 * 4, 3 * 8192 * 2  # and no map: nothing enters the first run
    # gradients of rows before runs are in float32
    seconds = 36 * (4 * H100.inside.latency + (2 * state + halo + 2 * halo) / H100.inside.alone)
    assert waiting.tolist() == pytest.approx([seconds / 1e-12] * 2, rel=1e-6)
    operations = 4 * 36 * 2000 * layer.flops
    assert int(computing[1]) == pytest.approx(operations / H100.linear_rate / 1e-12, rel=1e-6)
    assert int(computing[0] - computing[1]) == pytest.approx(
        4 * 36 * 2000 * layer.leave_flops / H100.linear_rate / 1e-12, rel=1e-6
    )
    apart = carried_by(Mask([2000, 2000]), Layout.contiguous(4000, 2), w.layer, node=2)
    assert not w.ticks(np.array([2000, 2000]), apart)[1].any() and not apart.items
    again = RecurrentWeights.of(replace(shape, recompute="full"), H100, 1e-12)
    assert again.passes == 36 * 3 and again.row == pytest.approx(w.row * 5 / 4)
    assert (again.items["halo"].times, again.items["halo_grad"].times) == (36 * 2, 36)


def test_a_chain_costs_its_exchanges_and_the_parts_of_states_before_a_rank_s_own() -> None:
    w = RecurrentWeights.of(ModelShape.preset("nemotron-h-8b"), H100, 1e-12)
    layer = w.layer._replace(heads=1, map=1 << 40, work=None)  # which nobody would gather
    for node, near, far in ((8, 7, 0), (4, 6, 1), (1, 0, 7)):
        carried = carried_by(Mask([8000]), Layout.contiguous(8000, 8), layer, node=node)
        assert set(carried.items) == {"state", "halo", "halo_grad"} and carried.blocks == 1
        # one more for the rows before runs, which rank 0 sends to a neighbour
        assert [x[0] for x in carried.exchanges] == [near + (node > 1), far + (node == 1)]
        assert [x[0] for x in carried.late] == [max(0, near - (far == 0)), max(0, far - 1)]
        late = carried.late.near * w.items["state"].hop + carried.late.far * w.items["state"].far
        exchanges = carried.exchanges.near * w.near + carried.exchanges.far * w.far
        at_once = w.ticks(np.full(8, 1000), carried._replace(late=type(carried.late)(late * 0, late * 0)))[1]
        assert (w.ticks(np.full(8, 1000), carried)[1] - at_once == w.passes * late).all()
        assert (at_once > w.passes * exchanges).all()
    short = carried_by(Mask([2000, 6000]), Layout.contiguous(8000, 8), layer, node=8)
    assert short.exchanges.near.tolist() == [2, 2, 6, 6, 6, 6, 6, 6]
    parts = carried_by(Mask([8000]), Layout.contiguous(8000, 8), layer._replace(heads=2, state=1 << 30), node=8)
    assert parts.blocks == 2 and parts.exchanges.near.tolist() == [9] * 8


def test_a_pipeline_waits_for_the_rows_of_others_and_computes_nothing_beforehand() -> None:
    layer = RecurrentLayer(8, 128, 128, delta=True).bytes("float32", device="cpu")
    carried = carried_by(Mask([64 << 10]), Layout.contiguous(64 << 10, 4), layer, node=4)
    assert carried.blocks == 8 and set(carried.items) == {"state"} and not carried.leaving.any()
    assert carried.waited.tolist() == [3 * (16 << 10) // 8] * 4 and carried.exchanges.near.tolist() == [3 + 7] * 4
    w = RecurrentWeights.of(ModelShape.preset("nemotron-h-8b"), Hardware.preset("cpu"), 1e-12)
    rows = np.full(4, 16 << 10)
    at_once = carried._replace(waited=carried.waited * 0)
    (computing, waiting), (same, less) = (w.ticks(rows, each) for each in (carried, at_once))
    assert (computing == rows * w.row).all() and (same == computing).all()
    assert (waiting - less == carried.waited * w.row).all()
    two = layer._replace(work=layer.work._replace(width=2))  # heads at once: as many as a block has, or all are late
    later = carried_by(Mask([64 << 10]), Layout.contiguous(64 << 10, 4), two, node=4)
    assert later.blocks == 4 and later.waited.tolist() == [3 * (16 << 10) // 4] * 4


def test_a_layer_without_a_state_waits_for_rows_alone() -> None:
    layer = RecurrentLayer.short_convolution(4096, taps=3).bytes()
    carried = carried_by(Mask([4000]), Layout.contiguous(4000, 2), layer, node=2)
    assert set(carried.items) == {"halo", "halo_grad"} and carried.exchanges.near.tolist() == [1, 1]


def test_states_from_other_nodes_cross_the_slower_links() -> None:
    w = RecurrentWeights.of(ModelShape.preset("nemotron-h-8b"), H100, 1e-12)
    one, two = (carried_by(Mask([8000]), Layout.contiguous(8000, 4), GATHERED, node=node) for node in (4, 2))
    rows = np.full(4, 2000)
    assert (w.ticks(rows, two)[1] > w.ticks(rows, one)[1]).all()
    assert [x.tolist() for x in one.items["state"]] == [[3, 2, 2, 3], [0] * 4]
    assert [x.tolist() for x in two.items["state"]] == [[1] * 4, [2] * 4]


@pytest.mark.parametrize("name", HYBRIDS)
def test_forecasts_of_hybrid_models_show_attention_and_recurrences(name: str) -> None:
    lengths = [60000, 20000] + [900] * 60
    plan = plan_batch(lengths, 8, model=name, hardware=H100)
    forecast = plan.forecast
    assert forecast is not None and 0 <= forecast.gap < 0.5
    shape = forecast.model
    assert shape.attention_count + shape.recurrent_layers <= shape.layers
    shares = {name: float(seconds.sum()) for name, seconds in forecast.phases.items()}
    assert list(shares) == ["attention", "recurrent", "exposed", "linear", "head"] and min(shares.values()) > 0
    assert sum(shares.values()) == pytest.approx(float(forecast.ticks.total.sum()) * forecast.second)
    assert "recurrent" in plan.describe() and "recurrences at the rate of linear layers" in str(forecast)
    w = Weights.of(shape, H100.among(8)).recurrent
    assert w is not None
    carried = carried_by(plan.mask, plan.layout, w.layer, node=8)
    np.testing.assert_array_equal(w.ticks(plan.layout.sizes(), carried)[0], forecast.ticks.recurrent)
    alone = plan_batch([900] * 64, 8, model=name, hardware=H100)
    assert alone.forecast is not None and not alone.forecast.ticks.exposed.any()


def test_a_model_without_attention_is_planned() -> None:
    layer = RecurrentLayer.mamba2(512, heads=16, head_dim=64, groups=1, state=64, taps=4)
    shape = ModelShape(
        "mamba", 512, 6, 16, 1, 64, 0, 1000, recurrent=layer, recurrent_layers=6, ffn_layers=0, attention_layers=0
    )
    forecast = plan_batch([5000, 3000, 10], 3, model=shape, hardware=H100).forecast
    assert forecast is not None and forecast.gap >= 0 and not forecast.ticks.attention.any()
    assert shape.window_groups() == [(None, 0)]
    with pytest.raises(ValueError, match="masks has 2 masks for the 0 layers with attention"):
        plan_batch([5], 1, model=shape, hardware=H100, masks=[Mask([5])] * 2)
    lengths, tree = [5000, 3000, 10], Mask.shared_prefix([(20, [5, 7])])
    of_mask = plan_batch(Mask(lengths), 3, model=shape, hardware=H100)
    of_none = plan_batch(lengths, 3, model=shape, hardware=H100, masks=[])
    assert of_mask.digest() == of_none.digest() == plan_batch(lengths, 3, model=shape, hardware=H100).digest()
    assert plan_batch(tree, 2, model=shape, hardware=H100).mask == tree
    assert [m.plan.mask for m in plan_step(Mask(lengths), 3, model=shape, hardware=H100)] == [Mask(lengths)]


def test_plans_of_models_without_recurrences_have_no_such_phase() -> None:
    forecast = plan_batch([5000, 300], 2, hardware=H100).forecast
    assert forecast is not None and "recurrent" not in forecast.phases and "recurr" not in str(forecast)
    assert not forecast.ticks.recurrent.any()


def test_states_and_products_take_memory() -> None:
    shape = ModelShape.preset("qwen3-next-80b-a3b")
    layer = shape.recurrent
    assert layer is not None
    small = replace(shape, recurrent=replace(layer, value_dim=64))
    more, less = Memory.of(shape, H100, 1 << 20), Memory.of(small, H100, 1 << 20)
    assert more.fixed - less.fixed == 2 * 8 * 32 * 128 * 64 * 4
    assert more.bytes(9) - more.fixed > less.bytes(9) - less.fixed


def test_sizes_that_no_layer_has_are_refused() -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"heads": 4, "groups": 3, "key_dim": 8, "value_dim": 8}, "heads 4 must be a multiple of groups 3"),
        ({"heads": 4}, "are all 0 or none is"),
        ({"taps": 3}, "give heads, or both taps and channels"),
        ({}, "give heads, or both"),
        ({"heads": -1}, "heads must be an integer of at least 0, got -1"),
        ({"heads": 4, "key_dim": 1.5}, "key_dim must be an integer of at least 0, got 1.5"),
        ({"heads": 4, "key_dim": 8, "value_dim": 8, "decay": "row"}, "decay must be one of none, scalar, channel"),
        ({"heads": 4, "key_dim": 8, "value_dim": 2, "decay": "rates"}, "'rates' is of channels, with value_dim 1"),
    ]
    for sizes, message in wrong:
        with pytest.raises(ValueError, match=message):
            RecurrentLayer(**sizes)
    llama, layer = ModelShape.preset("llama-8b"), RecurrentLayer.short_convolution(4096, taps=3)
    shapes: list[tuple[dict[str, Any], str]] = [
        ({"recurrent": layer}, "recurrent_layers 0 with recurrent"),
        ({"recurrent_layers": 3}, "recurrent_layers 3 with recurrent None"),
        ({"recurrent": layer, "recurrent_layers": 33}, "-1 layers of 32 with attention"),
        ({"attention_layers": 33}, "33 layers of 32 with attention"),
        ({"attention_layers": 0}, "no layer has attention or a recurrence"),
    ]
    for sizes, message in shapes:
        with pytest.raises(ValueError, match=f"ModelShape 'llama-8b': .*{message}"):
            replace(llama, **sizes)


MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 32, "mamba_expand": 2}
SMALL = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 99,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen3Next": {
        "num_hidden_layers": 8, "num_experts": 8, "num_experts_per_tok": 2, "head_dim": 16, "linear_num_value_heads": 4,
        "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    },
    "Qwen3_5Text": {
        "num_hidden_layers": 4, "head_dim": 16, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
        "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    },
    "OlmoHybrid": {"num_hidden_layers": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 32},
    "KimiLinear": {
        "num_hidden_layers": 8, "num_key_value_heads": 4, "linear_num_heads": 4, "linear_head_dim": 16,
        "num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "kv_lora_rank": 16,
        "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
    },
    "BailingHybrid": {
        "num_hidden_layers": 6, "num_key_value_heads": 4, "head_dim": 16, "num_local_experts": 8,
        "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 32, "kv_lora_rank": 16,
        "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
    },
    "NemotronH": {
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp", "linear_attention"],
        "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 32, "head_dim": 16,
    },
    "GraniteMoeHybrid": MAMBA | {
        "layer_types": ["linear_attention", "full_attention", "linear_attention"], "num_hidden_layers": 3,
        "num_local_experts": 6, "num_experts_per_tok": 2, "shared_intermediate_size": 192,
    },
    "FalconH1": MAMBA | {"num_hidden_layers": 3, "mamba_d_ssm": 128, "head_dim": 16},
    "Bamba": MAMBA | {"num_hidden_layers": 4, "attn_layer_indices": [2]},
    "Lfm2": {"num_hidden_layers": 4, "full_attn_idxs": [1, 3], "block_multiple_of": 16},
    "Lfm3": {"num_hidden_layers": 5, "head_dim": 16, "sliding_window": 8},
    "Mamba": {"hidden_size": 64, "state_size": 8, "vocab_size": 99, "num_hidden_layers": 3},
    "FalconMamba": {
        "hidden_size": 64, "state_size": 8, "vocab_size": 99, "num_hidden_layers": 3, "expand": 16,
        "intermediate_size": 96,
    },
    "Jamba": {"num_hidden_layers": 9, "mamba_d_state": 8, "num_experts": 4},
    "RecurrentGemma": {"num_hidden_layers": 5, "lru_width": 96},
    "MiniMax": {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2},
    "Mamba2": {"hidden_size": 64, "num_heads": 8, "head_dim": 16, "state_size": 32, "n_groups": 2, "vocab_size": 99,
               "num_hidden_layers": 3},
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_of_a_config_are_those_of_its_model(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, f"{name}Config"):
        pytest.skip(f"this transformers has no {name}")
    common = {} if name in ("Mamba", "FalconMamba", "Mamba2") else SMALL
    config = getattr(transformers, f"{name}Config")(**common | CONFIGS[name])
    shape = ModelShape.from_config(config, name=name)
    with torch.device("meta"):
        model = getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")(config)
    model.tie_weights()
    matrices = {
        id(p): p.numel()
        for p in model.parameters()
        if p.dim() > 1 and not (p.dim() == 3 and "conv" in p_name(model, p))
    }
    lead = shape.vocab * shape.hidden * (1 if shape.tied else 2)
    assert shape.parameters - norms(shape) - lead == pytest.approx(sum(matrices.values()) - lead, rel=0.01)
    layers = {True: shape.recurrent_layers, False: shape.attention_count}
    mixers = [
        m
        for m in model.modules()
        if type(m).__name__.endswith(("Mixer", "GatedDeltaNet", "DeltaAttention", "ShortConv"))
    ]
    assert not mixers or len(mixers) == layers[True]


def p_name(model: torch.nn.Module, wanted: Tensor) -> str:
    return next(name for name, p in model.named_parameters() if p is wanted)


def norms(shape: ModelShape) -> int:
    return (shape.attention_count + shape.recurrent_layers + shape.ffn_count + 1) * shape.hidden


def test_patterns_and_checkpoints_entries_are_read() -> None:
    entries = {
        "model_type": "nemotron_h", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "intermediate_size": 21504, "vocab_size": 131072, "mamba_num_heads": 128,
        "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4, "expand": 2,
        "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    }  # fmt: skip
    assert ModelShape.from_config(entries, name="nemotron-h-8b") == ModelShape.preset("nemotron-h-8b")
    kimi = {
        "model_type": "kimi_linear", "hidden_size": 2304, "num_hidden_layers": 27, "num_attention_heads": 32,
        "num_key_value_heads": 32, "intermediate_size": 9216, "moe_intermediate_size": 1024, "num_experts": 256,
        "num_experts_per_token": 8, "num_shared_experts": 1, "first_k_dense_replace": 1, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 163840,
        "linear_attn_config": {
            "full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "num_heads": 32, "head_dim": 128,
            "short_conv_kernel_size": 4,
        },
    }  # fmt: skip
    assert ModelShape.from_config(kimi, name="kimi-linear-48b-a3b") == ModelShape.preset("kimi-linear-48b-a3b")
    with pytest.raises(ValueError, match="layer types .'retention'. of 'qwen3_next' are not known"):
        ModelShape.from_config({"model_type": "qwen3_next", "layer_types": ["retention"], "hidden_size": 8})
    with pytest.raises(ValueError, match="layer types .'X'. of 'nemotron_h' are not known"):
        ModelShape.from_config(entries | {"hybrid_override_pattern": "M-X"})
    both = entries | {"hybrid_override_pattern": "M-E*"}
    with pytest.raises(ValueError, match="1 layers with an ffn .* 1 with experts"):
        ModelShape.from_config(both | {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8})


def test_presets_are_the_published_sizes() -> None:
    published = {"qwen3-next-80b-a3b": 80.0, "kimi-linear-48b-a3b": 49.1, "nemotron-h-8b": 8.1}
    for name, total in (published | {"granite-4.0-h-small": 32.2}).items():
        assert ModelShape.preset(name).parameters == pytest.approx(total * 1e9, rel=0.01)
    kinds = {n: (s.attention_count, s.recurrent_layers) for n in HYBRIDS for s in (ModelShape.preset(n),)}
    assert list(kinds.values()) == [(12, 36), (7, 20), (4, 24), (4, 36)]


def test_counts_are_of_ranks_that_share_a_node() -> None:
    assert carried_by(Mask([4]), Layout.contiguous(4, 2), GATHERED, node=8).peers == 1
