"""Root-mean-square norms, plain and with an output gate; statistics in float32."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_ACTIVATIONS = {"sigmoid": torch.sigmoid, "silu": F.silu}


class RMSNorm(nn.Module):
    """x * rsqrt(mean(x^2) + eps) * weight over the last axis; returns x's dtype."""

    def __init__(self, hidden_size: int, eps: float = 1e-5):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size))

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"

    def _normalize(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return wide * scale * self.weight

    def forward(self, x: Tensor) -> Tensor:  # [..., D]
        return self._normalize(x).to(x.dtype)


class GatedRMSNorm(RMSNorm):
    """RMSNorm(x) * act(gate), the output norm of Kimi Linear (arXiv:2510.26692) and others.

    Args:
        hidden_size: size of the last axis.
        eps: added to the mean square.
        activation: "sigmoid" or "silu".
    """

    def __init__(self, hidden_size: int, eps: float = 1e-5, activation: str = "sigmoid"):
        super().__init__(hidden_size, eps)
        if activation not in _ACTIVATIONS:
            raise ValueError(f"activation must be 'sigmoid' or 'silu', got {activation!r}")
        self.activation = activation

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:  # both [..., D]
        y = self._normalize(x)
        return (y * _ACTIVATIONS[self.activation](gate.to(y.dtype))).to(x.dtype)
