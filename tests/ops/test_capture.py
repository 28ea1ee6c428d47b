"""CUDA graphs, streams and compilations: what a captured loop relies on."""

import pytest
import torch

import flaop
from flaop.testing import kda_oracle, relative_error
from flaop.testing.graphs import (
    assert_all_equal,
    assert_unwarmed_capture_is_refused,
    capture,
    compiled_variants,
    refresh,
    replay,
    settled_memory,
    step,
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("compiled_families")]

FUNCTIONS = {
    "kda": flaop.kda, "chunk": flaop.chunk_kda, "fused_recurrent": flaop.fused_recurrent_kda,
}  # fmt: skip
CU_SEQLENS = (
    [0, 128, 256, 384, 512], [0, 1, 2, 511, 512], [0, 0, 0, 300, 512], [0, 512, 512, 512, 512],
)  # fmt: skip


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("T", [20, 130])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_replay_with_new_values(name, T, grad, arguments):
    fn = FUNCTIONS[name]
    inputs = arguments("main", T=T, device="cuda", requires_grad=grad)
    graph, results = capture(fn, inputs, grad)
    for seed in (0, 1, 2):
        values = arguments("main", T=T, device="cuda", requires_grad=grad, seed=seed)
        expected = step(fn, values, grad)
        refresh(inputs, values)
        assert_all_equal(replay(graph, results), expected)


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("name", ["chunk", "fused_recurrent"])
def test_replay_with_new_boundaries(name, grad, arguments):
    fn = FUNCTIONS[name]
    inputs = arguments("packed", lengths=[128] * 4, device="cuda", requires_grad=grad)
    graph, results = capture(fn, inputs, grad)
    for seed, offsets in enumerate(CU_SEQLENS):
        values = arguments(
            "packed", lengths=[128] * 4, device="cuda", requires_grad=grad, seed=seed
        )
        values["cu_seqlens"] = torch.tensor(offsets, device="cuda")
        expected = step(fn, values, grad)
        refresh(inputs, values)
        got = replay(graph, results)
        assert_all_equal(got, expected)
        with torch.no_grad():
            o, state = kda_oracle(**values)
        assert relative_error(got[0], o) < 1e-2
        assert relative_error(got[1], state) < 1e-2


@pytest.mark.parametrize("op", ["chunk_kda_fwd", "fused_recurrent_kda_fwd"])
def test_ops_with_residuals(op, arguments):
    """The forward ops of the autograd formulas, called by name."""
    inputs = arguments("main", device="cuda")
    op = getattr(torch.ops.flaop, op).default
    values = [inputs[a.name] for a in op._schema.arguments if a.name in inputs]

    def call(**_):
        return [x for x in op(*values) if x.numel()]

    graph, results = capture(call, {"q": inputs["q"]}, False)
    refresh(inputs, arguments("main", device="cuda", seed=3))
    assert_all_equal(replay(graph, results), call())


def test_kept_intermediate_results(arguments):
    inputs = arguments("main", device="cuda", requires_grad=True) | {"disable_recompute": True}
    graph, results = capture(flaop.chunk_kda, inputs, True)
    values = arguments("main", device="cuda", requires_grad=True, seed=1)
    expected = step(flaop.chunk_kda, values | {"disable_recompute": True}, True)
    refresh(inputs, values | {"disable_recompute": True})
    assert_all_equal(replay(graph, results), expected)


@pytest.mark.parametrize("name, grad", [("chunk_kda", True), ("fused_recurrent_kda", False)])
def test_an_unwarmed_call_says_so_and_the_process_can_capture_again(name, grad, tmp_path):
    assert_unwarmed_capture_is_refused(name, "kda", tmp_path, grad)


def noncontiguous(x):
    return x.transpose(1, 2).contiguous().transpose(1, 2)


@pytest.mark.parametrize("name", ["chunk", "fused_recurrent"])
@pytest.mark.parametrize("family", ["main", "packed"])
def test_no_length_or_stride_compiles_anew(name, family, arguments):
    fn = FUNCTIONS[name]
    flaop.warmup(fn, **arguments(family, device="cuda", requires_grad=True))
    before = compiled_variants()
    if family == "main":
        shapes = [{"T": T} for T in (1, 2, 64, 65, 77, 128, 1000)] + [{"B": 3, "T": 100}]
    else:
        shapes = [{"lengths": x} for x in ([5], [64, 64], [0, 0, 1], [3] * 40, [700, 1, 16])]
    for shape in shapes:
        inputs = arguments(family, **shape, device="cuda", requires_grad=True)
        flaop.warmup(fn, **inputs)
        inputs["q"], inputs["v"] = noncontiguous(inputs["q"]), noncontiguous(inputs["v"])
        flaop.warmup(fn, **inputs)
    assert compiled_variants() == before


@pytest.mark.parametrize("final_state", [False, True])
def test_work_in_segments_compiles_and_changes_nothing(monkeypatch, final_state, arguments):
    """Long sequences are worked on in segments, so that the workspace stays bounded."""
    from flaop.launch.delta import chunk, stages

    inputs = arguments("main", B=2, T=500, device="cuda", output_final_state=final_state)
    monkeypatch.setattr(stages._scan, "variants", {})  # other tests have had all of them
    expected = step(flaop.chunk_kda, inputs, False)
    before = compiled_variants()
    monkeypatch.setattr(chunk, "WORKSPACE", 3 * 2 * 64 * 128 * 2 * 4)  # four rows
    assert_all_equal(step(flaop.chunk_kda, inputs, False), expected)
    assert compiled_variants() == before


@pytest.mark.parametrize("name", ["chunk", "fused_recurrent"])
@pytest.mark.parametrize("family", ["main", "packed"])
def test_current_stream(name, family, arguments):
    """Kernels run on the stream that is current, behind what it waits for."""
    fn = FUNCTIONS[name]
    inputs = arguments(family, device="cuda", requires_grad=True)
    expected = step(fn, inputs, True)
    values = {n: x.detach().clone() for n, x in inputs.items() if isinstance(x, torch.Tensor)}
    with torch.no_grad():
        for n in ("q", "v"):
            inputs[n].fill_(torch.nan)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        refresh(inputs, {**inputs, **values})
        got = step(fn, inputs, True)
    side.synchronize()
    assert_all_equal(got, expected)


@pytest.mark.parametrize("name", ["kda", "chunk", "fused_recurrent"])
@pytest.mark.parametrize("family", ["main", "packed"])
def test_the_host_waits_for_nothing(name, family, arguments):
    fn = FUNCTIONS[name]
    calls = []
    for grad in (False, True):
        inputs = arguments(family, device="cuda", requires_grad=grad)
        step(fn, inputs, grad)
        calls.append((inputs, grad))
    torch.cuda.set_sync_debug_mode("error")
    try:
        for inputs, grad in calls:
            step(fn, inputs, grad)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_memory_of_a_call_is_returned(arguments):
    """Nothing outlives a call but its outputs."""
    inputs = arguments("main", B=2, T=500, device="cuda", requires_grad=True)
    step(flaop.chunk_kda, inputs, True)
    before = settled_memory()
    for _ in range(3):
        step(flaop.chunk_kda, inputs, True)
    assert settled_memory() == before
