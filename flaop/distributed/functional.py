"""The documented functions of context parallelism."""

from collections.abc import Callable

import torch
from torch import Tensor

from flaop.distributed.agreement import agree
from flaop.distributed.chunk import FAMILIES, chunk
from flaop.distributed.group import Group, resolve
from flaop.validation import checks
from flaop.validation import gated_delta_rule as _gdn
from flaop.validation import kda as _kda
from flaop.validation.decay import check_gla, check_simple_gla

_CHECKS = {
    "kda": _kda.check,
    "gated_delta_rule": _gdn.check,
    "simple_gla": check_simple_gla,
    "gla": check_gla,
}


def kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    group,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    chunk_size: int = 64,
    split_size: int = 0,
    disable_recompute: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Kimi Delta Attention on sequences that are cut into shards over the ranks of a group.

    Rank r of R ranks holds tokens [r T, (r + 1) T) of R T tokens in all; T is the same on every
    rank. Sequences start, end and span anywhere. Every rank calls it, and runs the backward if one
    does: both hold one all-gather. Takes the chunk path whatever the length.

    Args:
        q, k, v, g, beta: the shard of this rank, shaped as for `flaop.kda`.
        group: a ProcessGroup, a DeviceMesh of one dimension (`mesh["cp"]`), (mesh, dimension), or
            what `flaop.distributed.resolve` made of one.
        initial_state: [N, HV, K, V] on every rank, or on none. Row n is read on the rank where
            sequence n starts, and its gradient is zero on the others: gradients sum over the ranks.
        output_final_state: return the state after the last token; the same on every rank.
        cu_seqlens: global offsets [N + 1], in [0, R T], the same on every rank; needs B = 1. None:
            each of the B sequences spans all ranks.

    The others are those of `flaop.kda`.

    Returns:
        o [B, T, HV, V], the shard's outputs, and the final state [N, HV, K, V] or None. Row n of it
        is there on the rank where sequence n ends, and zero on the others.

    Raises:
        ValueError: a shape, device or value breaks the above on any rank, or the calls differ: the
            same sentence on every rank, before any of them waits for another. A group that is not
            initialised. With FLAOP_DEBUG=1 also cu_seqlens that differ.
        TypeError: a dtype does.
        NotImplementedError: double backward.

    A traced call is checked by its fakes alone: nothing is exchanged.

    Cost: beside the chunk op, a summary of the shard in each direction (the within-chunk stages and
    a scan), an all-gather of 4 HV K (V + K) bytes a rank and member of the batch, and with
    cu_seqlens N states. docs/context_parallel.md has the derivation.

    Reference: Kimi Linear, arXiv:2510.26692; the transfer matrix of a chunk, arXiv:2406.06484.
    """
    return _call(
        *("kda", group, q, k, v, g, beta, scale, initial_state, output_final_state, cu_seqlens),
        *(A_log, dt_bias, use_qk_l2norm_in_kernel, use_gate_in_kernel),
        *(use_beta_sigmoid_in_kernel, allow_neg_eigval, safe_gate, lower_bound, state_v_first),
        *(chunk_size, split_size, disable_recompute),
    )


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    *,
    group,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    chunk_size: int = 64,
    split_size: int = 0,
    disable_recompute: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule on sequences that are cut into shards over the ranks of a group.

    Args:
        q, k, v, g, beta: the shard of this rank, shaped as for `flaop.gated_delta_rule`; g may be
            None.
        group, initial_state, output_final_state, cu_seqlens: as of `flaop.distributed.kda`.

    The others are those of `flaop.gated_delta_rule`.

    Returns, Raises and Cost: as of `flaop.distributed.kda`.

    Reference: Gated Delta Networks, arXiv:2412.06464.
    """
    return _call(
        *("gated_delta_rule", group, q, k, v, g, beta, scale, initial_state, output_final_state),
        *(cu_seqlens, A_log, dt_bias, use_qk_l2norm_in_kernel, use_gate_in_kernel),
        *(use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first),
        *(chunk_size, split_size, disable_recompute),
    )


def simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    *,
    group,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    state_v_first: bool = False,
    chunk_size: int = 64,
    split_size: int = 0,
) -> tuple[Tensor, Tensor | None]:
    """Linear attention with a gate per head on sequences that are cut into shards.

    Args:
        q, k, v, g: the shard of this rank, shaped as for `flaop.simple_gla`.
        g_gamma: [HV], the same on every rank; its gradient is of this rank's tokens.
        group, initial_state, output_final_state, cu_seqlens: as of `flaop.distributed.kda`.

    The others are those of `flaop.simple_gla`.

    Returns and Raises: as of `flaop.distributed.kda`.

    Cost: as of `flaop.distributed.kda`, with an all-gather of 4 HV K (V + 1) bytes.

    Reference: Mamba-2, arXiv:2405.21060.
    """
    return _call(
        *("simple_gla", group, q, k, v, g, g_gamma, scale, initial_state, output_final_state),
        *(cu_seqlens, state_v_first, chunk_size, split_size),
    )


def gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    *,
    group,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    state_v_first: bool = False,
    chunk_size: int = 64,
    split_size: int = 0,
) -> tuple[Tensor, Tensor | None]:
    """Gated linear attention on sequences that are cut into shards over the ranks of a group.

    A gate on value channels is served by the recurrent path of `flaop.gla` alone, not here.

    Args:
        q, k, v, g: the shard of this rank, shaped as for `flaop.gla`.
        group, initial_state, output_final_state, cu_seqlens: as of `flaop.distributed.kda`.

    The others are those of `flaop.gla`.

    Returns and Raises: as of `flaop.distributed.kda`.

    Cost: as of `flaop.distributed.kda`, with an all-gather of 4 HV K (V + 1) bytes.

    Reference: Gated Linear Attention Transformers, arXiv:2312.06635.
    """
    return _call(
        *("gla", group, q, k, v, g, scale, initial_state, output_final_state, cu_seqlens),
        *(state_v_first, chunk_size, split_size),
    )


def _call(family: str, group, *args) -> tuple[Tensor, Tensor | None]:
    group = resolve(group)
    if not torch.compiler.is_compiling():
        call = dict(zip(FAMILIES[family].arguments, args, strict=True))
        T = call["q"].shape[1] if call["q"].dim() > 1 else 0
        agree(group, _checker(family, group, args, call), {"T, the length of a shard,": T, **call})
    q, k, v, *others = args
    return chunk(family, group, (*_autocast(q, k, v), *others))


def _checker(family: str, group: Group, args: tuple, call: dict) -> Callable[[], None]:
    """Checks the arguments of this rank."""

    def check() -> None:
        q, k, v, *others = args
        checked = _CHECKS[family](*_autocast(q, k, v), *others)
        with_state = checked.initial_state is not None or checked.output_final_state
        if checked.N == 0 and with_state:
            raise ValueError(
                "initial_state and output_final_state need a sequence that starts and ends, got "
                f"none: cu_seqlens of shape {list(call['cu_seqlens'].shape)}"
                if checked.cu_seqlens is not None
                else "initial_state and output_final_state need a sequence that starts and ends, "
                f"got none: q of shape {list(q.shape)}"
            )
        if checks.DEBUG and checked.cu_seqlens is not None:
            checks.cu_seqlens_values(checked.cu_seqlens, group.size * checked.T)

    return check


def _autocast(*tensors: Tensor) -> list[Tensor]:
    """q, k and v as autocast casts them for the plain functions, and nothing else."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return list(tensors)
    dtype = torch.get_autocast_dtype(device)
    return [x if x.dtype == torch.float64 else x.to(dtype) for x in tensors]
