"""What simple_gla and gla have in common: their kernels and fakes, from the checked call on."""

from torch import Tensor

from flaop.validation import checks
from flaop.validation.checks import CHUNK
from flaop.validation.decay import DecayCall, check_backward, check_values

from . import common


def checked(check, *args) -> DecayCall:
    """For the kernels: a fake has no values to look at."""
    call = check(*args)
    if checks.DEBUG:
        check_values(call)
    return call


def _inputs(call: DecayCall, count: int) -> tuple[tuple[Tensor | None, ...], int]:
    """The differentiable inputs in the order of `count` gradients, and where the state is."""
    if call.channel:
        return (call.q, call.k, call.v, call.g, call.initial_state, call.gv)[:count], 4
    return (call.q, call.k, call.v, call.g, call.g_gamma, call.initial_state), 5


def outputs_fake(call: DecayCall) -> tuple[Tensor, Tensor]:
    return common.new_output(call), common.new_state(call)


def residuals_fake(call: DecayCall) -> tuple[Tensor, ...]:
    """What a call of chunk_gla_fwd returns."""
    return *outputs_fake(call), call.q.new_empty((call.B, call.T, call.HV, CHUNK))


def gradients_fake(call: DecayCall, grad_mask) -> tuple[Tensor, ...]:
    inputs, _ = _inputs(call, len(grad_mask))
    return tuple(common.new_gradients(call, inputs, grad_mask))


def chunk(call: DecayCall) -> tuple[Tensor, Tensor]:
    if common.is_empty(call):
        return common.new_output(call).zero_(), common.passed_state(call)
    if call.q.device.type == "cpu":
        from flaop.reference.decay import chunk_forward

        o, final_state, _ = chunk_forward(call)
    else:
        from flaop.launch.decay import chunk

        with common.device_guard(call.q):
            o, final_state = chunk.forward(call, remember=not checks.DEBUG)
    return o, common.final_state_of(call, final_state)


def chunk_fwd(call: DecayCall) -> tuple[Tensor, ...]:
    """Outputs, and for gla the residual A."""
    if common.is_empty(call):
        fake = residuals_fake(call) if call.channel else outputs_fake(call)
        return fake[0].zero_(), common.passed_state(call), *(x.zero_() for x in fake[2:])
    if call.q.device.type == "cpu":
        from flaop.reference.decay import chunk_forward

        o, final_state, A = chunk_forward(call)
        residuals = [A] if call.channel else []
    else:
        from flaop.launch.decay import chunk

        with common.device_guard(call.q):
            o, final_state, *residuals = chunk.forward_residuals(call)
    return o, common.final_state_of(call, final_state), *residuals


def chunk_bwd(
    call: DecayCall,
    d_o: Tensor | None,
    d_final_state: Tensor | None,
    A: Tensor | None,
    grad_mask,
) -> tuple[Tensor, ...]:
    check_backward(call, d_o, d_final_state, A)
    inputs, state_index = _inputs(call, len(grad_mask))
    if common.is_empty(call):
        return common.passed_gradients(call, inputs, d_final_state, state_index, grad_mask)
    if call.q.device.type == "cpu":
        from flaop.reference.decay import chunk_backward

        gradients = chunk_backward(call, d_o, d_final_state, A, grad_mask)
    else:
        from flaop.launch.decay import chunk

        with common.device_guard(call.q):
            gradients = chunk.backward(call, d_o, d_final_state, A, grad_mask)
    return common.gradients_of(call, inputs, gradients, grad_mask)


def recurrent(call: DecayCall) -> tuple[Tensor, Tensor]:
    if common.is_empty(call):
        return common.new_output(call).zero_(), common.passed_state(call)
    if call.q.device.type == "cpu":
        from flaop.reference.decay import recurrent_forward

        o, final_state = recurrent_forward(call)
    else:
        from flaop.launch.decay import recurrent

        with common.device_guard(call.q):
            o, final_state = recurrent.forward(call)
    return o, common.final_state_of(call, final_state)


def recurrent_bwd(
    call: DecayCall, d_o: Tensor | None, d_final_state: Tensor | None, grad_mask
) -> tuple[Tensor, ...]:
    check_backward(call, d_o, d_final_state)
    inputs, state_index = _inputs(call, len(grad_mask))
    if common.is_empty(call):
        return common.passed_gradients(call, inputs, d_final_state, state_index, grad_mask)
    if call.q.device.type == "cpu":
        from flaop.reference.decay import recurrent_backward

        gradients = recurrent_backward(call, d_o, d_final_state, grad_mask)
    else:
        from flaop.launch.decay import recurrent

        with common.device_guard(call.q):
            gradients = recurrent.backward(call, d_o, d_final_state, grad_mask)
    return common.gradients_of(call, inputs, gradients, grad_mask)
