"""CUDA graphs, streams and compilations of the gated delta rule: what a captured loop relies on."""

import pytest
import torch

import flaop
from flaop.testing import gdn_oracle, relative_error
from flaop.testing.graphs import (
    assert_all_equal,
    assert_unwarmed_capture_is_refused,
    capture,
    compiled_variants,
    refresh,
    replay,
    step,
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("compiled_families")]

PATHS = ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule")
CU_SEQLENS = (
    [0, 128, 256, 384, 512], [0, 1, 2, 511, 512], [0, 0, 0, 300, 512], [0, 512, 512, 512, 512],
)  # fmt: skip


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("T", [20, 130])
@pytest.mark.parametrize("name", ["gated_delta_rule", *PATHS])
def test_replay_with_new_values(name, T, grad, arguments):
    fn = getattr(flaop, name)
    inputs = arguments("delta main", T=T, device="cuda", requires_grad=grad)
    graph, results = capture(fn, inputs, grad)
    for seed in (0, 1, 2):
        values = arguments("delta main", T=T, device="cuda", requires_grad=grad, seed=seed)
        expected = step(fn, values, grad)
        refresh(inputs, values)
        assert_all_equal(replay(graph, results), expected)


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("name", PATHS)
def test_replay_with_new_boundaries(name, grad, arguments):
    fn = getattr(flaop, name)
    options = {"lengths": [128] * 4, "device": "cuda", "requires_grad": grad}
    inputs = arguments("delta packed", **options)
    graph, results = capture(fn, inputs, grad)
    for seed, offsets in enumerate(CU_SEQLENS):
        values = arguments("delta packed", **options, seed=seed)
        values["cu_seqlens"] = torch.tensor(offsets, device="cuda")
        expected = step(fn, values, grad)
        refresh(inputs, values)
        got = replay(graph, results)
        assert_all_equal(got, expected)
        with torch.no_grad():
            o, state = gdn_oracle(**values)
        assert relative_error(got[0], o) < 1e-2
        assert relative_error(got[1], state) < 1e-2


@pytest.mark.parametrize("op", [f"{name}_fwd" for name in PATHS])
def test_ops_with_residuals(op, arguments):
    """The forward ops of the autograd formulas, called by name."""
    inputs = arguments("delta main", device="cuda")
    op = getattr(torch.ops.flaop, op).default
    values = [inputs[a.name] for a in op._schema.arguments if a.name in inputs]

    def call(**_):
        return [x for x in op(*values) if x.numel()]

    graph, results = capture(call, {"q": inputs["q"]}, False)
    refresh(inputs, arguments("delta main", device="cuda", seed=3))
    assert_all_equal(replay(graph, results), call())


def test_kept_intermediate_results(arguments):
    fn, kept = flaop.chunk_gated_delta_rule, {"disable_recompute": True}
    inputs = arguments("delta main", device="cuda", requires_grad=True) | kept
    graph, results = capture(fn, inputs, True)
    values = arguments("delta main", device="cuda", requires_grad=True, seed=1) | kept
    expected = step(fn, values, True)
    refresh(inputs, values)
    assert_all_equal(replay(graph, results), expected)


def test_delta_rule(arguments):
    def inputs_of(seed):
        inputs = arguments("delta without gate", device="cuda", requires_grad=True, seed=seed)
        names = ("q", "k", "v", "beta", "initial_state", "cu_seqlens", "use_qk_l2norm_in_kernel")
        return {n: inputs[n] for n in names}

    inputs, values = inputs_of(0), inputs_of(1)
    graph, results = capture(flaop.delta_rule, inputs, True)
    expected = step(flaop.delta_rule, values, True)
    refresh(inputs, values)
    assert_all_equal(replay(graph, results), expected)


def test_stages(arguments):
    def stages(k, v, g, beta, **_):
        sums = flaop.chunk_local_cumsum(g, 64)
        A = flaop.solve_tril(v.repeat(1, 1, 1, 3)[..., :64] / 64)
        w, u = flaop.recompute_w_u(k, v, beta, A, g=sums)
        return A, w, u, *flaop.chunk_delta_fwd_h(k, w, u, g=sums, output_final_state=True)

    inputs = arguments("delta given gate", device="cuda")
    graph, results = capture(stages, inputs, False)
    values = arguments("delta given gate", device="cuda", seed=1)
    expected = step(stages, values, False)
    refresh(inputs, values)
    assert_all_equal(replay(graph, results), expected)


@pytest.mark.parametrize("name", PATHS)
def test_an_unwarmed_call_says_so_and_the_process_can_capture_again(name, tmp_path):
    assert_unwarmed_capture_is_refused(name, "gdn", tmp_path)


def noncontiguous(x):
    return x.transpose(1, 2).contiguous().transpose(1, 2)


@pytest.mark.parametrize("name", PATHS)
@pytest.mark.parametrize("family", ["delta main", "delta packed"])
def test_no_length_or_stride_compiles_anew(name, family, arguments):
    fn = getattr(flaop, name)
    flaop.warmup(fn, **arguments(family, device="cuda", requires_grad=True))
    before = compiled_variants()
    if family == "delta main":
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
@pytest.mark.parametrize("family", ["delta main", "delta packed"])
def test_current_stream(name, family, arguments):
    """Kernels run on the stream that is current, behind what it waits for."""
    fn = getattr(flaop, name)
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


@pytest.mark.parametrize("name", ["gated_delta_rule", *PATHS])
@pytest.mark.parametrize("family", ["delta main", "delta packed"])
def test_the_host_waits_for_nothing(name, family, arguments):
    fn = getattr(flaop, name)
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
