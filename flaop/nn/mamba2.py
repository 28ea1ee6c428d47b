"""The mixer of Mamba-2 (arXiv:2405.21060)."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flaop.nn.conv import ShortConvolution
from flaop.nn.norm import RMSNorm
from flaop.nn.recurrent import RecurrentLayer, check_dt_range, draw_softplus_gate


class Mamba2State(NamedTuple):
    """What a layer carries from one piece of a sequence to the next."""

    conv: Tensor  # [N, W - 1, heads * headdim + 2 * groups * dstate]
    recurrent: Tensor  # [N, heads, headdim, dstate]; float32


class Mamba2Mixer(RecurrentLayer):
    """One projection to z, x, B, C and dt, a short convolution of x, B and C, Mamba-2's SSD.

    The output y * silu(z) passes a norm and a projection. Parameter names follow the published
    Mamba-2 checkpoints. The path is that of flaop.backend.

    Args:
        hidden_size: width of the residual stream.
        num_heads: number of heads.
        head_dim: values of a head (headdim).
        state_size: size of the state per value (dstate).
        num_groups: groups of heads that share B and C; num_heads is a multiple of it.
        conv_size: window of the short convolution, in tokens.
        dt_range: smallest and largest initial dt; the log decay per token starts between
            -dt and -16 dt.
        dt_limit: bounds of the step size.
        norm_eps: epsilon of the output norm.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int = 64,
        state_size: int = 128,
        num_groups: int = 1,
        conv_size: int = 4,
        dt_range: tuple[float, float] = (1e-3, 1e-1),
        dt_limit: tuple[float, float] = (0, float("inf")),
        norm_eps: float = 1e-5,
    ):
        super().__init__()
        if num_heads % num_groups:
            raise ValueError(
                f"num_heads must be a multiple of num_groups, got {num_heads} and {num_groups}"
            )
        self.num_heads, self.head_dim = num_heads, head_dim
        self.state_size, self.num_groups = state_size, num_groups
        self.dt_range, self.dt_limit = check_dt_range(dt_range), tuple(dt_limit)
        inner, shared = num_heads * head_dim, num_groups * state_size
        self.in_proj = nn.Linear(hidden_size, 2 * inner + 2 * shared + num_heads, bias=False)
        self.conv1d = ShortConvolution(inner + 2 * shared, conv_size, bias=True)
        self.A_log = nn.Parameter(torch.empty(num_heads))
        self.dt_bias = nn.Parameter(torch.empty(num_heads))
        self.D = nn.Parameter(torch.ones(num_heads))
        self.norm = RMSNorm(inner, norm_eps)
        self.out_proj = nn.Linear(inner, hidden_size, bias=False)
        self.reset_gate()

    @classmethod
    def from_config(cls, config, layer_idx: int) -> "Mamba2Mixer":
        """Query/key heads are groups, value heads are heads, the key size is the state's."""
        heads = config.num_heads if config.num_v_heads is None else config.num_v_heads
        return cls(
            config.hidden_size,
            heads,
            config.head_dim if config.head_v_dim is None else config.head_v_dim,
            state_size=config.head_dim,
            num_groups=config.num_heads,
            conv_size=config.conv_size,
            dt_range=config.dt_range,
            norm_eps=config.norm_eps,
        )

    def reset_gate(self) -> None:
        """Draws A_log and dt_bias."""
        draw_softplus_gate(self.A_log, self.dt_bias, self.dt_range)

    def initial_state(self, batch_size: int) -> Mamba2State:
        """A state of zeros, in the parameters' dtype (the recurrent part in float32)."""
        weight, conv = self.in_proj.weight, self.conv1d
        wide = torch.promote_types(weight.dtype, torch.float32)
        sizes = (batch_size, self.num_heads, self.head_dim, self.state_size)
        return Mamba2State(
            weight.new_zeros(batch_size, conv.kernel_size - 1, conv.hidden_size),
            weight.new_zeros(sizes, dtype=wide),
        )

    def forward(
        self,
        x: Tensor,  # [B, T, hidden_size]
        state: Mamba2State | None = None,
        cu_seqlens: Tensor | None = None,  # [N + 1]
        output_state: bool = False,
    ) -> tuple[Tensor, Mamba2State | None]:
        """Runs the layer over a piece of each sequence; gradients flow through both states.

        Args:
            x: [B, T, hidden_size]; B = 1 with cu_seqlens.
            state: the state before the piece; None is zeros.
            cu_seqlens: [N + 1] int32 or int64 on x's device, bounds of packed sequences.
            output_state: whether to return the state after the piece.

        Returns:
            y [B, T, hidden_size], and the state or None.
        """
        inner, shared = self.num_heads * self.head_dim, self.num_groups * self.state_size
        z, mixed, dt = self.in_proj(x).split([inner, inner + 2 * shared, self.num_heads], dim=-1)
        mixed, conv = self.convolve("conv", self.conv1d, mixed, state, cu_seqlens, output_state)
        x, B, C = mixed.split([inner, shared, shared], dim=-1)
        heads, groups = (self.num_heads, self.head_dim), (self.num_groups, self.state_size)
        x, z = x.unflatten(-1, heads), z.unflatten(-1, heads)
        # the arithmetic of flaop.mamba2_ssd around the operator
        wide = torch.promote_types(x.dtype, torch.float32)
        dt = F.softplus(dt.to(wide) + self.dt_bias).clamp(*self.dt_limit)
        g = -self.A_log.to(wide).exp() * dt
        values = (x * dt.unsqueeze(-1)).to(x.dtype)
        inputs = (C.unflatten(-1, groups), B.unflatten(-1, groups), values, g, None)
        options = {"scale": 1.0, "state_v_first": True}
        y, recurrent = self.operate("simple_gla", inputs, options, state, cu_seqlens, output_state)
        y = ((y + x * self.D.to(wide).unsqueeze(-1)) * F.silu(z.to(wide))).to(x.dtype)
        y = self.out_proj(self.norm(y.flatten(2)))
        return y, Mamba2State(conv, recurrent) if output_state else None
