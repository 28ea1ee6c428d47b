"""Field reports on numerics (N, C01, F06, M06) for the decay families and, where a probe asks
the same of it, the gated delta rule.
"""

import math

import pytest
import torch

import flaop
from flaop.testing import (
    gla_inputs,
    gla_oracle,
    relative_error,
    simple_gla_inputs,
    simple_gla_oracle,
)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
IDS = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}.get
SMALL = dict(H=1, K=16, V=8)


def test_C01_channels_in_many_blocks_without_a_gate(device, matches):
    """Partial sums over blocks of K are summed once: K beyond any block, no gate."""
    for K in (256, 320):
        shape = dict(B=2, T=20, H=2, K=K, V=16, device=device)
        inputs = simple_gla_inputs(gate=None, **shape)
        for fn in (flaop.chunk_simple_gla, flaop.fused_recurrent_simple_gla):
            matches(fn, inputs, oracle=simple_gla_oracle)
            call = torch.compile(lambda **x: fn(**x)[0], fullgraph=True, backend="aot_eager")  # noqa: B023
            assert torch.equal(call(**inputs), fn(**inputs)[0])
            torch._dynamo.reset()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape",
    [dict(lengths=[16] * 2050, H=32), dict(B=10923, T=32, H=6), dict(T=300_000, H=1)],
    ids=["sequences", "batch", "tokens"],
)
def test_N02_long_axes(path, shape):
    """More than 65535 programs along every axis that data can lengthen, both directions."""
    if not path.chunk and shape.get("T") == 300_000:
        pytest.skip("token by token: a minute")
    inputs = path.inputs(
        K=16, V=16, gates="fast", dtype=BF16, device="cuda", requires_grad=True, **shape
    )
    o, state = path.fn(**inputs)
    (o.float().sum() + state.sum()).backward()
    tokens = {n: inputs[n][-1:, -16:].detach() for n in path.tokens}
    if "lengths" in shape:
        assert relative_error(o[-1:, -16:], path.oracle(**tokens)[0]) < 1e-2
    else:  # gates that forget: the last token hardly knows what came before the last 16
        assert relative_error(o[-1:, -1:], path.oracle(**tokens)[0][:, -1:]) < 1e-2
    for name in tokens:
        assert torch.isfinite(inputs[name].grad).all(), name


def test_N04_positions_after_65536(device):
    """A decay of exp(-50) leaves each token alone: o = scale q (k v), at every position."""
    T = 65_537
    ones = torch.ones(1, T, 1, 4, device=device)
    for fn, g in ((flaop.chunk_simple_gla, ones[..., 0]), (flaop.chunk_gla, ones)):
        o, _ = fn(ones / 2, ones / 2, ones, -50 * g)
        torch.testing.assert_close(o, torch.full_like(o, 0.5), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=IDS)
@pytest.mark.parametrize("case", ["no gate", "alternating"])
def test_N05_gates_of_exactly_zero(path, device, matches, dtype, case):
    inputs = path.inputs(T=130, dtype=dtype, device=device, **SMALL)
    inputs["g"].zero_()
    if case == "alternating":
        inputs["g"][:, 1::2] = -8
    matches(path.fn, inputs, oracle=path.oracle)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=IDS)
@pytest.mark.parametrize("token", [0, 63], ids=["first", "last"])
def test_N06_one_strong_decay_in_each_chunk(path, device, matches, dtype, token):
    inputs = path.inputs(T=129, dtype=dtype, device=device, initial_state=True, **SMALL)
    inputs["g"].fill_(-0.01)
    inputs["g"][:, token::64] = -60
    matches(path.fn, inputs, oracle=path.oracle)


@pytest.mark.parametrize("T", [64, 65])
def test_N07_every_gate_strong(path, device, matches, T):
    inputs = path.inputs(T=T, device=device, **SMALL)
    inputs["g"] = -10 - 10 * torch.rand_like(inputs["g"])
    matches(path.fn, inputs, oracle=path.oracle)


def test_N07_positive_gates_are_the_callers_risk(path, device):
    """Growth of e^8 over a chunk still matches; docs say that g <= 0 is the contract."""
    inputs = path.inputs(T=64, device=device, **SMALL)
    inputs["g"].fill_(0.125)
    assert relative_error(path.fn(**inputs)[0], path.oracle(**inputs)[0]) < 1e-3
    assert "<= 0" in getattr(flaop, path.family).__doc__


@pytest.mark.parametrize("g", [-5.5, -8.0, -20.0, -88.0, -1000.0])
def test_N09_decay_of_every_strength(path, device, matches, g):
    inputs = path.inputs(T=66, device=device, initial_state=True, **SMALL)
    inputs["g"].fill_(g)
    matches(path.fn, inputs, oracle=path.oracle)


def test_N09_infinite_decay_starts_afresh(decay, device, gradients_of):
    inputs = decay.inputs(T=70, device=device, initial_state=True, **SMALL)
    inputs["g"][:, 32] = -torch.inf
    outputs, gradients = gradients_of(decay.fn, inputs)
    rest = {**inputs, "initial_state": None}
    for name in ("q", "k", "v", "g"):
        rest[name] = inputs[name][:, 32:].clone()
    rest["g"][:, 0] = 0
    o, state = decay.oracle(**rest)
    assert relative_error(outputs["o"][:, 32:], o) < 1e-5
    assert relative_error(outputs["state"], state) < 1e-5
    assert all(torch.isfinite(x).all() for x in gradients.values())


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=IDS)
def test_N11_gate_gradient_under_strong_decay(decay, device, matches, dtype):
    """Without a state the first gate has nothing to decay: its gradient is nothing."""
    inputs = decay.inputs(T=100, H=2, K=32, V=32, dtype=dtype, device=device)
    inputs["g"] = -torch.nn.functional.softplus(torch.randn_like(inputs["g"]) + 1) * 4
    _, gradients = matches(decay.fn, inputs, oracle=decay.oracle)
    dg = gradients["g"].float().abs()
    assert dg[:, 0].mean() <= 1e-3 * dg.mean()


@pytest.mark.parametrize("allow", [False, True])
def test_N13_one_precision_policy(path, device, matches, allow):
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allow
    try:
        inputs = path.inputs(T=130, H=1, K=64, V=64, device=device)
        matches(path.fn, inputs, oracle=path.oracle)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize("filled, expected", [(2000.0, 22627.4), (10_000.0, math.inf)])
def test_N14_read_out_beyond_fp16(path, device, filled, expected):
    """A finite state never reads as NaN; beyond 65504 an fp16 output is inf, a float32 one not."""
    inputs = path.inputs(T=1, H=1, K=128, V=128, dtype=FP16, device=device, initial_state=True)
    inputs["q"].fill_(128**-0.5)
    inputs["k"].zero_()
    inputs["g"].zero_()
    inputs["initial_state"].fill_(filled)
    o, state = path.fn(**{**inputs, "scale": 1.0})
    assert torch.equal(state, inputs["initial_state"])
    if math.isinf(expected):
        assert (o == expected).all()
        wide = {n: inputs[n].float() for n in "qkv"}
        o, _ = path.fn(**{**inputs, **wide, "scale": 1.0})
        expected = 113_137.1
    torch.testing.assert_close(o.float(), torch.full_like(o.float(), expected), rtol=1e-2, atol=0)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=IDS)
@pytest.mark.parametrize("state", [None, FP32, BF16], ids=["none", "fp32", "bf16"])
def test_N15_final_states_are_float32(path, device, dtype, state):
    inputs = path.inputs(T=3, dtype=dtype, device=device, initial_state=state is not None, **SMALL)
    if state is not None:
        # below bfloat16's and float16's resolution of 1: lost by a cast down
        inputs["initial_state"] = torch.full((1, 1, 16, 8), 1 + 2**-14, device=device).to(state)
        inputs["g"].zero_()
        inputs["k"].zero_()
    _, final_state = path.fn(**inputs)
    assert final_state.dtype is FP32
    if state is not None:
        torch.testing.assert_close(final_state, inputs["initial_state"].float(), rtol=1e-7, atol=0)


@pytest.mark.parametrize("state", [True, False], ids=["state", "none"])
@pytest.mark.parametrize("gate", [None, "g", "g_gamma", "both"])
@pytest.mark.parametrize("fn", [flaop.chunk_simple_gla, flaop.fused_recurrent_simple_gla])
def test_N16_every_gradient_of_every_subset(fn, device, matches, gate, state):
    inputs = simple_gla_inputs(
        T=100, dtype=FP32, device=device, gate=gate, initial_state=state, **SMALL
    )
    _, gradients = matches(fn, inputs, oracle=simple_gla_oracle)
    gates = {None: set(), "both": {"g", "g_gamma"}}.get(gate, {gate})
    assert set(gradients) == {"q", "k", "v"} | gates | ({"initial_state"} if state else set())


@pytest.mark.parametrize("state", [True, False], ids=["state", "none"])
def test_N16_gates_of_value_channels(device, matches, state):
    inputs = gla_inputs(
        T=100, dtype=BF16, device=device, value_gate=True, initial_state=state, **SMALL
    )
    _, gradients = matches(flaop.fused_recurrent_gla, inputs, oracle=gla_oracle)
    assert {"g", "gv"} < set(gradients)


@pytest.mark.parametrize("state_v_first", [False, True])
def test_N20_decay_comes_first(decay, device, state_v_first):
    """o = 1, then 0.5 + 1: the write of a token is not decayed by its own gate."""
    inputs = decay.inputs(T=2, H=1, K=1, V=1, device=device, state_v_first=state_v_first)
    for name in "qkv":
        inputs[name].fill_(1)
    inputs["g"].view(-1).copy_(torch.tensor([0.0, math.log(0.5)]))
    o, state = decay.fn(**{**inputs, "scale": 1.0})
    torch.testing.assert_close(o.flatten().tolist(), [1.0, 1.5])
    torch.testing.assert_close(state.item(), 1.5)


# Relative errors of o and dk: three times as much is a change of precision. Measured on the CPU,
# where 16-bit gradients are rounded once, as in the loop; the kernels round as those of KDA do.
LEVELS = {
    ("cpu", FP32): (2.5e-7, 2.5e-7),
    ("cpu", BF16): (1.7e-3, 1e-4),
    ("cpu", FP16): (2.1e-4, 2e-5),
    ("cuda", FP32): (1.5e-6, 3e-6),
    ("cuda", BF16): (4e-3, 6e-3),
    ("cuda", FP16): (6e-4, 9e-4),
}


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=IDS)
def test_N21_errors_stay_at_their_level(decay, device, gradients_of, dtype):
    inputs = decay.inputs(T=66, H=1, K=64, V=64, dtype=dtype, device=device)
    outputs, gradients = gradients_of(decay.fn, inputs)
    expected, expected_gradients = gradients_of(decay.oracle, inputs)
    level_o, level_k = LEVELS[device, dtype]
    assert relative_error(outputs["o"], expected["o"]) < 3 * level_o
    assert relative_error(gradients["k"], expected_gradients["k"]) < 3 * level_k


@pytest.mark.parametrize("lengths", [[256], [60, 0, 196]], ids=str)
def test_F06_weak_decay_is_exact_however_work_is_split(path, device, lengths):
    inputs = path.inputs(lengths=lengths, device=device, initial_state=True, **SMALL)
    inputs["g"].fill_(-1e-4)
    expected = path.oracle(**inputs)
    for split_size in (0, 64) if path.chunk else (0,):
        o, state = path.fn(**inputs, split_size=split_size)
        assert relative_error(o, expected[0]) < 1e-5 and relative_error(state, expected[1]) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=IDS)
def test_H12_M06_the_same_bits_every_time(decay, gives_the_same_bits, dtype):
    inputs = decay.inputs(
        T=1000 if decay.chunk else 100, H=2, HV=4, K=64, V=64, dtype=dtype, device="cuda",
        initial_state=True,
    )  # fmt: skip
    gives_the_same_bits(decay.fn, inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("K, V", [(64, 64), (100, 64), (192, 384)])
def test_H01_H05_gradients_on_hopper(decay, matches, K, V):
    inputs = decay.inputs(T=1000 if decay.chunk else 200, H=1, K=K, V=V, dtype=BF16, device="cuda")
    matches(decay.fn, inputs, oracle=decay.oracle)
