"""Chunkwise and recurrent reference of simple_gla and gla against the token loop in float64."""

import pytest
import torch

from flaop.reference import decay as reference
from flaop.testing import (
    gla_inputs,
    gla_oracle,
    pairwise,
    relative_error,
    simple_gla_inputs,
    simple_gla_oracle,
    worst_error,
)
from flaop.validation import decay as validation

# What an oracle must reach to be compared relatively: decays below are cut to zero.
NOTHING = {torch.float64: 1e-100, torch.float32: 1e-15}
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}
# Kept apart in the second comparison: rows of heads, heads of states, channels of gates.
APART = {
    "o": (0, 1, 2), "final_state": (0, 1), "d_initial_state": (0, 1),
    "d_q": (2, 3), "d_k": (2, 3), "d_v": (2, 3), "d_gv": (2, 3),
}  # fmt: skip
KINDS = ("chunk", "recurrent")
# Gates of simple_gla, then of gla.
HEAD_GATES = ("g", "g_gamma", "both", None)
CHANNEL_GATES = ("channel", "channel and value")


def make(gate, **options):
    """Arguments of the family that has this gate."""
    if gate in CHANNEL_GATES:
        return gla_inputs(value_gate=gate != "channel", **options)
    return simple_gla_inputs(gate=gate, **options)


def names_of(kind, kwargs):
    """The inputs in the order of their gradients."""
    if "g_gamma" in kwargs:
        return ("q", "k", "v", "g", "g_gamma", "initial_state")
    return ("q", "k", "v", "g", "initial_state", "gv")[: 5 if kind == "chunk" else 6]


def checked(kwargs):
    family = "simple_gla" if "g_gamma" in kwargs else "gla"
    return getattr(validation, f"check_{family}")(**kwargs)


def evaluate(kind, kwargs, d_o=None, d_final_state=None):
    """Outputs, and gradients of what is not None."""
    call = checked(kwargs)
    o, final_state, *residuals = getattr(reference, f"{kind}_forward")(call)
    results = {"o": o, "final_state": final_state}
    if d_o is not None or d_final_state is not None:
        names = names_of(kind, kwargs)
        mask = [kwargs.get(name) is not None for name in names]
        backward = getattr(reference, f"{kind}_backward")
        gradients = backward(call, d_o, d_final_state, *residuals, mask)
        for name, gradient, wanted in zip(names, gradients, mask, strict=True):
            assert (gradient is not None) == wanted
            if wanted:
                assert gradient.dtype == kwargs[name].dtype
                assert gradient.is_contiguous()
                results[f"d_{name}"] = gradient
    return results


def expect(kwargs, d_o=None, d_final_state=None):
    """The same from the oracle, differentiated by autograd."""
    oracle = simple_gla_oracle if "g_gamma" in kwargs else gla_oracle
    names = [name for name in names_of("recurrent", kwargs) if kwargs.get(name) is not None]
    inputs = {name: kwargs[name].detach().requires_grad_() for name in names}
    o, final_state = oracle(**{**kwargs, **inputs})
    results = {"o": o.detach(), "final_state": final_state.detach()}
    pairs = [(x, d) for x, d in ((o, d_o), (final_state, d_final_state)) if d is not None]
    if pairs:
        loss = sum((x * d.double()).sum() for x, d in pairs)
        gradients = torch.autograd.grad(
            loss, list(inputs.values()), allow_unused=True, materialize_grads=True
        )
        results |= {f"d_{name}": x for name, x in zip(inputs, gradients, strict=True)}
    return results


def compare(results, expected, dtype):
    assert results.keys() == expected.keys()
    for name, want in expected.items():
        got, apart = results[name], APART.get(name)
        if name == "d_g":
            apart = tuple(range(2, want.ndim))
        if want.square().mean().sqrt() < NOTHING[dtype]:
            assert got.abs().max() < NOTHING[dtype], name
            continue
        # the gradient of g_gamma is a sum over all tokens that may cancel
        looser = 10 if name == "d_g_gamma" else 1
        assert relative_error(got, want) < looser * TOLERANCE[dtype], name
        if apart:
            assert worst_error(got, want, apart) < 10 * TOLERANCE[dtype], name


def random_gradients(kwargs):
    return torch.randn_like(kwargs["v"]), torch.randn_like(kwargs["initial_state"])


CASES = pairwise(
    T=(130, 1, 63, 64, 65, 1000),
    K=(64, 16, 60, 100, 128, 256, 300),
    gate=(*HEAD_GATES, *CHANNEL_GATES),
    gates=("mixed", "fast", "slow"),
    through=("both", "o", "final_state"),
    state=("k_first", None, "v_first"),
    kind=KINDS,
    dtype=(torch.float64, torch.float32),
    packed=(False, True),
    HV=(1, 2),
    V=(24, 128),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_values_and_gradients(case):
    T, dtype, packed, HV = case["T"], case["dtype"], case["packed"], case["HV"]
    gate = case["gate"]
    if gate == "channel and value" and case["kind"] == "chunk":
        gate = "channel"
    kwargs = make(
        gate,
        B=2 if T < 1000 else 1,
        T=T,
        H=1,
        HV=HV,
        K=case["K"],
        V=case["V"],
        dtype=dtype,
        gates=case["gates"],
        lengths=[0, T // 3, 1, 0, T - T // 3] if packed else None,
        initial_state=case["state"] is not None,
        state_v_first=case["state"] == "v_first",
    )
    d_o = d_final_state = None
    if case["through"] != "final_state":
        d_o = torch.randn_like(kwargs["v"])
    if case["through"] != "o":
        d_final_state = torch.randn(checked(kwargs).state_shape, dtype=dtype)
    results = evaluate(case["kind"], kwargs, d_o, d_final_state)
    compare(results, expect(kwargs, d_o, d_final_state), dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gate", ["g", "channel"])
@pytest.mark.parametrize("gates", ["reset", "empty", "edges", "alternating", "one place"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_gates_of_any_size(kind, gate, gates, dtype):
    kwargs = make(gate, T=200, K=32, V=16, dtype=dtype, gates="slow", initial_state=True)
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
        g[:, ::3, 0][..., :1] = -1000
        g[:, 5, 0][..., :2] = -torch.inf
    d_o, d_final_state = random_gradients(kwargs)
    results = evaluate(kind, kwargs, d_o, d_final_state)
    compare(results, expect(kwargs, d_o, d_final_state), dtype)


def test_gates_per_value_channel_of_any_size():
    kwargs = make("channel and value", T=100, K=16, V=24, gates="slow", initial_state=True)
    kwargs["gv"][:, ::7, :, :5] = -torch.inf
    kwargs["gv"][:, 10:50, 0] = -1000
    d_o, d_final_state = random_gradients(kwargs)
    results = evaluate("recurrent", kwargs, d_o, d_final_state)
    compare(results, expect(kwargs, d_o, d_final_state), torch.float32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gate", ["both", "channel"])
def test_many_sequences(kind, gate):
    lengths = [16] * 200 + [0, 1, 65] + [3] * 50
    kwargs = make(gate, lengths=lengths, H=1, K=16, V=16, dtype=torch.float64, initial_state=True)
    d_o, d_final_state = random_gradients(kwargs)
    results = evaluate(kind, kwargs, d_o, d_final_state)
    compare(results, expect(kwargs, d_o, d_final_state), torch.float64)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gate", ["both", None, "channel"])
def test_grouped_heads(kind, gate):
    kwargs = make(gate, B=2, T=70, H=2, HV=6, K=16, V=24, dtype=torch.float64, initial_state=True)
    d_o, d_final_state = random_gradients(kwargs)
    results = evaluate(kind, kwargs, d_o, d_final_state)
    compare(results, expect(kwargs, d_o, d_final_state), torch.float64)


@pytest.mark.parametrize("gate", ["both", "channel"])
@pytest.mark.parametrize("lengths", [None, [130, 0, 300, 64, 1, 7]])
def test_slabs_change_nothing(gate, lengths, monkeypatch):
    kwargs = make(
        gate,
        **{"B": 3, "T": 300, "H": 1, "K": 16, "V": 24, "lengths": lengths},
        dtype=torch.float64,
        initial_state=True,
    )
    d_o, d_final_state = random_gradients(kwargs)
    expected = expect(kwargs, d_o, d_final_state)
    for rows in (1, 2, 5):
        monkeypatch.setattr("flaop.reference.decay_chunk._SLAB", rows * 64 * 24)
        compare(evaluate("chunk", kwargs, d_o, d_final_state), expected, torch.float64)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gate", ["both", "channel"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_inputs(kind, gate, dtype):
    kwargs = make(gate, T=200, K=32, V=16, dtype=dtype, initial_state=True)
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


@pytest.mark.parametrize("kind", KINDS)
def test_by_hand(kind):
    def tokens(*values):
        return torch.tensor(values, dtype=torch.float64).view(1, 3, 1, 1)

    kwargs = {
        **{"q": tokens(2, 2, 2), "k": tokens(1, 1, 3), "v": tokens(1, 2, 3)},
        **{"g": tokens(0.5, 1, 0.25).log(), "scale": 1.0},
        "initial_state": torch.full((1, 1, 1, 1), 4.0),
    }
    # S: 4 -> 2 -> 3 -> 5 -> 1.25 -> 10.25
    for family in ({}, {"g": kwargs["g"].squeeze(-1), "g_gamma": None}):
        results = evaluate(kind, {**kwargs, **family})
        torch.testing.assert_close(results["o"], tokens(6, 10, 20.5))
        torch.testing.assert_close(results["final_state"].item(), 10.25)
    kwargs["g_gamma"] = torch.tensor([0.5]).log()
    kwargs["g"] = None
    # S: 4 -> 2 -> 3 -> 1.5 -> 3.5 -> 1.75 -> 10.75
    torch.testing.assert_close(evaluate(kind, kwargs)["o"], tokens(6, 7, 21.5))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gate", ["both", "channel"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [1, 63, 64, 100])
def test_what_follows_cannot_change_a_prefix(kind, gate, dtype, length):
    first, second = (make(gate, T=300, H=1, HV=2, dtype=dtype, seed=seed) for seed in (0, 1))
    for name in ("q", "k", "v", "g"):
        second[name][:, :length] = first[name][:, :length]
    if gate == "both":
        second["g_gamma"] = first["g_gamma"]
    prefixes = [evaluate(kind, kwargs)["o"][:, :length] for kwargs in (first, second)]
    assert torch.equal(*prefixes)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gate", ["both", "channel"])
def test_infinite_gate_forgets(kind, gate):
    kwargs = make(gate, T=150, dtype=torch.float64, gates="slow", initial_state=True)
    kwargs["g"][:, 70] = -torch.inf
    d_o, d_final_state = random_gradients(kwargs)
    d_o[:, :70] = 0
    results = evaluate(kind, kwargs, d_o, d_final_state)
    for name in ("q", "k", "v", "g"):
        assert results[f"d_{name}"][:, :70].count_nonzero() == 0
    assert results["d_g"][:, 70].count_nonzero() == 0
    assert results["d_initial_state"].count_nonzero() == 0

    rest = {name: kwargs[name][:, 70:] for name in ("q", "k", "v", "g")}
    fresh = evaluate(kind, {**kwargs, **rest, "initial_state": None})
    torch.testing.assert_close(results["o"][:, 70:], fresh["o"])
    torch.testing.assert_close(results["final_state"], fresh["final_state"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gate", ["both", None, "channel"])
@pytest.mark.parametrize("T", [0, 1, 64, 100])
def test_nothing_to_do(kind, gate, T):
    kwargs = make(gate, B=0, T=T, initial_state=True)
    results = evaluate(kind, kwargs, kwargs["v"], kwargs["initial_state"])
    assert results["o"].shape == kwargs["v"].shape

    lengths = [0, T, 0]
    kwargs = make(gate, lengths=lengths, initial_state=True)
    d_o, d_final_state = random_gradients(kwargs)
    results = evaluate(kind, kwargs, d_o, d_final_state)
    for n, length in enumerate(lengths):
        if length == 0:
            assert torch.equal(results["final_state"][n], kwargs["initial_state"][n])
            assert torch.equal(results["d_initial_state"][n], d_final_state[n])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gate", ["both", "g_gamma", "channel"])
def test_tokens_of_no_sequence_are_zero(kind, gate):
    kwargs = make(gate, B=1, T=200, H=1, dtype=torch.float64, initial_state=True)
    kwargs["initial_state"] = torch.randn(4, 1, 64, 64, dtype=torch.float64)
    # Decreasing and outside: sequences 10..80, empty, 80..150, 150..150.
    kwargs["cu_seqlens"] = torch.tensor([10, 80, 30, 150, -5])
    d_o = torch.randn_like(kwargs["v"])
    results = evaluate(kind, kwargs, d_o)
    for name in ("o", "d_q", "d_k", "d_v", "d_g"):
        if name in results:
            assert results[name][:, :10].count_nonzero() == 0
            assert results[name][:, 150:].count_nonzero() == 0
    sane = {**kwargs, "cu_seqlens": torch.tensor([10, 80, 80, 150, 150])}
    for name, want in expect(sane, d_o).items():
        assert relative_error(results[name], want) < 1e-10, name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gate", ["both", "channel"])
def test_any_strides_and_inputs_left_alone(kind, gate):
    kwargs = make(gate, B=2, T=100, H=2, K=32, V=16, initial_state=True)
    d_o = torch.ones(()).expand_as(kwargs["v"])
    expected = evaluate(kind, kwargs, d_o.contiguous())
    strided = {
        name: x.mT.contiguous().mT if torch.is_tensor(x) and x.ndim > 2 else x
        for name, x in kwargs.items()
    }
    copies = {name: x.clone() for name, x in strided.items() if torch.is_tensor(x)}
    results = evaluate(kind, strided, d_o)
    for name, want in expected.items():
        torch.testing.assert_close(results[name], want)
    for name, copy in copies.items():
        assert torch.equal(strided[name], copy)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gate", ["both", "channel", "channel and value"])
def test_only_gradients_asked_for(kind, gate):
    if kind == "chunk" and gate == "channel and value":
        pytest.skip("a gate per value channel is served token by token only")
    kwargs = make(gate, T=70, K=16, V=16, initial_state=True)
    call, names = checked(kwargs), names_of(kind, kwargs)
    _, _, *residuals = getattr(reference, f"{kind}_forward")(call)
    backward = getattr(reference, f"{kind}_backward")
    everything = backward(call, kwargs["v"], None, *residuals, [True] * len(names))
    for i, name in enumerate(names):
        mask = [j == i for j in range(len(names))]
        gradients = backward(call, kwargs["v"], None, *residuals, mask)
        assert [x is not None for x in gradients] == [m and kwargs.get(name) is not None
                                                      for m in mask]  # fmt: skip
        if gradients[i] is not None:
            assert torch.equal(gradients[i], everything[i])


@pytest.mark.parametrize("kind, gate", [("chunk", "both"), ("chunk", "channel"),
                                        ("recurrent", "both"),
                                        ("recurrent", "channel and value")])  # fmt: skip
def test_gradcheck(kind, gate):
    kwargs = make(
        gate,
        **{"lengths": [3, 0, 4], "H": 1, "HV": 2, "K": 3, "V": 2, "dtype": torch.float64},
        **{"initial_state": True, "state_v_first": True, "requires_grad": True},
    )
    names = names_of(kind, kwargs)

    class Reference(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            ctx.call = checked({**kwargs, **dict(zip(names, inputs, strict=True))})
            o, final_state, *ctx.residuals = getattr(reference, f"{kind}_forward")(ctx.call)
            return o, final_state

        @staticmethod
        def backward(ctx, *gradients):
            backward = getattr(reference, f"{kind}_backward")
            return backward(ctx.call, *gradients, *ctx.residuals, ctx.needs_input_grad)

    assert torch.autograd.gradcheck(Reference.apply, [kwargs[name] for name in names])


@pytest.mark.parametrize("kind", KINDS)
def test_gates_have_dtypes_of_their_own(kind):
    kwargs = make("both", T=70, K=16, V=16, initial_state=True)
    kwargs["g"], kwargs["g_gamma"] = kwargs["g"].bfloat16(), kwargs["g_gamma"].double()
    d_o, d_final_state = random_gradients(kwargs)
    results = evaluate(kind, kwargs, d_o, d_final_state)
    expected = expect(kwargs, d_o, d_final_state)
    for name, want in expected.items():
        assert relative_error(results[name], want) < (1e-2 if name == "d_g" else 1e-4), name
