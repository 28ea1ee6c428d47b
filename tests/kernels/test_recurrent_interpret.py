"""Token-serial KDA through the interpreter: each output and gradient against the token loop."""

import pytest
import torch

from flaop.launch.delta import recurrent
from flaop.testing import kda_inputs, kda_oracle, relative_error, worst_error
from flaop.validation.kda import check

GRADIENTS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")
# dimensions whose slices are compared one by one: rows of heads, channels, heads of states
SLICES = {
    "o": (0, 1, 2), "q": (0, 1, 2), "k": (0, 1, 2), "v": (0, 1, 2), "g": (2, 3), "beta": (2,),
    "final_state": (0, 1), "initial_state": (0, 1),
}  # fmt: skip
# whole tensors; a slice may be ten times worse
LIMITS = {torch.float32: 5e-6, torch.float16: 1e-3}


def kda_call(inputs):
    detached = {
        name: x.detach() if isinstance(x, torch.Tensor) else x for name, x in inputs.items()
    }
    return check(**detached)


def log_gate(x, A_log, dt_bias, lower_bound):
    rate = A_log.exp()[:, None]
    x = x + dt_bias.view(x.shape[2:])
    if lower_bound is None:
        return -rate * torch.nn.functional.softplus(x)
    return lower_bound * torch.sigmoid(rate * x)


def expected(inputs, d_o, d_final_state):
    """Outputs and gradients of the token loop in float64; what A_log and dt_bias are sums of."""
    leaves = {
        name: x.detach().double().requires_grad_()
        for name in GRADIENTS
        if (x := inputs[name]) is not None
    }
    options = {**inputs, **leaves}
    if inputs["use_gate_in_kernel"]:
        gate = log_gate(*[options[name] for name in ("g", "A_log", "dt_bias", "lower_bound")])
        options.update(g=gate, use_gate_in_kernel=False, A_log=None, dt_bias=None, lower_bound=None)
    o, final_state = kda_oracle(**options)
    loss = o.new_zeros(())
    if d_o is not None:
        loss = loss + (o * d_o.double()).sum()
    if d_final_state is not None:
        loss = loss + (final_state * d_final_state.double()).sum()
    if not loss.requires_grad:  # no sequence at all
        return o, final_state, {name: torch.zeros_like(x) for name, x in leaves.items()}, {}
    gradients = torch.autograd.grad(
        loss, list(leaves.values()), materialize_grads=True, retain_graph=True
    )
    gradients = dict(zip(leaves, gradients, strict=True))
    terms = {}
    if inputs["use_gate_in_kernel"]:
        (d_gate,) = torch.autograd.grad(loss, [gate], materialize_grads=True)
        terms = {"A_log": d_gate * gate.detach(), "dt_bias": gradients["g"]}
    return o.detach(), final_state.detach(), gradients, terms


def compare(name, got, ref, terms=None):
    """terms: what ref sums up; a sum that cancels has the rounding of its terms."""
    limit = LIMITS[torch.float16 if got.dtype is torch.float16 else torch.float32]
    assert got.shape == ref.shape, name
    assert torch.isfinite(got).all(), name
    if ref.numel() == 0 or not ref.any():
        assert not got.any(), f"{name} should be zero"
    elif terms is not None:
        assert (got - ref).norm() < limit * max(ref.norm(), terms.norm()), name
    else:
        assert relative_error(got, ref) < limit, name
        assert worst_error(got, ref, SLICES[name]) < 10 * limit, name


def run(inputs, mask=(True,) * 8, with_d_o=True, with_d_final_state=True):
    """Compares a forward and a backward; returns the call and what the launchers gave."""
    call = kda_call(inputs)
    generator = torch.Generator().manual_seed(1)
    d_o = d_final_state = None
    if with_d_o:
        d_o = torch.randn(call.v.shape, generator=generator).to(call.v.dtype)
    if with_d_final_state:
        d_final_state = torch.randn(call.state_shape, generator=generator)
    o, final_state, u = recurrent.forward_residuals(call)
    got = recurrent.backward(call, d_o, d_final_state, u, mask)
    ref_o, ref_state, ref, terms = expected(inputs, d_o, d_final_state)
    assert o.dtype is call.v.dtype and u.dtype is torch.float32
    compare("o", o, ref_o)
    if call.output_final_state:
        assert final_state.dtype is torch.float32
        compare("final_state", final_state, ref_state)
    else:
        assert final_state is None
    for name, asked, gradient in zip(GRADIENTS, mask, got, strict=True):
        if not asked or inputs[name] is None:
            assert gradient is None, name
        else:
            assert gradient.dtype is inputs[name].dtype and gradient.is_contiguous(), name
            compare(name, gradient, ref[name], terms.get(name))
    return call, (o, final_state, u), got


CASES = {
    "fast": dict(T=17, K=16, V=24, gates="fast", l2norm=True, beta_sigmoid=True),
    "slow_softplus": dict(T=17, K=16, V=8, gates="slow", gate_in_kernel="softplus", l2norm=True),
    "mixed_bounded": dict(T=17, K=32, V=8, gate_in_kernel="bounded", neg_eigval=True),
    "fast_softplus": dict(T=17, K=16, V=8, gates="fast", gate_in_kernel="softplus", l2norm=True),
    "grouped": dict(B=2, T=5, H=2, HV=4, K=16, V=24, gate_in_kernel="softplus", l2norm=True),
    "k60_v_first": dict(T=17, K=60, V=24, state_v_first=True, gate_in_kernel="softplus"),
    "k100_tiles": dict(T=5, K=100, V=128, gates="slow", gate_in_kernel="bounded", l2norm=True),
    "k128_tiles_v_first": dict(T=5, K=128, V=128, state_v_first=True, neg_eigval=True),
    "k256": dict(T=5, K=256, V=24, gate_in_kernel="bounded", beta_sigmoid=True),
    "k256_v_first": dict(T=1, K=256, V=48, state_v_first=True, gate_in_kernel="softplus"),
    "decode": dict(B=3, T=1, K=60, V=24, gate_in_kernel="softplus", l2norm=True, neg_eigval=True),
    "fp16": dict(T=17, K=60, V=24, dtype=torch.float16, gate_in_kernel="softplus", l2norm=True),
    "fp16_v_first": dict(T=5, K=16, V=24, dtype=torch.float16, state_v_first=True, gates="fast"),
    "no_state": dict(T=5, K=16, V=24, initial_state=False, output_final_state=False),
    "two_chunks": dict(T=66, K=16, V=8, gates="fast", gate_in_kernel="softplus", l2norm=True),
    "packed": dict(lengths=[0, 5, 1, 0, 17, 0], H=1, HV=2, K=16, V=24, gate_in_kernel="softplus"),
    "packed_v_first": dict(
        lengths=[1, 3, 0], K=60, V=8, state_v_first=True, gate_in_kernel="bounded", l2norm=True
    ),
    "packed_chunks": dict(lengths=[65, 2], K=16, V=8, gate_in_kernel="softplus"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_against_token_loop(case):
    options = {"H": 1, "initial_state": True, **CASES[case]}
    run(kda_inputs(**options), with_d_final_state=options.get("output_final_state", True))


def test_inference_gives_the_same():
    inputs = kda_inputs(T=5, H=1, K=16, V=24, initial_state=True)
    call, (o, final_state, _), _ = run(inputs)
    o_again, state_again = recurrent.forward(call)
    assert torch.equal(o, o_again) and torch.equal(final_state, state_again)


def test_prefix_does_not_see_the_future():
    inputs = kda_inputs(T=7, H=1, K=16, V=24, gate_in_kernel="softplus", l2norm=True)
    o, _ = recurrent.forward(kda_call(inputs))
    for name in ("q", "k", "v", "g", "beta"):
        inputs[name] = inputs[name][:, :4]
    o_prefix, _ = recurrent.forward(kda_call(inputs))
    assert torch.equal(o[:, :4], o_prefix)


@pytest.mark.parametrize("bounds", [[3, 3, 8, 6, 30], [2, 5], [-4, 4, 4, 9], [11]])
def test_any_cu_seqlens(bounds):
    """Decreasing or outside values stay inside the tensors; rows of no sequence are zero."""
    inputs = kda_inputs(lengths=[11], H=1, K=16, V=8)
    inputs["cu_seqlens"] = torch.tensor(bounds, dtype=torch.int32)
    _, (o, _, u), gradients = run(inputs)
    ends = inputs["cu_seqlens"].clamp(0, 11).cummax(0).values
    outside = torch.ones(11, dtype=torch.bool)
    outside[ends[0] : ends[-1]] = False
    for x in (o, u, *gradients[:5]):
        assert not x[0, outside].any()


def test_state_emptied_by_infinite_gates():
    inputs = kda_inputs(T=9, H=1, K=16, V=8, initial_state=True)
    inputs["g"][:, 2] = -torch.inf
    inputs["g"][:, 5, :, ::2] = -torch.inf
    _, _, gradients = run(inputs)
    assert not gradients[3][:, 2].any()


@pytest.mark.parametrize("gate", ["softplus", "bounded"])
def test_extreme_gate_parameters(gate):
    inputs = kda_inputs(
        T=5, HV=4, H=1, K=16, V=8, gate_in_kernel=gate, l2norm=True, initial_state=True
    )
    inputs["A_log"] = torch.tensor([-100.0, 0.0, 3.0, 100.0])
    inputs["g"][..., :4] = 50.0
    inputs["g"][..., 4:8] = -50.0
    inputs["dt_bias"][:, :8] = 0.0
    _, _, gradients = run(inputs)
    if gate == "softplus":
        assert not gradients[3][:, :, 3].any()  # state emptied in every channel
    else:
        assert gradients[3][:, :, 1:, :8].abs().max() < 1e-20


def test_each_input_in_its_own_dtype():
    inputs = kda_inputs(T=5, H=1, K=16, V=8, gate_in_kernel="softplus", beta_sigmoid=True)
    inputs["beta"] = inputs["beta"].half()
    inputs["A_log"], inputs["dt_bias"] = inputs["A_log"].half(), inputs["dt_bias"].half().flatten()
    inputs["initial_state"] = torch.randn(1, 1, 16, 8).half()
    inputs["scale"] = 1.0
    run(inputs)


@pytest.mark.parametrize("only", range(8))
def test_gradients_not_asked_for(only):
    inputs = kda_inputs(T=3, H=1, K=16, V=8, gate_in_kernel="softplus", initial_state=True)
    run(inputs, mask=tuple(i == only for i in range(8)), with_d_o=only % 2 == 0)


def test_views_as_inputs_and_gradients():
    inputs = kda_inputs(T=3, H=2, K=16, V=8)
    call = kda_call(inputs)
    strided = call._replace(
        q=call.q.transpose(1, 2).contiguous().transpose(1, 2), v=call.v.repeat(1, 1, 1, 2)[..., :8]
    )
    o, _, u = recurrent.forward_residuals(strided)
    assert torch.equal(o, recurrent.forward(call)[0])
    ones = torch.ones(()).expand(call.v.shape)
    got = recurrent.backward(strided, ones, None, u, (True,) * 8)
    ref = recurrent.backward(call, torch.ones(call.v.shape), None, u, (True,) * 8)
    assert all(torch.equal(x, y) for x, y in zip(got[:5], ref[:5], strict=True))


@pytest.mark.parametrize("shape", [dict(T=0), dict(B=0, T=3), dict(lengths=[0, 0])])
def test_nothing_to_do(shape):
    inputs = kda_inputs(**shape, H=1, K=16, V=8, gate_in_kernel="softplus", initial_state=True)
    run(inputs)
