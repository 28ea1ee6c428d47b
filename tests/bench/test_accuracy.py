"""The check before the clock must pass what is right and catch what is wrong."""

import sys
import types

import pytest
import torch

from flaop.bench.accuracy import Slice, relative_errors
from flaop.bench.case import Case, build_inputs, parse_shape
from flaop.bench.contenders import Unavailable, load
from flaop.testing import kda_oracle


def make(op="chunk_kda", mode="fwd", shape="B2T200H3HV6K16V8", kind="softplus"):
    return Case(op, mode, parse_shape(shape), "fp32", "mixed", kind, "cpu")


@pytest.mark.parametrize("mode", ["fwd", "fwdbwd"])
@pytest.mark.parametrize("shape", ["B2T200H3HV6K16V8", "T210H3D16N3", "B3T20H1K16V8"])
def test_the_loop_itself_has_no_error(mode, shape):
    case = make(mode=mode, shape=shape)
    errors = relative_errors(case, kda_oracle, build_inputs(case))
    assert max(errors.values()) < 1e-5
    gradients = {"q", "k", "v", "g", "beta", "A_log", "dt_bias"}
    assert gradients & set(errors) == (gradients if mode == "fwdbwd" else set())


DECAY = ("simple_gla", "gla", "retention")


@pytest.mark.parametrize("mode", ["fwd", "fwdbwd"])
@pytest.mark.parametrize("name", DECAY)
@pytest.mark.parametrize("shape", ["B3T200H3HV6K16V8", "T210H3D16N3"])
def test_decay_families_and_their_loops(mode, name, shape):
    case = make(f"chunk_{name}", mode, shape, "precomputed")
    inputs = build_inputs(case)
    for contender in ("token loop", "flaop"):
        errors = relative_errors(case, load(contender, case.op), inputs)
        assert max(errors.values()) < 1e-5
        names = {"q", "k", "v"} | ({"g"} if "gla" in name else set())
        assert set(errors) - {"o", "final_state"} == (names if mode == "fwdbwd" else set())


@pytest.mark.parametrize("name", DECAY)
def test_decay_steps(name):
    case = make(f"fused_recurrent_{name}", "step", "B3T1H2D16", "precomputed")
    errors = relative_errors(case, load("flaop", case.op), build_inputs(case))
    assert set(errors) == {"o", "final_state"} and max(errors.values()) < 1e-5


@pytest.mark.parametrize("mode", ["fwd", "fwdbwd"])
@pytest.mark.parametrize(
    ("op", "kind", "gradients"),
    [
        ("chunk_gated_delta_rule", "precomputed", "q k v g beta"),
        ("chunk_gated_delta_rule", "softplus", "q k v g beta A_log dt_bias"),
        ("chunk_delta_rule", "precomputed", "q k v beta"),
    ],
)
@pytest.mark.parametrize("shape", ["B3T200H3HV6K16V8", "T210H3D16N3"])
def test_delta_families_and_their_loops(mode, op, kind, gradients, shape):
    case = make(op, mode, shape, kind)
    inputs = build_inputs(case)
    for contender in ("token loop", "flaop"):
        errors = relative_errors(case, load(contender, op), inputs)
        assert max(errors.values()) < 1e-4
        names = set(gradients.split()) if mode == "fwdbwd" else set()
        assert set(errors) - {"o", "final_state"} == names


@pytest.mark.parametrize("name", ["gated_delta_rule", "delta_rule"])
def test_delta_steps(name):
    case = make(f"fused_recurrent_{name}", "step", "B3T1H2HV4D16", "precomputed")
    errors = relative_errors(case, load("flaop", case.op), build_inputs(case))
    assert set(errors) == {"o", "final_state"} and max(errors.values()) < 1e-5


def test_flaop_is_within_fp32_limits():
    case = make(mode="fwdbwd")
    errors = relative_errors(case, load("flaop", "chunk_kda"), build_inputs(case))
    assert max(errors.values()) < 1e-4


def test_a_decode_step_is_compared_with_its_state():
    case = make("fused_recurrent_kda", "step", "B3T1H2D16", "bounded")
    errors = relative_errors(case, load("flaop", "fused_recurrent_kda"), build_inputs(case))
    assert set(errors) == {"o", "final_state"}
    assert max(errors.values()) < 1e-5


@pytest.mark.parametrize("mode", ["fwd", "fwdbwd"])
def test_attention_against_its_definition(mode):
    case = make("scaled_dot_product_attention", mode, "B1T200H2D16")
    errors = relative_errors(case, load("torch", case.op), build_inputs(case))
    assert max(errors.values()) < 1e-5


def test_a_wrong_gate_is_caught():
    case = make()

    def wrong(**inputs):
        return kda_oracle(**{**inputs, "g": inputs["g"] * 1.5})

    assert relative_errors(case, wrong, build_inputs(case))["o"] > 1e-3


def test_one_wrong_gradient_is_caught_by_name():
    case = make(mode="fwdbwd")

    def wrong(**inputs):
        beta = inputs["beta"]
        return kda_oracle(**{**inputs, "beta": 2 * beta.detach() - beta})

    errors = relative_errors(case, wrong, build_inputs(case))
    assert errors.pop("beta") == pytest.approx(2, rel=0.01)
    assert max(errors.values()) < 1e-5


def test_the_slice_keeps_grouped_heads_together():
    part = Slice(make())
    assert (part.batch, part.heads, part.value_heads) == (2, 2, 4)
    bias = torch.zeros(6 * 16)
    assert part.cut("dt_bias", bias).shape == (64,)
    assert part.cut("dt_bias", bias.view(6, 16)).shape == (4, 16)
    assert part.cut("dt_bias", torch.zeros(6)).shape == (4,)


def test_a_missing_peer_is_unavailable(monkeypatch):
    monkeypatch.setitem(sys.modules, "fla", None)
    monkeypatch.delitem(sys.modules, "fla.ops.kda", raising=False)
    with pytest.raises(Unavailable, match="fla cannot be imported"):
        load("fla", "chunk_kda")
    for op in ("kda", "gla", "retention", "gated_delta_rule", "delta_rule"):
        with pytest.raises(Unavailable, match=f"fla has no {op}"):
            load("fla", op)
    monkeypatch.setitem(sys.modules, "flash_qla", None)
    with pytest.raises(Unavailable, match="FlashQLA cannot be imported"):
        load("flash_qla", "chunk_gated_delta_rule")
    for op in ("gated_delta_rule", "fused_recurrent_gated_delta_rule", "chunk_delta_rule"):
        with pytest.raises(Unavailable, match=f"FlashQLA has no {op}"):
            load("flash_qla", op)


def test_arguments_reach_fla_under_its_names(monkeypatch):
    seen = []
    for name in ("kda", "simple_gla", "gla", "retention", "gated_delta_rule", "delta_rule"):
        module = types.ModuleType(f"fla.ops.{name}")
        for op in (f"chunk_{name}", f"fused_recurrent_{name}"):
            setattr(module, op, lambda **inputs: seen.append(set(inputs)))
        monkeypatch.setitem(sys.modules, f"fla.ops.{name}", module)
    for package in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, package, types.ModuleType(package))
    common = {"q", "k", "v", "scale", "initial_state", "output_final_state", "cu_seqlens"}
    in_op = {f"use_{x}_in_kernel" for x in ("gate", "beta_sigmoid", "qk_l2norm")}
    gated = {"g", "beta", "A_log", "dt_bias", "allow_neg_eigval", "state_v_first"} | in_op
    for op, extra in (
        ("chunk_simple_gla", {"g", "state_v_first"}),
        ("chunk_gla", {"g", "state_v_first"}),
        ("fused_recurrent_gla", {"gk", "state_v_first"}),
        ("chunk_retention", set()),
        ("chunk_kda", gated | {"safe_gate", "lower_bound"}),
        ("chunk_gated_delta_rule", gated),
        ("fused_recurrent_gated_delta_rule", gated),
        ("chunk_delta_rule", {"beta", "use_qk_l2norm_in_kernel"}),
        ("fused_recurrent_delta_rule", {"beta", "use_qk_l2norm_in_kernel"}),
    ):
        load("fla", op)(**build_inputs(make(op, shape="T20H1D16", kind="precomputed")))
        assert seen.pop() == common | extra
    for op, name, value in (
        ("chunk_gla", "split_size", 64),
        ("chunk_retention", "state_v_first", True),
        ("fused_recurrent_delta_rule", "use_beta_sigmoid_in_kernel", True),
    ):
        with pytest.raises(Unavailable, match=f"fla's {op} has no {name}"):
            load("fla", op)(**{name: value})


def test_flash_qla_takes_what_it_has(monkeypatch):
    seen = []
    module = types.ModuleType("flash_qla")
    module.chunk_gated_delta_rule = lambda **inputs: seen.append(set(inputs))
    monkeypatch.setitem(sys.modules, "flash_qla", module)
    op, shape = "chunk_gated_delta_rule", "T20H1D16"
    load("flash_qla", op)(**build_inputs(make(op, shape=shape, kind="precomputed")))
    assert seen == [
        {"q", "k", "v", "g", "beta", "scale", "initial_state", "output_final_state"}
        | {"cu_seqlens", "use_qk_l2norm_in_kernel", "state_v_first"}
    ]
    with pytest.raises(Unavailable, match="FlashQLA's chunk_gated_delta_rule has no use_gate_in"):
        load("flash_qla", op)(**build_inputs(make(op, shape=shape)))
    with pytest.raises(Unavailable, match="has no A_log"):
        load("flash_qla", op)(A_log=torch.zeros(1))
