"""The public stages of the delta families through the interpreter, against float64 oracles."""

import pytest
import torch

from flaop.launch.delta import public
from flaop.testing import relative_error, worst_error
from flaop.testing.delta_stage_oracles import (
    chunk_delta_fwd_h_oracle,
    recompute_w_u_oracle,
    solve_tril_oracle,
)
from flaop.testing.stage_oracles import chunk_local_cumsum_oracle

FP16 = torch.float16
LIMITS = {torch.float32: 1e-5, FP16: 3e-3}
LENGTHS = [0, 1, 66, 0, 33]


def offsets(lengths):
    if lengths is None:
        return None
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).to(torch.int32)


def matrices(BT, lengths=None, B=2, T=67, H=2, size=1.0):
    """Random rows, also where the matrix that is inverted has none, and boundaries."""
    generator = torch.Generator().manual_seed(0)
    if lengths is not None:
        B, T = 1, sum(lengths)
    return size * (2 * torch.rand(B, T, H, BT, generator=generator) - 1), offsets(lengths)


@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["batched", "packed"])
@pytest.mark.parametrize("BT", [16, 32, 64])
def test_inverse(BT, lengths):
    L, cu_seqlens = matrices(BT, lengths)
    X = public.solve_tril(L, cu_seqlens)
    ref = solve_tril_oracle(L, cu_seqlens)
    assert ref.abs().max() > {16: 1, 32: 10, 64: 100}[BT]
    assert X.dtype is torch.float32 and relative_error(X, ref) < 1e-7


def test_inverse_of_large_entries():
    L, _ = matrices(16, size=10.0)
    assert relative_error(public.solve_tril(L), solve_tril_oracle(L)) < 1e-7


def test_inverse_in_half_precision():
    L, cu_seqlens = matrices(32, LENGTHS, size=0.2)
    L = L.half()
    X = public.solve_tril(L, cu_seqlens)
    assert X.dtype is FP16 and relative_error(X, solve_tril_oracle(L, cu_seqlens)) < 1e-3


def test_inverse_outside_of_sequences_is_zero():
    L, _ = matrices(16, [80])
    cu_seqlens = torch.tensor([3, 30, 70], dtype=torch.int64)
    X = public.solve_tril(L, cu_seqlens)
    dL = public.solve_tril_backward(torch.ones_like(X), X, cu_seqlens)
    for x in (X, dL):
        assert not x[:, :3].any() and not x[:, 70:].any()


@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["batched", "packed"])
@pytest.mark.parametrize("BT", [16, 64])
def test_gradient_of_the_inverse(BT, lengths):
    L, cu_seqlens = matrices(BT, lengths, size=0.3)
    dX = torch.randn(L.shape, generator=torch.Generator().manual_seed(1))
    dL = public.solve_tril_backward(dX, public.solve_tril(L, cu_seqlens), cu_seqlens)
    leaf = L.double().requires_grad_()
    solve_tril_oracle(leaf, cu_seqlens).backward(dX.double())
    assert relative_error(dL, leaf.grad) < 1e-6


def inputs(K=16, V=24, B=2, T=67, H=2, HV=2, lengths=None, chunk_size=64, gates=(), dtype=None):
    """k, w, v, beta, A, the gates asked for as in-chunk sums, boundaries."""
    generator = torch.Generator().manual_seed(0)
    if lengths is not None:
        B, T = 1, sum(lengths)
    cu_seqlens = offsets(lengths)

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(dtype or torch.float32)

    k, w, v = normal(B, T, H, K), 0.2 * normal(B, T, HV, K), normal(B, T, HV, V)
    beta = torch.rand(B, T, HV, generator=generator)
    A = normal(B, T, HV, chunk_size)
    found = {}
    for name, shape in (("g", ()), ("gk", (K,))):
        if name in gates:
            raw = -torch.rand(B, T, HV, *shape, generator=generator)
            found[name] = chunk_local_cumsum_oracle(raw, chunk_size, cu_seqlens=cu_seqlens).float()
    return k, w, v, beta, A, found, cu_seqlens


CASES = {
    "plain": dict(),
    "scalar": dict(gates=("g",), chunk_size=16),
    "keys": dict(gates=("gk",), K=37, HV=4, chunk_size=32),
    "both": dict(gates=("g", "gk"), K=72, V=8, chunk_size=16),
    "wide": dict(gates=("g",), K=256, V=72, B=1),
    "packed": dict(gates=("g", "gk"), lengths=LENGTHS, chunk_size=16),
    "packed_fp16": dict(gates=("g",), lengths=LENGTHS, dtype=FP16),
}


@pytest.mark.parametrize("case", CASES)
def test_w_u(case):
    k, _, v, beta, A, gates, cu_seqlens = inputs(**CASES[case])
    got = public.recompute_w_u(k, v, beta, A, **gates, cu_seqlens=cu_seqlens)
    ref = recompute_w_u_oracle(k, v, beta, A, **gates, cu_seqlens=cu_seqlens)
    for x, y in zip(got, ref, strict=True):
        assert x.dtype is k.dtype and worst_error(x, y, (0, 1, 2), 1e-2) < 3 * LIMITS[k.dtype]


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_states(case, v_first):
    options = CASES[case]
    k, w, u, _, _, gates, cu_seqlens = inputs(**options)
    k = k / k.norm(dim=-1, keepdim=True)
    N = len(options["lengths"]) if "lengths" in options else k.shape[0]
    state = (u.shape[3], k.shape[3]) if v_first else (k.shape[3], u.shape[3])
    h0 = torch.randn(N, u.shape[2], *state, generator=torch.Generator().manual_seed(1))
    arguments = dict(
        **gates, initial_state=h0, output_final_state=True, cu_seqlens=cu_seqlens,
        chunk_size=options.get("chunk_size", 64), state_v_first=v_first,
    )  # fmt: skip
    h, v_new, final_state = public.chunk_delta_fwd_h(k, w, u, **arguments)
    ref_h, ref_v, ref_final = chunk_delta_fwd_h_oracle(k, w, u, **arguments)
    assert h.shape == ref_h.shape and h.dtype is final_state.dtype is torch.float32
    assert v_new.dtype is u.dtype
    assert relative_error(h, ref_h) < LIMITS[k.dtype]
    assert relative_error(v_new, ref_v) < LIMITS[k.dtype]
    assert worst_error(final_state, ref_final, (0, 1)) < 3 * LIMITS[k.dtype]


def test_final_state_only_when_asked_for():
    k, w, u, *_ = inputs()
    h, _, final_state = public.chunk_delta_fwd_h(k, 0.1 * w, u)
    assert final_state.numel() == 0
    assert relative_error(h, chunk_delta_fwd_h_oracle(k, 0.1 * w, u)[0]) < 1e-5
