"""Field reports on numerics (N)."""

import math

import pytest
import torch

import flaop
from flaop.testing import kda_inputs, kda_oracle, relative_error

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
IDS = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}.get


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape",
    [dict(lengths=[16] * 2050, H=32), dict(B=10923, T=32, H=6), dict(T=300_000, H=1)],
    ids=["sequences", "batch", "tokens"],
)
def test_N02_long_axes(fn, shape):
    """More than 65535 programs along every axis that data can lengthen, both directions."""
    inputs = kda_inputs(
        K=16, V=16, gates="fast", dtype=BF16, device="cuda", requires_grad=True, **shape
    )
    if fn is flaop.fused_recurrent_kda and shape.get("T") == 300_000:
        pytest.skip("token by token: a minute")
    o, state = fn(**inputs)
    (o.float().sum() + state.sum()).backward()
    last = {
        n: x[-1:, -16:].detach() for n, x in inputs.items() if n in ("q", "k", "v", "g", "beta")
    }
    # gates that forget: the last tokens see only themselves
    if "lengths" in shape or shape.get("T") == 32:
        start = slice(-16, None) if "lengths" in shape else slice(None)
        last = {n: inputs[n][-1:, start].detach() for n in last}
        ref, _ = kda_oracle(**last)
        assert relative_error(o[-1:, start], ref) < 1e-2
    for name in last:
        assert torch.isfinite(inputs[name].grad).all(), name


@pytest.mark.parametrize("gate", ["softplus", "scalar", "channel", "head"])
def test_N02_long_axis_of_grids(gate):
    """Grids have one axis: no extent can meet the limit of 65535 of the others."""
    triton = pytest.importorskip("triton")
    from flaop.launch.kernel import Kernel

    seen = []
    original = Kernel.__call__

    def record(self, grid, *args, **options):
        seen.append(grid)

    from flaop.testing.launches import Case, launches

    Kernel.__call__ = record
    try:
        launches(Case(90, "bf16", 64, gate))
    finally:
        Kernel.__call__ = original
    assert triton and len(seen) > 10
    assert all(len(grid) == 1 for grid in seen)


def test_N04_positions_after_65536(device):
    """Every position of a long call, all-ones inputs: the last as right as the first."""
    T = 65_537
    ones = torch.ones(1, T, 1, 4, device=device)
    # a decay of exp(-50) leaves each token alone: o = scale q (beta v k)
    o, _ = flaop.chunk_kda(ones / 2, ones / 2, ones, -50 * ones, ones[..., 0])
    torch.testing.assert_close(o, torch.full_like(o, 0.5), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=IDS)
@pytest.mark.parametrize("case", ["no gate", "alternating", "no write"])
def test_N05_gates_of_exactly_zero(fn, device, matches, dtype, case):
    inputs = kda_inputs(T=130, H=1, K=16, V=8, dtype=dtype, device=device)
    inputs["g"].zero_()
    if case == "alternating":
        inputs["g"][:, 1::2] = -8
    if case == "no write":
        inputs["beta"].zero_()
    matches(fn, inputs)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=IDS)
def test_N05_equal_keys(fn, device, dtype):
    """64 equal unit keys, beta 1, q = k, no decay: each output is its own v times scale."""
    k = torch.zeros(1, 64, 1, 64, device=device, dtype=dtype)
    k[..., 7] = 1
    v = torch.randn(1, 64, 1, 64, device=device).to(dtype)
    beta = torch.ones(1, 64, 1, device=device)
    o, _ = fn(k, k, v, torch.zeros_like(k), beta, scale=0.5)
    # o sums differences of neighbouring values: their rounding to bfloat16 alone gives 1.4e-2
    limit = {FP32: 1e-5, FP16: 1e-2, BF16: 2e-2}[dtype]
    assert relative_error(o, v.double() * 0.5) < limit


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=IDS)
@pytest.mark.parametrize("token", [0, 63], ids=["first", "last"])
def test_N06_one_strong_decay_in_each_chunk(fn, device, matches, dtype, token):
    inputs = kda_inputs(T=129, H=1, K=16, V=8, dtype=dtype, device=device, initial_state=True)
    inputs["g"].fill_(-0.01)
    inputs["g"][:, token::64] = -60
    matches(fn, inputs)


@pytest.mark.parametrize("T", [64, 65])
def test_N07_every_gate_strong(fn, device, matches, T):
    inputs = kda_inputs(T=T, H=1, K=16, V=8, device=device)
    inputs["g"] = -10 - 10 * torch.rand_like(inputs["g"])
    matches(fn, inputs)


def test_N07_positive_gates_are_the_callers_risk(fn, device):
    """Growth of e^8 over a chunk still matches; docs say that g <= 0 is the contract."""
    inputs = kda_inputs(T=64, H=1, K=16, V=8, device=device)
    inputs["g"].fill_(0.125)
    assert relative_error(fn(**inputs)[0], kda_oracle(**inputs)[0]) < 1e-3
    assert "<= 0" in flaop.kda.__doc__


@pytest.mark.parametrize("g", [-5.5, -8.0, -20.0, -88.0, -1000.0])
def test_N09_decay_of_every_strength(fn, device, matches, g):
    inputs = kda_inputs(T=66, H=1, K=16, V=8, device=device, initial_state=True)
    inputs["g"].fill_(g)
    matches(fn, inputs)


def test_N09_infinite_decay_starts_afresh(fn, device, gradients_of):
    """g = -inf at token 32 empties the state: the rest is a sequence of its own."""
    inputs = kda_inputs(T=70, H=1, K=16, V=8, device=device, initial_state=True)
    inputs["g"][:, 32] = -torch.inf
    outputs, gradients = gradients_of(fn, inputs)
    rest = {**inputs, "initial_state": None}
    for name in ("q", "k", "v", "g", "beta"):
        rest[name] = inputs[name][:, 32:].clone()
    rest["g"][:, 0] = 0
    o, state = kda_oracle(**rest)
    assert relative_error(outputs["o"][:, 32:], o) < 1e-5
    assert relative_error(outputs["state"], state) < 1e-5
    assert all(torch.isfinite(x).all() for x in gradients.values())


@pytest.mark.parametrize("gate", ["softplus", "bounded"])
def test_N10_saturated_gates(fn, device, gradients_of, gate):
    inputs = kda_inputs(
        T=37, H=1, HV=5, K=60, V=8, device=device, gate_in_kernel=gate, initial_state=True
    )
    inputs["A_log"] = torch.tensor([-20.0, 0.0, 20.0, 88.0, 100.0], device=device)
    inputs["dt_bias"].zero_()
    inputs["g"][..., 0::3], inputs["g"][..., 1::3] = -50, 50
    outputs, gradients = gradients_of(fn, inputs)
    for name, x in {**outputs, **gradients}.items():
        assert torch.isfinite(x).all(), name
    saturated = [0, 1, 3, 4]
    if gate == "bounded":
        assert gradients["g"][:, :, 2:, saturated].abs().max() < 1e-15


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=IDS)
def test_N11_gate_gradient_under_strong_decay(fn, device, matches, dtype):
    inputs = kda_inputs(
        T=100, H=2, K=32, V=32, dtype=dtype, device=device, gate_in_kernel="softplus", l2norm=True
    )
    inputs["A_log"] = torch.rand(2, device=device) * math.log(16)
    inputs["dt_bias"].fill_(1.0)
    _, gradients = matches(fn, inputs)
    # without a state the first gate has nothing to decay
    dg = gradients["g"].float().abs()
    assert dg[:, 0].mean() <= 1e-3 * dg.mean()


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=IDS)
@pytest.mark.parametrize("norm, beta", [(1.0, 0.99), (1.3, 0.5), (1.3, 0.99)])
def test_N12_keys_that_are_not_normalised(fn, device, dtype, norm, beta):
    """Wherever beta |k|^2 < 2 the recurrence contracts, and the op follows it."""
    inputs = kda_inputs(T=64, H=1, K=16, V=8, dtype=dtype, device=device, gates="slow")
    inputs["k"] *= norm
    inputs["beta"].fill_(beta)
    assert relative_error(fn(**inputs)[0], kda_oracle(**inputs)[0]) < (
        1e-4 if dtype is FP32 else 1e-2
    )


@pytest.mark.parametrize("allow", [False, True])
def test_N13_one_precision_policy(fn, device, matches, allow):
    """float32 stays float32 whatever PyTorch's TF32 switch says."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allow
    try:
        matches(fn, kda_inputs(T=130, H=1, K=64, V=64, device=device))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize("filled, expected", [(2000.0, 22627.4), (10_000.0, math.inf)])
def test_N14_read_out_beyond_fp16(fn, device, filled, expected):
    """A finite state never reads as NaN; beyond 65504 an fp16 output is inf, a float32 one not."""
    ones = torch.full((1, 1, 1, 128), 128**-0.5, device=device, dtype=FP16)
    state = torch.full((1, 1, 128, 128), filled, device=device)
    zeros = torch.zeros(1, 1, 1, device=device)
    arguments = (torch.zeros_like(ones), zeros)
    o, final_state = fn(
        ones, ones, ones, *arguments, scale=1.0, initial_state=state, output_final_state=True
    )
    assert torch.equal(final_state, state)
    if math.isinf(expected):
        assert (o == expected).all()
        wide = ones.float()
        o, _ = fn(wide, wide, wide, *arguments, scale=1.0, initial_state=state)
        expected = 113_137.1
    torch.testing.assert_close(o.float(), torch.full_like(o.float(), expected), rtol=1e-2, atol=0)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=IDS)
@pytest.mark.parametrize("state", [None, FP32, BF16], ids=["none", "fp32", "bf16"])
def test_N15_final_states_are_float32(fn, device, dtype, state):
    inputs = kda_inputs(
        T=3, H=1, K=16, V=8, dtype=dtype, device=device, initial_state=state is not None
    )
    if state is not None:
        # below bfloat16's and float16's resolution of 1: lost by a cast down
        inputs["initial_state"] = torch.full((1, 1, 16, 8), 1 + 2**-14, device=device).to(state)
        inputs["g"].zero_()
        inputs["beta"].zero_()
    _, final_state = fn(**inputs)
    assert final_state.dtype is FP32
    if state is not None:
        torch.testing.assert_close(final_state, inputs["initial_state"].float(), rtol=1e-7, atol=0)


@pytest.mark.parametrize("gate", [True, False], ids=["gate", "no gate"])
@pytest.mark.parametrize("beta", [True, False], ids=["beta", "beta 1"])
@pytest.mark.parametrize("state", [True, False], ids=["state", "none"])
def test_N16_every_gradient_of_every_subset(fn, device, matches, gate, beta, state):
    inputs = kda_inputs(T=100, H=1, K=16, V=8, dtype=BF16, device=device, initial_state=state)
    if not gate:
        inputs["g"].zero_()
    if not beta:
        inputs["beta"].fill_(1)
    _, gradients = matches(fn, inputs)
    assert (
        set(gradients) >= {"q", "k", "v", "g", "beta"} and ("initial_state" in gradients) == state
    )


def test_N18_the_space_of_the_gate_is_in_the_contract():
    """A decay in (0, 1) where its logarithm belongs is refused under FLAOP_DEBUG=1."""
    from flaop.validation.kda import check, check_values

    inputs = kda_inputs(T=3, H=1, K=8, V=8)
    inputs["g"] = inputs["g"].exp()
    with pytest.raises(ValueError, match="g must be at most 0.*FLAOP_DEBUG"):
        check_values(check(**inputs))
    assert "natural logarithm" in flaop.kda.__doc__


def test_N19_softplus_gate_is_never_the_bounded_one(device):
    """The fused kernel knows the bounded gate only: it declines softplus; no bound by default."""
    inputs = kda_inputs(
        T=100, H=1, K=128, V=128, dtype=BF16, device=device, gate_in_kernel="softplus", l2norm=True,
        beta_sigmoid=True, output_final_state=False,
    )  # fmt: skip
    assert not flaop.supports("flash_kda", flaop.kda, **inputs)
    explanation = flaop.explain(flaop.kda, **inputs)
    assert explanation.path == "chunk"
    assert any("lower_bound" in s or "bound" in s for s in explanation.passed_over)
    softplus, _ = kda_oracle(**inputs)
    bounded, _ = kda_oracle(**{**inputs, "lower_bound": -5.0})
    o, _ = flaop.kda(**inputs)
    assert relative_error(o, softplus) < 1e-2 < relative_error(o, bounded)


@pytest.mark.parametrize("state_v_first", [False, True])
def test_N20_decay_comes_first(fn, device, state_v_first):
    x = torch.ones(1, 2, 1, 1, device=device)
    g = torch.tensor([0.0, math.log(0.5)], device=device).view(1, 2, 1, 1)
    o, state = fn(
        x, x, x, g, x[..., 0], scale=1.0, output_final_state=True, state_v_first=state_v_first
    )
    torch.testing.assert_close(o.flatten().tolist(), [1.0, 1.0])
    torch.testing.assert_close(state.item(), 1.0)


# relative errors of o and dk measured on the CPU: three times as much is a change of precision
LEVELS = {FP32: (1.5e-6, 3e-6), BF16: (4e-3, 6e-3), FP16: (6e-4, 9e-4)}


@pytest.mark.parametrize("dtype", LEVELS, ids=IDS)
def test_N21_errors_stay_at_their_level(fn, device, gradients_of, dtype):
    inputs = kda_inputs(T=66, H=1, K=64, V=64, dtype=dtype, device=device)
    outputs, gradients = gradients_of(fn, inputs)
    expected, expected_gradients = gradients_of(kda_oracle, inputs)
    level_o, level_k = LEVELS[dtype]
    assert relative_error(outputs["o"], expected["o"]) < 3 * level_o
    assert relative_error(gradients["k"], expected_gradients["k"]) < 3 * level_k
