// Gated linear attention with one gate per head: schemas, dispatcher, autograd and autocast. CPU
// and CUDA kernels and the fakes are registered by flaop/ops/simple_gla.py.
#include "dispatcher.h"
#include "formula.h"

namespace flaop {
namespace {

// Every path takes the same arguments.
#define SIMPLE_GLA_ARGS                                                                     \
  "Tensor q, Tensor k, Tensor v, Tensor? g=None, Tensor? g_gamma=None, float? scale=None, " \
  "Tensor? initial_state=None, bool output_final_state=False, Tensor? cu_seqlens=None, "    \
  "bool state_v_first=False, int chunk_size=64, int split_size=0"
#define BACKEND_ARG ", str backend=\"auto\""
#define BACKWARD_ARGS                                                             \
  "Tensor? d_o, Tensor? d_final_state, Tensor q, Tensor k, Tensor v, Tensor? g, " \
  "Tensor? g_gamma, Tensor? initial_state, Tensor? cu_seqlens, float? scale, "    \
  "bool state_v_first, int chunk_size, int split_size, bool[6] grad_mask"
#define GRADIENTS \
  "(Tensor dq, Tensor dk, Tensor dv, Tensor dg, Tensor dg_gamma, Tensor d_initial_state)"

// In SIMPLE_GLA_ARGS and BACKEND_ARG.
constexpr Positions kPositions{/*cu_seqlens=*/8, /*backend=*/12};

void simple_gla(const c10::OperatorHandle& op, Stack* stack) {
  static const auto chunk = find_op("flaop::chunk_simple_gla");
  static const auto recurrent = find_op("flaop::fused_recurrent_simple_gla");
  const Path path = choose_general(CallView(op, *stack, kPositions));
  torch::jit::drop(*stack, 1);  // backend
  (path == Path::kChunk ? chunk : recurrent).callBoxed(*stack);
}

void explain_simple_gla(const c10::OperatorHandle& op, Stack* stack) {
  const CallView call(op, *stack, kPositions);
  return_decision(op, stack, dispatch::decide(call.backend(), general_needs(call)));
}

}  // namespace

// Named outside the anonymous namespace: this is what grad_fn shows.
struct ChunkSimpleGla : Formula<ChunkSimpleGla> {
  static constexpr const char* kForward = "flaop::chunk_simple_gla_fwd";
  static constexpr const char* kBackward = "flaop::chunk_simple_gla_bwd";
};
struct FusedRecurrentSimpleGla : Formula<FusedRecurrentSimpleGla> {
  static constexpr const char* kForward = "flaop::fused_recurrent_simple_gla_fwd";
  static constexpr const char* kBackward = "flaop::fused_recurrent_simple_gla_bwd";
};

}  // namespace flaop

TORCH_LIBRARY_FRAGMENT(flaop, m) {
  m.set_python_module("flaop.ops.simple_gla");
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  m.def("simple_gla(" SIMPLE_GLA_ARGS BACKEND_ARG ") -> (Tensor, Tensor)", tags);
  m.def("chunk_simple_gla(" SIMPLE_GLA_ARGS ") -> (Tensor, Tensor)", tags);
  m.def("chunk_simple_gla_fwd(" SIMPLE_GLA_ARGS ") -> (Tensor o, Tensor final_state)", tags);
  m.def("chunk_simple_gla_bwd(" BACKWARD_ARGS ") -> " GRADIENTS, tags);
  m.def("fused_recurrent_simple_gla(" SIMPLE_GLA_ARGS ") -> (Tensor, Tensor)", tags);
  m.def("fused_recurrent_simple_gla_fwd(" SIMPLE_GLA_ARGS ") -> (Tensor o, Tensor final_state)",
        tags);
  m.def("fused_recurrent_simple_gla_bwd(" BACKWARD_ARGS ") -> " GRADIENTS, tags);
  m.def("_explain_simple_gla(" SIMPLE_GLA_ARGS BACKEND_ARG ") -> (str, str[])", tags);
}

// The launcher in Python (remembered.cpp).
TORCH_LIBRARY_FRAGMENT(flaop_launch, m) {
  m.def("chunk_simple_gla(" SIMPLE_GLA_ARGS ") -> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(flaop, CompositeImplicitAutograd, m) {
  m.impl("simple_gla", flaop::boxed<&flaop::simple_gla>());
  m.impl("_explain_simple_gla", flaop::boxed<&flaop::explain_simple_gla>());
}

TORCH_LIBRARY_IMPL(flaop, Autograd, m) {
  m.impl("chunk_simple_gla", flaop::boxed<&flaop::ChunkSimpleGla::autograd>());
  m.impl("chunk_simple_gla_fwd", flaop::boxed<&flaop::refuse_residuals>());
  m.impl("chunk_simple_gla_bwd", flaop::boxed<&flaop::refuse_double_backward>());
  m.impl("fused_recurrent_simple_gla", flaop::boxed<&flaop::FusedRecurrentSimpleGla::autograd>());
  m.impl("fused_recurrent_simple_gla_fwd", flaop::boxed<&flaop::refuse_residuals>());
  m.impl("fused_recurrent_simple_gla_bwd", flaop::boxed<&flaop::refuse_double_backward>());
}

TORCH_LIBRARY_IMPL(flaop, AutocastCPU, m) {
  for (const char* name : {"simple_gla", "chunk_simple_gla", "fused_recurrent_simple_gla"}) {
    m.impl(name, flaop::boxed<&flaop::autocast_qkv<c10::DeviceType::CPU>>());
  }
}
TORCH_LIBRARY_IMPL(flaop, AutocastCUDA, m) {
  for (const char* name : {"simple_gla", "chunk_simple_gla", "fused_recurrent_simple_gla"}) {
    m.impl(name, flaop::boxed<&flaop::autocast_qkv<c10::DeviceType::CUDA>>());
  }
}
