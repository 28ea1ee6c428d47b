// Kimi Delta Attention: schemas, dispatcher, autograd and autocast. CPU and CUDA kernels and the
// fakes are registered by flaop/ops/kda.py.
#include "../dispatch/device.h"
#include "dispatcher.h"
#include "flash.h"
#include "formula.h"

namespace flaop {
namespace {

// The arguments that every path shares; schemas.md calls them KP.
#define KDA_ARGS                                                                         \
  "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, float? scale=None, "             \
  "Tensor? initial_state=None, bool output_final_state=False, Tensor? cu_seqlens=None, " \
  "Tensor? A_log=None, Tensor? dt_bias=None, bool use_qk_l2norm_in_kernel=False, "       \
  "bool use_gate_in_kernel=False, bool use_beta_sigmoid_in_kernel=False, "               \
  "bool allow_neg_eigval=False, bool safe_gate=False, float? lower_bound=None, "         \
  "bool state_v_first=False"
#define CHUNK_ARGS ", int chunk_size=64, int split_size=0, bool disable_recompute=False"
#define BACKEND_ARG ", str backend=\"auto\""
// The backward ops: incoming gradients and inputs, residuals, then what is not a tensor.
#define BACKWARD_INPUTS                                                                       \
  "Tensor? d_o, Tensor? d_final_state, Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, " \
  "Tensor? initial_state, Tensor? cu_seqlens, Tensor? A_log, Tensor? dt_bias, "
#define BACKWARD_OPTIONS                                                                         \
  ", float? scale, bool use_qk_l2norm_in_kernel, bool use_gate_in_kernel, "                      \
  "bool use_beta_sigmoid_in_kernel, bool allow_neg_eigval, bool safe_gate, float? lower_bound, " \
  "bool state_v_first, "
#define GRADIENTS                                                                                \
  "(Tensor dq, Tensor dk, Tensor dv, Tensor dg, Tensor dbeta, Tensor dA_log, Tensor d_dt_bias, " \
  "Tensor d_initial_state)"

// Positions in KDA_ARGS, CHUNK_ARGS and BACKEND_ARG.
enum Arg : size_t {
  kQ,
  kK,
  kV,
  kG,
  kBeta,
  kScale,
  kInitialState,
  kOutputFinalState,
  kCuSeqlens,
  kALog,
  kDtBias,
  kL2Norm,
  kGate,
  kBetaSigmoid,
  kNegEigval,
  kSafeGate,
  kLowerBound,
  kStateVFirst,
  kSharedCount,
  kChunkSize = kSharedCount,
  kSplitSize,
  kDisableRecompute,
  kChunkCount,
  kBackend = kChunkCount,
  kPieces = kSharedCount  // of flash_kda_fwd
};

class Arguments : public CallView {
 public:
  Arguments(const c10::OperatorHandle& op, const Stack& stack)
      : CallView(op, stack, {kCuSeqlens, kBackend}) {}

  FeatureSet length_and_gradient() const {
    FeatureSet needs{Feature::kKernel};
    add_length_and_gradient(needs);
    return needs;
  }

  // What the fused inference kernel may lack. Reads head sizes, hence guards on them.
  void add_inference_needs(FeatureSet& needs) const {
    const bool on_target =
        q().device().is_cuda() &&
        dispatch::compute_capability(q().device().index()) == dispatch::kFlashCapability;
    needs.add_if(!on_target, Feature::kOtherDevice);
    needs.add_if(q().scalar_type() != at::kBFloat16 || tensor(kG).scalar_type() != at::kBFloat16,
                 Feature::kOtherDtype);
    const c10::SymBool head_sizes = q().sym_size(3)
                                        .sym_eq(dispatch::kFlashHeadSize)
                                        .sym_and(v().sym_size(3).sym_eq(dispatch::kFlashHeadSize));
    needs.add_if(!head_sizes.guard_or_false(__FILE__, __LINE__), Feature::kOtherHeads);
    const c10::SymBool grouped = q().sym_size(2).sym_ne(v().sym_size(2));
    needs.add_if(grouped.guard_or_true(__FILE__, __LINE__), Feature::kGroupedHeads);
    needs.add_if(!flag(kGate), Feature::kGivenGate);
    needs.add_if(!flag(kL2Norm), Feature::kGivenNorm);
    needs.add_if(!flag(kBetaSigmoid), Feature::kGivenBeta);
    needs.add_if(flag(kNegEigval), Feature::kNegEigval);
    bool safe = flag(kSafeGate) && !at(kLowerBound).isNone();
    if (safe) {
      const double bound = at(kLowerBound).toDouble();
      safe = dispatch::kFlashLowerBound <= bound && bound < 0;
    }
    needs.add_if(!safe, Feature::kUnsafeGate);
    const bool any_state = !at(kInitialState).isNone() || flag(kOutputFinalState);
    needs.add_if(any_state && !flag(kStateVFirst), Feature::kStateKFirst);
  }

 private:
  bool flag(Arg arg) const { return at(arg).toBool(); }
};

Path choose(const Arguments& arguments) {
  const dispatch::Backend backend = arguments.backend();
  // The general paths serve every call: a forced one guards nothing.
  if (backend.forced && backend.path != Path::kFlash) return backend.path;
  FeatureSet needs = arguments.length_and_gradient();
  // Head sizes are looked at only if the fused kernel is still in question.
  if (dispatch::takes(backend, Path::kFlash, needs)) arguments.add_inference_needs(needs);
  if (const auto path = dispatch::first(backend, needs)) return *path;
  arguments.add_inference_needs(needs);
  arguments.refuse(backend, needs);
}

void kda(const c10::OperatorHandle& op, Stack* stack) {
  static const auto chunk = find_op("flaop::chunk_kda");
  static const auto recurrent = find_op("flaop::fused_recurrent_kda");
  static const auto flash = find_op("flaop::flash_kda_fwd");
  const Path path = choose(Arguments(op, *stack));
  torch::jit::drop(*stack, 1);  // backend
  if (path == Path::kChunk) return chunk.callBoxed(*stack);
  torch::jit::drop(*stack, kChunkCount - kSharedCount);
  if (path == Path::kRecurrent) return recurrent.callBoxed(*stack);
  stack->emplace_back(int64_t{0});  // pieces
  flash.callBoxed(*stack);
}

void explain_kda(const c10::OperatorHandle& op, Stack* stack) {
  const Arguments arguments(op, *stack);
  FeatureSet needs = arguments.length_and_gradient();
  arguments.add_inference_needs(needs);
  return_decision(op, stack, dispatch::decide(arguments.backend(), needs));
}

// What the fused kernel lacks for a call is an error here: nothing chose it but the caller.
void flash_kda_fwd(const c10::OperatorHandle& op, Stack* stack) {
  const Arguments arguments(op, *stack);
  FeatureSet needs{Feature::kKernel};
  arguments.add_inference_needs(needs);
  const FeatureSet offer = dispatch::path_offer(Path::kFlash);
  TORCH_CHECK_NOT_IMPLEMENTED(offer.covers(needs), "flaop::flash_kda_fwd cannot serve this call: ",
                              dispatch::missing(needs, offer));
  const auto optional = [&](Arg arg) {
    return arguments.at(arg).isNone() ? Tensor() : arguments.tensor(arg);
  };
  FlashKdaCall call{
      arguments.tensor(kQ),
      arguments.tensor(kK),
      arguments.tensor(kV),
      arguments.tensor(kG),
      arguments.tensor(kBeta),
      optional(kInitialState),
      optional(kCuSeqlens),
      optional(kALog),
      optional(kDtBias),
      arguments.at(kScale).toOptional<double>(),
      arguments.at(kLowerBound).toDouble(),
      arguments.at(kOutputFinalState).toBool(),
      arguments.at(kNegEigval).toBool(),
      arguments.at(kPieces).toInt(),
  };
  auto [o, final_state] = flash_kda(std::move(call));
  torch::jit::drop(*stack, op.schema().arguments().size());
  stack->emplace_back(std::move(o));
  stack->emplace_back(std::move(final_state));
}

}  // namespace

// Named outside the anonymous namespace: this is what grad_fn shows.
struct ChunkKda : Formula<ChunkKda> {
  static constexpr const char* kForward = "flaop::chunk_kda_fwd";
  static constexpr const char* kBackward = "flaop::chunk_kda_bwd";
};
struct FusedRecurrentKda : Formula<FusedRecurrentKda> {
  static constexpr const char* kForward = "flaop::fused_recurrent_kda_fwd";
  static constexpr const char* kBackward = "flaop::fused_recurrent_kda_bwd";
};

namespace {

void refuse_recompute(const c10::OperatorHandle& op, Stack* stack) {
  refuse_gradient(op, stack, "it gives residuals to a backward; call flaop::chunk_kda");
}

void refuse_flash_fwd(const c10::OperatorHandle& op, Stack* stack) {
  refuse_gradient(op, stack, "it serves inference only; call flaop::chunk_kda for a gradient");
}

}  // namespace
}  // namespace flaop

TORCH_LIBRARY_FRAGMENT(flaop, m) {
  m.set_python_module("flaop.ops.kda");
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  m.def("kda(" KDA_ARGS CHUNK_ARGS BACKEND_ARG ") -> (Tensor, Tensor)", tags);
  m.def("chunk_kda(" KDA_ARGS CHUNK_ARGS ") -> (Tensor, Tensor)", tags);
  m.def("chunk_kda_fwd(" KDA_ARGS CHUNK_ARGS
        ") -> (Tensor o, Tensor final_state, Tensor A, "
        "Tensor A_qk, Tensor w, Tensor qg, Tensor kg, Tensor decay, Tensor v_new, Tensor h)",
        tags);
  m.def("chunk_kda_bwd(" BACKWARD_INPUTS
        "Tensor A, Tensor A_qk, Tensor w, Tensor qg, Tensor kg, Tensor decay, Tensor v_new, "
        "Tensor h" BACKWARD_OPTIONS
        "int chunk_size, int split_size, bool disable_recompute, bool[8] grad_mask) -> " GRADIENTS,
        tags);
  m.def(
      "chunk_kda_recompute(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor A, "
      "float? scale=None, Tensor? initial_state=None, Tensor? A_log=None, Tensor? dt_bias=None, "
      "bool use_qk_l2norm_in_kernel=False, bool use_gate_in_kernel=False, "
      "bool use_beta_sigmoid_in_kernel=False, bool allow_neg_eigval=False, bool safe_gate=False, "
      "float? lower_bound=None, bool state_v_first=False, int chunk_size=64) -> (Tensor w, "
      "Tensor qg, Tensor kg, Tensor decay, Tensor v_new, Tensor h)",
      tags);
  m.def("fused_recurrent_kda(" KDA_ARGS ") -> (Tensor, Tensor)", tags);
  m.def("fused_recurrent_kda_fwd(" KDA_ARGS ") -> (Tensor o, Tensor final_state, Tensor u)", tags);
  m.def("fused_recurrent_kda_bwd(" BACKWARD_INPUTS "Tensor u" BACKWARD_OPTIONS
        "bool[8] grad_mask) -> " GRADIENTS,
        tags);
  m.def("flash_kda_fwd(" KDA_ARGS ", int pieces=0) -> (Tensor, Tensor)", tags);
  m.def("_explain_kda(" KDA_ARGS CHUNK_ARGS BACKEND_ARG ") -> (str, str[])", tags);
}

// The launcher in Python (remembered.cpp).
TORCH_LIBRARY_FRAGMENT(flaop_launch, m) {
  m.def("chunk_kda(" KDA_ARGS CHUNK_ARGS ") -> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(flaop, CompositeImplicitAutograd, m) {
  m.impl("kda", flaop::boxed<&flaop::kda>());
  m.impl("_explain_kda", flaop::boxed<&flaop::explain_kda>());
}

TORCH_LIBRARY_IMPL(flaop, Autograd, m) {
  m.impl("chunk_kda", flaop::boxed<&flaop::ChunkKda::autograd>());
  m.impl("chunk_kda_fwd", flaop::boxed<&flaop::refuse_residuals>());
  m.impl("chunk_kda_bwd", flaop::boxed<&flaop::refuse_double_backward>());
  m.impl("chunk_kda_recompute", flaop::boxed<&flaop::refuse_recompute>());
  m.impl("fused_recurrent_kda", flaop::boxed<&flaop::FusedRecurrentKda::autograd>());
  m.impl("fused_recurrent_kda_fwd", flaop::boxed<&flaop::refuse_residuals>());
  m.impl("fused_recurrent_kda_bwd", flaop::boxed<&flaop::refuse_double_backward>());
  m.impl("flash_kda_fwd", flaop::boxed<&flaop::refuse_flash_fwd>());
}

TORCH_LIBRARY_IMPL(flaop, AutocastCPU, m) {
  for (const char* name : {"kda", "chunk_kda", "fused_recurrent_kda", "_explain_kda"}) {
    m.impl(name, flaop::boxed<&flaop::autocast_qkv<c10::DeviceType::CPU>>());
  }
}
TORCH_LIBRARY_IMPL(flaop, AutocastCUDA, m) {
  for (const char* name : {"kda", "chunk_kda", "fused_recurrent_kda", "_explain_kda"}) {
    m.impl(name, flaop::boxed<&flaop::autocast_qkv<c10::DeviceType::CUDA>>());
  }
}

TORCH_LIBRARY_IMPL(flaop, CPU, m) {
  m.impl("flash_kda_fwd", flaop::boxed<&flaop::flash_kda_fwd>());
}
TORCH_LIBRARY_IMPL(flaop, CUDA, m) {
  m.impl("flash_kda_fwd", flaop::boxed<&flaop::flash_kda_fwd>());
}
