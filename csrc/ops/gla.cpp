// Gated linear attention with one gate per key channel: schemas, dispatcher, autograd and autocast.
// CPU and CUDA kernels and the fakes are registered by flaop/ops/gla.py.
#include "dispatcher.h"
#include "formula.h"

namespace flaop {
namespace {

// The arguments that every path shares.
#define GLA_ARGS                                                                            \
  "Tensor q, Tensor k, Tensor v, Tensor g, float? scale=None, Tensor? initial_state=None, " \
  "bool output_final_state=False, Tensor? cu_seqlens=None, bool state_v_first=False, "      \
  "int chunk_size=64, int split_size=0"
#define BACKEND_ARG ", str backend=\"auto\""
#define VALUE_GATE_ARG ", Tensor? gv=None"
#define BACKWARD_INPUTS                                                          \
  "Tensor? d_o, Tensor? d_final_state, Tensor q, Tensor k, Tensor v, Tensor g, " \
  "Tensor? initial_state, Tensor? cu_seqlens, "
#define GRADIENTS "(Tensor dq, Tensor dk, Tensor dv, Tensor dg, Tensor d_initial_state"

// In GLA_ARGS, BACKEND_ARG and VALUE_GATE_ARG.
constexpr Positions kPositions{/*cu_seqlens=*/7, /*backend=*/11};
constexpr size_t kValueGate = 12;

bool has_value_gate(const CallView& call) { return !call.at(kValueGate).isNone(); }

// The chunk path declines a gate on value channels, so that length and gradient decide nothing.
FeatureSet gla_needs(const CallView& call) {
  if (has_value_gate(call)) return {Feature::kOtherFamily, Feature::kValueGate};
  return general_needs(call);
}

Path choose_gla(const CallView& call) {
  if (!has_value_gate(call)) return choose_general(call);
  const dispatch::Backend backend = call.backend();
  const FeatureSet needs = gla_needs(call);
  if (const auto path = dispatch::first(backend, needs)) return *path;
  call.refuse(backend, needs);
}

void gla(const c10::OperatorHandle& op, Stack* stack) {
  static const auto chunk = find_op("flaop::chunk_gla");
  static const auto recurrent = find_op("flaop::fused_recurrent_gla");
  const Path path = choose_gla(CallView(op, *stack, kPositions));
  c10::IValue gv = torch::jit::pop(*stack);
  torch::jit::drop(*stack, 1);  // backend
  if (path == Path::kChunk) return chunk.callBoxed(*stack);
  stack->push_back(std::move(gv));
  recurrent.callBoxed(*stack);
}

void explain_gla(const c10::OperatorHandle& op, Stack* stack) {
  const CallView call(op, *stack, kPositions);
  return_decision(op, stack, dispatch::decide(call.backend(), gla_needs(call)));
}

}  // namespace

// Named outside the anonymous namespace: this is what grad_fn shows.
struct ChunkGla : Formula<ChunkGla> {
  static constexpr const char* kForward = "flaop::chunk_gla_fwd";
  static constexpr const char* kBackward = "flaop::chunk_gla_bwd";
};
struct FusedRecurrentGla : Formula<FusedRecurrentGla> {
  static constexpr const char* kForward = "flaop::fused_recurrent_gla_fwd";
  static constexpr const char* kBackward = "flaop::fused_recurrent_gla_bwd";
};

}  // namespace flaop

TORCH_LIBRARY_FRAGMENT(flaop, m) {
  m.set_python_module("flaop.ops.gla");
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  m.def("gla(" GLA_ARGS BACKEND_ARG VALUE_GATE_ARG ") -> (Tensor, Tensor)", tags);
  m.def("chunk_gla(" GLA_ARGS ") -> (Tensor, Tensor)", tags);
  m.def("chunk_gla_fwd(" GLA_ARGS ") -> (Tensor o, Tensor final_state, Tensor A)", tags);
  m.def("chunk_gla_bwd(" BACKWARD_INPUTS
        "Tensor A, float? scale, bool state_v_first, int chunk_size, int split_size, "
        "bool[5] grad_mask) -> " GRADIENTS ")",
        tags);
  m.def("fused_recurrent_gla(" GLA_ARGS VALUE_GATE_ARG ") -> (Tensor, Tensor)", tags);
  m.def("fused_recurrent_gla_fwd(" GLA_ARGS VALUE_GATE_ARG ") -> (Tensor o, Tensor final_state)",
        tags);
  m.def("fused_recurrent_gla_bwd(" BACKWARD_INPUTS
        "Tensor? gv, float? scale, bool state_v_first, bool[6] grad_mask) -> " GRADIENTS
        ", Tensor dgv)",
        tags);
  m.def("_explain_gla(" GLA_ARGS BACKEND_ARG VALUE_GATE_ARG ") -> (str, str[])", tags);
}

// The launcher in Python (remembered.cpp).
TORCH_LIBRARY_FRAGMENT(flaop_launch, m) { m.def("chunk_gla(" GLA_ARGS ") -> (Tensor, Tensor)"); }

TORCH_LIBRARY_IMPL(flaop, CompositeImplicitAutograd, m) {
  m.impl("gla", flaop::boxed<&flaop::gla>());
  m.impl("_explain_gla", flaop::boxed<&flaop::explain_gla>());
}

TORCH_LIBRARY_IMPL(flaop, Autograd, m) {
  m.impl("chunk_gla", flaop::boxed<&flaop::ChunkGla::autograd>());
  m.impl("chunk_gla_fwd", flaop::boxed<&flaop::refuse_residuals>());
  m.impl("chunk_gla_bwd", flaop::boxed<&flaop::refuse_double_backward>());
  m.impl("fused_recurrent_gla", flaop::boxed<&flaop::FusedRecurrentGla::autograd>());
  m.impl("fused_recurrent_gla_fwd", flaop::boxed<&flaop::refuse_residuals>());
  m.impl("fused_recurrent_gla_bwd", flaop::boxed<&flaop::refuse_double_backward>());
}

TORCH_LIBRARY_IMPL(flaop, AutocastCPU, m) {
  for (const char* name : {"gla", "chunk_gla", "fused_recurrent_gla"}) {
    m.impl(name, flaop::boxed<&flaop::autocast_qkv<c10::DeviceType::CPU>>());
  }
}
TORCH_LIBRARY_IMPL(flaop, AutocastCUDA, m) {
  for (const char* name : {"gla", "chunk_gla", "fused_recurrent_gla"}) {
    m.impl(name, flaop::boxed<&flaop::autocast_qkv<c10::DeviceType::CUDA>>());
  }
}
