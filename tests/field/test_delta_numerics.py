"""Field reports on numerics (N, H12, M06) for the delta families: beta, keys, the inverse of a
chunk, the order of decay and correction. Those that they share with others: test_decay_numerics.
"""

import math

import pytest
import torch

import flaop
from flaop.testing import relative_error, solve_tril_oracle

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = [BF16, FP16, FP32]
IDS = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}.get
LIMITS = {BF16: 1e-2, FP16: 1e-2, FP32: 1e-4}
SMALL = dict(H=1, K=16, V=8)
# Options that the tests of tests/ops compile on CUDA.
MAIN = dict(H=2, HV=4, K=128, V=128, dtype=BF16, gate="softplus", l2norm=True, beta_sigmoid=True)


def test_N04_positions_after_65536(delta, device):
    """A decay of exp(-50) leaves each token alone: o = scale q (beta v k), at every position."""
    if not delta.chunk and device == "cpu":
        pytest.skip("token by token: half a minute")
    ones = torch.ones(1, 65_537, 1, 4, device=device)
    o, _ = delta.fn(ones / 2, ones / 2, ones, -50 * ones[..., 0], ones[..., 0])
    torch.testing.assert_close(o, torch.full_like(o, 0.5), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=IDS)
def test_N05_nothing_is_written(delta, device, matches, dtype):
    """beta = 0: the state decays and is read, no more."""
    inputs = delta.inputs(T=130, dtype=dtype, device=device, initial_state=True, **SMALL)
    inputs["beta"].zero_()
    matches(delta.fn, inputs, oracle=delta.oracle)


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
def test_N05_equal_keys(delta, device, dtype):
    """64 equal unit keys, beta 1, q = k, no decay: each output is its own v times scale."""
    k = torch.zeros(1, 64, 1, 16, device=device, dtype=dtype)
    k[..., 7] = 1
    v = torch.randn(1, 64, 1, 8, device=device).to(dtype)
    g, beta = torch.zeros(1, 64, 1, device=device), torch.ones(1, 64, 1, device=device)
    o, _ = delta.fn(k, k, v, g, beta, scale=0.5)
    # o sums differences of neighbouring values: their rounding to bfloat16 alone gives 1.4e-2
    limit = {FP32: 1e-5, FP16: 1e-2, BF16: 2e-2}[dtype]
    assert relative_error(o, v.double() * 0.5) < limit


@pytest.mark.parametrize("BT", [16, 32, 64])
@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
def test_N05_inverse_of_equal_keys(device, dtype, BT):
    """Ones below the diagonal: 1 and -1 in two diagonals, exactly."""
    ones = torch.ones(BT, BT, device=device, dtype=dtype)
    X = flaop.solve_tril(ones.view(1, BT, 1, BT)).view(BT, BT)
    expected = torch.eye(BT) - torch.eye(BT).roll(1, 0).tril(-1)
    assert torch.equal(X.float().cpu(), expected)


def test_N10_saturated_gates(delta, device, gradients_of):
    inputs = delta.inputs(
        T=37, H=1, HV=5, K=16, V=8, device=device, gate="softplus", initial_state=True
    )
    inputs["A_log"] = torch.tensor([-20.0, 0.0, 20.0, 88.0, 100.0], device=device)
    inputs["dt_bias"].zero_()
    inputs["g"][:, 0::3], inputs["g"][:, 1::3] = -50, 50
    outputs, gradients = gradients_of(delta.fn, inputs)
    for name, x in {**outputs, **gradients}.items():
        assert torch.isfinite(x).all(), name
    assert not gradients["g"][:, 1::3, 2:].any()


def test_N11_gate_gradient_under_strong_decay(delta, device, matches):
    """From an empty state the first gate has nothing to decay: its gradient is nothing."""
    inputs = delta.inputs(T=130, device=device, initial_state=True, **MAIN)
    inputs["initial_state"].zero_()
    inputs["A_log"] = torch.rand(len(inputs["A_log"])).to(device) * math.log(16)
    inputs["dt_bias"].fill_(1)
    _, gradients = matches(delta.fn, inputs, oracle=delta.oracle)
    dg = gradients["g"].float().abs()
    assert dg[:, 0].mean() <= 1e-3 * dg.mean()


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
@pytest.mark.parametrize("norm", [1.0, 1.3])
def test_N12_keys_that_are_not_normalised(delta, device, dtype, norm):
    """Wherever beta |k|^2 < 2 the recurrence contracts, and the op follows it."""
    inputs = delta.inputs(T=64, dtype=dtype, device=device, gate=None, **SMALL)
    inputs["k"] *= norm
    for beta in (0.5, 0.99):
        inputs["beta"].fill_(beta)
        assert relative_error(delta.fn(**inputs)[0], delta.oracle(**inputs)[0]) < LIMITS[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
@pytest.mark.parametrize("norm, beta", [(2.0, 0.99), (8.0, 0.5), (8.0, 0.99)])
def test_N12_both_paths_diverge_where_the_recurrence_does(delta, device, dtype, norm, beta):
    """The first chunk that is not finite is that of the loop, or beside it.

    On CUDA the inverse of 16-bit inputs is made of fp16 products (docs/numerics.md): it may leave
    fp16 before the state leaves bfloat16, never after.
    """
    inputs = delta.inputs(T=256, dtype=dtype, device=device, gate=None, **SMALL)
    inputs["k"] *= norm
    inputs["beta"].fill_(beta)
    expected = delta.oracle(**inputs)[0].to(dtype)
    first = [
        (~torch.isfinite(o)).flatten(1).cpu().nonzero()[:1, 1].tolist()
        for o in (delta.fn(**inputs)[0], expected)
    ]
    found, loop = (x[0] // (64 * 8) if x else 256 // 64 for x in first)
    assert found <= loop + 1
    if device == "cpu" or dtype is FP32 or not delta.chunk:
        assert found >= loop - 1
    assert "beta |k|^2 > 2" in flaop.delta_rule.__doc__


@pytest.mark.parametrize("allow", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
def test_N12_N13_inverse_of_keys(device, dtype, allow):
    """beta |k|^2 of 1.7: as exact as the dtype of L, whatever PyTorch's TF32 switch says."""
    k = 1.3 * torch.nn.functional.normalize(torch.randn(2, 64, 16), dim=-1)
    L = (0.99 * k @ k.mT).tril(-1).to(dtype).unsqueeze(2).to(device)
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allow
    try:
        X = flaop.solve_tril(L)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    limit = 1e-5 if dtype is FP32 else torch.finfo(dtype).eps
    assert relative_error(X, solve_tril_oracle(L)) < limit


@pytest.mark.parametrize("state_v_first", [False, True])
def test_N20_decay_comes_first(delta, device, state_v_first):
    """The second token finds 0.5 and corrects it to 1; corrected first, it would be 0.5."""
    x = torch.ones(1, 2, 1, 1, device=device)
    g = torch.tensor([0.0, math.log(0.5)], device=device).view(1, 2, 1)
    o, state = delta.fn(
        x, x, x, g, x[..., 0], scale=1.0, output_final_state=True, state_v_first=state_v_first
    )
    torch.testing.assert_close(o.flatten().tolist(), [1.0, 1.0])
    torch.testing.assert_close(state.item(), 1.0)


@pytest.mark.gpu
def test_H12_M06_the_same_bits_every_time(delta, gives_the_same_bits):
    inputs = delta.inputs(T=1000 if delta.chunk else 100, device="cuda", initial_state=True, **MAIN)
    gives_the_same_bits(delta.fn, inputs)
