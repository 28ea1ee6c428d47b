"""Chunked KDA through the interpreter: each output and gradient against the token loop."""

import pytest
import torch

from flaop.launch.delta import chunk
from flaop.testing import (
    assert_within_budget,
    chunk_budget_reference,
    kda_inputs,
    kda_oracle,
    relative_error,
    worst_error,
)
from flaop.validation.kda import check

FP16 = torch.float16
GRADIENTS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")
# dimensions whose slices are compared one by one: rows of heads, channels, heads of states
SLICES = {
    "o": (0, 1, 2), "q": (0, 1, 2), "k": (0, 1, 2), "v": (0, 1, 2), "g": (2, 3), "beta": (2,),
    "final_state": (0, 1), "initial_state": (0, 1),
}  # fmt: skip
# sums over all tokens, whose terms cancel: held to a limit instead of a budget
SUMS = ("A_log", "dt_bias")
LIMITS = {torch.float32: 3e-5, torch.float16: 5e-3}
# of a slice; rows that nearly cancel are worse than their tensor
WORST = {torch.float32: 1e-4, torch.float16: 5e-2}


def kda_call(inputs, **options):
    detached = {
        name: x.detach() if isinstance(x, torch.Tensor) else x for name, x in inputs.items()
    }
    return check(**detached, **options)


def cotangents(call, with_d_o=True, with_d_final_state=True):
    generator = torch.Generator().manual_seed(1)
    d_o = torch.randn(call.v.shape, generator=generator).to(call.v.dtype)
    d_final_state = torch.randn(call.state_shape, generator=generator)
    return d_o if with_d_o else None, d_final_state if with_d_final_state else None


def expected(function, inputs, d_o, d_final_state):
    """Outputs and gradients of a differentiable formula; absent gradients are zeros."""
    leaves = {
        name: inputs[name].detach().clone().requires_grad_()
        for name in GRADIENTS
        if inputs[name] is not None
    }
    if function is kda_oracle:
        leaves = {name: x.detach().double().requires_grad_() for name, x in leaves.items()}
    o, final_state = function(**{**inputs, **leaves})
    loss = o.new_zeros((), dtype=torch.float64)
    if d_o is not None:
        loss = loss + (o * d_o.to(o.dtype)).double().sum()
    if d_final_state is not None:
        loss = loss + (final_state * d_final_state.to(final_state.dtype)).double().sum()
    gradients = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
    return {"o": o.detach(), "final_state": final_state.detach()}, dict(zip(leaves, gradients))


def compare(name, got, ref, budget, dtype, kind, terms=None, slices=SLICES):
    """dtype: of the inputs; terms: what ref sums up, whose rounding a sum that cancels has;
    slices: dimensions of what is compared piece by piece, too.

    float32 errors are a few roundings, and the budget reference has other ones.
    """
    coarser = FP16 if FP16 in (dtype, got.dtype) else torch.float32
    assert torch.isfinite(got).all(), name
    if not ref.any():
        assert not got.any() or got.abs().max() < 1e-6, f"{name} should be zero"
        return
    if name in SUMS:
        # the terms themselves are suffix sums over a chunk, whose rounding they share
        assert (got - ref).norm() < 10 * LIMITS[coarser] * max(ref.norm(), terms.norm()), name
    elif dtype is FP16:
        assert_within_budget(name, got, ref, budget, dtype, kind)
    else:
        assert relative_error(got, ref) < LIMITS[coarser], name
    if name in slices:
        assert worst_error(got, ref, slices[name], floor=1e-2) < WORST[coarser], name


def residuals_of(found):
    """As the op hands them to the backward: empty tensors where nothing was kept."""
    return [torch.empty(0) if x is None else x for x in found]


def run(inputs, mask=(True,) * 8, with_d_o=True, with_d_final_state=True, slices=SLICES, **options):
    """Compares a forward and a backward; returns (o, final_state) and the gradients."""
    call = kda_call(inputs, **options)
    d_o, d_final_state = cotangents(call, with_d_o, with_d_final_state)
    o, final_state, *residuals = chunk.forward_residuals(call)
    assert (residuals[-1] is not None) == call.disable_recompute
    o_alone, final_alone = chunk.forward(call)
    assert torch.equal(o, o_alone)
    got = chunk.backward(call, d_o, d_final_state, residuals_of(residuals), mask)

    outputs, gradients = expected(kda_oracle, inputs, d_o, d_final_state)
    budget, budget_gradients = expected(chunk_budget_reference, inputs, d_o, d_final_state)
    dtype = call.q.dtype
    assert o.dtype is call.v.dtype
    compare("o", o, outputs["o"], budget["o"], dtype, "output")
    if call.output_final_state:
        assert final_state.dtype is torch.float32 and torch.equal(final_state, final_alone)
        ref = outputs["final_state"]
        compare("final_state", final_state, ref, budget["final_state"], dtype, "output")
    else:
        assert final_state is None and final_alone is None
    for name, asked, gradient in zip(GRADIENTS, mask, got, strict=True):
        if not asked or inputs[name] is None:
            assert gradient is None, name
            continue
        assert gradient.dtype is inputs[name].dtype and gradient.is_contiguous(), name
        compare(
            name, gradient, gradients[name], budget_gradients[name], dtype, "gradient",
            gradients["g"], slices,
        )  # fmt: skip
    return (o, final_state), got


CASES = {
    "mixed": dict(T=63, K=16, V=24, initial_state=True),
    "fast": dict(T=65, K=16, V=8, gates="fast", l2norm=True, beta_sigmoid=True),
    "slow_softplus": dict(T=65, K=60, V=8, gates="slow", gate_in_kernel="softplus", l2norm=True),
    "fast_softplus": dict(T=63, K=16, V=40, gates="fast", gate_in_kernel="softplus", l2norm=True),
    "bounded": dict(T=130, K=16, V=24, gate_in_kernel="bounded", l2norm=True, neg_eigval=True),
    "bounded_k100": dict(T=65, K=100, V=8, gates="fast", gate_in_kernel="bounded", l2norm=True),
    "one_token": dict(B=2, T=1, K=60, V=24, gate_in_kernel="softplus", initial_state=True),
    "grouped": dict(B=2, T=65, H=2, HV=4, K=16, V=8, gate_in_kernel="softplus", l2norm=True),
    "v_first": dict(T=65, K=16, V=72, gate_in_kernel="bounded", state_v_first=True),
    "fp16": dict(T=65, K=60, V=24, dtype=FP16, gate_in_kernel="softplus", l2norm=True),
    "fp16_bounded": dict(T=63, K=16, V=8, dtype=FP16, gates="fast", gate_in_kernel="bounded"),
    "fp16_grouped_v_first": dict(T=65, HV=2, K=16, V=40, dtype=FP16, state_v_first=True),
    "packed": dict(lengths=[0, 1, 66, 0, 2, 0], K=16, V=24, gate_in_kernel="softplus"),
    "packed_v_first": dict(
        lengths=[1, 65, 0], HV=2, K=16, V=8, gate_in_kernel="bounded", state_v_first=True
    ),
    "packed_fp16": dict(lengths=[3, 0, 64], K=16, V=24, dtype=FP16, l2norm=True),
    "no_state": dict(T=65, K=16, V=8, output_final_state=False),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_against_token_loop(case):
    options = {"H": 1, "initial_state": CASES[case].get("output_final_state", True), **CASES[case]}
    run(kda_inputs(**options), with_d_final_state=options["initial_state"])


def test_promised_range_of_a_given_gate():
    """safe_gate beside a log gate: the factored blocks of bounded gates, no gate in the kernel."""
    inputs = kda_inputs(T=65, H=1, K=16, V=8, gates="fast")
    inputs["safe_gate"] = True
    run(inputs)


@pytest.mark.parametrize("bounds", [[3, 3, 70, 64, 130], [-4, 4, 4, 99], [2, 67]])
def test_any_cu_seqlens(bounds):
    """Decreasing or outside values stay inside the tensors; rows of no sequence are zero."""
    inputs = kda_inputs(lengths=[131], H=1, K=16, V=8, l2norm=True)
    inputs["cu_seqlens"] = torch.tensor(bounds, dtype=torch.int32)
    (o, _), gradients = run(inputs)
    ends = inputs["cu_seqlens"].clamp(0, 131).cummax(0).values
    outside = torch.ones(131, dtype=torch.bool)
    outside[ends[0] : ends[-1]] = False
    for x in (o, *gradients[:5]):
        assert not x[0, outside].any()


SEGMENTED = {
    "batched": dict(B=2, T=130, K=16, V=8, gate_in_kernel="softplus"),
    "packed": dict(lengths=[0, 65, 1, 130, 0], K=16, V=8, state_v_first=True),
    "packed_fp16": dict(lengths=[70, 0, 3], K=16, V=40, dtype=FP16, output_final_state=False),
}


@pytest.mark.parametrize("case", SEGMENTED)
def test_segments_change_nothing(case, monkeypatch):
    """Rows worked on one after the other carry the state through memory, bit for bit."""
    inputs = kda_inputs(H=1, initial_state=True, **SEGMENTED[case])
    call = kda_call(inputs)
    whole = chunk.forward(call)
    monkeypatch.setattr(chunk, "WORKSPACE", 1)
    for found in (chunk.forward(call), chunk.forward_residuals(call)):
        for got, ref in zip(found[:2], whole):
            assert (got is None and ref is None) or torch.equal(got, ref)


@pytest.mark.parametrize("dtype", [torch.float32, FP16], ids=["fp32", "fp16"])
def test_kept_residuals_give_the_same_gradients(dtype):
    inputs = kda_inputs(
        lengths=[65, 0, 3], H=1, K=16, V=24, dtype=dtype, gate_in_kernel="softplus",
        initial_state=True,
    )  # fmt: skip
    _, kept = run(inputs, disable_recompute=True)
    call = kda_call(inputs)
    *_, A, A_qk, _, _, _, _, _, _ = chunk.forward_residuals(call)
    residuals = residuals_of([A, A_qk, *[None] * 6])
    recomputed = chunk.backward(call, *cotangents(call), residuals, (True,) * 8)
    assert all(torch.equal(x, y) for x, y in zip(kept, recomputed, strict=True))


@pytest.mark.parametrize("with_d_o", [False, True], ids=["state", "output"])
def test_one_incoming_gradient_absent(with_d_o):
    inputs = kda_inputs(T=65, H=1, HV=2, K=16, V=8, gate_in_kernel="softplus", initial_state=True)
    _, gradients = run(inputs, with_d_o=with_d_o, with_d_final_state=not with_d_o)
    assert gradients[0].any() == with_d_o


@pytest.mark.parametrize("only", [0, 2, 4, 7])
def test_gradients_not_asked_for(only):
    inputs = kda_inputs(T=3, H=1, K=16, V=8, gate_in_kernel="softplus", initial_state=True)
    run(inputs, mask=tuple(i == only for i in range(8)))


def test_state_emptied_by_infinite_gates():
    inputs = kda_inputs(T=67, H=1, K=16, V=8, initial_state=True)
    inputs["g"][:, 2] = -torch.inf
    inputs["g"][:, 65] = -torch.inf
    inputs["g"][:, 5, :, ::2] = -torch.inf
    (o, _), _ = run(inputs)
    fresh = {**inputs, "initial_state": None}
    for name in ("q", "k", "v", "g", "beta"):
        fresh[name] = inputs[name][:, 65:].clone()
    fresh["g"][:, 0] = 0
    torch.testing.assert_close(o[:, 65:], kda_oracle(**fresh)[0].float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("gate", ["softplus", "bounded"])
def test_extreme_gate_parameters(gate):
    inputs = kda_inputs(
        T=5, HV=4, H=1, K=16, V=8, gate_in_kernel=gate, l2norm=True, initial_state=True
    )
    inputs["A_log"] = torch.tensor([-100.0, 0.0, 3.0, 100.0])
    inputs["g"][..., :4] = 50.0
    inputs["g"][..., 4:8] = -50.0
    inputs["dt_bias"][:, :8] = 0.0
    # a nearly saturated channel has few digits of its own
    run(inputs, slices={})


def test_prefix_does_not_see_the_future():
    inputs = kda_inputs(T=80, H=1, K=16, V=24, gate_in_kernel="softplus", l2norm=True)
    o, _ = chunk.forward(kda_call(inputs))
    for name in ("q", "k", "v", "g", "beta"):
        inputs[name] = inputs[name][:, :40]
    assert torch.equal(o[:, :40], chunk.forward(kda_call(inputs))[0])


def test_each_input_in_its_own_dtype():
    inputs = kda_inputs(T=5, H=1, K=16, V=8, gate_in_kernel="softplus", beta_sigmoid=True)
    inputs["beta"] = inputs["beta"].half()
    inputs["A_log"], inputs["dt_bias"] = inputs["A_log"].half(), inputs["dt_bias"].half().flatten()
    inputs["initial_state"] = torch.randn(1, 1, 16, 8).half()
    inputs["scale"] = 1.0
    run(inputs)


def test_views_as_inputs_and_gradients():
    call = kda_call(kda_inputs(T=3, H=2, K=16, V=8))
    strided = call._replace(
        q=call.q.transpose(1, 2).contiguous().transpose(1, 2),
        k=torch.nn.functional.pad(call.k, (1, 0))[..., 1:],
        v=call.v.repeat(1, 1, 1, 2)[..., :8],
    )
    o, _, *residuals = chunk.forward_residuals(strided)
    assert torch.equal(o, chunk.forward(call)[0])
    ones = torch.ones(()).expand(call.v.shape)
    residuals = residuals_of(residuals)
    got = chunk.backward(strided, ones, None, residuals, (True,) * 8)
    ref = chunk.backward(call, torch.ones(call.v.shape), None, residuals, (True,) * 8)
    assert all(torch.equal(x, y) for x, y in zip(got[:5], ref[:5], strict=True))
