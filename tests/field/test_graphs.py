"""Field reports on CUDA graphs and host reads (G)."""

import os
import subprocess
import sys

import pytest
import torch

import flaop
from flaop.testing import kda_inputs, kda_oracle, relative_error

SIZES = dict(H=1, K=16, V=8)
TOKENS = ("q", "k", "v", "g", "beta")


@pytest.mark.gpu
def test_G01_no_host_read(fn):
    """The same boundaries, equal ones in fresh tensors, and batched calls: nothing ever waits."""
    packed = kda_inputs(lengths=[5, 64, 0, 59], device="cuda", requires_grad=True, **SIZES)
    batched = kda_inputs(T=128, device="cuda", requires_grad=True, **SIZES)
    for inputs in (packed, batched):
        flaop.warmup(fn, **inputs)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            for inputs in (packed, {**packed, "cu_seqlens": packed["cu_seqlens"].clone()}, batched):
                o, state = fn(**inputs)
                (o.sum() + state.sum()).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_G03_replay_with_other_boundaries(fn):
    """Forward and backward captured once; any boundaries of the same count replay."""
    inputs = kda_inputs(lengths=[128] * 4, device="cuda", requires_grad=True, **SIZES)
    leaves = [inputs[name] for name in TOKENS]

    def step():
        o, state = fn(**inputs)
        return (o, state, *torch.autograd.grad(o.square().sum() + state.square().sum(), leaves))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for bounds in (
        [0, 128, 256, 384, 512],
        [0, 1, 2, 511, 512],
        [0, 0, 0, 300, 512],
        [0] + [512] * 4,
    ):
        inputs["cu_seqlens"].copy_(torch.tensor(bounds))
        graph.replay()
        for got, ref in zip(captured, step()):
            assert torch.equal(got, ref), bounds


SCRIPT = """
import torch, flaop
from flaop.testing import kda_inputs
small = kda_inputs(T=70, H=1, K=16, V=16, device="cuda")
def capture(inputs):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        return graph, flaop.chunk_kda(**inputs)
try:
    capture(small)
except RuntimeError as error:
    assert "flaop.warmup" in str(error), error
else:
    raise AssertionError("the first call compiled inside a capture")
flaop.warmup(flaop.chunk_kda, **small)
graph, (o, _) = capture(small)
graph.replay()
assert torch.equal(o, flaop.chunk_kda(**small)[0])
longer = kda_inputs(T=700, H=3, K=16, V=16, device="cuda")
graph, (o, _) = capture(longer)
graph.replay()
assert torch.equal(o, flaop.chunk_kda(**longer)[0])
"""


@pytest.mark.gpu
def test_G04_first_call_inside_a_capture(tmp_path):
    """One sentence, and the process can capture again; other lengths need no own warm-up."""
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=500,
        env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path)},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]


@pytest.mark.gpu
def test_G05_state_fed_back_in_reduce_overhead_mode():
    """With a copy into a buffer, as flaop.nn's cache does it: 32 steps as eager."""
    inputs = kda_inputs(T=32, device="cuda", **SIZES)
    state = torch.zeros(1, 1, 16, 8, device="cuda")
    torch._dynamo.reset()

    @torch.compile(mode="reduce-overhead", fullgraph=True)
    def step(q, k, v, g, beta, state):
        o, final_state = flaop.kda(q, k, v, g, beta, initial_state=state, output_final_state=True)
        state.copy_(final_state)
        return o

    with torch.no_grad():
        outputs = [
            step(*(inputs[n][:, t : t + 1].contiguous() for n in TOKENS), state).clone()
            for t in range(32)
        ]
    assert relative_error(torch.cat(outputs, 1), kda_oracle(**inputs)[0]) < 1e-4


def test_G07_schemas_hold_no_opaque_argument():
    for name in dir(torch.ops.flaop):
        if name.startswith("__"):
            continue
        op = getattr(getattr(torch.ops.flaop, name), "default", None)
        if op is not None:
            for argument in op._schema.arguments:
                assert "ScriptObject" not in str(argument.type) and "ClassType" not in repr(
                    argument.type
                )


@pytest.mark.parametrize("end", [300, 0])
def test_G09_buffers_larger_than_their_tokens(fn, device, gradients_of, end):
    """A buffer of 512 rows with 300 in use: padding gives zeros, whatever it holds."""
    inputs = kda_inputs(lengths=[512], device=device, **SIZES)
    inputs["cu_seqlens"] = torch.tensor([0, end], device=device)
    used = {**inputs, **{name: inputs[name][:, :end].clone() for name in TOKENS}}
    for name in TOKENS:
        inputs[name] = inputs[name].clone()
        inputs[name][:, end:] = torch.nan
    outputs, gradients = gradients_of(fn, inputs)
    expected, _ = fn(**used)
    assert torch.equal(outputs["o"][:, :end], expected)
    assert not outputs["o"][:, end:].any()
    for name in TOKENS:
        assert torch.isfinite(gradients[name]).all() and not gradients[name][:, end:].any(), name


@pytest.mark.gpu
def test_G11_nothing_frozen_but_shapes(fn):
    """A captured decode step and a captured prefill replay with other values, gates and states."""
    for T in (1, 64):
        inputs = kda_inputs(T=T, device="cuda", initial_state=True, **SIZES)
        flaop.warmup(fn, **inputs)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            o, state = fn(**inputs)
        for seed in (1, 2):
            other = kda_inputs(
                T=T, device="cuda", initial_state=True, seed=seed, gates="fast", **SIZES
            )
            for name in (*TOKENS, "initial_state"):
                inputs[name].copy_(other[name])
            graph.replay()
            expected = kda_oracle(**other)
            assert (
                relative_error(o, expected[0]) < 1e-4 and relative_error(state, expected[1]) < 1e-4
            )
