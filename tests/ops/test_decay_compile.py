"""torch.compile(fullgraph=True) of the decay families: how often it compiles, what graphs hold,
equal to eager. Processes that share a compile cache are in test_compile.py.
"""

import contextlib

import pytest
import torch

import flaop
from flaop.testing import relative_error
from flaop.testing.compilation import Compiled

LENGTHS = (8, 9, 33, 64, 70, 100, 129, 12)
NAMES = ("q", "k", "v", "g", "initial_state", "cu_seqlens")
SMALL = {"K": 16, "V": 24, "dtype": "float32", "H": 1, "HV": 2}


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# Each op between other operations, as a layer has it.


def decayed(v, g):
    return (v * g.unsqueeze(-1).exp()).to(v.dtype)


def simple_gla(q, k, v, g, initial_state, cu_seqlens):
    o, state = flaop.simple_gla(
        q, k, v * 2, g, initial_state=initial_state, cu_seqlens=cu_seqlens,
        output_final_state=True,
    )  # fmt: skip
    return o + 1, state


def gla(q, k, v, g, initial_state, cu_seqlens):
    o, state = flaop.gla(
        q, k, v * 2, g, initial_state=initial_state, cu_seqlens=cu_seqlens,
        output_final_state=True, split_size=64,
    )  # fmt: skip
    return o + 1, state


def retention(q, k, v, g, initial_state, cu_seqlens):
    o, state = flaop.retention(
        q, k, decayed(v, g), initial_state=initial_state, cu_seqlens=cu_seqlens,
        output_final_state=True,
    )  # fmt: skip
    return o + 1, state


def linear_attn(q, k, v, g, initial_state, cu_seqlens):
    initial_state = torch.cat([initial_state, initial_state[..., :1].abs()], -1)
    o, state = flaop.linear_attn(
        q.abs(), k.abs(), decayed(v, g), initial_state=initial_state,
        cu_seqlens=cu_seqlens, output_final_state=True, normalize=True,
    )  # fmt: skip
    return o + 1, state


def lightning_attn(q, k, v, g, initial_state, cu_seqlens):
    o, state = flaop.lightning_attn(
        q, k, decayed(v, g), 1, 4, initial_state=initial_state,
        cu_seqlens=cu_seqlens, output_final_state=True,
    )  # fmt: skip
    return o + 1, state


def mamba2(q, k, v, g, initial_state, cu_seqlens):
    y, state = flaop.mamba2_ssd(
        v, -g, -torch.ones_like(g[0, 0]), k, q, z=v, dt_softplus=True, return_final_states=True,
        initial_states=initial_state.mT, cu_seqlens=cu_seqlens,
    )  # fmt: skip
    return y, state.mT


MODELS = {
    fn.__name__: fn for fn in (simple_gla, gla, retention, lightning_attn, linear_attn, mamba2)
}
OWN = ("simple_gla", "gla")


@pytest.fixture
def tensors(decay_device, arguments):
    """The positional arguments of a model for one length or some packed lengths."""

    def make(model, T=None, grad=False, lengths=None):
        sizes = {} if decay_device == "cuda" else SMALL
        shape = {"T": T} if lengths is None else {"lengths": lengths, "H": 1, "HV": 2}
        family = "channel main" if model == "gla" else "simple main"
        inputs = arguments(family, **{**sizes, **shape}, device=decay_device, requires_grad=grad)
        return [inputs[name] for name in NAMES]

    return make


def run(fn, arguments, grad):
    """Outputs and, with a gradient, the gradients of every floating-point argument."""
    o, state = fn(*arguments)
    if not grad:
        return [o, state]
    loss = o.float().square().sum() + state.square().sum()
    return [o, state, *torch.autograd.grad(loss, arguments[:5])]


def assert_equal_to_eager(model, compiled, arguments, grad):
    expected = run(MODELS[model], arguments, grad)
    for x, y in zip(run(compiled, arguments, grad), expected, strict=True):
        assert x.dtype == y.dtype and x.stride() == y.stride()
        assert relative_error(x, y) < (1e-5 if x.dtype == torch.float32 else 1e-2)


def expected_graphs(model, grad, compilations):
    op = "gla" if model == "gla" else "simple_gla"
    if grad:
        return [[f"chunk_{op}_fwd"], [f"chunk_{op}_bwd"]] * compilations
    return [[f"fused_recurrent_{op}"]] + [[f"chunk_{op}"]] * (compilations - 1)


MODES = {
    "train": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}


@pytest.mark.parametrize(
    "model, mode",
    [
        *((model, "train") for model in MODELS),
        *((model, mode) for model in OWN for mode in ("no_grad", "inference_mode")),
        *((model, "no_grad") for model in ("linear_attn", "mamba2")),
    ],
)
def test_one_graph_a_side_of_the_threshold(tensors, model, mode):
    grad = mode == "train"
    compiled = Compiled(MODELS[model], dynamic=True)
    with MODES[mode]():
        for T in LENGTHS:
            assert_equal_to_eager(model, compiled.call, tensors(model, T, grad), grad)
    assert compiled.compilations == 2
    assert compiled.graphs == expected_graphs(model, grad, 2)


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("model", OWN)
def test_automatic_dynamic_shapes(tensors, model, grad):
    """The first length is static, the second one makes it dynamic; T = 1 has its own graph."""
    compiled = Compiled(MODELS[model], dynamic=None)
    for T in LENGTHS:
        assert_equal_to_eager(model, compiled.call, tensors(model, T, grad), grad)
    assert compiled.compilations <= 3
    assert_equal_to_eager(model, compiled.call, tensors(model, 1, grad), grad)
    assert compiled.compilations <= 4


@pytest.mark.parametrize("T", [33, 100])
@pytest.mark.parametrize("model", OWN)
def test_static_shapes(tensors, model, T):
    compiled = Compiled(MODELS[model], dynamic=False)
    for grad in (False, True):
        assert_equal_to_eager(model, compiled.call, tensors(model, T, grad), grad)
    assert compiled.compilations == 2


@pytest.mark.parametrize("model", OWN)
def test_packed_training(tensors, model):
    compiled = Compiled(MODELS[model], dynamic=True)
    for lengths in ([3, 6, 2], [10, 0, 9], [40, 50, 1], [200, 3, 4], [70, 200, 300], [1, 63, 64]):
        arguments = tensors(model, grad=True, lengths=lengths)
        assert_equal_to_eager(model, compiled.call, arguments, True)
    assert compiled.compilations == 2
    assert compiled.graphs == expected_graphs(model, True, 2)


def test_a_value_gate_has_one_graph(decay_device, arguments):
    """Its path does not depend on the length, so neither does the graph."""

    def model(q, k, v, g, gv):
        return flaop.gla(q, k, v, g, gv=gv)[0]

    compiled = Compiled(model, dynamic=True)
    sizes = SMALL if decay_device == "cpu" else {}
    for T in LENGTHS:
        inputs = arguments("channel and value", **sizes, T=T, device=decay_device)
        values = [inputs[name] for name in ("q", "k", "v", "g", "gv")]
        assert relative_error(compiled.call(*values), model(*values)) < 1e-2
    assert compiled.graphs == [["fused_recurrent_gla"]]


@pytest.mark.parametrize("model", ["gla", pytest.param("linear_attn", marks=pytest.mark.slow)])
def test_inductor(tensors, model):
    compiled = torch.compile(MODELS[model], fullgraph=True, dynamic=True)
    for T, grad in ((100, True), (70, True), (33, False), (20, False)):
        assert_equal_to_eager(model, compiled, tensors(model, T, grad), grad)


def test_stages(decay_device):
    """One graph for all lengths: the cumulative sum with its backward, states and outputs."""

    def model(q, k, v, g):
        sums = flaop.chunk_local_cumsum(g, 64)
        with torch.no_grad():
            h, state = flaop.chunk_fwd_h(k, v, g=sums, output_final_state=True)
            o = flaop.chunk_fwd_o(q, k, v, h, g=sums)
        return sums, o, state

    compiled = Compiled(model, dynamic=True)
    for T in (100, 64, 130):
        q, k, v = (torch.randn(2, T, 2, 64, device=decay_device) for _ in range(3))
        g = -torch.rand(2, T, 2, device=decay_device)
        g.requires_grad_()
        results = []
        for fn in (compiled.call, model):
            sums, o, state = fn(q, k, v, g)
            results.append([sums, o, state, *torch.autograd.grad(sums.square().sum(), g)])
        for x, y in zip(*results, strict=True):
            assert relative_error(x, y) < 1e-5
    stages = ["chunk_local_cumsum", "chunk_fwd_h", "chunk_fwd_o"]
    assert compiled.graphs == [stages, ["chunk_local_cumsum"]]
