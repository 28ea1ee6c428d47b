// Kernels that serve any family, written against the stack of arguments. A long argument list is
// handed on as it stands: no op here is unpacked and packed again on its way to its kernel.
#pragma once

#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/GradMode.h>
#include <torch/library.h>

namespace flaop {

using torch::jit::Stack;

// The arguments of `op` are the last entries of the stack.
inline size_t first_argument(const c10::OperatorHandle& op, const Stack& stack) {
  return stack.size() - op.schema().arguments().size();
}

inline c10::OperatorHandle find_op(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
}

// Grad mode, and a tensor among the entries from `first` on requires grad. Inference mode is not
// asked: under torch.compile it always reads false.
inline bool needs_grad(const Stack& stack, size_t first) {
  if (!c10::GradMode::is_enabled()) return false;
  for (size_t i = first; i < stack.size(); ++i) {
    if (stack[i].isTensor() && stack[i].toTensor().requires_grad()) return true;
  }
  return false;
}

inline void call_below_autograd(const c10::OperatorHandle& op, Stack* stack) {
  at::AutoDispatchBelowADInplaceOrView below;
  op.callBoxed(*stack);
}

inline void check_no_gradient(const c10::OperatorHandle& op, const Stack& stack,
                              const char* advice) {
  TORCH_CHECK_NOT_IMPLEMENTED(!needs_grad(stack, first_argument(op, stack)),
                              op.operator_name().name, " is not differentiable: ", advice);
}

// The Autograd kernel of an op without a gradient. Without it a CPU kernel made of ATen calls would
// be differentiable by accident.
inline void refuse_gradient(const c10::OperatorHandle& op, Stack* stack, const char* advice) {
  check_no_gradient(op, *stack, advice);
  call_below_autograd(op, stack);
}

// Casts the first three arguments, q, k and v, and nothing else: gates, A_log and states keep their
// dtype.
template <c10::DeviceType device>
void autocast_qkv(const c10::OperatorHandle& op, Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard no_autocast(
      at::autocast::get_autocast_dispatch_key_from_device_type(device));
  const at::ScalarType dtype = at::autocast::get_autocast_dtype(device);
  const size_t first = first_argument(op, *stack);
  for (size_t i = first; i < first + 3; ++i) {
    (*stack)[i] = at::autocast::cached_cast(dtype, (*stack)[i].toTensor(), device);
  }
  op.callBoxed(*stack);
}

template <void (*kernel)(const c10::OperatorHandle&, Stack*)>
torch::CppFunction boxed() {
  return torch::CppFunction::makeFromBoxedFunction<kernel>();
}

}  // namespace flaop
