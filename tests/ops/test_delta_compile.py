"""torch.compile(fullgraph=True) of the gated delta rule and the delta rule: how often it compiles,
what graphs hold, equal to eager. Processes that share a compile cache are in test_compile.py.
"""

import contextlib

import pytest
import torch

import flaop
from flaop.testing import relative_error
from flaop.testing.compilation import Compiled

LENGTHS = (8, 9, 33, 64, 70, 100, 129, 12)
NAMES = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "cu_seqlens")
SMALL = {"K": 16, "V": 24, "dtype": "float32", "H": 1, "HV": 2}


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# Each op between other operations, as a layer has it.


def gated_delta_rule(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens):
    o, state = flaop.gated_delta_rule(
        q, k, v * 2, g, beta, initial_state=initial_state, cu_seqlens=cu_seqlens, A_log=A_log,
        dt_bias=dt_bias, use_gate_in_kernel=True, use_qk_l2norm_in_kernel=True,
        use_beta_sigmoid_in_kernel=True, output_final_state=True,
    )  # fmt: skip
    return o + 1, state


def delta_rule(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens):
    o, state = flaop.delta_rule(
        q, k, v * g.unsqueeze(-1), beta + A_log + dt_bias, initial_state=initial_state,
        cu_seqlens=cu_seqlens, use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True,
        output_final_state=True,
    )  # fmt: skip
    return o + 1, state


MODELS = {fn.__name__: fn for fn in (gated_delta_rule, delta_rule)}


@pytest.fixture
def tensors(delta_device, arguments):
    """The positional arguments of a model for one length or some packed lengths."""

    def make(T=None, grad=False, lengths=None):
        sizes = {} if delta_device == "cuda" else SMALL
        shape = {"T": T} if lengths is None else {"lengths": lengths}
        inputs = arguments(
            "delta main", **{**sizes, **shape}, device=delta_device, requires_grad=grad
        )
        return [inputs[name] for name in NAMES]

    return make


def run(fn, arguments, grad):
    """Outputs and, with a gradient, the gradients of every floating-point argument."""
    o, state = fn(*arguments)
    if not grad:
        return [o, state]
    loss = o.float().square().sum() + state.square().sum()
    return [o, state, *torch.autograd.grad(loss, arguments[:8])]


def assert_equal_to_eager(model, compiled, arguments, grad):
    expected = run(MODELS[model], arguments, grad)
    for x, y in zip(run(compiled, arguments, grad), expected, strict=True):
        assert x.dtype == y.dtype and x.stride() == y.stride()
        assert relative_error(x, y) < (1e-5 if x.dtype == torch.float32 else 1e-2)


def expected_graphs(grad, compilations):
    if grad:
        both = [["chunk_gated_delta_rule_fwd"], ["chunk_gated_delta_rule_bwd"]]
        return both * compilations
    chunk = [["chunk_gated_delta_rule"]] * (compilations - 1)
    return [["fused_recurrent_gated_delta_rule"], *chunk]


MODES = {
    "train": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("model", MODELS)
def test_one_graph_a_side_of_the_threshold(tensors, model, mode):
    grad = mode == "train"
    compiled = Compiled(MODELS[model], dynamic=True)
    with MODES[mode]():
        for T in LENGTHS:
            assert_equal_to_eager(model, compiled.call, tensors(T, grad), grad)
    assert compiled.compilations == 2
    assert compiled.graphs == expected_graphs(grad, 2)


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
def test_automatic_dynamic_shapes(tensors, grad):
    """The first length is static, the second one makes it dynamic; T = 1 has its own graph."""
    compiled = Compiled(gated_delta_rule, dynamic=None)
    for T in LENGTHS:
        assert_equal_to_eager("gated_delta_rule", compiled.call, tensors(T, grad), grad)
    assert compiled.compilations <= 3
    assert_equal_to_eager("gated_delta_rule", compiled.call, tensors(1, grad), grad)
    assert compiled.compilations <= 4


@pytest.mark.parametrize("T", [33, 100])
def test_static_shapes(tensors, T):
    compiled = Compiled(gated_delta_rule, dynamic=False)
    for grad in (False, True):
        assert_equal_to_eager("gated_delta_rule", compiled.call, tensors(T, grad), grad)
    assert compiled.compilations == 2


def test_packed_training(tensors):
    compiled = Compiled(gated_delta_rule, dynamic=True)
    for lengths in ([3, 6, 2], [10, 0, 9], [40, 50, 1], [200, 3, 4], [70, 200, 300], [1, 63, 64]):
        arguments = tensors(grad=True, lengths=lengths)
        assert_equal_to_eager("gated_delta_rule", compiled.call, arguments, True)
    assert compiled.compilations == 2
    assert compiled.graphs == expected_graphs(True, 2)


def test_inductor(tensors):
    compiled = torch.compile(gated_delta_rule, fullgraph=True, dynamic=True)
    for T, grad in ((100, True), (70, True), (33, False), (20, False)):
        assert_equal_to_eager("gated_delta_rule", compiled, tensors(T, grad), grad)


def test_stages(delta_device):
    """One graph for all lengths: the inverse with its backward, w and u, states."""

    def model(k, v, beta, L):
        A = flaop.solve_tril(L)
        with torch.no_grad():
            w, u = flaop.recompute_w_u(k, v, beta, A)
            h, v_new, state = flaop.chunk_delta_fwd_h(k, w, u, output_final_state=True)
        return A, h, v_new, state

    compiled = Compiled(model, dynamic=True)
    for T in (100, 64, 130):
        k, v = (torch.randn(2, T, 2, 64, device=delta_device) for _ in range(2))
        k = torch.nn.functional.normalize(k, dim=-1)
        beta, L = v[..., 0].sigmoid(), torch.rand(2, T, 2, 64, device=delta_device) / 8
        L.requires_grad_()
        results = []
        for fn in (compiled.call, model):
            A, *others = fn(k, v, beta, L)
            results.append([A, *others, *torch.autograd.grad(A.square().sum(), L)])
        for x, y in zip(*results, strict=True):
            assert relative_error(x, y) < 1e-5
    stages = ["solve_tril", "recompute_w_u", "chunk_delta_fwd_h"]
    assert compiled.graphs == [stages, ["solve_tril_bwd"]]
