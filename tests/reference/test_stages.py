"""The stage ops on the CPU against float64, and as the parts that make up a family."""

import pytest
import torch

from flaop.reference import stages
from flaop.testing import (
    chunk_fwd_h_oracle,
    chunk_fwd_o_oracle,
    chunk_local_cumsum_oracle,
    pairwise,
    relative_error,
    simple_gla_inputs,
    simple_gla_oracle,
)

LENGTHS = (None, [0, 1, 40, 0, 89], [130, 64])
CASES = pairwise(
    lengths=LENGTHS,
    chunk_size=(64, 16, 32),
    chunks_of_a_split=(0, 1, 2),
    state=("k_first", None, "v_first"),
    heads=((1, 2), (2, 2)),
    gates=(("g",), ("g_gamma",), ("g", "g_gamma"), ("gk",), ("gv",), ("g", "gk", "gv"), ()),
    dtype=(torch.float64, torch.float32),
)


def inputs_of(case):
    """k, v and the state, with sums of gates within chunks."""
    H, HV = case["heads"]
    kwargs = simple_gla_inputs(
        **{"B": 2, "T": 130, "H": H, "HV": HV, "K": 20, "V": 12, "gate": "both"},
        lengths=case["lengths"],
        dtype=case["dtype"],
        initial_state=case["state"] is not None,
        state_v_first=case["state"] == "v_first",
    )
    sums = {"g": kwargs["g"], "g_gamma": kwargs["g_gamma"]}
    shape = kwargs["v"].shape[:3]
    sums["gk"], sums["gv"] = (-torch.rand(*shape, D, dtype=case["dtype"]) for D in (20, 12))
    for name in ("g", "gk", "gv"):
        sums[name] = chunk_local_cumsum_oracle(
            sums[name], case["chunk_size"], cu_seqlens=kwargs["cu_seqlens"]
        ).to(case["dtype"])
    return kwargs, {name: sums[name] for name in case["gates"]}


def tolerance(case):
    return 1e-12 if case["dtype"] == torch.float64 else 2e-6


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_states(case):
    kwargs, sums = inputs_of(case)
    options = {
        **{name: kwargs[name] for name in ("initial_state", "cu_seqlens", "state_v_first")},
        **{"chunk_size": case["chunk_size"], "output_final_state": True},
        "split_size": case["chunks_of_a_split"] * case["chunk_size"],
    }
    results = stages.fwd_h(kwargs["k"], kwargs["v"], **sums, **options)
    expected = chunk_fwd_h_oracle(kwargs["k"], kwargs["v"], **sums, **options)
    for got, want in zip(results, expected, strict=True):
        assert got.dtype == case["dtype"] and got.is_contiguous()
        assert relative_error(got, want) < tolerance(case)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_outputs(case):
    kwargs, sums = inputs_of(case)
    gates = {name: sums.get(name) for name in ("g", "g_gamma")}
    options = {name: kwargs[name] for name in ("cu_seqlens", "state_v_first")}
    options["chunk_size"] = case["chunk_size"]
    h, _ = chunk_fwd_h_oracle(
        kwargs["k"], kwargs["v"], **gates, **options, initial_state=kwargs["initial_state"]
    )
    args = kwargs["q"], kwargs["k"], kwargs["v"], h.to(case["dtype"])
    got = stages.fwd_o(*args, **gates, **options)
    assert got.dtype == case["dtype"] and got.is_contiguous()
    assert relative_error(got, chunk_fwd_o_oracle(*args, **gates, **options)) < tolerance(case)
    # The gates within chunks make up the family's.
    if gates["g"] is not None:
        gates["g"] = kwargs["g"]
    o, _ = simple_gla_oracle(**{**kwargs, **gates})
    assert relative_error(got, o) < tolerance(case)


@pytest.mark.parametrize("chunk_size", [16, 32, 64])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("D", [None, 5])
def test_sums(chunk_size, reverse, lengths, D):
    B, T = (2, 130) if lengths is None else (1, sum(lengths))
    g = torch.randn(B, T, 3, D) if D else torch.randn(B, T, 3)
    cu_seqlens = None if lengths is None else torch.tensor([0, *lengths]).cumsum(0)
    got = stages.local_cumsum(g, chunk_size, reverse, 0.5, cu_seqlens)
    want = chunk_local_cumsum_oracle(g, chunk_size, reverse, 0.5, cu_seqlens)
    assert got.dtype == torch.float32 and got.shape == g.shape
    assert relative_error(got, want) < 1e-6
    half = stages.local_cumsum(g.bfloat16(), chunk_size, reverse, 0.5, cu_seqlens)
    assert half.dtype == torch.float32
    assert relative_error(half, want) < 1e-2


def test_backward_of_sums_is_the_reverse():
    g = torch.randn(1, 130, 2, requires_grad=True)
    cu_seqlens = torch.tensor([3, 100, 130])
    d = torch.randn(1, 130, 2)
    sums = chunk_local_cumsum_oracle(g, 64, False, 0.5, cu_seqlens)
    (want,) = torch.autograd.grad(sums, g, d.double())
    assert relative_error(stages.local_cumsum(d, 64, True, 0.5, cu_seqlens), want) < 1e-6


def test_dtype_of_states():
    k, v = torch.randn(1, 70, 1, 16).bfloat16(), torch.randn(1, 70, 1, 16).bfloat16()
    assert stages.fwd_h(k, v)[0].dtype == torch.bfloat16
    assert stages.fwd_h(k, v, states_in_fp32=True)[0].dtype == torch.float32
    assert stages.fwd_h(k.half(), v.half())[0].dtype == torch.float32
    h, final_state = stages.fwd_h(k, v)
    assert final_state.shape == (0,) and h.shape == (2, 1, 16, 16)


def test_unused_rows_are_zero():
    k, v = torch.randn(1, 100, 1, 4), torch.randn(1, 100, 1, 4)
    h, final_state = stages.fwd_h(
        k, v, cu_seqlens=torch.tensor([0, 30, 30, 64]), chunk_size=16, output_final_state=True
    )
    # ceil(100 / 16) + 2 rows, of which 2 + 0 + 3 are used
    assert h.shape[0] == 9 and h[5:].count_nonzero() == 0
    assert final_state[1].count_nonzero() == 0


def test_infinite_sums_empty_the_state():
    k, v, g = torch.randn(1, 100, 1, 4), torch.randn(1, 100, 1, 4), -torch.rand(1, 100, 1)
    g[:, 63] = -torch.inf
    sums = stages.local_cumsum(g, 64)
    h, _ = stages.fwd_h(k, v, sums)
    assert h[0].count_nonzero() == 0
    assert relative_error(h[1, 0], k[0, 63, 0].unsqueeze(1) * v[0, 63, 0]) < 1e-6
    assert stages.fwd_o(k, k, v, h, sums).isfinite().all()


@pytest.mark.parametrize("cu_seqlens", [None, torch.tensor([0]), torch.tensor([0, 0, 0])])
def test_nothing_to_do(cu_seqlens):
    x = torch.zeros(1, 0, 1, 4)
    h, final_state = stages.fwd_h(x, x, cu_seqlens=cu_seqlens, output_final_state=True)
    assert final_state.shape[0] == (1 if cu_seqlens is None else len(cu_seqlens) - 1)
    assert stages.fwd_o(x, x, x, h, cu_seqlens=cu_seqlens).shape == x.shape
    assert stages.local_cumsum(x, 64, cu_seqlens=cu_seqlens).shape == x.shape
