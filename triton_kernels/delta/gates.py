"""In-kernel activations of the delta families, forward and derivative, in fp32.

    softplus gate   g = -exp(A_log) softplus(x + dt_bias)
    bounded gate    g = lower_bound sigmoid(exp(A_log) (x + dt_bias))
    beta            sigmoid(x), times 2 with allow_neg_eigval
    L2 norm         x rsqrt(sum x^2 + 1e-6)

Every function is finite where its exact value is: products such as exp(A_log) softplus(x) are
formed in the exponent, so that inf * 0 does not occur. Absent A_log and dt_bias are passed as 0.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
# base-2 log gates are floored here: exp2 of it is 0 in fp32, and sums of 64 of them stay finite
LOG2_GATE_FLOOR = tl.constexpr(-150.0)
# exp(80) times anything that is not yet saturated is finite, exp(89) is not
A_LOG_CAP = tl.constexpr(80.0)
L2NORM_EPS = tl.constexpr(1e-6)


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp2(-x * LOG2E))


@triton.jit
def log1p_ratio(e):
    """log(1 + e) / e for e in [0, 1], relative error 1e-7: 2 atanh(s) / e with s = e / (2 + e)."""
    b_inv = 1.0 / (2.0 + e)
    s = e * b_inv
    s = s * s
    # Horner form of the series 1 + s/3 + s^2/5 + ...; s <= 1/9
    p = 1.0 / 13.0
    p = p * s + 1.0 / 11.0
    p = p * s + 1.0 / 9.0
    p = p * s + 1.0 / 7.0
    p = p * s + 1.0 / 5.0
    p = p * s + 1.0 / 3.0
    p = p * s + 1.0
    return 2.0 * b_inv * p


@triton.jit
def gate_fwd(x, a_log, bias, lower_bound, BOUNDED: tl.constexpr):
    """Natural-log gate, <= 0, possibly -inf. NaN in, NaN out.

    x: raw gate, any shape, fp32; a_log, bias: fp32, broadcast against x; lower_bound: float.
    """
    z = x + bias
    b_a = tl.exp2(tl.minimum(a_log, A_LOG_CAP) * LOG2E)
    if BOUNDED:
        return lower_bound * sigmoid(b_a * z)
    else:
        b_abs = tl.abs(z)
        # exp(a) softplus(z) = exp(a) max(z, 0) + exp(a - |z|) log1p(e) / e,  e = exp(-|z|)
        b_tail = tl.exp2((a_log - b_abs) * LOG2E) * log1p_ratio(tl.exp2(-b_abs * LOG2E))
        return -(b_a * tl.maximum(z, 0.0) + b_tail)


@triton.jit
def gate_bwd(dg, x, a_log, bias, lower_bound, BOUNDED: tl.constexpr):
    """Gradient dg of the natural-log gate -> (dx, dA_log per element). ddt_bias is the sum of dx.

    Arguments as in gate_fwd. Both results are 0 where the gate is at its floor.
    """
    z = x + bias
    b_g = gate_fwd(x, a_log, bias, lower_bound, BOUNDED)
    b_live = b_g * LOG2E > LOG2_GATE_FLOOR
    b_a = tl.exp2(tl.minimum(a_log, A_LOG_CAP) * LOG2E)
    if BOUNDED:
        b_arg = b_a * z
        e = tl.exp2(-tl.abs(b_arg) * LOG2E)
        # s (1 - s) underflows long before its argument overflows: no inf * 0
        b_live = b_live & (e > 0.0)
        b_dz = dg * lower_bound * (e / ((1.0 + e) * (1.0 + e)))
        b_dx = b_dz * b_a
        b_da = b_dz * b_arg
    else:
        e = tl.exp2(-tl.abs(z) * LOG2E)
        b_da = dg * b_g
        b_dx = -dg * (tl.exp2((a_log + tl.minimum(z, 0.0)) * LOG2E) / (1.0 + e))
    return tl.where(b_live, b_dx, 0.0), tl.where(b_live, b_da, 0.0)


@triton.jit
def log2_gate(g):
    """Natural-log gate -> base-2 log gate, floored. NaN in, NaN out."""
    return tl.maximum(g * LOG2E, LOG2_GATE_FLOOR, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def beta_fwd(x, USE_SIGMOID: tl.constexpr, NEG_EIGVAL: tl.constexpr):
    """Write strength from its input, fp32."""
    if USE_SIGMOID:
        x = sigmoid(x)
        if NEG_EIGVAL:
            x = x * 2.0
    return x


@triton.jit
def beta_bwd(dbeta, x, USE_SIGMOID: tl.constexpr, NEG_EIGVAL: tl.constexpr):
    """Gradient of the write strength -> gradient of its input x, fp32."""
    if USE_SIGMOID:
        dbeta = dbeta * (sigmoid(x) * sigmoid(-x))
        if NEG_EIGVAL:
            dbeta = dbeta * 2.0
    return dbeta


@triton.jit
def l2norm_fwd(x, axis: tl.constexpr):
    """x / sqrt(sum x^2 + eps) along an axis, fp32."""
    return x * tl.rsqrt(tl.sum(x * x, axis, keep_dims=True) + L2NORM_EPS)


@triton.jit
def l2norm_bwd(dy, x, axis: tl.constexpr):
    """Gradient dy of the normalised vector -> gradient of x, fp32."""
    b_rstd = tl.rsqrt(tl.sum(x * x, axis, keep_dims=True) + L2NORM_EPS)
    y = x * b_rstd
    return b_rstd * (dy - y * tl.sum(y * dy, axis, keep_dims=True))
