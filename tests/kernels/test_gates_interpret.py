"""In-kernel activations against float64, elementwise, far beyond the usual range."""

import pytest
import torch
import triton
import triton.language as tl
from flaop.triton_kernels.delta.gates import gate_bwd, gate_fwd, log2_gate


@triton.jit
def gate_kernel(
    x,  # [BN]
    a_log,  # [BN]
    dg,  # [BN]
    g,  # [BN]
    dx,  # [BN]
    da,  # [BN]
    lower_bound,
    BN: tl.constexpr,
    BOUNDED: tl.constexpr,
):
    o_n = tl.arange(0, BN)
    b_x, b_a, b_dg = tl.load(x + o_n), tl.load(a_log + o_n), tl.load(dg + o_n)
    tl.store(g + o_n, gate_fwd(b_x, b_a, 0.0, lower_bound, BOUNDED))
    b_dx, b_da = gate_bwd(b_dg, b_x, b_a, 0.0, lower_bound, BOUNDED)
    tl.store(dx + o_n, b_dx)
    tl.store(da + o_n, b_da)


@triton.jit
def floor_kernel(
    x,  # [4]
    y,  # [4]
):
    o_n = tl.arange(0, 4)
    tl.store(y + o_n, log2_gate(tl.load(x + o_n)))


@pytest.mark.parametrize("bounded", [False, True])
def test_gate_against_float64(bounded):
    inputs = [-200.0, -95.0, -50.0, -20.0, -8.0, -3.0, -1e-3, 1e-6, 0.3, 2.0, 7.0, 50.0, 90.0]
    a_logs = [-100.0, -50.0, -3.0, 0.0, 2.7, 5.0, 50.0, 88.0, 100.0]
    x, a_log = torch.cartesian_prod(torch.tensor(inputs), torch.tensor(a_logs)).T
    size = triton.next_power_of_2(x.numel())
    x, a_log = (torch.nn.functional.pad(y, (0, size - y.numel())) for y in (x, a_log))
    dg = torch.randn(size, generator=torch.Generator().manual_seed(0))
    g, dx, da = (torch.empty(size) for _ in range(3))
    gate_kernel[(1,)](x, a_log, dg, g, dx, da, -5.0, BN=size, BOUNDED=bounded)

    wide = [y.double().requires_grad_() for y in (x, a_log)]
    if bounded:
        ref = -5.0 * torch.sigmoid(wide[1].exp() * wide[0])
    else:
        ref = -wide[1].exp() * torch.nn.functional.softplus(wide[0], threshold=1e9)
    # the floor of the gate has no slope
    live = ref.detach() * 1.4426950408889634 > -150
    ref_dx, ref_da = torch.autograd.grad((ref * dg.double() * live).sum(), wide)
    assert not (ref_dx.isnan() | ref_da.isnan()).any()
    torch.testing.assert_close(g.double()[live], ref.detach()[live], rtol=3e-5, atol=1e-37)
    assert (g[~live] < -103).all()
    for got, expected in ((dx, ref_dx), (da, ref_da)):
        assert torch.isfinite(got).all()
        torch.testing.assert_close(got.double(), expected, rtol=3e-5, atol=1e-15)


def test_gate_floor_keeps_nan():
    x = torch.tensor([0.0, -1.0, -torch.inf, torch.nan])
    y = torch.empty(4)
    floor_kernel[(1,)](x, y)
    assert y[:3].tolist() == pytest.approx([0.0, -1.4426950408889634, -150.0])
    assert y[3].isnan()
