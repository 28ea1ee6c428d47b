"""RMSNorm and its gated form against torch's rms_norm."""

import torch
from torch.nn import functional as F

from flaop.nn import GatedRMSNorm, RMSNorm


def test_equals_torch(device):
    x = torch.randn(3, 5, 8, dtype=torch.float64, device=device)
    gate = torch.randn_like(x)
    plain, gated = (kind(8, eps=1e-6).to(x) for kind in (RMSNorm, GatedRMSNorm))
    for norm in (plain, gated):
        torch.nn.init.normal_(norm.weight)
    torch.testing.assert_close(plain(x), F.rms_norm(x, (8,), plain.weight, 1e-6))
    expected = F.rms_norm(x, (8,), gated.weight, 1e-6) * gate.sigmoid()
    torch.testing.assert_close(gated(x, gate), expected)


def test_statistics_in_float32(device):
    norm = RMSNorm(64).to(device)
    x = 300 * torch.randn(4, 64, device=device).half()  # squares overflow in half precision
    assert norm(x).dtype == torch.float16
    torch.testing.assert_close(norm(x), norm(x.float()).half())
