"""The public stages of the decay families by the interpreter, against their float64 oracles."""

import pytest
import torch

from flaop.launch.decay import stages
from flaop.testing import relative_error, worst_error
from flaop.testing.stage_oracles import (
    chunk_fwd_h_oracle,
    chunk_fwd_o_oracle,
    chunk_local_cumsum_oracle,
)

FP16 = torch.float16
LIMITS = {torch.float32: 1e-5, FP16: 3e-3}
LENGTHS = [0, 1, 66, 0, 33]


def offsets(lengths):
    if lengths is None:
        return None
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).to(torch.int32)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("chunk_size", [16, 32, 64])
@pytest.mark.parametrize("shape", [(2, 67, 3), (1, 130, 2, 37)])
def test_cumsum(shape, chunk_size, reverse):
    g = -torch.rand(shape)
    got = stages.local_cumsum(g, chunk_size, reverse, 0.5)
    ref = chunk_local_cumsum_oracle(g, chunk_size, reverse, 0.5)
    assert got.dtype is torch.float32 and worst_error(got, ref, (0, 1, 2)) < 1e-6


def test_cumsum_of_packed_sequences():
    """Rows of no sequence are zero."""
    g = -torch.rand(1, 120, 3).half()
    cu_seqlens = offsets(LENGTHS) + 7
    got = stages.local_cumsum(g, 32, True, 1.0, cu_seqlens)
    assert relative_error(got, chunk_local_cumsum_oracle(g, 32, True, 1.0, cu_seqlens)) < 1e-6
    assert not got[:, :7].any() and not got[:, 107:].any()


def inputs(K=16, V=24, B=2, T=67, H=2, HV=2, lengths=None, chunk_size=64, gates=(), dtype=None):
    """q, k, v, the gates asked for as in-chunk sums, boundaries."""
    generator = torch.Generator().manual_seed(0)
    if lengths is not None:
        B, T = 1, sum(lengths)
    cu_seqlens = offsets(lengths)

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(dtype or torch.float32)

    q, k, v = normal(B, T, H, K), normal(B, T, H, K), normal(B, T, HV, V)
    found = {}
    for name, shape in (("g", ()), ("gk", (K,)), ("gv", (V,))):
        if name in gates:
            raw = -torch.rand(B, T, HV, *shape, generator=generator)
            found[name] = chunk_local_cumsum_oracle(raw, chunk_size, cu_seqlens=cu_seqlens).float()
    if "g_gamma" in gates:
        found["g_gamma"] = -torch.rand(HV, generator=generator)
    return q, k, v, found, cu_seqlens


CASES = {
    "plain": dict(),
    "scalar": dict(gates=("g",), chunk_size=16),
    "constant": dict(gates=("g_gamma",), HV=4, chunk_size=32),
    "keys": dict(gates=("gk",), K=37),
    "values": dict(gates=("gv",), V=41, chunk_size=32),
    "all": dict(gates=("g", "g_gamma", "gk", "gv"), K=72, V=8, chunk_size=16),
    "wide": dict(gates=("g",), K=300, V=72, B=1),
    "packed": dict(gates=("g", "gk"), lengths=LENGTHS, chunk_size=16),
    "packed_fp16": dict(gates=("g", "gv"), lengths=LENGTHS, dtype=FP16),
}


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_states(case, v_first):
    options = CASES[case]
    chunk_size = options.get("chunk_size", 64)
    _, k, v, gates, cu_seqlens = inputs(**options)
    N = len(options["lengths"]) if "lengths" in options else k.shape[0]
    state = (v.shape[3], k.shape[3]) if v_first else (k.shape[3], v.shape[3])
    h0 = torch.randn(N, v.shape[2], *state, generator=torch.Generator().manual_seed(1))
    for split_size in (0, 64):
        arguments = dict(
            **gates, initial_state=h0, output_final_state=True, cu_seqlens=cu_seqlens,
            chunk_size=chunk_size, split_size=split_size, state_v_first=v_first,
        )  # fmt: skip
        h, final_state = stages.fwd_h(k, v, **arguments)
        ref_h, ref_final = chunk_fwd_h_oracle(k, v, **arguments)
        assert h.shape == ref_h.shape and h.dtype is final_state.dtype is torch.float32
        assert relative_error(h, ref_h) < LIMITS[k.dtype]
        assert worst_error(final_state, ref_final, (0, 1)) < LIMITS[k.dtype]


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("case", [c for c in CASES if c not in ("keys", "values", "all")])
def test_outputs(case, v_first):
    options = CASES[case]
    chunk_size = options.get("chunk_size", 64)
    q, k, v, gates, cu_seqlens = inputs(**options)
    gates = {name: x for name, x in gates.items() if name in ("g", "g_gamma")}
    arguments = dict(
        **gates, cu_seqlens=cu_seqlens, chunk_size=chunk_size, state_v_first=v_first
    )
    h = chunk_fwd_h_oracle(k, v, **arguments)[0].float().contiguous()
    o = stages.fwd_o(q, k, v, h, **arguments)
    ref = chunk_fwd_o_oracle(q, k, v, h, **arguments)
    assert o.dtype is v.dtype and worst_error(o, ref, (0, 1, 2), 1e-2) < 3 * LIMITS[q.dtype]


def test_final_state_only_when_asked_for():
    _, k, v, _, _ = inputs()
    h, final_state = stages.fwd_h(k, v)
    assert final_state.numel() == 0 and relative_error(h, chunk_fwd_h_oracle(k, v)[0]) < 1e-5
