"""The decayed pair products against their definition."""

import pytest
import torch

from flaop.reference.pairs import pair_products, token_decay, total_decay, unit_lower_inverse


@pytest.mark.parametrize("width", [1, 2, 16, 64])
@pytest.mark.parametrize("gate", [0.0, -0.01, -3.0, -1000.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_pair_products(width, gate, dtype):
    M, K = 3, 8
    x, y = torch.randn(M, width, 2, K, dtype=dtype), torch.randn(M, width, K, dtype=dtype)
    g = gate * torch.rand(M, width, K, dtype=dtype)
    # One gate empties a channel: its neighbours must keep all their digits.
    g[:, width // 2, 0] = -torch.inf
    decay = token_decay(g)
    rows, columns = x * decay.unsqueeze(2), y.clone()
    products = pair_products(rows, columns, decay)

    x, y, decay = x.double(), y.double(), g.double().exp()
    for i in range(width):
        for j in range(width):
            want = torch.zeros(2, M, dtype=torch.float64)
            if j < i:
                pair_decay = decay[:, j + 1 : i + 1].prod(1)
                want = torch.einsum("mnk,mk,mk->nm", x[:, i], y[:, j], pair_decay)
            torch.testing.assert_close(
                products[:, :, i, j].double(), want, rtol=0, atol=50 * torch.finfo(dtype).eps
            )
    prefix, total = decay.cumprod(1), decay.prod(1, keepdim=True)
    suffix = torch.stack([decay[:, j + 1 :].prod(1) for j in range(width)], dim=1)
    close = dict(rtol=1e-5, atol=1e-15)
    torch.testing.assert_close(rows.double(), x * prefix.unsqueeze(2), **close)
    torch.testing.assert_close(columns.double(), y * suffix, **close)
    torch.testing.assert_close(total_decay(token_decay(g)).double(), total, **close)


@pytest.mark.parametrize("width", [1, 16, 64])
def test_inverse_of_equal_keys(width):
    # All ones below the diagonal: the inverse is the identity minus the subdiagonal, exactly.
    L = torch.ones(1, width, width).tril(-1)
    want = torch.eye(width) - torch.ones(width - 1).diag(-1) if width > 1 else torch.eye(1)
    assert torch.equal(unit_lower_inverse(L)[0], want)


def test_inverse_ignores_the_upper_triangle():
    L = torch.randn(2, 64, 64).tril(-1) * 0.1
    A = unit_lower_inverse(L)
    assert torch.equal(A, unit_lower_inverse(L + torch.randn(2, 64, 64).triu()))
    assert A.triu(1).count_nonzero() == 0
    torch.testing.assert_close((torch.eye(64) + L) @ A, torch.eye(64).expand(2, 64, 64))
