"""The gated delta rule through the interpreter, chunked and token-serial: each output and gradient
against the token loop."""

import pytest
import torch

from flaop.launch.delta import gdn, recurrent
from flaop.testing import gdn_inputs, gdn_oracle, relative_error, worst_error
from flaop.validation.gated_delta_rule import check

FP16 = torch.float16
GRADIENTS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")
# dimensions whose slices are compared one by one: rows of heads, heads, heads of states
SLICES = {
    "o": (0, 1, 2), "q": (0, 1, 2), "k": (0, 1, 2), "v": (0, 1, 2), "g": (2,), "beta": (2,),
    "final_state": (0, 1), "initial_state": (0, 1),
}  # fmt: skip
# sums over all tokens, whose terms cancel
SUMS = ("A_log", "dt_bias")
LIMITS = {torch.float32: 3e-5, FP16: 2e-3}
# of a slice; rows that nearly cancel are worse than their tensor
WORST = {torch.float32: 1e-4, FP16: 5e-2}
# a root mean square that counts as zero: what fast gates leave of a state, gradients that cancel
ZERO = 1e-6
PATHS = {"chunk": gdn, "recurrent": recurrent}


def gdn_call(inputs, **options):
    detached = {
        name: x.detach() if isinstance(x, torch.Tensor) else x for name, x in inputs.items()
    }
    return check(**detached, **options)


def cotangents(call):
    generator = torch.Generator().manual_seed(1)
    d_o = torch.randn(call.v.shape, generator=generator).to(call.v.dtype)
    return d_o, torch.randn(call.state_shape, generator=generator)


def expected(inputs, d_o, d_final_state):
    """Outputs of the token loop, and its gradients through o and through the final state."""
    leaves = {
        name: inputs[name].detach().double().requires_grad_()
        for name in GRADIENTS
        if inputs[name] is not None
    }
    o, final_state = gdn_oracle(**{**inputs, **leaves})
    through = [
        torch.autograd.grad(
            x, list(leaves.values()), d.double(), retain_graph=True, allow_unused=True,
            materialize_grads=True,
        )
        for x, d in ((o, d_o), (final_state, d_final_state))
    ]  # fmt: skip
    gradients = [dict(zip(leaves, found, strict=True)) for found in through]
    return {"o": o.detach(), "final_state": final_state.detach()}, gradients


def compare(name, got, ref, terms):
    """terms: the gradient of the gate, whose rounding sums of it have."""
    coarser = FP16 if got.dtype is FP16 else torch.float32
    assert got.shape == ref.shape and torch.isfinite(got).all(), name
    if ref.numel() == 0 or ref.square().mean().sqrt() < ZERO:
        assert got.numel() == 0 or got.abs().max() < ZERO, f"{name} should be zero"
    elif name in SUMS:
        limit = 10 * LIMITS[coarser] * max(ref.norm(), terms.norm())
        assert (got - ref).norm() < limit, name
    else:
        assert relative_error(got, ref) < LIMITS[coarser], name
        assert worst_error(got, ref, SLICES[name], floor=1e-2) < WORST[coarser], name


def residuals_of(found):
    """As the op hands them to the backward: empty tensors where nothing was kept."""
    return [torch.empty(0) if x is None else x for x in found]


def backward(path, call, d_o, d_final_state, residuals, mask=(True,) * 8):
    if path == "recurrent":
        (residuals,) = residuals
    return PATHS[path].backward(call, d_o, d_final_state, residuals, mask)


def run(path, inputs, **options):
    """Compares a forward and backward passes through both outputs and each alone.

    Returns (o, final_state) and the gradients through both.
    """
    call = gdn_call(inputs, **options)
    d_o, d_final_state = cotangents(call)
    o, final_state, *residuals = PATHS[path].forward_residuals(call)
    residuals = residuals_of(residuals)
    o_alone, final_alone = PATHS[path].forward(call)
    assert torch.equal(o, o_alone)
    outputs, through = expected(inputs, d_o, d_final_state)
    # fp16 inputs round whatever comes out in float32, too
    dtype = call.q.dtype
    assert o.dtype is call.v.dtype
    compare("o", o, outputs["o"], None)
    if call.output_final_state:
        assert final_state.dtype is torch.float32 and torch.equal(final_state, final_alone)
        compare("final_state", final_state.to(dtype), outputs["final_state"], None)
    else:
        assert final_state is None and final_alone is None
    both = {name: x + through[1][name] for name, x in through[0].items()}
    for d, ref in (
        ((d_o, None), through[0]), ((None, d_final_state), through[1]), ((d_o, d_final_state), both)
    ):  # fmt: skip
        got = backward(path, call, *d, residuals)
        for name, gradient in zip(GRADIENTS, got, strict=True):
            if inputs[name] is None:
                assert gradient is None, name
                continue
            assert gradient.dtype is inputs[name].dtype and gradient.is_contiguous(), name
            compare(name, gradient.to(dtype), ref[name], ref.get("g"))
    return (o, final_state), got


CASES = {
    "mixed": dict(T=63, H=2, K=16, V=24),
    "fast": dict(T=65, K=20, V=8, gates="fast", l2norm=True, beta_sigmoid=True),
    "slow_softplus": dict(T=65, K=60, V=8, gates="slow", gate="softplus", l2norm=True),
    "fast_softplus": dict(T=130, K=16, V=72, gates="fast", gate="softplus", neg_eigval=True),
    "no_gate": dict(T=65, K=16, V=24, gate=None),
    "no_gate_grouped": dict(B=2, T=3, H=2, HV=4, K=16, V=8, gate=None, l2norm=True),
    "one_token": dict(B=2, T=1, K=60, V=24, gate="softplus", dt_bias=False),
    "grouped": dict(B=2, T=65, H=2, HV=4, K=16, V=8, gate="softplus", l2norm=True),
    "many_heads": dict(T=3, H=2, HV=18, K=16, V=8, gate="softplus"),
    "v_first": dict(T=65, K=72, V=72, gate="softplus", state_v_first=True),
    "wide": dict(T=5, K=200, V=40, state_v_first=True),
    "fp16": dict(T=65, K=60, V=24, dtype=FP16, gate="softplus", l2norm=True),
    "fp16_fast": dict(T=63, K=16, V=8, dtype=FP16, gates="fast"),
    "fp16_grouped_v_first": dict(T=65, HV=2, K=72, V=40, dtype=FP16, state_v_first=True),
    "packed": dict(lengths=[0, 1, 66, 0, 2, 0], K=16, V=24, gate="softplus"),
    "packed_v_first": dict(lengths=[1, 65, 0], HV=2, K=16, V=8, state_v_first=True),
    "packed_no_gate": dict(lengths=[0, 66], K=16, V=8, gate=None),
    "packed_fp16": dict(lengths=[3, 0, 64], K=16, V=24, dtype=FP16, l2norm=True),
    "no_state": dict(T=65, K=16, V=8, initial_state=False, output_final_state=False),
}  # fmt: skip


def case_inputs(options):
    return gdn_inputs(**{"H": 1, "initial_state": True, **options})


@pytest.mark.parametrize("case", CASES)
def test_chunks_against_token_loop(case):
    run("chunk", case_inputs(CASES[case]))


@pytest.mark.parametrize("case", CASES)
def test_recurrent_against_token_loop(case):
    """On short sequences: the interpreter takes its time for each token."""
    options = dict(CASES[case])
    if "lengths" in options:
        options["lengths"] = [n % 48 for n in options["lengths"]]
    else:
        options["T"] %= 48
    run("recurrent", case_inputs(options))


def test_recurrent_over_two_chunks():
    """The sums of the gate gradient start anew."""
    run("recurrent", gdn_inputs(T=66, H=1, K=16, V=8, gates="slow", gate="softplus"))


@pytest.mark.parametrize(
    ("path", "T", "bounds"),
    [
        ("chunk", 131, [3, 3, 70, 64, 130]),
        ("chunk", 131, [-4, 4, 4, 99]),
        ("recurrent", 11, [3, 3, 8, 6, 30]),
        ("recurrent", 11, [-4, 4, 4, 9]),
    ],
)
def test_any_cu_seqlens(path, T, bounds):
    """Decreasing or outside values stay inside the tensors; rows of no sequence are zero."""
    inputs = gdn_inputs(lengths=[T], H=1, K=16, V=8, l2norm=True)
    inputs["cu_seqlens"] = torch.tensor(bounds, dtype=torch.int32)
    (o, _), gradients = run(path, inputs)
    ends = inputs["cu_seqlens"].clamp(0, T).cummax(0).values
    outside = torch.ones(T, dtype=torch.bool)
    outside[ends[0] : ends[-1]] = False
    for x in (o, *gradients[:5]):
        assert not x[0, outside].any()


@pytest.mark.parametrize("dtype", [torch.float32, FP16], ids=["fp32", "fp16"])
def test_kept_residuals_give_the_same_gradients(dtype):
    inputs = gdn_inputs(
        lengths=[65, 0, 3], H=1, K=16, V=24, dtype=dtype, gate="softplus", initial_state=True
    )
    _, kept = run("chunk", inputs, disable_recompute=True)
    call = gdn_call(inputs)
    *_, A, A_qk, _, _ = gdn.forward_residuals(call)
    residuals = residuals_of([A, A_qk, None, None])
    recomputed = gdn.backward(call, *cotangents(call), residuals, (True,) * 8)
    assert all(torch.equal(x, y) for x, y in zip(kept, recomputed, strict=True))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("only", range(8))
def test_gradients_not_asked_for(only, path):
    inputs = gdn_inputs(T=3, H=1, K=16, V=8, gate="softplus", initial_state=True)
    call = gdn_call(inputs)
    residuals = residuals_of(PATHS[path].forward_residuals(call)[2:])
    whole = backward(path, call, *cotangents(call), residuals)
    mask = tuple(i == only for i in range(8))
    for i, x in enumerate(backward(path, call, *cotangents(call), residuals, mask)):
        assert torch.equal(x, whole[i]) if i == only else x is None


@pytest.mark.parametrize("path", PATHS)
def test_state_emptied_by_infinite_gates(path):
    T = {"chunk": 67, "recurrent": 9}[path]
    inputs = gdn_inputs(T=T, H=1, HV=2, K=16, V=8, initial_state=True)
    inputs["g"][:, 2] = -torch.inf
    inputs["g"][:, T - 2, 0] = -torch.inf
    inputs["g"][:, 5] = -1000.0
    (o, _), gradients = run(path, inputs)
    assert not gradients[3][:, [2, 5]].any()
    fresh = {**inputs, "initial_state": None}
    for name in ("q", "k", "v", "g", "beta"):
        fresh[name] = inputs[name][:, T - 2 :].clone()
    fresh["g"][:, 0] = 0
    ref = gdn_oracle(**fresh)[0].float()
    torch.testing.assert_close(o[:, T - 2 :, 0], ref[:, :, 0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("path", PATHS)
def test_extreme_gate_parameters(path):
    inputs = gdn_inputs(T=5, HV=8, H=1, K=16, V=8, gate="softplus", l2norm=True, initial_state=True)
    inputs["A_log"] = torch.tensor([-100.0, 0.0, 3.0, 100.0] * 2)
    inputs["dt_bias"] = torch.tensor([50.0] * 4 + [-50.0] * 4)
    run(path, inputs)


@pytest.mark.parametrize("path", PATHS)
def test_prefix_does_not_see_the_future(path):
    T = {"chunk": 80, "recurrent": 8}[path]
    inputs = gdn_inputs(T=T, H=1, K=16, V=24, gate="softplus", l2norm=True)
    o, _ = PATHS[path].forward(gdn_call(inputs))
    for name in ("q", "k", "v", "g", "beta"):
        inputs[name] = inputs[name][:, : T // 2]
    assert torch.equal(o[:, : T // 2], PATHS[path].forward(gdn_call(inputs))[0])


@pytest.mark.parametrize("path", PATHS)
def test_each_input_in_its_own_dtype(path):
    inputs = gdn_inputs(T=5, H=1, K=16, V=8, gate="softplus", beta_sigmoid=True)
    inputs["beta"] = inputs["beta"].half()
    inputs["A_log"], inputs["dt_bias"] = inputs["A_log"].half(), inputs["dt_bias"].half()
    inputs["initial_state"] = torch.randn(1, 1, 16, 8).half()
    inputs["scale"] = 1.0
    call = gdn_call(inputs)
    residuals = residuals_of(PATHS[path].forward_residuals(call)[2:])
    got = backward(path, call, *cotangents(call), residuals)
    _, through = expected(inputs, *cotangents(call))
    for name, x in zip(GRADIENTS, got, strict=True):
        assert x.dtype is inputs[name].dtype
        compare(name, x, through[0][name] + through[1][name], through[0]["g"] + through[1]["g"])


@pytest.mark.parametrize("path", PATHS)
def test_views_as_inputs_and_gradients(path):
    call = gdn_call(gdn_inputs(T=3, H=2, K=16, V=8))
    strided = call._replace(
        q=call.q.transpose(1, 2).contiguous().transpose(1, 2),
        k=torch.nn.functional.pad(call.k, (1, 0))[..., 1:],
        v=call.v.repeat(1, 1, 1, 2)[..., :8],
        g=call.g.mT.contiguous().mT,
    )
    o, _, *residuals = PATHS[path].forward_residuals(strided)
    assert torch.equal(o, PATHS[path].forward(call)[0])
    residuals = residuals_of(residuals)
    ones = torch.ones(()).expand(call.v.shape)
    got = backward(path, strided, ones, None, residuals)
    ref = backward(path, call, torch.ones(call.v.shape), None, residuals)
    assert all(torch.equal(x, y) for x, y in zip(got[:5], ref[:5], strict=True))
