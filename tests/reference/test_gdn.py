"""Chunkwise and recurrent reference of the gated delta rule against the token loop in float64."""

import pytest
import torch

from flaop.testing import (
    gdn_budget_reference,
    gdn_inputs,
    gdn_oracle,
    pairwise,
    relative_error,
    worst_error,
)

# What an oracle must reach to be compared relatively: decays below are cut to zero.
NOTHING = {torch.float64: 1e-100, torch.float32: 1e-15}
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}
# Kept apart in the second comparison: rows of heads, heads of states, of gates and of beta.
APART = {
    "o": (0, 1, 2),
    "final_state": (0, 1),
    "d_initial_state": (0, 1),
    "d_q": (2, 3),
    "d_k": (2, 3),
    "d_v": (2, 3),
    "d_g": (2,),
    "d_beta": (2,),
}

CASES = pairwise(
    T=(130, 1, 63, 64, 65, 1000),
    K=(64, 16, 60, 128, 256),
    gates=("mixed", "fast", "slow"),
    gate=("g", "softplus", None),
    through=("both", "o", "final_state"),
    state=("k_first", None, "v_first"),
    beta=("plain", "sigmoid", "negative"),
    kind=("chunk", "recurrent"),
    dtype=(torch.float64, torch.float32),
    packed=(False, True),
    HV=(1, 2),
    V=(24, 128),
    l2norm=(False, True),
    dt_bias=(True, False),
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
    kwargs = gdn_inputs(
        **{"B": 2 if T < 1000 else 1, "T": T, "H": 1, "dtype": dtype},
        **{name: case[name] for name in ("HV", "K", "V", "gates", "gate", "l2norm", "dt_bias")},
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
@pytest.mark.parametrize("gates", ["reset", "empty", "edges", "alternating"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_gates_of_any_size(kind, gates, dtype, evaluate, expect):
    kwargs = gdn_inputs(T=200, K=32, V=16, dtype=dtype, gates="slow", initial_state=True)
    g = kwargs["g"]
    if gates == "reset":
        g[:, ::7] = -torch.inf
    elif gates == "empty":
        g[:, 10:150] = -1000
    elif gates == "edges":
        g[:, ::64] = -60
        g[:, 63::64] = -60
    else:
        g[:] = 0
        g[:, 1::2] = -8
    d_o, d_final_state = torch.randn_like(kwargs["v"]), torch.randn_like(kwargs["initial_state"])
    results = evaluate(kind, kwargs, d_o, d_final_state)
    compare(results, expect(kwargs, d_o, d_final_state), dtype)


@pytest.mark.parametrize("kind", ["chunk", "recurrent"])
def test_many_sequences_and_grouped_heads(kind, evaluate, expect):
    lengths = [16] * 100 + [0, 1, 65] + [3] * 50
    kwargs = gdn_inputs(
        **{"lengths": lengths, "H": 2, "HV": 6, "K": 16, "V": 16, "l2norm": True},
        dtype=torch.float64,
        initial_state=True,
    )
    d_o, d_final_state = torch.randn_like(kwargs["v"]), torch.randn_like(kwargs["initial_state"])
    results = evaluate(kind, kwargs, d_o, d_final_state)
    compare(results, expect(kwargs, d_o, d_final_state), torch.float64)


@pytest.mark.parametrize("kind", ["chunk", "recurrent"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_inputs(kind, dtype, evaluate, expect):
    kwargs = gdn_inputs(T=200, K=32, V=16, dtype=dtype, gate="softplus", initial_state=True)
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


# The budget reference


INPUTS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")


def with_gradients(function, kwargs, d_o, d_final_state):
    inputs = {name: kwargs[name] for name in INPUTS if kwargs.get(name) is not None}
    o, final_state = function(**kwargs)
    d_o, d_final_state = d_o.to(o.dtype), d_final_state.to(final_state.dtype)
    gradients = torch.autograd.grad((o, final_state), inputs.values(), (d_o, d_final_state))
    return {"o": o, "final_state": final_state, **dict(zip(inputs, gradients))}


@pytest.mark.parametrize(
    "case",
    pairwise(
        gate=("g", "softplus", None),
        lengths=(None, [65, 0, 1, 30]),
        HV=(1, 2),
        state_v_first=(False, True),
        l2norm=(False, True),
        neg_eigval=(False, True),
    ),
    ids=lambda case: "-".join(map(str, case.values())),
)
def test_the_budget_without_rounding_is_the_recurrence(case):
    kwargs = gdn_inputs(
        T=100, H=1, K=20, V=16, dtype=torch.float64, initial_state=True, requires_grad=True, **case
    )
    d = torch.randn_like(kwargs["v"]), torch.randn_like(kwargs["initial_state"])
    expected = with_gradients(gdn_oracle, kwargs, *d)
    for name, got in with_gradients(gdn_budget_reference, kwargs, *d).items():
        assert relative_error(got, expected[name]) < 1e-10, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gates", ["mixed", "slow"])
@pytest.mark.parametrize("gate", ["g", None])
def test_rounding_costs_about_its_precision(dtype, gates, gate):
    kwargs = gdn_inputs(
        T=300, dtype=dtype, gates=gates, gate=gate, initial_state=True, requires_grad=True
    )
    d = torch.randn_like(kwargs["v"]), torch.randn(kwargs["initial_state"].shape)
    expected = with_gradients(gdn_oracle, kwargs, *d)
    eps = torch.finfo(dtype).eps
    for name, got in with_gradients(gdn_budget_reference, kwargs, *d).items():
        assert 0.05 * eps < relative_error(got, expected[name]) < 1.5 * eps, name
