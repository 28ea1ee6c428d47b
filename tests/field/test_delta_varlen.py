"""Field reports on packed sequences and sizes (V) for the delta families. Those that they share
with others: test_decay_varlen.
"""

import pytest
import torch

import flaop
from flaop.testing import relative_error, solve_tril_oracle

SIZES = dict(H=1, K=16, V=8)


def test_V01_only_empty_sequences(delta, device, gradients_of):
    inputs = delta.inputs(lengths=[0] * 5, device=device, initial_state=True, **SIZES)
    outputs, gradients = gradients_of(delta.fn, inputs)
    assert outputs["o"].shape == (1, 0, 1, 8)
    assert torch.equal(outputs["state"], inputs["initial_state"])
    assert gradients["q"].shape == (1, 0, 1, 16)


@pytest.mark.parametrize("T, K, V", [(1, 8, 1), (2, 16, 8), (7, 12, 3), (65, 1, 1)])
def test_V06_sizes_below_a_tile(delta, device, matches, T, K, V):
    inputs = delta.inputs(T=T, H=1, K=K, V=V, device=device, initial_state=True)
    matches(delta.fn, inputs, oracle=delta.oracle)


@pytest.mark.parametrize(
    "T, K, V",
    [(3, 24, 16), (7, 60, 64), (8, 64, 100), (15, 100, 1), (16, 128, 8), (17, 192, 16),
     (63, 256, 8), (64, 8, 100), (20, 192, 384)],
)  # fmt: skip
def test_V06_S14_H05_odd_sizes(delta, matches, T, K, V):
    inputs = delta.inputs(T=T, H=1, K=K, V=V, initial_state=True)
    matches(delta.fn, inputs, oracle=delta.oracle)


@pytest.mark.parametrize("shape", [(0, 5), (2, 0)], ids=["no batch", "no token"])
def test_V07_nothing_to_invert(device, shape):
    L = torch.zeros(*shape, 1, 16, device=device, requires_grad=True)
    X = flaop.solve_tril(L)
    assert X.shape == L.shape
    X.sum().backward()
    assert L.grad.shape == L.shape


@pytest.mark.parametrize("bounds", [[0, 256, 512, 768], [0, 100, 50, 256], [1, 256], [0, 255]])
def test_V08_bounds_of_the_inverse_cannot_lead_outside(device, bounds):
    """As those of every op: made monotone and clamped; rows outside are zero."""
    L = torch.randn(1, 256, 1, 64, device=device) / 8
    bounds = torch.tensor(bounds)
    X = flaop.solve_tril(L, cu_seqlens=bounds.to(device))
    covered = bounds.clamp(0, 256).cummax(0).values
    assert relative_error(X, solve_tril_oracle(L, covered)) < 1e-5
    assert not X[:, : covered[0]].any() and not X[:, covered[-1] :].any()


@pytest.mark.parametrize("pieces", [[1, 2, 3, 63, 64, 64], [1] * 40], ids=["pieces", "tokens"])
def test_V10_pieces_with_carried_state(delta, device, pieces, pieces_make_one_run):
    inputs = delta.inputs(
        T=sum(pieces), device=device, initial_state=True, requires_grad=True, **SIZES
    )
    pieces_make_one_run(delta.fn, inputs, delta.tokens, pieces)
