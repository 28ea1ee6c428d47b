"""torch.compile(fullgraph=True): how often it compiles, what is in the graphs, equal to eager.

Changing the backend after compilation and packed inference are in tests/test_dispatch.py, whole
models in every mode in tests/nn/test_model.py.
"""

import contextlib
import json
import os
import subprocess
import sys

import pytest
import torch

import flaop
from flaop.testing import relative_error
from flaop.testing.compilation import Compiled

LENGTHS = (8, 9, 33, 64, 70, 100, 129, 12)
TENSORS = ("q", "k", "v", "g", "beta")


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def tensors(device, arguments):
    """The positional arguments of `model` for one length or some packed lengths."""

    def make(T=None, grad=False, lengths=None):
        sizes = {} if device == "cuda" else {"K": 16, "V": 24, "dtype": "float32", "H": 1, "HV": 2}
        shape = {"T": T} if lengths is None else {"lengths": lengths, "H": 1, "HV": 2}
        inputs = arguments("main", **{**sizes, **shape}, device=device, requires_grad=grad)
        names = (*TENSORS, "A_log", "dt_bias", "initial_state", "cu_seqlens")
        return [inputs[name] for name in names]

    return make


def model(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens):
    """The op between other operations, as a layer has it."""
    o, state = flaop.kda(
        q, k, v * 2, g, beta, A_log=A_log, dt_bias=dt_bias, initial_state=initial_state,
        cu_seqlens=cu_seqlens, output_final_state=True, use_gate_in_kernel=True,
        use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True, safe_gate=True,
        lower_bound=-5.0,
    )  # fmt: skip
    return o + 1, state


def run(fn, arguments, grad):
    """Outputs and, with a gradient, the gradients of the first eight arguments."""
    o, state = fn(*arguments)
    if not grad:
        return [o, state]
    loss = o.float().square().sum() + state.square().sum()
    return [o, state, *torch.autograd.grad(loss, arguments[:8])]


def assert_equal_to_eager(compiled, arguments, grad):
    expected = run(model, arguments, grad)
    for x, y in zip(run(compiled, arguments, grad), expected, strict=True):
        assert x.dtype == y.dtype and x.stride() == y.stride()
        assert relative_error(x, y) < (1e-5 if x.dtype == torch.float32 else 1e-2)


def expected_graphs(grad, compilations):
    if grad:
        return [["chunk_kda_fwd"], ["chunk_kda_bwd"]] * compilations
    return [["fused_recurrent_kda"]] + [["chunk_kda"]] * (compilations - 1)


MODES = {
    "train": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}


@pytest.mark.parametrize("mode", MODES)
def test_one_graph_a_side_of_the_threshold(tensors, mode):
    grad = mode == "train"
    compiled = Compiled(model, dynamic=True)
    with MODES[mode]():
        for T in LENGTHS:
            assert_equal_to_eager(compiled.call, tensors(T, grad), grad)
    assert compiled.compilations == 2
    assert compiled.graphs == expected_graphs(grad, 2)


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
def test_automatic_dynamic_shapes(tensors, grad):
    """The first length is static, the second one makes it dynamic; T = 1 has its own graph."""
    compiled = Compiled(model, dynamic=None)
    for T in LENGTHS:
        assert_equal_to_eager(compiled.call, tensors(T, grad), grad)
    assert compiled.compilations <= 3
    assert_equal_to_eager(compiled.call, tensors(1, grad), grad)
    assert compiled.compilations <= 4


@pytest.mark.parametrize("T", [33, 100])
def test_static_shapes(tensors, T):
    compiled = Compiled(model, dynamic=False)
    for grad in (False, True):
        assert_equal_to_eager(compiled.call, tensors(T, grad), grad)
    assert compiled.compilations == 2


def test_packed_training(tensors):
    compiled = Compiled(model, dynamic=True)
    for lengths in ([3, 6, 2], [10, 0, 9], [40, 50, 1], [200, 3, 4], [70, 200, 300], [1, 63, 64]):
        assert_equal_to_eager(compiled.call, tensors(grad=True, lengths=lengths), True)
    assert compiled.compilations == 2
    assert compiled.graphs == expected_graphs(True, 2)


def test_inductor(tensors):
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    for T, grad in ((100, True), (70, True), (33, False), (20, False)):
        assert_equal_to_eager(compiled, tensors(T, grad), grad)


# A process that shares the compile cache on disk with others.
CHILD = """
import json, sys
import torch
import flaop

torch.manual_seed(0)
setting = sys.argv[1]
q, k, v, g, beta = (torch.randn(1, 20, 1, 16) for _ in range(5))
arguments = (q, k, v, -g.abs(), beta[..., 0].sigmoid())
compiled = torch.compile(lambda *x: flaop.kda(*x)[0], fullgraph=True, dynamic=True)
kinds = [torch.profiler.ProfilerActivity.CPU]
with torch.no_grad(), flaop.backend(setting):
    o = compiled(*arguments)
    with torch.profiler.profile(activities=kinds) as profile:
        compiled(*arguments)
    assert torch.allclose(o, flaop.kda(*arguments, backend=setting)[0], atol=1e-5)
names = [event.key for event in profile.key_averages() if event.key.startswith("flaop::")]
counters = torch._dynamo.utils.counters
hits = counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]
print(json.dumps([names, hits > 0]))
"""


def test_processes_that_share_the_cache_take_their_own_path(tmp_path):
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
    }

    def taken(setting):
        command = [sys.executable, "-c", CHILD, setting]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, cwd=tmp_path
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(done.stdout.splitlines()[-1])

    recurrent, chunk = ["flaop::fused_recurrent_kda"], ["flaop::chunk_kda"]
    assert taken("auto") == [recurrent, False]
    assert taken("chunk") == [chunk, False]
    # What was cached serves those with the same settings.
    assert taken("auto") == [recurrent, True]
