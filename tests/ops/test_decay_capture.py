"""CUDA graphs, streams and compilations of the decay families: what a captured loop relies on."""

import pytest
import torch

import flaop
from flaop.testing import gla_oracle, relative_error, simple_gla_oracle
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

# Functions and the family of options they are called with.
MAIN = {
    "simple_gla": "simple main",
    "chunk_simple_gla": "simple main",
    "fused_recurrent_simple_gla": "simple main",
    "gla": "channel main",
    "chunk_gla": "channel main",
    "fused_recurrent_gla": "channel main",
}
PATHS = [name for name in MAIN if name not in ("simple_gla", "gla")]
CU_SEQLENS = (
    [0, 128, 256, 384, 512], [0, 1, 2, 511, 512], [0, 0, 0, 300, 512], [0, 512, 512, 512, 512],
)  # fmt: skip


def packed(name):
    return MAIN[name].replace("main", "packed")


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("T", [20, 130])
@pytest.mark.parametrize("name", MAIN)
def test_replay_with_new_values(name, T, grad, arguments):
    fn = getattr(flaop, name)
    inputs = arguments(MAIN[name], T=T, device="cuda", requires_grad=grad)
    graph, results = capture(fn, inputs, grad)
    for seed in (0, 1, 2):
        values = arguments(MAIN[name], T=T, device="cuda", requires_grad=grad, seed=seed)
        expected = step(fn, values, grad)
        refresh(inputs, values)
        assert_all_equal(replay(graph, results), expected)


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("name", PATHS)
def test_replay_with_new_boundaries(name, grad, arguments):
    fn = getattr(flaop, name)
    oracle = gla_oracle if name.endswith("_gla") and "simple" not in name else simple_gla_oracle
    options = {"lengths": [128] * 4, "device": "cuda", "requires_grad": grad}
    inputs = arguments(packed(name), **options)
    graph, results = capture(fn, inputs, grad)
    for seed, offsets in enumerate(CU_SEQLENS):
        values = arguments(packed(name), **options, seed=seed)
        values["cu_seqlens"] = torch.tensor(offsets, device="cuda")
        expected = step(fn, values, grad)
        refresh(inputs, values)
        got = replay(graph, results)
        assert_all_equal(got, expected)
        with torch.no_grad():
            o, state = oracle(**values)
        assert relative_error(got[0], o) < 1e-2
        assert relative_error(got[1], state) < 1e-2


@pytest.mark.parametrize("name", ["chunk_simple_gla", "chunk_gla"])
@pytest.mark.parametrize("layout", ["main", "packed"])
def test_replay_with_splits(name, layout, arguments):
    """The backward that keeps states at split boundaries only."""
    shape = {"T": 500} if layout == "main" else {"lengths": [300, 0, 1, 199]}
    family = MAIN[name] if layout == "main" else packed(name)
    inputs = arguments(family, **shape, device="cuda", requires_grad=True) | {"split_size": 128}
    graph, results = capture(getattr(flaop, name), inputs, True)
    values = arguments(family, **shape, device="cuda", requires_grad=True, seed=1)
    expected = step(getattr(flaop, name), values | {"split_size": 128}, True)
    refresh(inputs, values)
    assert_all_equal(replay(graph, results), expected)


@pytest.mark.parametrize("op", [f"{name}_fwd" for name in PATHS])
def test_ops_with_residuals(op, arguments):
    """The forward ops of the autograd formulas, called by name."""
    inputs = arguments(MAIN[op.removesuffix("_fwd")], device="cuda")
    family = MAIN[op.removesuffix("_fwd")]
    op = getattr(torch.ops.flaop, op).default
    values = [inputs[a.name] for a in op._schema.arguments if a.name in inputs]

    def call(**_):
        return [x for x in op(*values) if x.numel()]

    graph, results = capture(call, {"q": inputs["q"]}, False)
    refresh(inputs, arguments(family, device="cuda", seed=3))
    assert_all_equal(replay(graph, results), call())


@pytest.mark.parametrize(
    "name, options",
    [
        ("retention", {}),
        ("lightning_attn", {"layer_idx": 1, "num_layers": 4}),
        ("linear_attn", {"normalize": True}),
    ],
)
def test_composites(name, options, arguments):
    """Their constants are made on the device: nothing is copied from the host in a capture."""

    def inputs_of(seed):
        inputs = arguments("simple constant", device="cuda", requires_grad=True, seed=seed)
        return {n: inputs[n] for n in ("q", "k", "v", "cu_seqlens")} | options

    inputs, values = inputs_of(0), inputs_of(1)
    fn = getattr(flaop, name)
    graph, results = capture(fn, inputs, True)
    expected = step(fn, values, True)
    refresh(inputs, values)
    assert_all_equal(replay(graph, results), expected)


def test_stages(arguments):
    def stages(k, v, g, q, **_):
        sums = flaop.chunk_local_cumsum(g, 64)
        h, state = flaop.chunk_fwd_h(k, v, g=sums, output_final_state=True)
        return sums, h, state, flaop.chunk_fwd_o(q, k, v, h, g=sums)

    inputs = arguments("simple main", device="cuda")
    graph, results = capture(stages, inputs, False)
    values = arguments("simple main", device="cuda", seed=1)
    expected = step(stages, values, False)
    refresh(inputs, values)
    assert_all_equal(replay(graph, results), expected)


@pytest.mark.parametrize("name", ["chunk_gla", "fused_recurrent_gla"])
def test_an_unwarmed_call_says_so_and_the_process_can_capture_again(name, tmp_path):
    assert_unwarmed_capture_is_refused(name, "gla", tmp_path)


def noncontiguous(x):
    return x.transpose(1, 2).contiguous().transpose(1, 2)


@pytest.mark.parametrize("name", PATHS)
@pytest.mark.parametrize("layout", ["main", "packed"])
def test_no_length_or_stride_compiles_anew(name, layout, arguments):
    fn = getattr(flaop, name)
    family = MAIN[name] if layout == "main" else packed(name)
    flaop.warmup(fn, **arguments(family, device="cuda", requires_grad=True))
    before = compiled_variants()
    if layout == "main":
        shapes = [{"T": T} for T in (1, 2, 64, 65, 77, 128, 1000)] + [{"B": 3, "T": 100}]
    else:
        shapes = [{"lengths": x} for x in ([5], [64, 64], [0, 0, 1], [3] * 40, [700, 1, 16])]
    for shape in shapes:
        inputs = arguments(family, **shape, device="cuda", requires_grad=True)
        flaop.warmup(fn, **inputs)
        inputs["q"], inputs["v"] = noncontiguous(inputs["q"]), noncontiguous(inputs["v"])
        flaop.warmup(fn, **inputs)
    assert compiled_variants() == before


@pytest.mark.parametrize("name", PATHS)
@pytest.mark.parametrize("layout", ["main", "packed"])
def test_current_stream(name, layout, arguments):
    """Kernels run on the stream that is current, behind what it waits for."""
    fn = getattr(flaop, name)
    family = MAIN[name] if layout == "main" else packed(name)
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


@pytest.mark.parametrize("name", MAIN)
@pytest.mark.parametrize("layout", ["main", "packed"])
def test_the_host_waits_for_nothing(name, layout, arguments):
    fn = getattr(flaop, name)
    family = MAIN[name] if layout == "main" else packed(name)
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


@pytest.mark.parametrize("name", ["chunk_simple_gla", "chunk_gla"])
def test_splits_take_less_memory(name, arguments):
    """And nothing outlives a call but its outputs."""
    fn = getattr(flaop, name)
    inputs = arguments(MAIN[name], T=8192, device="cuda", requires_grad=True)

    def peak(split_size):
        call = inputs | {"split_size": split_size}
        step(fn, call, True)
        before = settled_memory()
        torch.cuda.reset_peak_memory_stats()
        step(fn, call, True)
        assert settled_memory() == before
        return torch.cuda.max_memory_allocated() - before

    _, T, HV, V = inputs["v"].shape
    K, state_bytes = inputs["k"].shape[3], 2
    states_and_gradients = 2 * (T // 64) * HV * K * V * state_bytes
    assert peak(0) - peak(512) >= 0.7 * states_and_gradients
