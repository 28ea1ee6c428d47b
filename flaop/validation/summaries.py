"""Arguments of the summary ops, which lack some of those of their family.

A forward summary has no q, and a backward one no v: what it has of the same shape stands in.
"""

import re
from collections.abc import Callable

from torch import Tensor

from . import checks, gated_delta_rule, kda
from .decay import DecayCall, check_gla, check_simple_gla
from .gated_delta_rule import GdnCall
from .kda import KdaCall

# Options between dt_bias and chunk_size.
_KDA_FLAGS, _GDN_FLAGS = 6, 4


def check_kda(
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    *options,
) -> KdaCall:
    """Check the arguments of chunk_kda_summary. `options` are the flags and chunk_size."""
    return _standing_in(
        *(kda.check, {"q": "k"}, k, k, v, g, beta, None, None, False, cu_seqlens, A_log, dt_bias),
        *_with_state_layout(_KDA_FLAGS, options),
    )


def check_kda_bwd(
    d_o: Tensor,
    q: Tensor,
    k: Tensor,
    g: Tensor,
    beta: Tensor,
    A: Tensor | None = None,
    A_qk: Tensor | None = None,
    w: Tensor | None = None,
    qg: Tensor | None = None,
    kg: Tensor | None = None,
    decay: Tensor | None = None,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    *options,
) -> KdaCall:
    """Check the arguments of chunk_kda_summary_bwd; v of the call is d_o.

    w, qg, kg and decay are those of chunk_kda_recompute, or empty, all of them or none.
    """
    call = _standing_in(
        *(kda.check, {"v": "d_o"}, q, k, d_o, g, beta, scale, None, False, cu_seqlens, A_log),
        *(dt_bias, *_with_state_layout(_KDA_FLAGS, options)),
    )
    _check_residuals(call, A, A_qk)
    if w is not None and w.dim() == 4 and cu_seqlens is None:
        shape = (call.rows, call.HV, checks.CHUNK, call.K)
        for name, x in (("w", w), ("qg", qg), ("kg", kg)):
            checks.shape(name, x, shape, "R, HV, C, K")
        checks.shape("decay", decay, (*shape[:2], call.K), "R, HV, K")
    return call


def check_kda_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    *options,
) -> KdaCall:
    """Check the arguments of chunk_kda_summary_fwd."""
    return kda.check(
        *(q, k, v, g, beta, scale, None, True, None, A_log, dt_bias),
        *_with_state_layout(_KDA_FLAGS, options),
    )


def check_gated_delta_rule(
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    cu_seqlens: Tensor | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    *options,
) -> GdnCall:
    """Check the arguments of chunk_gated_delta_rule_summary."""
    return _standing_in(
        *(gated_delta_rule.check, {"q": "k"}, k, k, v, g, beta, None, None, False, cu_seqlens),
        *(A_log, dt_bias, *_with_state_layout(_GDN_FLAGS, options)),
    )


def check_gated_delta_rule_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    scale: float | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    *options,
) -> GdnCall:
    """Check the arguments of chunk_gated_delta_rule_summary_fwd."""
    return gated_delta_rule.check(
        *(q, k, v, g, beta, scale, None, True, None, A_log, dt_bias),
        *_with_state_layout(_GDN_FLAGS, options),
    )


def check_gated_delta_rule_bwd(
    d_o: Tensor,
    q: Tensor,
    k: Tensor,
    g: Tensor | None,
    beta: Tensor,
    A: Tensor | None = None,
    A_qk: Tensor | None = None,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    *options,
) -> GdnCall:
    """Check the arguments of chunk_gated_delta_rule_summary_bwd; v of the call is d_o."""
    call = _standing_in(
        *(gated_delta_rule.check, {"v": "d_o"}, q, k, d_o, g, beta, scale, None, False),
        *(cu_seqlens, A_log, dt_bias, *_with_state_layout(_GDN_FLAGS, options)),
    )
    _check_residuals(call, A, A_qk)
    return call


def check_simple_gla_summary(
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
) -> DecayCall:
    """Check the arguments of chunk_simple_gla_summary."""
    return _standing_in(
        *(check_simple_gla, {"q": "k"}, k, k, v, g, g_gamma, None, None, False, cu_seqlens),
        *(False, chunk_size),
    )


def check_simple_gla_summary_bwd(
    d_o: Tensor,
    q: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
) -> DecayCall:
    """Check the arguments of chunk_simple_gla_summary_bwd; k of the call is q, and v is d_o."""
    return _standing_in(
        *(check_simple_gla, {"v": "d_o", "k": "q"}, q, q, d_o, g, g_gamma, scale, None, False),
        *(cu_seqlens, False, chunk_size),
    )


def check_gla_summary(
    k: Tensor, v: Tensor, g: Tensor, cu_seqlens: Tensor | None = None, chunk_size: int = 64
) -> DecayCall:
    """Check the arguments of chunk_gla_summary."""
    return _standing_in(
        *(check_gla, {"q": "k"}, k, k, v, g, None, None, False, cu_seqlens, False, chunk_size)
    )


def check_gla_summary_bwd(
    d_o: Tensor,
    q: Tensor,
    g: Tensor,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
) -> DecayCall:
    """Check the arguments of chunk_gla_summary_bwd; k of the call is q, and v is d_o."""
    return _standing_in(
        *(check_gla, {"v": "d_o", "k": "q"}, q, q, d_o, g, scale, None, False, cu_seqlens),
        *(False, chunk_size),
    )


def _with_state_layout(flags: int, options: tuple) -> tuple:
    """The options of a delta family, with its state_v_first between so many flags and chunk_size.

    Arguments at the end of a call that have their default do not come.
    """
    return options if len(options) <= flags else (*options[:flags], False, *options[flags:])


def _check_residuals(call: KdaCall | GdnCall, A: Tensor | None, A_qk: Tensor | None) -> None:
    """Both of chunk_F_fwd, or none."""
    if (A is None) != (A_qk is None):
        raise ValueError("A and A_qk come from one forward: got one without the other")
    if A is not None:
        kda.check_backward(call, None, None, A=A, A_qk=A_qk)


def _standing_in(check: Callable, names: dict[str, str], *args):
    """check(*args), whose sentences call the arguments by the names they have here."""
    try:
        return check(*args)
    except (ValueError, TypeError) as error:
        pattern = r"\b(" + "|".join(names) + r")\b"
        text = re.sub(pattern, lambda match: names[match[0]], str(error))
        raise type(error)(text) from None
