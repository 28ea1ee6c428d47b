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


def test_a_missing_peer_is_unavailable(monkeypatch):
    monkeypatch.setitem(sys.modules, "fla", None)
    monkeypatch.delitem(sys.modules, "fla.ops.kda", raising=False)
    with pytest.raises(Unavailable, match="fla cannot be imported"):
        load("fla", "chunk_kda")
    for op in ("kda", "gla", "retention"):
        with pytest.raises(Unavailable, match=f"fla has no {op}"):
            load("fla", op)


def test_arguments_reach_fla_under_its_names(monkeypatch):
    seen = []
    for name in ("simple_gla", "gla", "retention"):
        module = types.ModuleType(f"fla.ops.{name}")
        for op in (f"chunk_{name}", f"fused_recurrent_{name}"):
            setattr(module, op, lambda **inputs: seen.append(set(inputs)))
        monkeypatch.setitem(sys.modules, f"fla.ops.{name}", module)
    for package in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, package, types.ModuleType(package))
    common = {"q", "k", "v", "scale", "initial_state", "output_final_state", "cu_seqlens"}
    for op, extra in (
        ("chunk_simple_gla", {"g", "state_v_first"}),
        ("chunk_gla", {"g", "state_v_first"}),
        ("fused_recurrent_gla", {"gk", "state_v_first"}),
        ("chunk_retention", set()),
    ):
        load("fla", op)(**build_inputs(make(op, shape="T20H1D16", kind="precomputed")))
        assert seen.pop() == common | extra
    with pytest.raises(Unavailable, match="fla has no split_size"):
        load("fla", "chunk_gla")(split_size=64)
