"""Every configuration row of the gated delta rule, alone, in the manner of test_configs_gpu.py.

A row is met by the head sizes of a case. What compiles nothing (lengths, regimes of the gate,
groups of heads, hints) varies within the test. The sets of options, which do, and the tiles meet
pairwise in the fast run; the slow one has every row with every set.
"""

import functools
import itertools

import pytest
import torch
from flaop.triton_kernels.configs import gdn as configs

import flaop
from flaop.testing import gdn_inputs, pairwise, relative_error, worst_error
from flaop.testing.configurations import (
    BATCHED,
    PACKED,
    assert_rows_are_met,
    check_paths,
    head_sizes,
    in_turn,
    nan_memory,
    rows,
    with_heads,
)
from flaop.testing.delta_stage_oracles import (
    chunk_delta_fwd_h_oracle,
    recompute_w_u_oracle,
    solve_tril_oracle,
)
from flaop.testing.expected import DeltaExpected
from flaop.testing.launches import DTYPES
from flaop.testing.stage_oracles import chunk_local_cumsum_oracle


def narrow_scan(*problem):
    return configs.scan(*problem, narrow=True)


def narrow_scan_backward(*problem):
    return configs.scan_backward(*problem, narrow=True)


CHUNK_ROWS = functools.partial(rows, (
    configs.pairs, configs.scan, configs.scan_backward, configs.bwd_values, configs.bwd_intra,
    narrow_scan, narrow_scan_backward,
))  # fmt: skip
STAGE_ROWS = functools.partial(rows, (configs.w_u, configs.states))
# Arguments of gdn_inputs that compile flags of their own, and what varies under them.
OPTIONS = {
    "packed": ({"gate": "softplus", "l2norm": True, "beta_sigmoid": True}, PACKED),
    "batched": ({"gate": "g", "state_v_first": True}, BATCHED),
    "no gate": ({"gate": None, "l2norm": True, "beta_sigmoid": True}, PACKED[:2]),
}
# the head sizes of today's models meet every set of options in the fast run
COMMON = [(dtype, K, 64) for dtype in ("bf16", "fp16") for K in (64, 128)]


@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("rows_of", [CHUNK_ROWS, STAGE_ROWS], ids=["chunk", "stages"])
def test_the_cases_meet_every_row(rows_of, arch):
    assert_rows_are_met(rows_of, arch)


def cases():
    for tiles, options, fast in in_turn(list(OPTIONS), COMMON):
        values = tiles[0], *head_sizes(*tiles[1:], odd=options == "batched"), options
        marks = [pytest.mark.xdist_group(f"gdn {tiles}"), *([] if fast else [pytest.mark.slow])]
        yield pytest.param(*values, id="-".join(map(str, values)), marks=marks)


def check_chunks(expected, monkeypatch, forget, kept=False, chunk_size=64):
    """With the scans that a GPU of many multiprocessors takes, and with those of one of few."""
    from flaop.launch.delta import gdn_stages

    paths = {"chunk": functools.partial(flaop.chunk_gated_delta_rule, chunk_size=chunk_size)}
    if kept:
        paths["kept"] = functools.partial(flaop.chunk_gated_delta_rule, disable_recompute=True)
    for scans, count in (("narrow", 1 << 20), ("wide", 0)):
        monkeypatch.setattr(gdn_stages, "processors", lambda device, count=count: count)
        forget()
        check_paths(expected, {f"{path}, {scans}": fn for path, fn in paths.items()}, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, K, V, options", list(cases()))
def test_configuration(dtype, K, V, options, monkeypatch, fresh_launches):
    flags, variants = OPTIONS[options]
    for chunk_size, variant in zip((64, 32, 16), variants, strict=False):
        inputs = gdn_inputs(
            K=K, V=V, dtype=DTYPES[dtype], initial_state=True, **flags, **with_heads(variant, K, V)
        )
        kept = chunk_size == 64 and K >= 64 and V >= 64
        check_chunks(DeltaExpected(inputs), monkeypatch, fresh_launches, kept, chunk_size)


# The kernels of the recurrent path have rows of their own (configs/recurrent.py).
RECURRENT = pairwise(
    K=(256, 100, 64, 20, 12),
    V=(72, 24, 8),
    state_v_first=(False, True),
    gate=("softplus", "g", None),
    dtype=("bf16", "fp32", "fp16"),
    variant=(PACKED[0], BATCHED[0]),
    l2norm=(True, False),
    beta=({"neg_eigval": True}, {"beta_sigmoid": True}, {}),
    dt_bias=(True, False),
)


@pytest.mark.gpu
@pytest.mark.parametrize("index", range(len(RECURRENT)))
def test_recurrent_configuration(index):
    case = dict(RECURRENT[index])
    case |= with_heads(case.pop("variant"), case["K"], case["V"]) | case.pop("beta")
    case["dtype"] = DTYPES[case["dtype"]]
    expected = DeltaExpected(gdn_inputs(initial_state=True, **case))
    check_paths(expected, {"recurrent": flaop.fused_recurrent_gated_delta_rule}, "cuda")


def chunkwise(**inputs):
    """The chunkwise reference in float64, which tests/reference holds to the token loop."""
    wide = {n: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
            for n, x in inputs.items()}  # fmt: skip
    return flaop.chunk_gated_delta_rule(**wide)


def gated_backward_cases():
    for dtype, size in itertools.product(DTYPES, (64, 128)):
        # most of the variants are those of test_configuration, compiled once
        marks = pytest.mark.xdist_group(f"gdn {(dtype, size, 64)}")
        yield pytest.param(dtype, size, id=f"{dtype}-{size}", marks=marks)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("T", [64, 100, 4096])
@pytest.mark.parametrize("dtype, size", list(gated_backward_cases()))
def test_gated_backward(dtype, size, T, seed, monkeypatch, fresh_launches):
    """Tiles of 64 and 128 columns: what triton 3.6 with its own ptxas gets wrong on Hopper."""
    H = 1 if T > 100 else 4
    inputs = gdn_inputs(
        lengths=[T], H=H, HV=2 * H, K=size, V=size, dtype=DTYPES[dtype], initial_state=True,
        seed=seed, **OPTIONS["packed"][0],
    )  # fmt: skip
    expected = DeltaExpected(inputs, chunkwise if T > 100 else None)
    check_chunks(expected, monkeypatch, fresh_launches)


# The public stages: relative errors, of slices three times as large.
LIMITS = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 1e-2}


def close(got, ref, dtype, dims):
    got = got.cpu()
    assert got.isfinite().all()
    assert relative_error(got, ref) < LIMITS[dtype]
    assert worst_error(got, ref, dims, floor=1e-2) < 3 * LIMITS[dtype]


def on_gpu(arguments):
    return {n: x.cuda() if isinstance(x, torch.Tensor) else x for n, x in arguments.items()}


def stage_cases():
    for i, (tiles, _, fast) in enumerate(in_turn(["one"])):
        values = *tiles, (64, 16, 32)[(i + i // 3) % 3], i % 2 == 0, i % 4 > 1
        marks = [] if fast else [pytest.mark.slow]
        yield pytest.param(*values, id="-".join(map(str, values)), marks=marks)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, K_tile, V_tile, BT, packed, v_first", list(stage_cases()))
def test_stages(dtype, K_tile, V_tile, BT, packed, v_first):
    dtype, (K, V) = DTYPES[dtype], head_sizes(K_tile, V_tile, odd=not packed)
    variant = {"lengths": [0, 1, 66, 0, 33]} if packed else {"B": 2, "T": 67}
    inputs = gdn_inputs(
        **variant, H=1, HV=2, K=K, V=V, dtype=dtype, initial_state=True, state_v_first=v_first
    )
    k, v, beta, cu_seqlens = (inputs[name] for name in ("k", "v", "beta", "cu_seqlens"))
    gates = {"g": inputs["g"]}
    if BT < 64:  # of both kinds
        gates["gk"] = -0.1 * torch.rand(*beta.shape, K)
    for name, x in gates.items():
        gates[name] = chunk_local_cumsum_oracle(x, BT, cu_seqlens=cu_seqlens).float()
    w_u = {"k": k, "v": v, "beta": beta, "A": torch.randn(*beta.shape, BT).to(dtype)}
    w_u |= {"cu_seqlens": cu_seqlens, **gates}
    states = {"k": k, "w": (0.2 * torch.randn(*beta.shape, K)).to(dtype), "u": v, **gates}
    states |= {"initial_state": inputs["initial_state"], "output_final_state": True}
    states |= {"cu_seqlens": cu_seqlens, "chunk_size": BT, "state_v_first": v_first}
    with nan_memory():
        got = flaop.recompute_w_u(**on_gpu(w_u))
        got_states = flaop.chunk_delta_fwd_h(**on_gpu(states))
    for x, ref in zip(got, recompute_w_u_oracle(**w_u), strict=True):
        close(x, ref, dtype, (0, 1, 2))
    dims = ((0, 1), (0, 1, 2), (0, 1))
    for x, ref, kept in zip(got_states, chunk_delta_fwd_h_oracle(**states), dims, strict=True):
        close(x, ref, dtype, kept)


@pytest.mark.gpu
@pytest.mark.parametrize("BT", [16, 32, 64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_inverse(dtype, BT):
    dtype = DTYPES[dtype]
    L = (0.2 * (2 * torch.rand(1, 100, 2, BT) - 1)).to(dtype)
    dX = torch.randn(L.shape).to(dtype)
    cu_seqlens = torch.tensor([0, 0, 1, 67, 100])
    leaf, wide = (x.requires_grad_() for x in (L.cuda(), L.double()))
    with nan_memory():
        X = flaop.solve_tril(leaf, cu_seqlens=cu_seqlens.cuda())
        (dL,) = torch.autograd.grad(X, leaf, dX.cuda())
    ref = solve_tril_oracle(wide, cu_seqlens)
    close(X.detach(), ref.detach(), dtype, (0, 1, 2))
    close(dL, torch.autograd.grad(ref, wide, dX.double())[0], dtype, (0, 2))
