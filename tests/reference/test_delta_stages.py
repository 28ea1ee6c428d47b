"""The stage ops of the delta families on the CPU against float64, and as parts of a family."""

import pytest
import torch

from flaop.reference import delta_stages, stages
from flaop.testing import (
    chunk_delta_fwd_h_oracle,
    chunk_local_cumsum_oracle,
    gdn_inputs,
    gdn_oracle,
    pairwise,
    recompute_w_u_oracle,
    relative_error,
    solve_tril_oracle,
)

LENGTHS = (None, [0, 1, 40, 0, 89], [130, 64])
CASES = pairwise(
    lengths=LENGTHS,
    chunk_size=(64, 16, 32),
    state=("k_first", None, "v_first"),
    heads=((1, 2), (2, 2)),
    gates=(("g",), ("gk",), ("g", "gk"), ()),
    dtype=(torch.float64, torch.float32),
)


def inputs_of(case):
    """Inputs of the family, with sums of gates within chunks."""
    H, HV = case["heads"]
    kwargs = gdn_inputs(
        **{"B": 2, "T": 130, "H": H, "HV": HV, "K": 20, "V": 12},
        lengths=case["lengths"],
        dtype=case["dtype"],
        initial_state=case["state"] is not None,
        state_v_first=case["state"] == "v_first",
    )
    gates = {"g": kwargs["g"], "gk": -torch.rand(*kwargs["v"].shape[:3], 20, dtype=case["dtype"])}
    sums = {
        name: chunk_local_cumsum_oracle(
            gates[name], case["chunk_size"], cu_seqlens=kwargs["cu_seqlens"]
        ).to(case["dtype"])
        for name in case["gates"]
    }
    return kwargs, sums


def tolerance(case):
    return 1e-12 if case["dtype"] == torch.float64 else 2e-6


def matrix(kwargs, g, chunk_size):
    """The rows of L within chunks, from sums of gates per head."""
    k, beta = kwargs["k"], kwargs["beta"]
    B, T, HV = beta.shape
    k = k.repeat_interleave(HV // k.shape[2], dim=2)
    L = torch.zeros(B, T, HV, chunk_size, dtype=k.dtype)
    for start in range(0, T, chunk_size):
        chunk = slice(start, min(start + chunk_size, T))
        products = torch.einsum("bihk,bjhk->bihj", k[:, chunk], k[:, chunk])
        gate = (g[:, chunk].unsqueeze(-1) - g[:, chunk].transpose(1, 2).unsqueeze(1)).exp()
        lower = (beta[:, chunk].unsqueeze(-1) * products * gate).transpose(1, 2).tril(-1)
        L[:, chunk, :, : chunk.stop - chunk.start] = lower.transpose(1, 2)
    return L


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_w_and_u(case):
    kwargs, sums = inputs_of(case)
    A = torch.randn(*kwargs["beta"].shape, case["chunk_size"], dtype=case["dtype"])
    positions = torch.arange(A.shape[1])
    if case["lengths"] is not None:
        starts = kwargs["cu_seqlens"][:-1]
        positions = positions - starts[torch.searchsorted(starts, positions, right=True) - 1]
    row = (positions % case["chunk_size"]).view(-1, 1, 1)
    A = A.masked_fill(torch.arange(case["chunk_size"]) > row, 0)
    args = kwargs["k"], kwargs["v"], kwargs["beta"], A
    options = {**sums, "cu_seqlens": kwargs["cu_seqlens"]}
    results = delta_stages.recompute_w_u(*args, **options)
    expected = recompute_w_u_oracle(*args, **options)
    for got, want in zip(results, expected, strict=True):
        assert got.dtype == case["dtype"] and got.is_contiguous()
        assert relative_error(got, want) < tolerance(case)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_states(case):
    kwargs, sums = inputs_of(case)
    w = torch.randn(*kwargs["beta"].shape, 20, dtype=case["dtype"]) / 20
    args = kwargs["k"], w, kwargs["v"]
    options = {
        **{name: kwargs[name] for name in ("initial_state", "cu_seqlens", "state_v_first")},
        **{"chunk_size": case["chunk_size"], "output_final_state": True, **sums},
    }
    results = delta_stages.delta_fwd_h(*args, **options)
    expected = chunk_delta_fwd_h_oracle(*args, **options)
    for got, want in zip(results, expected, strict=True):
        assert got.dtype == case["dtype"] and got.is_contiguous()
        assert relative_error(got, want) < tolerance(case)


@pytest.mark.parametrize("chunk_size", [16, 32, 64])
def test_stages_make_up_the_family(chunk_size):
    kwargs = gdn_inputs(B=2, T=100, H=1, HV=2, K=20, V=12, dtype=torch.float64, initial_state=True)
    q, k, v, beta = (kwargs[name] for name in ("q", "k", "v", "beta"))
    g = chunk_local_cumsum_oracle(kwargs["g"], chunk_size)
    A = delta_stages.solve_tril(matrix(kwargs, g, chunk_size))
    w, u = delta_stages.recompute_w_u(k, v, beta, A, g)
    h, v_new, final_state = delta_stages.delta_fwd_h(
        k, w, u, g, None, kwargs["initial_state"], True, None, chunk_size
    )
    o = stages.fwd_o(q, k, v_new, h, g, chunk_size=chunk_size)
    want_o, want_state = gdn_oracle(**kwargs)
    assert relative_error(o, want_o) < 1e-12
    assert relative_error(final_state, want_state) < 1e-12


@pytest.mark.parametrize("chunk_size", [16, 32, 64])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_inverse_and_its_backward(chunk_size, lengths, dtype):
    B, T = (2, 130) if lengths is None else (1, sum(lengths))
    L = torch.randn(B, T, 2, chunk_size, dtype=dtype) / 4
    cu_seqlens = None if lengths is None else torch.tensor([0, *lengths]).cumsum(0)
    L.requires_grad_()
    want = solve_tril_oracle(L, cu_seqlens)
    d = torch.randn(want.shape, dtype=dtype)
    (want_gradient,) = torch.autograd.grad(want, L, d.double())
    X = delta_stages.solve_tril(L, cu_seqlens)
    limit = 1e-12 if dtype == torch.float64 else 1e-5
    assert X.dtype == dtype and relative_error(X, want) < limit
    gradient = delta_stages.solve_tril_backward(d, X, cu_seqlens)
    assert gradient.dtype == dtype and relative_error(gradient, want_gradient) < limit


@pytest.mark.parametrize("norm", [1.0, 1.3])
@pytest.mark.parametrize("chunk_size", [16, 32, 64])
def test_inverse_of_keys_is_as_exact_as_a_triangular_solve(chunk_size, norm):
    """Unit keys and longer ones, with beta |k|^2 up to 1.9."""
    k = norm * torch.nn.functional.normalize(torch.randn(1, 1000, 1, 64), dim=-1)
    inputs = {"k": k, "beta": torch.rand(1, 1000, 1) * 1.9 / norm**2}
    L = matrix(inputs, torch.zeros(1, 1000, 1), chunk_size)
    check_inverse(L)


@pytest.mark.parametrize("size, chunk_size", [(1, 16), (1, 32), (1, 64), (10, 16)])
def test_inverse_of_random_entries(size, chunk_size):
    check_inverse(size * (2 * torch.rand(1, 1000, 1, chunk_size) - 1))


def check_inverse(L):
    """At most twice the error of torch's float32 triangular solve."""
    want = solve_tril_oracle(L)
    blocks = L.squeeze(0).squeeze(1)[: L.shape[1] // L.shape[3] * L.shape[3]]
    blocks = blocks.view(-1, L.shape[3], L.shape[3]).tril(-1)
    eye = torch.eye(L.shape[3])
    solved = torch.linalg.solve_triangular(eye + blocks, eye.expand_as(blocks), upper=False)
    allowed = 2 * relative_error(solved.flatten(0, 1), want[0, : blocks.shape[0] * L.shape[3], 0])
    assert relative_error(delta_stages.solve_tril(L), want) <= allowed


@pytest.mark.parametrize("cu_seqlens", [None, torch.tensor([0]), torch.tensor([0, 0, 0])])
def test_nothing_to_do(cu_seqlens):
    x, A = torch.zeros(1, 0, 1, 4), torch.zeros(1, 0, 1, 16)
    h, v_new, final_state = delta_stages.delta_fwd_h(
        x, x, x, cu_seqlens=cu_seqlens, output_final_state=True
    )
    assert final_state.shape[0] == (1 if cu_seqlens is None else len(cu_seqlens) - 1)
    assert v_new.shape == x.shape and h.shape[1:] == (1, 4, 4)
    assert delta_stages.solve_tril(A, cu_seqlens).shape == A.shape
    w, u = delta_stages.recompute_w_u(x, x, x[..., 0], A, cu_seqlens=cu_seqlens)
    assert w.shape == u.shape == x.shape
