"""Token-serial decay families through the interpreter: each output and gradient against the token
loop.
"""

import pytest
import torch

from flaop.launch.decay import recurrent
from flaop.testing import relative_error, worst_error
from flaop.testing.decay_inputs import gla_inputs, simple_gla_inputs
from flaop.testing.decay_oracle import gla_oracle, simple_gla_oracle
from flaop.validation.decay import check_gla, check_simple_gla

FP16 = torch.float16
GRADIENTS = {
    "simple_gla": ("q", "k", "v", "g", "g_gamma", "initial_state"),
    "gla": ("q", "k", "v", "g", "initial_state", "gv"),
}
ALL = (True,) * 6
# dimensions whose slices are compared one by one: rows of heads, channels, heads of states
SLICES = {
    "o": (0, 1, 2), "q": (0, 1, 2), "k": (0, 1, 2), "v": (0, 1, 2), "g": (2, 3), "gv": (2, 3),
    "g_gamma": (0,), "final_state": (0, 1), "initial_state": (0, 1),
}  # fmt: skip
# whole tensors; a slice may be ten times worse
LIMITS = {torch.float32: 5e-6, FP16: 1e-3}


def inputs_of(family, **options):
    return (gla_inputs if family == "gla" else simple_gla_inputs)(**options)


def decay_call(family, inputs):
    detached = {
        name: x.detach() if isinstance(x, torch.Tensor) else x for name, x in inputs.items()
    }
    return (check_gla if family == "gla" else check_simple_gla)(**detached)


def expected(family, inputs, d_o, d_final_state):
    """Outputs and gradients of the token loop in float64."""
    leaves = {
        name: x.detach().double().requires_grad_()
        for name in GRADIENTS[family]
        if (x := inputs.get(name)) is not None
    }
    oracle = gla_oracle if family == "gla" else simple_gla_oracle
    o, final_state = oracle(**{**inputs, **leaves})
    loss = o.new_zeros(())
    if d_o is not None:
        loss = loss + (o * d_o.double()).sum()
    if d_final_state is not None:
        loss = loss + (final_state * d_final_state.double()).sum()
    if not loss.requires_grad:  # no sequence at all
        return o, final_state, {name: torch.zeros_like(x) for name, x in leaves.items()}
    gradients = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
    return o.detach(), final_state.detach(), dict(zip(leaves, gradients, strict=True))


def compare(name, got, ref):
    limit = LIMITS[FP16 if got.dtype is FP16 else torch.float32]
    assert got.shape == ref.shape, name
    assert torch.isfinite(got).all(), name
    if ref.numel() == 0 or not ref.any():
        assert not got.any(), f"{name} should be zero"
    else:
        assert relative_error(got, ref) < limit, name
        dims = [d for d in SLICES[name] if d < ref.ndim]
        assert worst_error(got, ref, dims) < 10 * limit, name


def cotangents(call, with_d_o=True, with_d_final_state=True):
    generator = torch.Generator().manual_seed(1)
    d_o = torch.randn(call.v.shape, generator=generator).to(call.v.dtype)
    d_final_state = torch.randn(call.state_shape, generator=generator)
    return d_o if with_d_o else None, d_final_state if with_d_final_state else None


def run(family, inputs, mask=ALL, with_d_o=True, with_d_final_state=True):
    """Compares a forward and a backward; returns o and the gradients."""
    call = decay_call(family, inputs)
    d_o, d_final_state = cotangents(call, with_d_o, with_d_final_state)
    o, final_state = recurrent.forward(call)
    got = recurrent.backward(call, d_o, d_final_state, mask)
    ref_o, ref_state, ref = expected(family, inputs, d_o, d_final_state)
    assert o.dtype is call.v.dtype
    compare("o", o, ref_o)
    if call.output_final_state:
        assert final_state.dtype is torch.float32
        compare("final_state", final_state, ref_state)
    else:
        assert final_state is None
    for name, asked, gradient in zip(GRADIENTS[family], mask, got, strict=True):
        if not asked or inputs.get(name) is None:
            assert gradient is None, name
        else:
            assert gradient.dtype is inputs[name].dtype and gradient.is_contiguous(), name
            compare(name, gradient, ref[name])
    return o, got


CASES = {
    "fast": ("simple_gla", dict(T=17, K=16, V=24, gates="fast")),
    "slow": ("simple_gla", dict(T=17, K=16, V=8, gates="slow", gate="both")),
    "no_gate": ("simple_gla", dict(T=5, K=16, V=8, gate=None)),
    "gamma": ("simple_gla", dict(T=17, H=2, K=32, V=8, gate="g_gamma")),
    "grouped": ("simple_gla", dict(B=2, T=5, H=2, HV=4, K=16, V=24, gate="both")),
    "k300": ("simple_gla", dict(T=5, HV=2, K=300, V=24, gate="both")),
    "k60_v_first": ("simple_gla", dict(T=17, K=60, V=24, state_v_first=True)),
    "fp16": ("simple_gla", dict(T=17, HV=2, K=60, V=24, dtype=FP16, gate="both")),
    "two_chunks": ("simple_gla", dict(T=66, K=16, V=8, gates="fast", gate="both")),
    "packed": (
        "simple_gla",
        dict(lengths=[0, 65, 1, 0, 5, 0], HV=2, K=16, V=24, gate="both"),
    ),
    "no_state": (
        "simple_gla",
        dict(T=5, K=16, V=24, initial_state=False, output_final_state=False),
    ),
    "channel_grouped": ("gla", dict(B=2, T=3, H=2, HV=4, K=16, V=24, value_gate=True)),
    "channel_fast": ("gla", dict(T=17, K=16, V=24, gates="fast", value_gate=True)),
    "channel_slow": ("gla", dict(T=17, K=16, V=8, gates="slow")),
    "channel_k100_tiles": ("gla", dict(T=5, HV=2, K=100, V=128, gates="slow")),
    "channel_k300": ("gla", dict(T=3, HV=2, K=300, V=40, value_gate=True)),
    "channel_k300_v_first": ("gla", dict(T=3, K=300, V=8, dtype=FP16, state_v_first=True)),
    "channel_k256_decode": ("gla", dict(B=2, T=1, K=256, V=48, state_v_first=True)),
    "channel_fp16": ("gla", dict(T=17, HV=2, K=60, V=24, dtype=FP16, value_gate=True)),
    "channel_chunks": ("gla", dict(T=66, K=16, V=8, gates="fast", value_gate=True)),
    "channel_packed": (
        "gla",
        dict(lengths=[65, 0, 2], K=16, V=24, state_v_first=True, value_gate=True),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_against_token_loop(case):
    family, options = CASES[case]
    options = {"H": 1, "initial_state": True, **options}
    with_state = options.get("output_final_state", True)
    run(family, inputs_of(family, **options), with_d_final_state=with_state)


def test_prefix_does_not_see_the_future():
    inputs = gla_inputs(T=7, H=1, K=16, V=24, value_gate=True)
    o, _ = recurrent.forward(decay_call("gla", inputs))
    for name in ("q", "k", "v", "g", "gv"):
        inputs[name] = inputs[name][:, :4]
    assert torch.equal(o[:, :4], recurrent.forward(decay_call("gla", inputs))[0])


@pytest.mark.parametrize("family", GRADIENTS)
@pytest.mark.parametrize("bounds", [[3, 3, 8, 6, 30], [2, 5], [-4, 4, 4, 9], [11]])
def test_any_cu_seqlens(bounds, family):
    """Decreasing or outside values stay inside the tensors; rows of no sequence are zero."""
    gate = {"value_gate": True} if family == "gla" else {"gate": "both"}
    inputs = inputs_of(family, lengths=[11], H=1, K=16, V=8, **gate)
    inputs["cu_seqlens"] = torch.tensor(bounds, dtype=torch.int32)
    o, gradients = run(family, inputs)
    ends = inputs["cu_seqlens"].clamp(0, 11).cummax(0).values
    outside = torch.ones(11, dtype=torch.bool)
    outside[ends[0] : ends[-1]] = False
    for x in (o, *gradients):
        assert x is None or x.ndim < 3 or not x[0, outside].any()


@pytest.mark.parametrize("family", GRADIENTS)
def test_state_emptied_by_infinite_gates(family):
    inputs = inputs_of(family, T=9, H=1, K=16, V=8, initial_state=True)
    inputs["g"][:, 2] = -torch.inf
    inputs["g"][:, 5, ..., ::2] = -torch.inf
    _, gradients = run(family, inputs)
    assert not gradients[3][:, 2].any()


def test_infinite_gate_of_a_head():
    inputs = simple_gla_inputs(T=5, H=2, K=16, V=8, gate="both", initial_state=True)
    inputs["g_gamma"][1] = -torch.inf
    _, gradients = run("simple_gla", inputs)
    assert not gradients[4][1].any()


def test_each_input_in_its_own_dtype():
    inputs = simple_gla_inputs(T=5, H=1, K=16, V=8, gate="both")
    inputs["g"], inputs["g_gamma"] = inputs["g"].half(), inputs["g_gamma"].half()
    inputs["initial_state"] = torch.randn(1, 1, 16, 8).half()
    inputs["scale"] = 1.0
    run("simple_gla", inputs)


@pytest.mark.parametrize("family", GRADIENTS)
@pytest.mark.parametrize("only", range(6))
def test_gradients_not_asked_for(only, family):
    gate = {"value_gate": True} if family == "gla" else {"gate": "both"}
    inputs = inputs_of(family, T=3, H=1, K=16, V=8, initial_state=True, **gate)
    mask = tuple(i == only for i in range(6))
    run(family, inputs, mask, with_d_o=only % 2 == 0)


def test_views_as_inputs_and_gradients():
    call = decay_call("gla", gla_inputs(T=3, H=2, K=16, V=8))
    strided = call._replace(
        q=call.q.transpose(1, 2).contiguous().transpose(1, 2), v=call.v.repeat(1, 1, 1, 2)[..., :8]
    )
    assert torch.equal(recurrent.forward(strided)[0], recurrent.forward(call)[0])
    got = recurrent.backward(strided, torch.ones(()).expand(call.v.shape), None, ALL)
    ref = recurrent.backward(call, torch.ones(call.v.shape), None, ALL)
    assert all(torch.equal(x, y) for x, y in zip(got[:4], ref[:4], strict=True))


@pytest.mark.parametrize("family", GRADIENTS)
@pytest.mark.parametrize("shape", [dict(T=0), dict(B=0, T=3), dict(lengths=[0, 0])])
def test_nothing_to_do(shape, family):
    run(family, inputs_of(family, **shape, H=1, K=16, V=8, initial_state=True))
