"""What the recurrent layers share: projections with convolutions, states, slots, decay rates."""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import flaop
import flaop.distributed
from flaop.nn.conv import ShortConvolution
from flaop.nn.slots import SlotCache, Slots

# Where the initial decay rates A * dt start, as in Mamba-2 (arXiv:2405.21060).
_A_RANGE = (1.0, 16.0)
# Most tokens of a sequence in one call of a step op.
_STEP_TOKENS = 8


class LinearAttentionState(NamedTuple):
    """What a layer carries from one piece of a sequence to the next."""

    q_conv: Tensor  # [N, W - 1, H * K]; W - 1 is 0 without convolutions
    k_conv: Tensor  # [N, W - 1, H * K]
    v_conv: Tensor  # [N, W - 1, HV * V]
    recurrent: Tensor  # [N, HV, K, V], or [N, HV, V, K] with state_v_first; float32


class StateCache(SlotCache):
    """The states of a layer, one per slot; the state_type is a tuple that ends with `recurrent`."""

    def __init__(self, state: tuple):  # of num_slots + 1 sequences
        super().__init__(state.recurrent.shape[0] - 1)
        self.state_type = type(state)
        for name, tensor in state._asdict().items():
            self.register_buffer(name, tensor)

    def state(self) -> tuple:
        """The state whose sequences are the slots, as views."""
        buffers = (getattr(self, name) for name in self.state_type._fields)
        return self.state_type(*(buffer[: self.num_slots] for buffer in buffers))


class SlotState(NamedTuple):
    """Takes the place of a state where a layer runs on slots of its cache, in place."""

    cache: StateCache
    slots: Slots


class RecurrentLayer(nn.Module):
    """A layer with initial_state(batch_size) and forward(x, state, cu_seqlens, output_state).

    Its forward runs its convolutions by `convolve` and its operator by `operate`, so that it takes
    a SlotState as well, and shards of sequences.
    """

    backend: str | None = None
    context_parallel: flaop.distributed.Group | None = None

    def set_context_parallel(self, group) -> None:
        """From now on x is this rank's shard of sequences, and cu_seqlens global.

        Rows of states are there where their sequences start and end, and zero elsewhere; every
        rank takes part in every call and every backward.

        Args:
            group: a ProcessGroup, a DeviceMesh of one dimension, (mesh, dimension), or None: no
                shards.
        """
        if group is not None and self.backend not in (None, "auto", "chunk"):
            raise ValueError(f"shards take the chunk path, got backend={self.backend!r}")
        self.context_parallel = None if group is None else flaop.distributed.resolve(group)

    def make_cache(
        self, num_slots: int, max_length: int, state_dtype: torch.dtype | None = None
    ) -> StateCache:
        """A cache of num_slots states; its size does not depend on max_length.

        The recurrent part is in state_dtype: float32 (None; float64 for float64 parameters),
        bfloat16 or float16.
        """
        state = self.initial_state(num_slots + 1)
        return StateCache(state._replace(recurrent=state.recurrent.to(state_dtype)))

    @torch.no_grad()
    def extend(
        self,
        x: Tensor,  # [B, T, hidden_size]
        cache: StateCache,
        state_indices: Tensor | Slots | None = None,  # [N]
        cu_seqlens: Tensor | None = None,  # [N + 1]
    ) -> Tensor:
        """Runs x from the states in the cache's slots and writes the new states into them.

        Args:
            x: [B, T, hidden_size]; B = 1 with cu_seqlens.
            cache: from make_cache.
            state_indices: the slot of each sequence, see SlotCache.select; None: 0, 1, 2, ...
            cu_seqlens: [N + 1] int32 or int64 on x's device, bounds of packed sequences.

        Up to 8 tokens run by the step op, more of them and packed sequences by the chunk op on
        pools: `backend` has no say. Nothing is read on the host.
        """
        if self.context_parallel is not None:
            raise ValueError("a layer that holds shards has no cache: set_context_parallel(None)")
        slots = cache.select(state_indices, x, cu_seqlens)
        return self(x, SlotState(cache, slots), cu_seqlens)[0]

    def convolve(
        self,
        name: str,  # of the convolution's state
        conv: ShortConvolution,
        x: Tensor,  # [B, T, D]
        state: tuple | None,
        cu_seqlens: Tensor | None,
        output_state: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """conv(x), and its new state: None where it is not asked for, or in a cache."""
        if not isinstance(state, SlotState):
            tail = None if state is None else getattr(state, name)
            return conv(x, tail, cu_seqlens, output_state, self.context_parallel)
        tails, rows = getattr(state.cache, name), state.slots.rows
        y, tail = conv(x, tails[rows], cu_seqlens, output_state=True)
        tails[rows] = tail.to(tails.dtype)
        return y, None

    def operate(
        self,
        family: str,
        inputs: tuple,  # q, k, v, gates and beta, as the family's operator takes them
        options: dict,  # its keyword arguments that come from the layer
        state: tuple | None,
        cu_seqlens: Tensor | None,
        output_state: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """flaop.<family>, or on slots its step or its chunk op on pools.

        Returns o [B, T, HV, V], and the new state: None where it is not asked for, or in a cache.
        """
        if not isinstance(state, SlotState):
            options = {
                "initial_state": None if state is None else state.recurrent,
                "output_final_state": output_state,
                "cu_seqlens": cu_seqlens,
                **options,
            }
            group = self.context_parallel
            if group is None:
                return getattr(flaop, family)(*inputs, backend=self.backend, **options)
            return getattr(flaop.distributed, family)(*inputs, group=group, **options)
        pool = state.cache.recurrent, state.slots.indices
        if cu_seqlens is None and inputs[0].shape[1] <= _STEP_TOKENS:
            # a promise for the chunk path alone
            options = {name: value for name, value in options.items() if name != "safe_gate"}
            return getattr(flaop, f"{family}_step_")(*inputs, *pool, **options), None
        run = getattr(flaop, f"chunk_{family}_pool_")
        return run(*inputs, *pool, cu_seqlens=cu_seqlens, **options), None


class LinearAttentionLayer(RecurrentLayer):
    """Projections of q, k and v, each through a short convolution with silu.

    Args:
        hidden_size: width of the residual stream.
        num_heads: number of query/key heads H.
        head_dim: key size K of a head.
        num_v_heads: number of value heads HV, a multiple of H; None is H.
        head_v_dim: value size V of a head; None is K.
        conv_size: window of the short convolutions, in tokens; 0: none.
        state_v_first: whether the recurrent state is [N, HV, V, K].
        backend: the path of the operator; None follows flaop.backend.
        activation: "silu" or None, of q, k and v where there are no convolutions.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        num_v_heads: int | None,
        head_v_dim: int | None,
        conv_size: int,
        state_v_first: bool,
        backend: str | None,
        activation: str | None = None,
    ):
        super().__init__()
        num_v_heads = num_heads if num_v_heads is None else num_v_heads
        head_v_dim = head_dim if head_v_dim is None else head_v_dim
        if num_v_heads % num_heads:
            raise ValueError(
                f"num_v_heads must be a multiple of num_heads, got {num_v_heads} and {num_heads}"
            )
        self.num_heads, self.num_v_heads = num_heads, num_v_heads
        self.head_dim, self.head_v_dim = head_dim, head_v_dim
        self.key_size, self.value_size = num_heads * head_dim, num_v_heads * head_v_dim
        self.conv_size = conv_size
        self.state_v_first = state_v_first
        self.backend = backend
        self.activation = activation
        self.q_proj = nn.Linear(hidden_size, self.key_size, bias=False)
        self.k_proj = nn.Linear(hidden_size, self.key_size, bias=False)
        self.v_proj = nn.Linear(hidden_size, self.value_size, bias=False)
        if conv_size:
            self.q_conv1d = ShortConvolution(self.key_size, conv_size)
            self.k_conv1d = ShortConvolution(self.key_size, conv_size)
            self.v_conv1d = ShortConvolution(self.value_size, conv_size)

    def initial_state(self, batch_size: int) -> LinearAttentionState:
        """A state of zeros, in the parameters' dtype (the recurrent part in float32)."""
        weight, carried = self.q_proj.weight, max(self.conv_size - 1, 0)
        wide = torch.promote_types(weight.dtype, torch.float32)
        sizes = (self.head_dim, self.head_v_dim)
        matrix = sizes[::-1] if self.state_v_first else sizes
        return LinearAttentionState(
            *(
                weight.new_zeros(batch_size, carried, size)
                for size in (self.key_size, self.key_size, self.value_size)
            ),
            weight.new_zeros(batch_size, self.num_v_heads, *matrix, dtype=wide),
        )

    def project(
        self,
        x: Tensor,  # [B, T, hidden_size]
        state: LinearAttentionState | SlotState | None,
        cu_seqlens: Tensor | None,  # [N + 1]
        output_state: bool,
    ) -> tuple[tuple[Tensor, Tensor, Tensor], tuple]:
        """q, k [B, T, H, K], v [B, T, HV, V], and the states of the convolutions or Nones."""
        tensors = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if self.conv_size:
            names = LinearAttentionState._fields[:3]
            convs = (self.q_conv1d, self.k_conv1d, self.v_conv1d)
            pairs = [
                self.convolve(name, conv, y, state, cu_seqlens, output_state)
                for name, conv, y in zip(names, convs, tensors, strict=True)
            ]
            tensors, states = zip(*pairs, strict=True)
        else:
            if self.activation == "silu":
                tensors = tuple(F.silu(y) for y in tensors)
            states = (None,) * 3
            if output_state:
                N = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
                states = tuple(y.new_zeros(N, 0, y.shape[-1]) for y in tensors)
        q, k, v = tensors
        return (
            q.unflatten(-1, (self.num_heads, self.head_dim)),
            k.unflatten(-1, (self.num_heads, self.head_dim)),
            v.unflatten(-1, (self.num_v_heads, self.head_v_dim)),
        ), states


def check_dt_range(dt_range: tuple[float, float]) -> tuple[float, float]:
    """The range as a tuple; raises ValueError."""
    if not 0.0 < dt_range[0] <= dt_range[1]:
        raise ValueError(f"dt_range must be positive and ordered, got {dt_range}")
    return tuple(dt_range)


def draw_rates(
    A_log: Tensor, dt_bias: Tensor, dt_range: tuple[float, float]
) -> tuple[Tensor, Tensor]:
    """A uniform in [1, 16] and dt log-uniform in dt_range, shaped as the two parameters."""
    A = torch.empty_like(A_log).uniform_(*_A_RANGE)
    return A, torch.empty_like(dt_bias).uniform_(*map(math.log, dt_range)).exp()


@torch.no_grad()
def draw_softplus_gate(A_log: Tensor, dt_bias: Tensor, dt_range: tuple[float, float]) -> None:
    """Draws both so that -exp(A_log) softplus(dt_bias) is -A * dt."""
    A, dt = draw_rates(A_log, dt_bias, dt_range)
    A_log.copy_(A.log())
    dt_bias.copy_(inverse_softplus(dt))


def inverse_softplus(x: Tensor) -> Tensor:
    return x + torch.log(-torch.expm1(-x))
