"""Chunked simple_gla through the interpreter: each output and gradient against the token loop."""

import pytest
import torch
from flaop.triton_kernels.configs import decay as configs

from flaop.launch.decay import chunk
from flaop.testing import assert_within_budget, relative_error, worst_error
from flaop.testing.decay_budget import decay_budget_reference
from flaop.testing.decay_inputs import simple_gla_inputs
from flaop.testing.decay_oracle import simple_gla_oracle
from flaop.validation.decay import check_simple_gla

FP16 = torch.float16
GRADIENTS = ("q", "k", "v", "g", "g_gamma", "initial_state")
# dimensions whose slices are compared one by one: rows of heads, heads of states
SLICES = {
    "o": (0, 1, 2), "q": (0, 1, 2), "k": (0, 1, 2), "v": (0, 1, 2), "g": (2,),
    "final_state": (0, 1), "initial_state": (0, 1),
}  # fmt: skip
LIMITS = {torch.float32: 3e-5, FP16: 5e-3}
# of a slice; rows that nearly cancel are worse than their tensor
WORST = {torch.float32: 1e-4, FP16: 5e-2}


def checked(inputs, **options):
    detached = {
        name: x.detach() if isinstance(x, torch.Tensor) else x for name, x in inputs.items()
    }
    return check_simple_gla(**detached, **options)


def cotangents(call, with_d_o=True, with_d_final_state=True):
    generator = torch.Generator().manual_seed(1)
    d_o = torch.randn(call.v.shape, generator=generator).to(call.v.dtype)
    d_final_state = torch.randn(call.state_shape, generator=generator)
    return d_o if with_d_o else None, d_final_state if with_d_final_state else None


def expected(function, inputs, d_o, d_final_state):
    """Outputs and gradients of a differentiable formula; absent gradients are zeros."""
    leaves = {name: inputs[name] for name in GRADIENTS if inputs[name] is not None}
    leaves = {name: x.detach().clone().requires_grad_() for name, x in leaves.items()}
    if function is simple_gla_oracle:
        leaves = {name: x.detach().double().requires_grad_() for name, x in leaves.items()}
    o, final_state = function(**{**inputs, **leaves})
    loss = o.new_zeros((), dtype=torch.float64)
    if d_o is not None:
        loss = loss + (o * d_o.to(o.dtype)).double().sum()
    if d_final_state is not None:
        loss = loss + (final_state * d_final_state.to(final_state.dtype)).double().sum()
    gradients = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
    return {"o": o.detach(), "final_state": final_state.detach()}, dict(zip(leaves, gradients))


def compare(name, got, ref, budget, dtype, kind):
    """float32 errors are a few roundings, and the budget reference has other ones."""
    assert torch.isfinite(got).all(), name
    if not ref.any():
        assert not got.any() or got.abs().max() < 1e-6, f"{name} should be zero"
        return
    if dtype is FP16:
        assert_within_budget(name, got, ref, budget, dtype, kind)
    else:
        assert relative_error(got, ref) < LIMITS[dtype], (name, relative_error(got, ref))
    if name in SLICES:
        worst = worst_error(got, ref, SLICES[name], floor=1e-2)
        assert worst < WORST[dtype], (name, worst)


def run(inputs, mask=(True,) * 6, with_d_o=True, with_d_final_state=True, **options):
    """Compares a forward and a backward; returns (o, final_state) and the gradients."""
    call = checked(inputs, **options)
    d_o, d_final_state = cotangents(call, with_d_o, with_d_final_state)
    o, final_state = chunk.forward(call)
    for x, y in zip(chunk.forward_residuals(call), (o, final_state), strict=True):
        assert x is y is None or torch.equal(x, y)
    got = chunk.backward(call, d_o, d_final_state, None, mask)

    outputs, gradients = expected(simple_gla_oracle, inputs, d_o, d_final_state)
    budget, budget_gradients = expected(decay_budget_reference, inputs, d_o, d_final_state)
    dtype = call.q.dtype
    assert o.dtype is call.v.dtype
    compare("o", o, outputs["o"], budget["o"], dtype, "output")
    if call.output_final_state:
        assert final_state.dtype is torch.float32
        ref = outputs["final_state"]
        compare("final_state", final_state, ref, budget["final_state"], dtype, "output")
    else:
        assert final_state is None
    for name, asked, gradient in zip(GRADIENTS, mask, got, strict=True):
        if not asked or inputs[name] is None:
            assert gradient is None, name
            continue
        assert gradient.dtype is inputs[name].dtype and gradient.is_contiguous(), name
        assert gradient.shape == inputs[name].shape, name
        ref, budget = gradients[name], budget_gradients[name]
        compare(name, gradient, ref, budget, dtype, "gradient")
    return (o, final_state), got


CASES = {
    "mixed": dict(T=63, H=2, K=16, V=24, initial_state=True),
    "fast": dict(T=65, K=16, V=8, gates="fast"),
    "slow": dict(T=130, K=16, V=8, gates="slow"),
    "constant": dict(T=130, H=2, K=16, V=8, gate="g_gamma"),
    "both": dict(B=2, T=65, H=2, K=16, V=24, gate="both"),
    "none": dict(T=65, K=16, V=8, gate=None),
    "odd": dict(B=2, T=67, K=37, V=41),
    "one_token": dict(B=2, T=1, K=60, V=24),
    "grouped": dict(B=2, T=65, H=2, HV=4, K=40, V=8),
    "v_first": dict(T=65, K=16, V=72, state_v_first=True),
    "wide": dict(T=65, K=300, V=40),
    "wide_packed": dict(lengths=[3, 0, 66], K=300, V=8, gate="both", state_v_first=True),
    "wide_none": dict(T=65, K=300, V=8, gate=None),
    "fp16": dict(T=65, K=60, V=24, dtype=FP16),
    "fp16_fast": dict(T=63, K=16, V=72, dtype=FP16, gates="fast"),
    "fp16_grouped_v_first": dict(T=65, HV=2, K=16, V=40, dtype=FP16, state_v_first=True),
    "fp16_two_slabs": dict(T=65, K=140, V=72, dtype=FP16, gate="both"),
    "fp16_wide": dict(T=65, K=300, V=8, dtype=FP16, gates="slow"),
    "packed": dict(lengths=[0, 1, 66, 0, 2, 0], K=16, V=24),
    "packed_v_first": dict(lengths=[1, 65, 0], HV=2, K=16, V=8, gate="both", state_v_first=True),
    "packed_fp16": dict(lengths=[3, 0, 64], K=16, V=24, dtype=FP16, gate="g_gamma"),
    "no_state": dict(T=65, K=16, V=8, output_final_state=False),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_against_token_loop(case):
    options = {"H": 1, "initial_state": CASES[case].get("output_final_state", True), **CASES[case]}
    run(simple_gla_inputs(**options), with_d_final_state=options["initial_state"])


SCANNED = ("mixed", "both", "none", "odd", "grouped", "v_first", "packed_v_first")


@pytest.mark.parametrize("case", SCANNED)
def test_scan_in_float32(case, monkeypatch):
    """States and outputs in one pass, which float32 leaves to two kernels."""
    monkeypatch.setattr(configs, "scan", configs.states)
    options = {"H": 1, "initial_state": True, **CASES[case]}
    run(simple_gla_inputs(**options))


@pytest.mark.parametrize("bounds", [[3, 3, 70, 64, 130], [-4, 4, 4, 99], [2, 67]])
@pytest.mark.parametrize("HV", [1, 2])
def test_any_cu_seqlens(bounds, HV):
    """Decreasing or outside values stay inside the tensors; rows of no sequence are zero."""
    inputs = simple_gla_inputs(lengths=[131], H=1, HV=HV, K=40, V=8)
    inputs["cu_seqlens"] = torch.tensor(bounds, dtype=torch.int32)
    (o, _), gradients = run(inputs)
    ends = inputs["cu_seqlens"].clamp(0, 131).cummax(0).values
    outside = torch.ones(131, dtype=torch.bool)
    outside[ends[0] : ends[-1]] = False
    for x in (o, *gradients[:4]):
        assert not x[0, outside].any()


SPLIT = {
    "batched": dict(B=2, T=200, K=16, V=8, gate="both"),
    "grouped": dict(T=130, HV=2, K=40, V=8, gate="g_gamma", state_v_first=True),
    "packed": dict(lengths=[0, 65, 1, 200, 0], K=16, V=8),
    "packed_fp16": dict(lengths=[70, 0, 3], K=16, V=40, dtype=FP16),
}


@pytest.mark.parametrize("split_size", [64, 128])
@pytest.mark.parametrize("case", SPLIT)
def test_splits_change_nothing(case, split_size):
    """Segments of the backward, whose states start from those of a first pass."""
    inputs = simple_gla_inputs(H=1, initial_state=True, **SPLIT[case])
    _, whole = run(inputs)
    _, split = run(inputs, split_size=split_size)
    for x, y in zip(whole, split, strict=True):
        assert x is y is None or torch.equal(x, y)


@pytest.mark.parametrize("case", SPLIT)
def test_segments_of_a_small_workspace(case, monkeypatch):
    """Rows worked on one after the other carry the state through memory, bit for bit."""
    monkeypatch.setattr(configs, "scan", lambda *_: None)
    inputs = simple_gla_inputs(H=1, initial_state=True, **SPLIT[case])
    whole, gradients = run(inputs)
    monkeypatch.setattr(chunk, "WORKSPACE", 1)
    monkeypatch.setattr(chunk, "BACKWARD_WORKSPACE", 1)
    found = run(inputs)
    for x, y in zip((*whole, *gradients), (*found[0], *found[1]), strict=True):
        assert x is y is None or torch.equal(x, y)


@pytest.mark.parametrize("with_d_o", [False, True], ids=["state", "output"])
@pytest.mark.parametrize("K", [16, 40])
def test_one_incoming_gradient_absent(with_d_o, K):
    inputs = simple_gla_inputs(T=65, H=1, HV=2, K=K, V=8, initial_state=True)
    _, gradients = run(inputs, with_d_o=with_d_o, with_d_final_state=not with_d_o)
    assert gradients[0].any() == with_d_o


@pytest.mark.parametrize("only", range(6))
def test_gradients_not_asked_for(only):
    inputs = simple_gla_inputs(T=3, H=1, K=16, V=8, gate="both", initial_state=True)
    run(inputs, mask=tuple(i == only for i in range(6)))


def test_state_emptied_by_infinite_gates():
    inputs = simple_gla_inputs(T=67, H=1, K=16, V=8, gates="slow", initial_state=True)
    inputs["g"][:, [2, 65]] = -torch.inf
    inputs["g"][:, 5] = -1000
    (o, _), gradients = run(inputs)
    assert not gradients[3][:, [2, 5, 65]].any()
    fresh = {**inputs, "initial_state": None}
    for name in ("q", "k", "v", "g"):
        fresh[name] = inputs[name][:, 65:].clone()
    fresh["g"][:, 0] = 0
    torch.testing.assert_close(
        o[:, 65:], simple_gla_oracle(**fresh)[0].float(), rtol=1e-5, atol=1e-6
    )


def test_gates_of_every_float_dtype_and_strided_inputs():
    inputs = simple_gla_inputs(T=65, H=2, K=16, V=8, gate="both")
    inputs["g"] = inputs["g"].bfloat16()
    inputs["g_gamma"] = inputs["g_gamma"].half()
    for name in ("q", "k", "v", "g"):
        inputs[name] = inputs[name].transpose(1, 2).contiguous().transpose(1, 2)
    call = checked(inputs)
    d_o = torch.ones(()).expand(call.v.shape)
    o, final_state = chunk.forward(call)
    outputs, gradients = expected(simple_gla_oracle, inputs, d_o, None)
    assert relative_error(o, outputs["o"]) < LIMITS[torch.float32]
    assert relative_error(final_state, outputs["final_state"]) < LIMITS[torch.float32]
    got = chunk.backward(call, d_o, None, None, (True,) * 6)
    for name, gradient in zip(GRADIENTS[:5], got):
        assert gradient.dtype is inputs[name].dtype
        limit = {"g": 5e-3, "g_gamma": 1e-3}.get(name, LIMITS[torch.float32])
        assert relative_error(gradient, gradients[name]) < limit, name


def test_outputs_of_a_prefix_do_not_depend_on_what_follows():
    inputs = simple_gla_inputs(T=130, H=1, K=16, V=8, initial_state=True)
    o = chunk.forward(checked(inputs))[0]
    for name in ("q", "k", "v", "g"):
        inputs[name][:, 40:] = -inputs[name][:, 40:].abs() * 3
    assert torch.equal(chunk.forward(checked(inputs))[0][:, :40], o[:, :40])
