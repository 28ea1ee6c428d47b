"""Field reports on strides, entry points and states (S, I, H11, R07) for the delta families; those
that they share with others: test_decay_inputs.
"""

import doctest
import inspect

import pytest
import torch

import flaop
from flaop.testing import (
    chunk_delta_fwd_h_oracle,
    gdn_inputs,
    gdn_oracle,
    recompute_w_u_oracle,
    relative_error,
    solve_tril_oracle,
)

GATED = ("gated_delta_rule", "gdn", "chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule")
UNGATED = ("delta_rule", "chunk_delta_rule", "fused_recurrent_delta_rule")
STAGES = ("solve_tril", "recompute_w_u", "chunk_delta_fwd_h")
OF_THE_GATE = ("g", "A_log", "dt_bias", "use_gate_in_kernel")


def arguments(name, gate="g", **options):
    """What gdn_inputs gives, without the gate for the functions that have none."""
    gate = None if name in UNGATED else gate
    inputs = gdn_inputs(H=1, K=16, V=8, gate=gate, **options)
    return {n: x for n, x in inputs.items() if name in GATED or n not in OF_THE_GATE}


@pytest.mark.parametrize("name", GATED + UNGATED)
def test_S13_smoke_call_of_every_public_function(device, name):
    """With its required arguments only, and with every one."""
    fn = getattr(flaop, name)
    inputs = arguments(name, T=5, HV=2, device=device)
    required = {n: inputs[n] for n in ("q", "k", "v", "g", "beta") if n in inputs}
    o, state = fn(*required.values())
    assert state is None
    assert relative_error(o, gdn_oracle(**{"g": None, **required})[0]) < 1e-4
    every = arguments(
        name, lengths=[5, 0, 70], HV=2, device=device, gate="softplus", l2norm=True,
        neg_eigval=True, initial_state=True, state_v_first=True,
    )  # fmt: skip
    hints = {"chunk_size": 32, "split_size": 64, "disable_recompute": True}
    found = fn(**{**every, "scale": 0.7}, **hints)
    for x, ref in zip(found, gdn_oracle(**{"g": None, **every, "scale": 0.7})):
        assert relative_error(x, ref) < 1e-4


@pytest.mark.parametrize("lengths", [None, [5, 0, 70]], ids=["required", "every"])
def test_S13_smoke_call_of_every_stage(device, lengths):
    x = gdn_inputs(
        T=75, H=1, HV=2, K=16, V=8, device=device, lengths=lengths, initial_state=True,
        state_v_first=True,
    )  # fmt: skip
    packed, gates, states = {}, {}, {}
    if lengths:
        packed = {"cu_seqlens": x["cu_seqlens"]}
        gates = {"g": flaop.chunk_local_cumsum(x["g"], 64, **packed)}
        states = {
            "initial_state": x["initial_state"], "output_final_state": True, "chunk_size": 64,
            "state_v_first": True,
        }  # fmt: skip
    L = 0.2 * torch.randn(1, 75, 2, 64, device=device)
    A = flaop.solve_tril(L, **packed)
    assert relative_error(A, solve_tril_oracle(L, **packed)) < 1e-5
    first = (x["k"], x["v"], x["beta"], A)
    w, u = flaop.recompute_w_u(*first, **gates, **packed)
    for found, ref in zip((w, u), recompute_w_u_oracle(*first, **gates, **packed)):
        assert relative_error(found, ref) < 1e-4
    options = {**gates, **packed, **states}
    found = flaop.chunk_delta_fwd_h(x["k"], w, u, **options)
    expected = chunk_delta_fwd_h_oracle(x["k"], w, u, **options)
    for name, y, ref in zip(("h", "v_new", "final_state"), found, expected, strict=True):
        if name == "final_state" and not lengths:
            assert y is None
        else:
            assert relative_error(y, ref) < 1e-4, name


def transposed(x):
    return x.transpose(0, -1).contiguous().transpose(0, -1)


def every_second(x):
    return torch.stack([x, x + 1], -1).flatten(-2)[..., ::2]


def offset_by_one(x):
    return torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape)


def nan_outside(x):
    """What is not below the diagonal is not the matrix."""
    rows = torch.arange(x.shape[1], device=x.device) % x.shape[-1]
    below = torch.arange(x.shape[-1], device=x.device) < rows.view(1, -1, 1, 1)
    return torch.where(below, x, torch.nan)


@pytest.mark.parametrize(
    "view", [transposed, every_second, offset_by_one, nan_outside], ids=lambda f: f.__name__
)
def test_S01_S04_S06_any_view_of_the_matrix(device, view):
    """Bitwise the inverse and the gradient of the contiguous one."""
    L = 0.2 * torch.randn(2, 70, 2, 16, device=device)
    d_X = torch.randn(2, 70, 2, 16, device=device)
    results = []
    for x, d_x in ((L, d_X), (view(L), transposed(d_X))):
        x = x.detach().requires_grad_()
        X = flaop.solve_tril(x)
        results.append((X, *torch.autograd.grad(X, x, d_x)))
    for found, expected in zip(*results):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("name", GATED + UNGATED + STAGES)
def test_H11_R07_docstring_examples_run_and_use_real_layouts(name):
    fn = getattr(flaop, name)
    for test in doctest.DocTestFinder(recurse=False).find(fn, name):
        assert test.examples and doctest.DocTestRunner().run(test).failed == 0
    assert ("[B, T, H, BT]" if name == "solve_tril" else "[B, T, H, K]") in inspect.getdoc(fn)


@pytest.mark.parametrize("T", [1, 65])
@pytest.mark.parametrize("name", GATED[:1] + GATED[2:] + UNGATED[:1])
def test_I03_always_the_same_pair(device, T, name):
    for requires_grad in (False, True):
        inputs = arguments(
            name, T=T, dtype=torch.bfloat16, device=device, requires_grad=requires_grad
        )
        tensors = [inputs[n] for n in ("q", "k", "v", "g", "beta") if n in inputs]
        for wanted in (False, True):
            result = getattr(flaop, name)(*tensors, output_final_state=wanted)
            assert type(result) is tuple and len(result) == 2
            o, state = result
            assert o.dtype is torch.bfloat16 and o.shape == (1, T, 1, 8)
            if wanted:
                assert state.dtype is torch.float32 and state.shape == (1, 1, 16, 8)
            else:
                assert state is None


# K = 2, V = 3, beta 1, 1/2, 1/2, worked out on paper: outputs, final state.
HAND = {
    # S1 = [1 2 3; 0 0 0]; u2 = v2 / 2, S2 = [.5 1 1.5; 2 2.5 3];
    # u3 = ([7 8 9] - [.25 .5 .75]) / 2, S3 = [.25 .5 .75; 1 1.25 1.5] + [u3; 0 0 0]
    0.5: (
        [[1, 2, 3], [2.5, 3.5, 4.5], [4.625, 5.5, 6.375]],
        [[3.625, 4.25, 4.875], [1, 1.25, 1.5]],
    ),
    # S2 = [1 2 3; 2 2.5 3]; u3 = ([7 8 9] - [1 2 3]) / 2, S3 = [4 5 6; 2 2.5 3]
    1.0: ([[1, 2, 3], [3, 4.5, 6], [6, 7.5, 9]], [[4, 5, 6], [2, 2.5, 3]]),
    None: ([[1, 2, 3], [3, 4.5, 6], [6, 7.5, 9]], [[4, 5, 6], [2, 2.5, 3]]),
}


@pytest.mark.parametrize("decay_of_a_token", HAND)
def test_I06_three_tokens_by_hand(delta, device, decay_of_a_token):
    k = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]], device=device).view(1, 3, 1, 2)
    q = torch.tensor([[1.0, 0.0], [1.0, 1.0], [1.0, 1.0]], device=device).view(1, 3, 1, 2)
    v = torch.arange(1.0, 10.0, device=device).view(1, 3, 1, 3)
    beta = torch.tensor([1.0, 0.5, 0.5], device=device).view(1, 3, 1)
    g = None
    if decay_of_a_token is not None:
        g = torch.full_like(beta, decay_of_a_token).log()
    o, state = delta.fn(q, k, v, g, beta, scale=1.0, output_final_state=True)
    expected, rows = (torch.tensor(x, dtype=torch.float32) for x in HAND[decay_of_a_token])
    torch.testing.assert_close(o.view(3, 3).cpu(), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(state.view(2, 3).cpu(), rows, rtol=1e-6, atol=1e-6)
