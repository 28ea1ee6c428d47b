"""Chunked gla through the interpreter: each output and gradient against the token loop, and the
stage within a chunk against its formula.
"""

import pytest
import torch
import triton
import triton.language as tl
from flaop.triton_kernels.decay.bwd_channel import state_operand

from flaop.launch.decay import channel, chunk
from flaop.launch.decay.problem import problem
from flaop.testing import relative_error, worst_error
from flaop.testing.decay_inputs import gla_inputs
from flaop.testing.decay_oracle import gla_oracle
from flaop.validation.decay import check_gla

FP16 = torch.float16
GRADIENTS = ("q", "k", "v", "g", "initial_state")
# dimensions whose slices are compared one by one: rows of heads, channels, heads of states
SLICES = {
    "o": (0, 1, 2), "q": (0, 1, 2), "k": (0, 1, 2), "v": (0, 1, 2), "g": (2, 3),
    "final_state": (0, 1), "initial_state": (0, 1),
}  # fmt: skip
LIMITS = {torch.float32: 5e-6, FP16: 1e-3}
# of a slice; rows that nearly cancel are worse than their tensor
WORST = {torch.float32: 1e-4, FP16: 2e-2}


def gla_call(inputs, **options):
    detached = {
        name: x.detach() if isinstance(x, torch.Tensor) else x for name, x in inputs.items()
    }
    return check_gla(**detached, **options)


def expected(inputs, d_o, d_final_state):
    """Outputs and gradients of the token loop in float64."""
    leaves = {
        name: inputs[name].detach().double().requires_grad_()
        for name in GRADIENTS
        if inputs[name] is not None
    }
    o, final_state = gla_oracle(**{**inputs, **leaves})
    loss = o.new_zeros(())
    if d_o is not None:
        loss = loss + (o * d_o.double()).sum()
    if d_final_state is not None:
        loss = loss + (final_state * d_final_state.double()).sum()
    gradients = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
    return o.detach(), final_state.detach(), dict(zip(leaves, gradients, strict=True))


def compare(name, got, ref, dtype):
    """dtype: of the inputs."""
    assert torch.isfinite(got).all(), name
    if not ref.any():
        assert not got.any() or got.abs().max() < 1e-6, f"{name} should be zero"
    else:
        assert relative_error(got, ref) < LIMITS[dtype], name
        assert worst_error(got, ref, SLICES[name], floor=1e-2) < WORST[dtype], name


def run(inputs, with_d_o=True, with_d_final_state=True):
    """Compares a forward and a backward; returns o and the gradients."""
    call = gla_call(inputs)
    generator = torch.Generator().manual_seed(1)
    d_o = d_final_state = None
    if with_d_o:
        d_o = torch.randn(call.v.shape, generator=generator).to(call.v.dtype)
    if with_d_final_state:
        d_final_state = torch.randn(call.state_shape, generator=generator)
    o, final_state, A = chunk.forward_residuals(call)
    got = chunk.backward(call, d_o, d_final_state, A, (True,) * 5)
    ref_o, ref_state, ref = expected(inputs, d_o, d_final_state)
    dtype = call.q.dtype
    assert o.dtype is call.v.dtype and A.dtype is dtype
    compare("o", o, ref_o, dtype)
    compare("final_state", final_state, ref_state, dtype)
    for name, gradient in zip(GRADIENTS, got, strict=True):
        if inputs[name] is None:
            assert gradient is None, name
        else:
            assert gradient.dtype is inputs[name].dtype and gradient.is_contiguous(), name
            compare(name, gradient, ref[name], dtype)
    return o, got


CASES = {
    "mixed": dict(T=63, K=16, V=24),
    "fast": dict(T=65, K=16, V=8, gates="fast"),
    "slow": dict(T=65, K=60, V=8, gates="slow"),
    "one_token": dict(B=2, T=1, K=60, V=24),
    "grouped": dict(B=2, T=65, H=2, HV=4, K=16, V=8),
    "v_first": dict(T=130, K=16, V=72, state_v_first=True),
    "k100": dict(T=17, K=100, V=8),
    "k300": dict(T=5, HV=2, K=300, V=24),
    "fp16": dict(T=65, K=60, V=24, dtype=FP16),
    "fp16_k140": dict(T=20, K=140, V=40, dtype=FP16, gates="fast"),
    "packed": dict(lengths=[0, 1, 66, 0, 2, 0], K=16, V=24),
    "packed_fp16": dict(lengths=[3, 0, 64], HV=2, K=16, V=8, dtype=FP16, state_v_first=True),
    "no_state": dict(T=3, K=16, V=8, initial_state=False),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_against_token_loop(case):
    run(gla_inputs(**{"H": 1, "initial_state": True, **CASES[case]}))


@pytest.mark.parametrize("with_d_o", [False, True], ids=["state", "output"])
def test_one_incoming_gradient_absent(with_d_o):
    inputs = gla_inputs(T=65, H=1, HV=2, K=16, V=8, initial_state=True)
    _, gradients = run(inputs, with_d_o, not with_d_o)
    assert gradients[0].any() == with_d_o


@pytest.mark.parametrize("bounds", [[3, 3, 70, 64, 130], [-4, 4, 4, 99]])
def test_any_cu_seqlens(bounds):
    """Decreasing or outside values stay inside the tensors; rows of no sequence are zero."""
    inputs = gla_inputs(lengths=[131], H=1, K=16, V=8)
    inputs["cu_seqlens"] = torch.tensor(bounds, dtype=torch.int32)
    o, gradients = run(inputs)
    ends = inputs["cu_seqlens"].clamp(0, 131).cummax(0).values
    outside = torch.ones(131, dtype=torch.bool)
    outside[ends[0] : ends[-1]] = False
    for x in (o, *gradients[:4]):
        assert not x[0, outside].any()


def test_state_emptied_by_infinite_gates():
    inputs = gla_inputs(T=67, H=1, K=16, V=8, initial_state=True)
    inputs["g"][:, 2] = -torch.inf
    inputs["g"][:, 65] = -torch.inf
    inputs["g"][:, 5, :, ::2] = -torch.inf
    _, gradients = run(inputs)
    assert not gradients[3][:, [2, 65]].any()


@triton.jit
def operand_kernel(x, y, N: tl.constexpr, PRECISION: tl.constexpr):
    o = tl.arange(0, N)
    tl.store(y + o, state_operand(tl.load(x + o), tl.float32, PRECISION))


def test_states_to_the_nearest_tf32():
    """Eleven bits of mantissa; the interpreter's products would take all 24."""
    x = torch.randn(128) * torch.logspace(-30, 30, 128)
    special = torch.tensor([torch.nan, -torch.nan, torch.inf, -torch.inf, 0.0, 1 + 2.0**-11])
    special[0].view(torch.int32).fill_(0x7FFFFFFF)
    x[:6] = special
    y = torch.empty_like(x)
    operand_kernel[(1,)](x, y, 128, "tf32")
    mantissa, exponent = torch.frexp(x[6:].double())
    assert torch.equal(y[6:].double(), torch.ldexp((mantissa * 2048).round() / 2048, exponent))
    assert y[:2].isnan().all() and y[2:5].tolist() == x[2:5].tolist() and y[5] == 1 + 2.0**-10
    operand_kernel[(1,)](x, y, 128, "tf32x3")
    assert torch.equal(y[2:], x[2:])


def test_prefix_does_not_see_the_future():
    inputs = gla_inputs(T=80, H=1, K=16, V=24)
    o = chunk.forward(gla_call(inputs))[0]
    for name in ("q", "k", "v", "g"):
        inputs[name] = inputs[name][:, :40]
    assert torch.equal(o[:, :40], chunk.forward(gla_call(inputs))[0])


def test_gate_in_its_own_dtype():
    inputs = gla_inputs(T=5, H=1, K=16, V=8)
    inputs["g"], inputs["scale"] = inputs["g"].half(), 1.0
    call = gla_call(inputs)
    o, _, A = chunk.forward_residuals(call)
    dg = chunk.backward(call, torch.ones_like(o), None, A, (True,) * 5)[3]
    ref_o, _, ref = expected(inputs, torch.ones_like(o), None)
    assert relative_error(o, ref_o) < 5e-6
    assert dg.dtype is FP16 and relative_error(dg, ref["g"]) < 1e-3


@pytest.mark.parametrize("size", [60, 150])
def test_decayed_operands(size):
    """qg, kg and the decay of rows whose chunk ends early; rows of tokens past the end are zero."""
    call = gla_call(gla_inputs(lengths=[3, 0, 65], H=1, K=size, V=8))
    p = problem(call)
    qg, kg = (torch.empty(p.rows, 1, 64, size) for _ in range(2))
    decay = torch.empty(p.rows, 1, size)
    channel.run_intra(p, None, qg, kg, decay, 0, p.rows)
    for row, (start, end) in enumerate([(0, 3), (3, 67), (67, 68)]):
        q, k, g = (x[0, start:end, 0].double() for x in (call.q, call.k, call.g))
        G = g.cumsum(0)
        n = end - start
        for got, ref in (
            (qg[row, 0, :n], call.scale * q * G.exp()),
            (kg[row, 0, :n], k * (G[-1:] - G).exp()),
            (decay[row, 0], G[-1].exp()),
        ):
            assert relative_error(got, ref) < 1e-5
        assert not qg[row, 0, n:].any() and not kg[row, 0, n:].any()
