"""Shapes, cases, inputs and floors of the benchmark."""

import json

import pytest
import torch

from flaop.bench import floors
from flaop.bench.case import (
    PRESETS,
    SLOTS,
    Case,
    Shape,
    another_set,
    build_inputs,
    leaves,
    parse_shape,
)
from flaop.bench.timing import DEFAULT_L2_BYTES, MOST_SETS, most_sets, number_of_sets


def case(op="chunk_kda", mode="fwd", shape="B1T96H2K32V16", gates="mixed", kind="bounded", **more):
    fields = {"dtype": "fp32", "device": "cpu", **more}
    return Case(op, mode, parse_shape(shape), gates=gates, gate_kind=kind, **fields)


def test_shape_is_read_in_any_order_and_with_defaults():
    assert parse_shape("B2T64H4HV8K32V16") == Shape(2, 64, 4, 8, 32, 16)
    assert parse_shape("t64h4d32") == Shape(1, 64, 4, 4, 32, 32)
    assert parse_shape("D32T64H4V8") == Shape(1, 64, 4, 4, 32, 8)
    assert parse_shape("h96") == Shape(1, 8192, 96, 96, 128, 128)
    assert parse_shape("gdn", (1300, 547)) == Shape(1, 1847, 16, 32, 128, 128, (1300, 547))


def test_every_preset_is_a_shape_and_prints_as_itself():
    for text in PRESETS.values():
        shape = parse_shape(text)
        assert parse_shape(str(shape)) == shape


def test_packed_shapes():
    assert parse_shape("T64H1D16N4").lengths == (16, 16, 16, 16)
    packed = parse_shape("T1H1D16", lengths=(3, 5))
    assert (packed.B, packed.T, packed.N) == (1, 8, 2)
    assert parse_shape("B4T64H1D16").N == 4


@pytest.mark.parametrize(
    ("text", "lengths", "message"),
    [
        ("T64H4", None, "does not give K, V"),
        ("T64H4D32X9", None, "not of the form"),
        ("T64T32H4D32", None, "not of the form"),
        ("T0H4D32", None, "at least 1"),
        ("T65H4D32N4", None, "multiple of N"),
        ("B2T64H4D32N4", None, "need B1"),
        ("T64H4HV6D32", None, "multiple of H"),
        ("T64H4D32", (4, 0), "at least 1"),
    ],
)
def test_bad_shapes_say_what_is_wrong(text, lengths, message):
    with pytest.raises(ValueError, match=message):
        parse_shape(text, lengths)


def test_step_needs_one_token_and_a_recurrent_op():
    with pytest.raises(ValueError, match="needs T1"):
        case("fused_recurrent_kda", "step")
    with pytest.raises(ValueError, match="chunk_kda does not serve it"):
        case("chunk_kda", "step", "B2T1H1D16")
    case("fused_recurrent_kda", "step", "B2T1H1D16")


def test_decay_cases_that_mean_nothing_are_refused():
    with pytest.raises(ValueError, match="chunk_gla has no bounded gate in its kernel"):
        case("chunk_gla")
    with pytest.raises(ValueError, match="chunk_retention does not serve it"):
        case("chunk_retention", "step", "B2T1H1D16", kind="precomputed")
    with pytest.raises(ValueError, match="changes nothing for gla"):
        case("gla", kind="precomputed", split_size=64)
    with pytest.raises(ValueError, match="chunk_kda has no split_size"):
        case(split_size=64)


def test_delta_cases_that_mean_nothing_are_refused():
    with pytest.raises(ValueError, match="the gate kind is precomputed or softplus"):
        case("chunk_gated_delta_rule")
    with pytest.raises(ValueError, match="delta_rule has no softplus gate"):
        case("delta_rule", kind="softplus")
    with pytest.raises(ValueError, match="chunk_gated_delta_rule does not serve it"):
        case("chunk_gated_delta_rule", "step", "B2T1H1D16", kind="precomputed")
    for op in ("chunk_gated_delta_rule", "chunk_delta_rule"):
        with pytest.raises(ValueError, match=f"{op} has no split_size"):
            case(op, kind="precomputed", split_size=64)


@pytest.mark.parametrize(
    ("op", "kind", "names"),
    [
        ("chunk_gated_delta_rule", "precomputed", {"q", "k", "v", "g", "beta"}),
        ("gated_delta_rule", "softplus", {"q", "k", "v", "g", "beta", "A_log", "dt_bias"}),
        ("chunk_delta_rule", "precomputed", {"q", "k", "v", "beta"}),
    ],
)
def test_delta_inputs(op, kind, names):
    forward = build_inputs(case(op, kind=kind, dtype="bf16"))
    both = build_inputs(case(op, "fwdbwd", kind=kind, dtype="bf16"))
    assert set(leaves(both)) == names and not leaves(forward)
    assert all(torch.equal(forward[name], both[name]) for name in names)
    # beta itself beside a log gate, which is fp32; its logit beside a raw one
    ready = kind == "precomputed"
    assert forward["use_beta_sigmoid_in_kernel"] is not ready
    assert bool((forward["beta"] > 0).all()) is ready
    if "g" in names:
        assert forward["g"].dim() == 3
        assert forward["g"].dtype == (torch.float32 if ready else torch.bfloat16)
    step = build_inputs(case(op.removeprefix("chunk_"), "step", "B3T1H2K16V32", kind=kind))
    assert step["initial_state"].shape == (3, 2, 16, 32) and step["output_final_state"]


@pytest.mark.parametrize(
    ("op", "names"),
    [("chunk_simple_gla", "qkvg"), ("fused_recurrent_gla", "qkvg"), ("retention", "qkv")],
)
def test_decay_inputs(op, names):
    forward = build_inputs(case(op, kind="precomputed", dtype="bf16"))
    both = build_inputs(case(op, "fwdbwd", kind="precomputed", dtype="bf16"))
    assert set(leaves(both)) == set(names) and not leaves(forward)
    assert all(torch.equal(forward[name], both[name]) for name in names)
    assert "gla" not in op or forward["g"].dim() == (3 if "simple" in op else 4)
    step = build_inputs(case(op.removeprefix("chunk_"), "step", "B3T1H2K16V32", kind="precomputed"))
    assert step["initial_state"].shape == (3, 2, 16, 32) and step["output_final_state"]


def test_split_size_shares_the_values():
    whole, split = (
        build_inputs(case("chunk_gla", kind="precomputed", split_size=n)) for n in (0, 64)
    )
    assert split.pop("split_size") == 64 and set(split) == set(whole)
    assert torch.equal(whole["q"], split["q"])


def test_a_case_travels_as_json():
    one = Case("kda", "fwd", parse_shape("T8H1D16N2"), "bf16", "fast", "softplus", "cpu", 3, True)
    assert Case.from_dict(json.loads(json.dumps(one.to_dict()))) == one
    split = case("chunk_gla", kind="precomputed", split_size=128)
    assert Case.from_dict(json.loads(json.dumps(split.to_dict()))) == split


def test_modes_and_ops_share_their_values():
    forward, both = build_inputs(case()), build_inputs(case(mode="fwdbwd"))
    attention = build_inputs(case("scaled_dot_product_attention"))
    assert not leaves(forward)
    assert set(leaves(both)) == {"q", "k", "v", "g", "beta", "A_log", "dt_bias"}
    assert set(attention) == {"q", "k", "v"}
    for name in attention:
        assert torch.equal(forward[name], both[name])
        assert torch.equal(forward[name], attention[name])


def test_step_inputs_carry_a_state():
    inputs = build_inputs(case("fused_recurrent_kda", "step", "B3T1H2K16V32"))
    assert inputs["initial_state"].shape == (3, 2, 16, 32)
    assert inputs["initial_state"].dtype == torch.float32
    assert inputs["output_final_state"]


def meta_inputs(text, mode, state=False):
    """Inputs of a large case without their storage."""
    s = parse_shape(text)
    new = {"dtype": torch.bfloat16, "device": "meta", "requires_grad": mode == "fwdbwd"}
    inputs = {name: torch.empty(s.B, s.T, s.H, s.K, **new) for name in "qk"}
    inputs |= {name: torch.empty(s.B, s.T, s.HV, s.K, **new) for name in "vg"}
    inputs["beta"] = torch.empty(s.B, s.T, s.HV, **new)
    if state:
        inputs["initial_state"] = torch.empty(s.B, s.HV, s.K, s.V, device="meta")
    return {**inputs, "output_final_state": state}


# What docs/bench.md's rates give for the shapes that are quoted most.
@pytest.mark.parametrize(
    ("text", "mode", "milliseconds"),
    [
        ("h96", "fwd", 0.24),
        ("h64", "fwd", 0.16),
        ("h32", "fwd", 0.08),
        ("h96", "fwdbwd", 0.24 + 0.53),
        ("decode256", "step", 0.252),
        ("decode32", "step", 0.032),
    ],
)
def test_floors(text, mode, milliseconds):
    op = "fused_recurrent_kda" if mode == "step" else "chunk_kda"
    one = case(op, mode, text, dtype="bf16")
    floor = floors.work(one, meta_inputs(text, mode, state=mode == "step"))["floor_ms"]
    assert floor == pytest.approx(milliseconds, rel=0.03)


# Bytes decide forward; the FLOPs of both directions by hand.
@pytest.mark.parametrize(("op", "milliseconds"), [("chunk_simple_gla", 0.19), ("chunk_gla", 0.24)])
def test_floors_of_decay_families(op, milliseconds):
    inputs = meta_inputs("h96", "fwd")
    del inputs["beta"]
    if op == "chunk_simple_gla":
        inputs["g"] = inputs["g"][..., 0]
    one = case(op, "fwd", "h96", kind="precomputed", dtype="bf16")
    assert floors.work(one, inputs)["floor_ms"] == pytest.approx(milliseconds, rel=0.03)
    tokens = 8192 * 96
    assert floors.forward_flops(one) == tokens * (4 * 128 * 128 + 2 * 64 * 256)
    assert floors.backward_flops(one) == pytest.approx(tokens * 10 * (128 * 128 + 64 * 128))
    step = case("gla", "step", "decode32", kind="precomputed")
    assert floors.forward_flops(step) == 32 * 32 * 5 * 128 * 128


@pytest.mark.parametrize(
    ("text", "mode", "milliseconds"),
    [
        ("gdn", "fwd", 0.06),
        ("gdn", "fwdbwd", 0.06 + 0.17),
        ("B256T1H16HV32D128", "step", 0.252),
        ("B32T1H16HV32D128", "step", 0.032),
    ],
)
def test_floors_of_the_gated_delta_rule(text, mode, milliseconds):
    op = "fused_recurrent_gated_delta_rule" if mode == "step" else "chunk_gated_delta_rule"
    inputs = meta_inputs(text, mode, state=mode == "step")
    inputs["g"] = torch.empty_like(inputs["beta"], dtype=torch.float32)
    one = case(op, mode, text, kind="precomputed", dtype="bf16")
    assert floors.work(one, inputs)["floor_ms"] == pytest.approx(milliseconds, rel=0.03)


def test_flops_of_delta_families():
    tokens = 8192 * 32
    for op in ("chunk_gated_delta_rule", "chunk_delta_rule"):
        one = case(op, "fwdbwd", "gdn", kind="precomputed")
        assert floors.forward_flops(one) == tokens * (6 * 128 * 128 + 4 * 64 * 256)
        backward = 16 * 128 * 128 + 64 * (12 * 128 + 10 * 128)
        assert floors.backward_flops(one) == pytest.approx(tokens * backward)
    for op, flops in (("gated_delta_rule", 7), ("delta_rule", 6)):
        step = case(op, "step", "decode32", kind="precomputed")
        assert floors.forward_flops(step) == 32 * 32 * flops * 128 * 128


def test_small_work_rotates_over_more_than_the_l2():
    l2 = DEFAULT_L2_BYTES
    assert number_of_sets(4 * l2, l2) == 1
    for moved in (1000, l2 // 7, l2, 3 * l2):
        sets = number_of_sets(moved, l2)
        assert sets == MOST_SETS or sets * moved >= 5 * l2


def step_case(B=2, HV=4, pool="bf16", **more):
    shape = f"B{B}T1H2HV{HV}K32V16"
    return case("gated_delta_rule_step_", "step", shape, kind="softplus", pool=pool, **more)


def test_steps_on_a_pool_need_one():
    with pytest.raises(ValueError, match="a pool goes with the ops kda_step_"):
        case("kda_step_", "step", "B2T1H1D16")
    with pytest.raises(ValueError, match="this is fused_recurrent_kda"):
        case("fused_recurrent_kda", "step", "B2T1H1D16", pool="fp32")
    with pytest.raises(ValueError, match="measured in mode step for up to 1024 sequences"):
        case("kda_step_", "fwd", "B2T1H1D16", pool="fp32")


def test_slots_of_the_input_sets_of_a_step():
    """One pool for all sets, and no slot twice."""
    for B in (2, 256):
        a_case = step_case(B, state_v_first=True)
        inputs = build_inputs(a_case)
        assert inputs["state"].shape == (SLOTS, 4, 16, 32)
        assert inputs["state"].dtype is torch.bfloat16
        sets = [inputs] + [another_set(inputs, i) for i in range(1, most_sets(a_case))]
        assert all(x["state"] is inputs["state"] for x in sets)
        slots = torch.cat([x["state_indices"] for x in sets])
        assert len(slots.unique()) == len(slots) == min(MOST_SETS * B, SLOTS)
        assert slots.min() >= 0 and slots.max() < SLOTS
        assert sets[1]["q"].data_ptr() != inputs["q"].data_ptr()


def test_floor_of_a_step_counts_its_slots_alone():
    a_case = step_case()
    inputs = build_inputs(a_case)
    work = floors.work(a_case, inputs)
    others = [x for n, x in inputs.items() if isinstance(x, torch.Tensor) and n != "state"]
    # o, and the two slots read and written
    expected = floors.size([*others, inputs["v"]]) + 2 * 2 * (4 * 32 * 16 * 2)
    assert work["bytes"] == expected
