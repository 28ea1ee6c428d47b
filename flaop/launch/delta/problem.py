"""One call of a delta family as the launchers of the chunk kernels see it."""

from typing import NamedTuple

import torch

from .. import cuda
from ..kernel import ABSENT, arch, configured, prepare
from ..table import chunk_table

CHUNK = 64
SAFE_BOUND = -5.0  # gates in [SAFE_BOUND, 0] may be factored within blocks of 16 tokens
DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


class Problem(NamedTuple):
    """One call as the launchers see it: aligned contiguous tensors, sizes, flags."""

    call: object
    q: torch.Tensor  # [B, T, H, K]
    k: torch.Tensor  # [B, T, H, K]
    v: torch.Tensor  # [B, T, HV, V]
    g: torch.Tensor | None  # [B, T, HV, K]; of gated_delta_rule [B, T, HV] or None
    beta: torch.Tensor  # [B, T, HV]
    A_log: torch.Tensor | None  # [HV]
    dt_bias: torch.Tensor | None  # [HV, K] or [HV * K]; of gated_delta_rule [HV]
    h0: torch.Tensor | None  # [N, HV, K, V] or [N, HV, V, K]
    table: object  # ChunkTable or None
    rows: int  # (sequence, chunk) rows of the grid
    gate: dict  # constexprs of the in-kernel options
    precision: str  # of products of the input dtype
    split: bool  # sums of gates from two fp16 terms
    inverse_dtype: torch.dtype  # operand dtype of the triangular inverse
    state_dtype: torch.dtype  # operand dtype of products with the state
    stored_state: torch.dtype  # of states kept per chunk
    cuda: bool  # the CUDA C++ kernels do what lies within the chunks

    def config(self, function, *flags):
        """(constexpr tiles, launch options) of a configuration function for this call."""
        call = self.call
        dtype = DTYPE_NAMES[self.q.dtype]
        return configured(function, arch(self.q.device), call.K, call.V, CHUNK, dtype, *flags)

    @property
    def state_shape(self):
        call = self.call
        last = (call.V, call.K) if call.state_v_first else (call.K, call.V)
        return (call.N, call.HV, *last)

    @property
    def B(self):
        """Sequences of a batch as kernels take it: 0 if packed."""
        return 0 if self.table else self.call.B

    @property
    def bounds(self):
        return self.table.bounds if self.table else ABSENT[torch.int64]

    @property
    def offsets(self):
        return self.table.offsets if self.table else ABSENT[torch.int32]

    @property
    def table_rows(self):
        return self.table.rows if self.table else ABSENT[torch.int32]


def problem(call):
    """The Problem of a checked KDA call; builds the chunk table of a packed one."""
    if call.use_gate_in_kernel:
        bounded = call.lower_bound is not None and call.lower_bound >= SAFE_BOUND
    else:
        bounded = call.safe_gate
    return _problem(call, {
        "USE_GATE": call.use_gate_in_kernel,
        "HAS_A_LOG": call.use_gate_in_kernel and call.A_log is not None,
        "HAS_BIAS": call.use_gate_in_kernel and call.dt_bias is not None,
        "HAS_BOUND": call.use_gate_in_kernel and call.lower_bound is not None,
        **_activations(call),
        # the centred factors of bounded gates leave the range of fp16
        "BOUNDED": bounded and call.q.dtype != torch.float16,
    }, cuda.serves_kda(call))  # fmt: skip


def scalar_problem(call):
    """The same for a call with one gate per head, or none."""
    return _problem(call, {
        "USE_G": call.g is not None,
        "USE_GATE": call.use_gate_in_kernel,
        "HAS_BIAS": call.use_gate_in_kernel and call.dt_bias is not None,
        **_activations(call),
    })  # fmt: skip


def _activations(call):
    return {
        "USE_L2NORM": call.use_qk_l2norm_in_kernel,
        "BETA_SIGMOID": call.use_beta_sigmoid_in_kernel,
        "NEG_EIGVAL": call.allow_neg_eigval,
    }


def _problem(call, gate, served=False):
    B, T, N = call.B, call.T, call.N
    packed = call.cu_seqlens is not None
    rows = max(-(-T // CHUNK) + N - 1, 0) if packed else B * -(-T // CHUNK)
    dtype = call.q.dtype
    return Problem(
        call,
        *(prepare(x) for x in (call.q, call.k, call.v, call.g, call.beta)),
        *(prepare(x) for x in (call.A_log, call.dt_bias, call.initial_state)),
        table=chunk_table(call.cu_seqlens, T, rows, CHUNK),
        rows=rows,
        gate=gate,
        precision="tf32x3" if dtype == torch.float32 else "tf32",
        split=dtype != torch.float32,
        inverse_dtype=torch.float32 if dtype == torch.float32 else torch.float16,
        # 65504 is less than a sum of values may reach
        state_dtype=torch.bfloat16 if dtype == torch.bfloat16 else torch.float32,
        stored_state=torch.bfloat16 if dtype == torch.bfloat16 else torch.float32,
        cuda=served,
    )
