"""What must hold for KDA whatever the numbers, and cases small enough to work out by hand."""

import math

import pytest
import torch

from flaop.reference import kda as reference
from flaop.testing import kda_inputs, relative_error
from flaop.validation import kda as validation

pytestmark = pytest.mark.parametrize("kind", ["chunk", "recurrent"])

INPUTS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")


def tokens(*values):
    """A float64 tensor [1, T, 1, D] (or [1, T, 1] from scalars)."""
    return torch.tensor(values, dtype=torch.float64).unsqueeze(0).unsqueeze(2)


def by_hand(q, k, v, decay, beta, **options):
    g = tokens(*decay).log()
    return dict(q=tokens(*q), k=tokens(*k), v=tokens(*v), g=g, beta=tokens(*beta), **options)


def test_one_channel_by_hand(kind, evaluate):
    kwargs = by_hand(
        q=[[2], [2], [2]],
        k=[[1], [1], [1]],
        v=[[1], [2], [3]],
        decay=[[0.5], [1], [0.25]],
        beta=[0.5, 1, 0.25],
        scale=1.0,
        initial_state=torch.full((1, 1, 1, 1), 4.0),
    )
    results = evaluate(kind, kwargs)
    # S: 4 -> 2 -> 1.5 -> 2 -> 0.5 -> 1.125
    torch.testing.assert_close(results["o"], tokens([3], [4], [2.25]))
    torch.testing.assert_close(results["final_state"].item(), 1.125)


def test_two_channels_by_hand(kind, evaluate):
    kwargs = by_hand(
        q=[[1, 1], [1, 2], [3, 5]],
        k=[[1, 0], [1, 1], [0, 2]],
        v=[[2], [3], [0]],
        decay=[[1, 1], [0.5, 0.25], [1, 0.5]],
        beta=[1, 0.5, 0.25],
        scale=1.0,
    )
    results = evaluate(kind, kwargs)
    # S: (0, 0) -> (2, 0) -> (1, 0) -> (2, 1) -> (2, 0.5) -> (2, 0)
    torch.testing.assert_close(results["o"], tokens([2], [4], [6]))
    torch.testing.assert_close(results["final_state"].flatten(), tokens([2, 0]).flatten())


def test_decay_comes_before_the_correction(kind, evaluate):
    kwargs = by_hand([[1], [1]], [[1], [1]], [[1], [1]], [[1], [0.5]], [1, 1], scale=1.0)
    results = evaluate(kind, kwargs)
    # The other order would read 0.5.
    torch.testing.assert_close(results["o"], tokens([1], [1]))
    torch.testing.assert_close(results["final_state"].item(), 1.0)


def test_identical_keys_recall_the_last_value(kind, evaluate):
    kwargs = kda_inputs(T=200)
    kwargs["k"] = kwargs["q"] = kwargs["k"][:, :1].expand_as(kwargs["k"])
    kwargs["g"] = torch.zeros_like(kwargs["g"])
    kwargs["beta"] = torch.ones_like(kwargs["beta"])
    kwargs["scale"] = 0.5
    results = evaluate(kind, kwargs)
    assert relative_error(results["o"], 0.5 * kwargs["v"]) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [1, 63, 64, 100])
def test_what_follows_cannot_change_a_prefix(kind, dtype, length, evaluate):
    first, second = (kda_inputs(T=300, H=1, HV=2, dtype=dtype, seed=seed) for seed in (0, 1))
    for name in ("q", "k", "v", "g", "beta"):
        second[name][:, :length] = first[name][:, :length]
    prefixes = [evaluate(kind, kwargs)["o"][:, :length] for kwargs in (first, second)]
    assert torch.equal(*prefixes)


def test_infinite_gate_forgets(kind, evaluate):
    kwargs = kda_inputs(T=150, dtype=torch.float64, gates="slow", initial_state=True)
    kwargs["g"][:, 70] = -torch.inf
    d_o = torch.randn_like(kwargs["v"])
    d_o[:, :70] = 0
    results = evaluate(kind, kwargs, d_o, torch.randn_like(kwargs["initial_state"]))
    for name in ("q", "k", "v", "g", "beta"):
        assert results[f"d_{name}"][:, :70].count_nonzero() == 0
    assert results["d_initial_state"].count_nonzero() == 0

    rest = {name: kwargs[name][:, 70:] for name in ("q", "k", "v", "g", "beta")}
    fresh = evaluate(kind, {**kwargs, **rest, "initial_state": None})
    torch.testing.assert_close(results["o"][:, 70:], fresh["o"])
    torch.testing.assert_close(results["final_state"], fresh["final_state"])


@pytest.mark.parametrize("gate", ["softplus", "bounded"])
def test_saturated_raw_gates_have_finite_gradients(kind, gate, evaluate):
    kwargs = kda_inputs(T=100, K=16, V=16, gate_in_kernel=gate, initial_state=True)
    kwargs["g"][:, ::5] = torch.inf
    kwargs["g"][:, 1::5] = -torch.inf
    results = evaluate(kind, kwargs, torch.randn_like(kwargs["v"]))
    assert all(x.isfinite().all() for x in results.values())


@pytest.mark.parametrize("T", [0, 1, 64, 100])
def test_nothing_to_do(kind, T, evaluate):
    kwargs = kda_inputs(B=0, T=T, initial_state=True)
    results = evaluate(kind, kwargs, kwargs["v"], kwargs["initial_state"])
    assert results["o"].shape == kwargs["v"].shape

    lengths = [0, T, 0]
    kwargs = kda_inputs(lengths=lengths, initial_state=True)
    d_final_state = torch.randn_like(kwargs["initial_state"])
    results = evaluate(kind, kwargs, torch.randn_like(kwargs["v"]), d_final_state)
    for n, length in enumerate(lengths):
        if length == 0:
            assert torch.equal(results["final_state"][n], kwargs["initial_state"][n])
            assert torch.equal(results["d_initial_state"][n], d_final_state[n])


def test_tokens_of_no_sequence_are_zero(kind, evaluate, expect):
    kwargs = kda_inputs(B=1, T=200, H=1, dtype=torch.float64, initial_state=True)
    kwargs["initial_state"] = torch.randn(4, 1, 64, 64, dtype=torch.float64)
    # Decreasing and outside: sequences 10..80, empty, 80..150, 150..150.
    kwargs["cu_seqlens"] = torch.tensor([10, 80, 30, 150, -5])
    d_o = torch.randn_like(kwargs["v"])
    results = evaluate(kind, kwargs, d_o)
    for name in ("o", "d_q", "d_k", "d_v", "d_g", "d_beta"):
        assert results[name][:, :10].count_nonzero() == 0
        assert results[name][:, 150:].count_nonzero() == 0
    sane = {**kwargs, "cu_seqlens": torch.tensor([10, 80, 80, 150, 150])}
    for name, want in expect(sane, d_o).items():
        assert relative_error(results[name], want) < 1e-10, name


def test_any_strides_and_inputs_left_alone(kind, evaluate):
    kwargs = kda_inputs(B=2, T=100, H=2, K=32, V=16, initial_state=True)
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


def test_only_gradients_asked_for(kind):
    kwargs = kda_inputs(T=70, K=16, V=16, gate_in_kernel="softplus", initial_state=True)
    call = validation.check(**kwargs)
    _, _, *residuals = getattr(reference, f"{kind}_forward")(call)
    backward = getattr(reference, f"{kind}_backward")
    everything = backward(call, kwargs["v"], None, *residuals, [True] * 8)
    for i in range(8):
        mask = [j == i for j in range(8)]
        gradients = backward(call, kwargs["v"], None, *residuals, mask)
        assert [x is not None for x in gradients] == mask
        assert torch.equal(gradients[i], everything[i])


def test_gradcheck(kind):
    kwargs = kda_inputs(
        lengths=[3, 0, 4],
        H=1,
        HV=2,
        K=3,
        V=2,
        dtype=torch.float64,
        gate_in_kernel="softplus",
        l2norm=True,
        neg_eigval=True,
        initial_state=True,
        state_v_first=True,
        requires_grad=True,
    )

    class Reference(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            call = validation.check(**{**kwargs, **dict(zip(INPUTS, inputs, strict=True))})
            o, final_state, *ctx.residuals = getattr(reference, f"{kind}_forward")(call)
            ctx.call = call
            return o, final_state

        @staticmethod
        def backward(ctx, *gradients):
            backward = getattr(reference, f"{kind}_backward")
            return backward(ctx.call, *gradients, *ctx.residuals, ctx.needs_input_grad)

    assert torch.autograd.gradcheck(Reference.apply, [kwargs[name] for name in INPUTS])


def test_scale_defaults_to_the_head_size(kind, evaluate):
    kwargs = kda_inputs(T=70, K=16, V=16)
    default = evaluate(kind, kwargs)["o"]
    assert torch.equal(default, evaluate(kind, {**kwargs, "scale": 1 / math.sqrt(16)})["o"])
    torch.testing.assert_close(evaluate(kind, {**kwargs, "scale": 1.0})["o"], 4 * default)
