// The gated delta rule, one gate per head or none: schemas, dispatcher, autograd and autocast. CPU
// and CUDA kernels and the fakes are registered by flaop/ops/gated_delta_rule.py.
#include "dispatcher.h"
#include "formula.h"

namespace flaop {
namespace {

// Every path takes the same arguments.
#define GDN_ARGS                                                                         \
  "Tensor q, Tensor k, Tensor v, Tensor? g, Tensor beta, float? scale=None, "            \
  "Tensor? initial_state=None, bool output_final_state=False, Tensor? cu_seqlens=None, " \
  "Tensor? A_log=None, Tensor? dt_bias=None, bool use_qk_l2norm_in_kernel=False, "       \
  "bool use_gate_in_kernel=False, bool use_beta_sigmoid_in_kernel=False, "               \
  "bool allow_neg_eigval=False, bool state_v_first=False, int chunk_size=64, "           \
  "int split_size=0, bool disable_recompute=False"
#define BACKEND_ARG ", str backend=\"auto\""
// The backward ops: incoming gradients and inputs, residuals, then what is not a tensor.
#define BACKWARD_INPUTS                                                                        \
  "Tensor? d_o, Tensor? d_final_state, Tensor q, Tensor k, Tensor v, Tensor? g, Tensor beta, " \
  "Tensor? initial_state, Tensor? cu_seqlens, Tensor? A_log, Tensor? dt_bias, "
#define BACKWARD_OPTIONS                                                    \
  ", float? scale, bool use_qk_l2norm_in_kernel, bool use_gate_in_kernel, " \
  "bool use_beta_sigmoid_in_kernel, bool allow_neg_eigval, bool state_v_first, "
#define GRADIENTS                                                                                \
  "(Tensor dq, Tensor dk, Tensor dv, Tensor dg, Tensor dbeta, Tensor dA_log, Tensor d_dt_bias, " \
  "Tensor d_initial_state)"

// In GDN_ARGS and BACKEND_ARG.
constexpr Positions kPositions{/*cu_seqlens=*/8, /*backend=*/19};

void gated_delta_rule(const c10::OperatorHandle& op, Stack* stack) {
  static const auto chunk = find_op("flaop::chunk_gated_delta_rule");
  static const auto recurrent = find_op("flaop::fused_recurrent_gated_delta_rule");
  const Path path = choose_general(CallView(op, *stack, kPositions));
  torch::jit::drop(*stack, 1);  // backend
  (path == Path::kChunk ? chunk : recurrent).callBoxed(*stack);
}

void explain_gated_delta_rule(const c10::OperatorHandle& op, Stack* stack) {
  const CallView call(op, *stack, kPositions);
  return_decision(op, stack, dispatch::decide(call.backend(), general_needs(call)));
}

}  // namespace

// Named outside the anonymous namespace: this is what grad_fn shows.
struct ChunkGatedDeltaRule : Formula<ChunkGatedDeltaRule> {
  static constexpr const char* kForward = "flaop::chunk_gated_delta_rule_fwd";
  static constexpr const char* kBackward = "flaop::chunk_gated_delta_rule_bwd";
};
struct FusedRecurrentGatedDeltaRule : Formula<FusedRecurrentGatedDeltaRule> {
  static constexpr const char* kForward = "flaop::fused_recurrent_gated_delta_rule_fwd";
  static constexpr const char* kBackward = "flaop::fused_recurrent_gated_delta_rule_bwd";
};

}  // namespace flaop

TORCH_LIBRARY_FRAGMENT(flaop, m) {
  m.set_python_module("flaop.ops.gated_delta_rule");
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  m.def("gated_delta_rule(" GDN_ARGS BACKEND_ARG ") -> (Tensor, Tensor)", tags);
  m.def("chunk_gated_delta_rule(" GDN_ARGS ") -> (Tensor, Tensor)", tags);
  m.def("chunk_gated_delta_rule_fwd(" GDN_ARGS
        ") -> (Tensor o, Tensor final_state, Tensor A, Tensor A_qk, Tensor v_new, Tensor h)",
        tags);
  m.def("chunk_gated_delta_rule_bwd(" BACKWARD_INPUTS
        "Tensor A, Tensor A_qk, Tensor v_new, Tensor h" BACKWARD_OPTIONS
        "int chunk_size, int split_size, bool disable_recompute, bool[8] grad_mask) -> " GRADIENTS,
        tags);
  m.def("fused_recurrent_gated_delta_rule(" GDN_ARGS ") -> (Tensor, Tensor)", tags);
  m.def("fused_recurrent_gated_delta_rule_fwd(" GDN_ARGS
        ") -> (Tensor o, Tensor final_state, Tensor u)",
        tags);
  m.def("fused_recurrent_gated_delta_rule_bwd(" BACKWARD_INPUTS "Tensor u" BACKWARD_OPTIONS
        "bool[8] grad_mask) -> " GRADIENTS,
        tags);
  m.def("_explain_gated_delta_rule(" GDN_ARGS BACKEND_ARG ") -> (str, str[])", tags);
}

// The launcher in Python (remembered.cpp).
TORCH_LIBRARY_FRAGMENT(flaop_launch, m) {
  m.def("chunk_gated_delta_rule(" GDN_ARGS ") -> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(flaop, CompositeImplicitAutograd, m) {
  m.impl("gated_delta_rule", flaop::boxed<&flaop::gated_delta_rule>());
  m.impl("_explain_gated_delta_rule", flaop::boxed<&flaop::explain_gated_delta_rule>());
}

TORCH_LIBRARY_IMPL(flaop, Autograd, m) {
  m.impl("chunk_gated_delta_rule", flaop::boxed<&flaop::ChunkGatedDeltaRule::autograd>());
  m.impl("chunk_gated_delta_rule_fwd", flaop::boxed<&flaop::refuse_residuals>());
  m.impl("chunk_gated_delta_rule_bwd", flaop::boxed<&flaop::refuse_double_backward>());
  m.impl("fused_recurrent_gated_delta_rule",
         flaop::boxed<&flaop::FusedRecurrentGatedDeltaRule::autograd>());
  m.impl("fused_recurrent_gated_delta_rule_fwd", flaop::boxed<&flaop::refuse_residuals>());
  m.impl("fused_recurrent_gated_delta_rule_bwd", flaop::boxed<&flaop::refuse_double_backward>());
}

TORCH_LIBRARY_IMPL(flaop, AutocastCPU, m) {
  for (const char* name :
       {"gated_delta_rule", "chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"}) {
    m.impl(name, flaop::boxed<&flaop::autocast_qkv<c10::DeviceType::CPU>>());
  }
}
TORCH_LIBRARY_IMPL(flaop, AutocastCUDA, m) {
  for (const char* name :
       {"gated_delta_rule", "chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"}) {
    m.impl(name, flaop::boxed<&flaop::autocast_qkv<c10::DeviceType::CUDA>>());
  }
}
