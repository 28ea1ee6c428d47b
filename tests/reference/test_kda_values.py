"""Chunkwise and recurrent reference of KDA against the token loop in float64."""

import pytest
import torch

from flaop.testing import kda_inputs, pairwise, relative_error, worst_error

# What an oracle must reach to be compared relatively: decays below are cut to zero.
NOTHING = {torch.float64: 1e-100, torch.float32: 1e-15}
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}
# Kept apart in the second comparison: rows of heads, heads of states, channels of gates.
APART = {
    "o": (0, 1, 2),
    "final_state": (0, 1),
    "d_initial_state": (0, 1),
    "d_q": (2, 3),
    "d_k": (2, 3),
    "d_v": (2, 3),
    "d_g": (2, 3),
    "d_beta": (2,),
}

CASES = pairwise(
    T=(130, 1, 63, 64, 65, 1000),
    K=(64, 60, 100, 128, 256),
    gates=("mixed", "fast", "slow"),
    gate_in_kernel=(None, "softplus", "bounded"),
    through=("both", "o", "final_state"),
    state=("k_first", None, "v_first"),
    beta=("plain", "sigmoid", "negative"),
    kind=("chunk", "recurrent"),
    dtype=(torch.float64, torch.float32),
    packed=(False, True),
    HV=(1, 2),
    V=(24, 128),
    l2norm=(False, True),
)


def compare(results, expected, dtype):
    assert results.keys() == expected.keys()
    for name, want in expected.items():
        got = results[name]
        if want.square().mean().sqrt() < NOTHING[dtype]:
            assert got.abs().max() < NOTHING[dtype], name
            continue
        assert relative_error(got, want) < TOLERANCE[dtype], name
        if name in APART:
            assert worst_error(got, want, APART[name]) < 10 * TOLERANCE[dtype], name


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_values_and_gradients(case, evaluate, expect):
    T, dtype, packed = case["T"], case["dtype"], case["packed"]
    kwargs = kda_inputs(
        B=2 if T < 1000 else 1,
        T=T,
        H=1,
        HV=case["HV"],
        K=case["K"],
        V=case["V"],
        dtype=dtype,
        gates=case["gates"],
        gate_in_kernel=case["gate_in_kernel"],
        l2norm=case["l2norm"],
        beta_sigmoid=case["beta"] == "sigmoid",
        neg_eigval=case["beta"] == "negative",
        lengths=[0, T // 3, 1, 0, T - T // 3] if packed else None,
        initial_state=case["state"] is not None,
        state_v_first=case["state"] == "v_first",
    )
    d_o = d_final_state = None
    if case["through"] != "final_state":
        d_o = torch.randn_like(kwargs["v"])
    if case["through"] != "o":
        N = 5 if packed else kwargs["q"].shape[0]
        sizes = (case["V"], case["K"]) if case["state"] == "v_first" else (case["K"], case["V"])
        d_final_state = torch.randn(N, case["HV"], *sizes, dtype=dtype)
    results = evaluate(case["kind"], kwargs, d_o, d_final_state)
    compare(results, expect(kwargs, d_o, d_final_state), dtype)


@pytest.mark.parametrize("kind", ["chunk", "recurrent"])
@pytest.mark.parametrize("gates", ["reset", "empty", "edges", "alternating", "one channel"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_gates_of_any_size(kind, gates, dtype, evaluate, expect):
    kwargs = kda_inputs(T=200, K=32, V=16, dtype=dtype, gates="slow", initial_state=True)
    g = kwargs["g"]
    if gates == "reset":
        g[:, ::7] = -torch.inf
    elif gates == "empty":
        g[:, 10:150] = -1000
    elif gates == "edges":
        g[:, ::64] = -60
        g[:, 63::64] = -60
    elif gates == "alternating":
        g[:] = 0
        g[:, 1::2] = -8
    else:
        g[:, ::3, :, 0] = -1000
        g[:, 5, 0, 1] = -torch.inf
    d_o, d_final_state = torch.randn_like(kwargs["v"]), torch.randn_like(kwargs["initial_state"])
    results = evaluate(kind, kwargs, d_o, d_final_state)
    compare(results, expect(kwargs, d_o, d_final_state), dtype)


@pytest.mark.parametrize("kind", ["chunk", "recurrent"])
def test_many_sequences(kind, evaluate, expect):
    lengths = [16] * 200 + [0, 1, 65] + [3] * 50
    kwargs = kda_inputs(lengths=lengths, H=1, K=16, V=16, dtype=torch.float64, initial_state=True)
    d_o, d_final_state = torch.randn_like(kwargs["v"]), torch.randn_like(kwargs["initial_state"])
    results = evaluate(kind, kwargs, d_o, d_final_state)
    compare(results, expect(kwargs, d_o, d_final_state), torch.float64)


@pytest.mark.parametrize("kind", ["chunk", "recurrent"])
@pytest.mark.parametrize("l2norm", [False, True])
def test_grouped_heads(kind, l2norm, evaluate, expect):
    kwargs = kda_inputs(
        B=2, T=70, H=2, HV=6, K=16, V=24, l2norm=l2norm, dtype=torch.float64, initial_state=True
    )
    d_o, d_final_state = torch.randn_like(kwargs["v"]), torch.randn_like(kwargs["initial_state"])
    results = evaluate(kind, kwargs, d_o, d_final_state)
    compare(results, expect(kwargs, d_o, d_final_state), torch.float64)


@pytest.mark.parametrize("lengths", [None, [130, 0, 300, 64, 1, 7]])
def test_slabs_change_nothing(lengths, evaluate, expect, monkeypatch):
    kwargs = kda_inputs(
        B=3, T=300, H=1, K=16, V=24, lengths=lengths, dtype=torch.float64, initial_state=True
    )
    d_o, d_final_state = torch.randn_like(kwargs["v"]), torch.randn_like(kwargs["initial_state"])
    expected = expect(kwargs, d_o, d_final_state)
    for rows in (1, 2, 5):
        monkeypatch.setattr("flaop.reference.kda_chunk._SLAB", rows * 64 * 24)
        compare(evaluate("chunk", kwargs, d_o, d_final_state), expected, torch.float64)


@pytest.mark.parametrize("kind", ["chunk", "recurrent"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_inputs(kind, dtype, evaluate, expect):
    kwargs = kda_inputs(T=200, K=32, V=16, dtype=dtype, initial_state=True)
    kwargs["initial_state"] = kwargs["initial_state"].bfloat16()
    d_o = torch.randn_like(kwargs["v"])
    d_final_state = torch.randn(kwargs["initial_state"].shape)
    results = evaluate(kind, kwargs, d_o, d_final_state)
    expected = expect(kwargs, d_o, d_final_state)
    assert results["o"].dtype == dtype and results["final_state"].dtype == torch.float32
    assert relative_error(results["final_state"], expected["final_state"]) < 1e-6
    for name, want in expected.items():
        eps = max(torch.finfo(d).eps for d in (dtype, results[name].dtype))
        assert relative_error(results[name], want) < eps, name
