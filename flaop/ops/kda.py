"""Kernels and fakes of the KDA ops. Schemas, autograd and autocast are in csrc/ops/kda.cpp."""

from contextlib import nullcontext

import torch
from torch import Tensor

from flaop.validation import checks
from flaop.validation.kda import CHUNK, KdaCall, check, check_backward, check_values


def _checked(*args) -> KdaCall:
    """For the kernels: a fake has no values to look at."""
    call = check(*args)
    if checks.DEBUG:
        check_values(call)
    return call


def _device_guard(q: Tensor):
    """Kernels run on q's device, whichever is current."""
    if q.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(q.device)


def _is_empty(call: KdaCall) -> bool:
    """No token or no sequence: nothing to launch."""
    return call.T == 0 or call.B == 0 or call.N == 0


# Allocation of what the ops return, for the fakes and for empty calls.


def _new_output(call: KdaCall) -> Tensor:
    return call.v.new_empty((call.B, call.T, call.HV, call.V))


def _new_state(call: KdaCall) -> Tensor:
    shape = call.state_shape if call.output_final_state else (0,)
    return call.q.new_empty(shape, dtype=call.state_dtype)


def _new_chunk_residuals(call: KdaCall) -> list[Tensor]:
    q, rows = call.q, call.rows
    A = [q.new_empty((call.B, call.T, call.HV, CHUNK)) for _ in range(2)]
    if not (call.disable_recompute and q.device.type == "cuda"):
        return A + _no_kept_residuals(call)
    keys = [q.new_empty((rows, call.HV, CHUNK, call.K)) for _ in range(3)]
    decay = q.new_empty((rows, call.HV, call.K), dtype=torch.float32)
    v_new = q.new_empty((call.B, call.T, call.HV, call.V))
    # fp16 states leave its range in ungated sums.
    state_dtype = torch.bfloat16 if q.dtype is torch.bfloat16 else torch.float32
    h = q.new_empty((rows, call.HV, call.K, call.V), dtype=state_dtype)
    return [*A, *keys, decay, v_new, h]


def _no_kept_residuals(call: KdaCall) -> list[Tensor]:
    """w, qg, kg, decay, v_new, h where the backward recomputes them."""
    q = call.q
    empty = [q.new_empty((0,)) for _ in range(6)]
    empty[3] = q.new_empty((0,), dtype=torch.float32)
    empty[5] = q.new_empty((0,), dtype=torch.float32)
    return empty


def _new_u(call: KdaCall) -> Tensor:
    return call.v.new_empty((call.B, call.T, call.HV, call.V), dtype=call.state_dtype)


def _inputs(call: KdaCall) -> tuple[Tensor | None, ...]:
    """The differentiable inputs, in the order of the gradients."""
    return (
        call.q,
        call.k,
        call.v,
        call.g,
        call.beta,
        call.A_log,
        call.dt_bias,
        call.initial_state,
    )


def _new_gradients(call: KdaCall, grad_mask) -> list[Tensor]:
    return [
        x.new_empty(x.shape) if wanted and x is not None else _no_gradient(call, x)
        for x, wanted in zip(_inputs(call), grad_mask, strict=True)
    ]


def _no_gradient(call: KdaCall, x: Tensor | None) -> Tensor:
    return (call.q if x is None else x).new_empty((0,))


# Calls without a token or without a sequence.


def _passed_state(call: KdaCall) -> Tensor:
    """The state that enters leaves unchanged."""
    state = _new_state(call)
    if not call.output_final_state:
        return state
    if call.initial_state is None:
        return state.zero_()
    return state.copy_(call.initial_state)


def _passed_gradients(call: KdaCall, d_final_state: Tensor | None, grad_mask) -> list[Tensor]:
    gradients = [x.zero_() for x in _new_gradients(call, grad_mask)]
    if d_final_state is not None and call.initial_state is not None and grad_mask[7]:
        gradients[7].copy_(d_final_state)
    return gradients


# What the kernels return, brought into the form of the schemas.


def _final_state(call: KdaCall, final_state: Tensor | None) -> Tensor:
    if call.output_final_state:
        return final_state
    return _new_state(call)


def _gradients(call: KdaCall, gradients, grad_mask) -> list[Tensor]:
    return [
        _no_gradient(call, x) if gradient is None or not wanted else gradient
        for gradient, x, wanted in zip(gradients, _inputs(call), grad_mask, strict=True)
    ]


# chunk_kda, chunk_kda_fwd


def _chunk(*args):
    call = _checked(*args)
    if _is_empty(call):
        return _new_output(call).zero_(), _passed_state(call)
    if call.q.device.type == "cpu":
        from flaop.reference.kda import chunk_forward

        o, final_state, *_ = chunk_forward(call)
    else:
        from flaop.launch.delta import chunk

        with _device_guard(call.q):
            o, final_state = chunk.forward(call)
    return o, _final_state(call, final_state)


def _chunk_fake(*args):
    call = check(*args)
    return _new_output(call), _new_state(call)


def _chunk_fwd(*args):
    call = _checked(*args)
    if _is_empty(call):
        residuals = [x.zero_() for x in _new_chunk_residuals(call)]
        return _new_output(call).zero_(), _passed_state(call), *residuals
    if call.q.device.type == "cpu":
        from flaop.reference.kda import chunk_forward

        o, final_state, A, A_qk = chunk_forward(call)
        return o, _final_state(call, final_state), A, A_qk, *_no_kept_residuals(call)
    from flaop.launch.delta import chunk

    with _device_guard(call.q):
        o, final_state, A, A_qk, *kept = chunk.forward_residuals(call)
    if not call.disable_recompute:
        kept = _no_kept_residuals(call)
    return o, _final_state(call, final_state), A, A_qk, *kept


def _chunk_fwd_fake(*args):
    call = check(*args)
    return _new_output(call), _new_state(call), *_new_chunk_residuals(call)


def _chunk_bwd_call(checker, args):
    """Split the arguments of chunk_kda_bwd; output_final_state is not among them."""
    d_o, d_final_state, *rest = args
    q, k, v, g, beta, initial_state, cu_seqlens, A_log, dt_bias = rest[:9]
    residuals, (scale, *flags), grad_mask = rest[9:17], rest[17:-1], rest[-1]
    call = checker(
        *(q, k, v, g, beta, scale, initial_state, False, cu_seqlens, A_log, dt_bias), *flags
    )
    check_backward(call, d_o, d_final_state, A=residuals[0], A_qk=residuals[1])
    return call, d_o, d_final_state, tuple(residuals), grad_mask


def _chunk_bwd(*args):
    call, d_o, d_final_state, residuals, grad_mask = _chunk_bwd_call(_checked, args)
    if _is_empty(call):
        return tuple(_passed_gradients(call, d_final_state, grad_mask))
    if call.q.device.type == "cpu":
        from flaop.reference.kda import chunk_backward

        gradients = chunk_backward(call, d_o, d_final_state, *residuals[:2], grad_mask)
    else:
        from flaop.launch.delta import chunk

        with _device_guard(call.q):
            gradients = chunk.backward(call, d_o, d_final_state, residuals, grad_mask)
    return tuple(_gradients(call, gradients, grad_mask))


def _chunk_bwd_fake(*args):
    call, _, _, _, grad_mask = _chunk_bwd_call(check, args)
    return tuple(_new_gradients(call, grad_mask))


# fused_recurrent_kda and its forward with residuals


def _recurrent(*args):
    call = _checked(*args)
    if _is_empty(call):
        return _new_output(call).zero_(), _passed_state(call)
    if call.q.device.type == "cpu":
        from flaop.reference.kda import recurrent_forward

        o, final_state, _ = recurrent_forward(call)
    else:
        from flaop.launch.delta import recurrent

        with _device_guard(call.q):
            o, final_state = recurrent.forward(call)
    return o, _final_state(call, final_state)


def _recurrent_fwd(*args):
    call = _checked(*args)
    if _is_empty(call):
        return _new_output(call).zero_(), _passed_state(call), _new_u(call).zero_()
    if call.q.device.type == "cpu":
        from flaop.reference.kda import recurrent_forward

        o, final_state, u = recurrent_forward(call)
    else:
        from flaop.launch.delta import recurrent

        with _device_guard(call.q):
            o, final_state, u = recurrent.forward_residuals(call)
    return o, _final_state(call, final_state), u


def _recurrent_fwd_fake(*args):
    call = check(*args)
    return _new_output(call), _new_state(call), _new_u(call)


def _recurrent_bwd_call(checker, args):
    """Split the arguments of fused_recurrent_kda_bwd."""
    d_o, d_final_state, q, k, v, g, beta, initial_state, cu_seqlens, A_log, dt_bias, u = args[:12]
    (scale, *flags), grad_mask = args[12:-1], args[-1]
    call = checker(
        *(q, k, v, g, beta, scale, initial_state, False, cu_seqlens, A_log, dt_bias), *flags
    )
    check_backward(call, d_o, d_final_state, u=u)
    return call, d_o, d_final_state, u, grad_mask


def _recurrent_bwd(*args):
    call, d_o, d_final_state, u, grad_mask = _recurrent_bwd_call(_checked, args)
    if _is_empty(call):
        return tuple(_passed_gradients(call, d_final_state, grad_mask))
    if call.q.device.type == "cpu":
        from flaop.reference.kda import recurrent_backward

        gradients = recurrent_backward(call, d_o, d_final_state, u, grad_mask)
    else:
        from flaop.launch.delta import recurrent

        with _device_guard(call.q):
            gradients = recurrent.backward(call, d_o, d_final_state, u, grad_mask)
    return tuple(_gradients(call, gradients, grad_mask))


def _recurrent_bwd_fake(*args):
    call, _, _, _, grad_mask = _recurrent_bwd_call(check, args)
    return tuple(_new_gradients(call, grad_mask))


def _flash_fake(*args):
    pieces_position = 18
    return _chunk_fake(*args[:pieces_position])


def _register(name: str, kernel, fake) -> None:
    torch.library.register_fake(f"flaop::{name}", fake)
    for device in ("CPU", "CUDA"):
        torch.library.impl(f"flaop::{name}", device, kernel)


_register("chunk_kda", _chunk, _chunk_fake)
_register("chunk_kda_fwd", _chunk_fwd, _chunk_fwd_fake)
_register("chunk_kda_bwd", _chunk_bwd, _chunk_bwd_fake)
_register("fused_recurrent_kda", _recurrent, _chunk_fake)
_register("fused_recurrent_kda_fwd", _recurrent_fwd, _recurrent_fwd_fake)
_register("fused_recurrent_kda_bwd", _recurrent_bwd, _recurrent_bwd_fake)
# Its CPU and CUDA kernels are in C++.
torch.library.register_fake("flaop::flash_kda_fwd", _flash_fake)
