// What the dispatchers of the families share: questions about a call, and answers to explain.
#pragma once

#include <string>
#include <utility>

#include "../dispatch/paths.h"
#include "../dispatch/policy.h"
#include "boxed.h"

namespace flaop {

using at::Tensor;
using dispatch::Feature;
using dispatch::FeatureSet;
using dispatch::Path;

// Where the arguments stand that families place differently; q, k and v are the first three.
struct Positions {
  size_t cu_seqlens;
  size_t backend;
};

// A view of the arguments on the stack that a dispatcher asks questions about.
class CallView {
 public:
  CallView(const c10::OperatorHandle& op, const Stack& stack, Positions positions)
      : stack_(stack), first_(first_argument(op, stack)), positions_(positions) {
    TORCH_CHECK_VALUE(tensor(kQ).dim() == 4, "q must have 4 dimensions [B, T, H, K], got shape ",
                      tensor(kQ).sym_sizes());
    TORCH_CHECK_VALUE(tensor(kV).dim() == 4, "v must have 4 dimensions [B, T, HV, V], got shape ",
                      tensor(kV).sym_sizes());
  }

  const c10::IValue& at(size_t arg) const { return stack_[first_ + arg]; }
  const Tensor& tensor(size_t arg) const { return at(arg).toTensor(); }
  const Tensor& q() const { return tensor(kQ); }
  const Tensor& v() const { return tensor(kV); }

  // One guard, with the general path as its false branch, also for unbacked sizes.
  bool is_short() const {
    const c10::SymInt T = q().sym_size(1);
    c10::SymBool is_short = T.sym_le(dispatch::kShortTokens);
    if (!at(positions_.cu_seqlens).isNone()) {
      const c10::SymInt N = tensor(positions_.cu_seqlens).sym_numel() - 1;
      is_short = is_short.sym_or(
          T.sym_le(N * dispatch::kShortTokens).sym_and(T.sym_le(dispatch::kShortPackedTokens)));
    }
    return is_short.guard_or_false(__FILE__, __LINE__);
  }

  // The length guard comes before the question for a gradient: a graph then holds the threshold in
  // training too, and export refuses a range that crosses it.
  void add_length_and_gradient(FeatureSet& needs) const {
    needs.add(is_short() ? Feature::kShort : Feature::kLong);
    needs.add_if(needs_grad(stack_, first_), Feature::kGradient);
  }

  dispatch::Backend backend() const {
    try {
      return dispatch::parse_backend(backend_text());
    } catch (const std::invalid_argument& error) {
      TORCH_CHECK_VALUE(false, error.what());
    }
  }

  // No path of `backend` offers all that the call needs.
  [[noreturn]] void refuse(const dispatch::Backend& backend, FeatureSet needs) const {
    TORCH_CHECK_VALUE(
        !backend.forced, dispatch::path_name(backend.path),
        " cannot serve this call: ", dispatch::missing(needs, dispatch::path_offer(backend.path)));
    TORCH_CHECK_VALUE(false, "no path of backend \"", backend_text(), "\" serves this call. ",
                      c10::Join(". ", dispatch::decide(backend, needs).sentences));
  }

 private:
  static constexpr size_t kQ = 0, kV = 2;

  const std::string& backend_text() const { return at(positions_.backend).toStringRef(); }

  const Stack& stack_;
  size_t first_;
  Positions positions_;
};

// What a call of a family without a fused inference kernel asks of a path.
inline FeatureSet general_needs(const CallView& call) {
  FeatureSet needs{Feature::kOtherFamily};
  call.add_length_and_gradient(needs);
  return needs;
}

// The path of such a call, chunk or fused_recurrent. Both serve every call: a forced one guards
// nothing.
inline Path choose_general(const CallView& call) {
  const dispatch::Backend backend = call.backend();
  if (backend.forced && backend.path != Path::kFlash) return backend.path;
  const FeatureSet needs = general_needs(call);
  if (const auto path = dispatch::first(backend, needs)) return *path;
  call.refuse(backend, needs);
}

// Replaces the arguments by the answer of an _explain op.
inline void return_decision(const c10::OperatorHandle& op, Stack* stack,
                            dispatch::Decision decision) {
  torch::jit::drop(*stack, op.schema().arguments().size());
  stack->emplace_back(std::move(decision.path));
  stack->emplace_back(std::move(decision.sentences));
}

}  // namespace flaop
