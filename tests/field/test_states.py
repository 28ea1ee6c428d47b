"""Field reports on states: gradients, dtypes, layouts (I)."""

import pytest
import torch

import flaop
from flaop.testing import kda_inputs, kda_oracle, relative_error

TOKENS = ("q", "k", "v", "g", "beta")


@pytest.mark.parametrize("state_v_first", [False, True])
def test_I01_axes_of_the_initial_state(fn, device, matches, state_v_first):
    """A state with one entry, S[0, 1]: q[0] reads it into o[1]."""
    inputs = kda_inputs(
        T=3, H=1, K=16, V=16, device=device, initial_state=True, state_v_first=state_v_first
    )
    matches(fn, inputs)
    inputs["initial_state"].zero_()
    inputs["initial_state"][(0, 0, 1, 0) if state_v_first else (0, 0, 0, 1)] = 1
    inputs["beta"].zero_()
    o, _ = fn(**inputs, scale=1.0) if "scale" not in inputs else fn(**{**inputs, "scale": 1.0})
    expected = torch.zeros_like(o)
    expected[..., 1] = inputs["q"][..., 0] * inputs["g"][..., 0].cumsum(1).exp()
    torch.testing.assert_close(o, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("decode", [flaop.chunk_kda, flaop.fused_recurrent_kda])
@pytest.mark.parametrize("state_v_first", [False, True])
@pytest.mark.parametrize("V", [32, 64])
def test_I02_prefill_then_decode(fn, device, decode, state_v_first, V):
    """70 tokens by one path, 5 by any, in one layout: 75 in one call."""
    inputs = kda_inputs(T=75, H=1, K=32, V=V, device=device, state_v_first=state_v_first)
    first = {**inputs, **{name: inputs[name][:, :70] for name in TOKENS}}
    _, state = fn(**first)
    outputs = []
    for t in range(70, 75):
        token = {name: inputs[name][:, t : t + 1] for name in TOKENS}
        o, state = decode(**{**inputs, **token, "initial_state": state})
        outputs.append(o)
    expected, expected_state = kda_oracle(**inputs)
    assert relative_error(torch.cat(outputs, 1), expected[:, 70:]) < 1e-4
    assert relative_error(state, expected_state) < 1e-4
    if V != 32:
        with pytest.raises(ValueError, match="initial_state must have shape"):
            decode(**{**inputs, "initial_state": state.mT.contiguous()})


@pytest.mark.parametrize("T", [1, 64, 65])
@pytest.mark.parametrize("backend", [None, "chunk", "fused_recurrent"])
def test_I03_always_the_same_pair(device, T, backend):
    for requires_grad in (False, True):
        for wanted in (False, True):
            inputs = kda_inputs(
                T=T, H=1, K=8, V=8, dtype=torch.bfloat16, device=device,
                output_final_state=wanted, requires_grad=requires_grad,
            )  # fmt: skip
            result = flaop.kda(**inputs, backend=backend)
            assert type(result) is tuple and len(result) == 2
            o, state = result
            assert o.dtype is torch.bfloat16 and o.shape == (1, T, 1, 8)
            if wanted:
                assert state.dtype is torch.float32 and state.shape == (1, 1, 8, 8)
            else:
                assert state is None


def test_I05_no_state_and_a_zero_state(fn, device, gradients_of):
    inputs = kda_inputs(T=70, H=1, K=16, V=8, device=device)
    zeros = {**inputs, "initial_state": torch.zeros(1, 1, 16, 8, device=device)}
    outputs, gradients = gradients_of(fn, inputs)
    with_zeros, with_zero_gradients = gradients_of(fn, zeros)
    for name, x in outputs.items():
        assert relative_error(x, with_zeros[name]) < 1e-6, name
    for name, x in gradients.items():
        assert relative_error(x, with_zero_gradients[name]) < 1e-5, name
    assert with_zero_gradients["initial_state"].any()


def test_I06_three_tokens_by_hand(fn, device):
    """K = 2, V = 3, worked out on paper: decay first, then the correction, then the read."""
    k = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]], device=device).view(1, 3, 1, 2)
    q = torch.tensor([[1.0, 0.0], [1.0, 1.0], [1.0, 1.0]], device=device).view(1, 3, 1, 2)
    v = torch.tensor([[1.0, 2, 3], [4, 5, 6], [7, 8, 9]], device=device).view(1, 3, 1, 3)
    g = torch.tensor([[0.5, 0.5], [0.5, 0.25], [0.5, 0.25]], device=device).log().view(1, 3, 1, 2)
    beta = torch.tensor([1.0, 1.0, 0.5], device=device).view(1, 3, 1)
    o, state = fn(q, k, v, g, beta, scale=1.0, output_final_state=True)
    # S1 = [1 2 3; 0 0 0].  S2 = [0.5 1 1.5; 4 5 6].
    # Token 3: S' = [0.25 0.5 0.75; 1 1.25 1.5], u = ([7 8 9] - [0.25 0.5 0.75]) / 2
    expected = torch.tensor([[1.0, 2, 3], [4.5, 6, 7.5], [4.625, 5.5, 6.375]])
    torch.testing.assert_close(o.view(3, 3).cpu(), expected, rtol=1e-6, atol=1e-6)
    rows = torch.tensor([[3.625, 4.25, 4.875], [1.0, 1.25, 1.5]])
    torch.testing.assert_close(state.view(2, 3).cpu(), rows, rtol=1e-6, atol=1e-6)
