// Kimi Delta Attention: schemas, dispatcher, autograd and autocast. CPU and CUDA kernels and the
// fakes are registered by flaop/ops/kda.py.
#include <torch/csrc/autograd/custom_function.h>

#include <array>

#include "../dispatch/device.h"
#include "../dispatch/paths.h"
#include "../dispatch/policy.h"
#include "boxed.h"

namespace flaop {
namespace {

using at::Tensor;
using dispatch::Feature;
using dispatch::FeatureSet;
using dispatch::Path;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

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
  kBackend = kChunkCount
};

// A view of the arguments on the stack that the dispatcher asks questions about.
class Arguments {
 public:
  Arguments(const c10::OperatorHandle& op, const Stack& stack)
      : stack_(stack), first_(first_argument(op, stack)) {
    TORCH_CHECK_VALUE(tensor(kQ).dim() == 4, "q must have 4 dimensions [B, T, H, K], got shape ",
                      tensor(kQ).sym_sizes());
    TORCH_CHECK_VALUE(tensor(kV).dim() == 4, "v must have 4 dimensions [B, T, HV, V], got shape ",
                      tensor(kV).sym_sizes());
  }

  const Tensor& tensor(Arg arg) const { return at(arg).toTensor(); }
  bool flag(Arg arg) const { return at(arg).toBool(); }
  const std::string& text(Arg arg) const { return at(arg).toStringRef(); }

  // One guard, with the general path as its false branch, also for unbacked sizes.
  bool is_short() const {
    const c10::SymInt T = tensor(kQ).sym_size(1);
    c10::SymBool is_short = T.sym_le(dispatch::kShortTokens);
    if (!at(kCuSeqlens).isNone()) {
      const c10::SymInt N = tensor(kCuSeqlens).sym_numel() - 1;
      is_short = is_short.sym_or(
          T.sym_le(N * dispatch::kShortTokens).sym_and(T.sym_le(dispatch::kShortPackedTokens)));
    }
    return is_short.guard_or_false(__FILE__, __LINE__);
  }

  // The length guard comes before the question for a gradient: a graph then holds the threshold in
  // training too, and export refuses a range that crosses it.
  FeatureSet length_and_gradient() const {
    FeatureSet needs{Feature::kKernel};
    needs.add(is_short() ? Feature::kShort : Feature::kLong);
    needs.add_if(needs_grad(stack_, first_), Feature::kGradient);
    return needs;
  }

  // What the fused inference kernel may lack. Reads head sizes, hence guards on them.
  void add_inference_needs(FeatureSet& needs) const {
    const Tensor& q = tensor(kQ);
    const Tensor& v = tensor(kV);
    const bool on_target =
        q.device().is_cuda() &&
        dispatch::compute_capability(q.device().index()) == dispatch::kFlashCapability;
    needs.add_if(!on_target, Feature::kOtherDevice);
    needs.add_if(q.scalar_type() != at::kBFloat16, Feature::kOtherDtype);
    const c10::SymBool head_sizes = q.sym_size(3)
                                        .sym_eq(dispatch::kFlashHeadSize)
                                        .sym_and(v.sym_size(3).sym_eq(dispatch::kFlashHeadSize));
    needs.add_if(!head_sizes.guard_or_false(__FILE__, __LINE__), Feature::kOtherHeads);
    const c10::SymBool grouped = q.sym_size(2).sym_ne(v.sym_size(2));
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

  dispatch::Backend backend() const {
    try {
      return dispatch::parse_backend(text(kBackend));
    } catch (const std::invalid_argument& error) {
      TORCH_CHECK_VALUE(false, error.what());
    }
  }

 private:
  const c10::IValue& at(Arg arg) const { return stack_[first_ + arg]; }

  const Stack& stack_;
  size_t first_;
};

Path choose(const Arguments& arguments) {
  const dispatch::Backend backend = arguments.backend();
  // The general paths serve every call: a forced one guards nothing.
  if (backend.forced && backend.path != Path::kFlash) return backend.path;
  FeatureSet needs = arguments.length_and_gradient();
  // Head sizes are looked at only if the fused kernel is still in question.
  if (dispatch::takes(backend, Path::kFlash, needs)) arguments.add_inference_needs(needs);
  for (Path path : {Path::kFlash, Path::kRecurrent, Path::kChunk}) {
    if (dispatch::takes(backend, path, needs)) return path;
  }
  arguments.add_inference_needs(needs);
  TORCH_CHECK_VALUE(!backend.forced, dispatch::path_name(backend.path), " cannot serve this call: ",
                    dispatch::missing(needs, dispatch::path_offer(backend.path)));
  TORCH_CHECK_VALUE(false, "no path of backend \"", arguments.text(kBackend),
                    "\" serves this call. ",
                    c10::Join(". ", dispatch::decide(backend, needs).sentences));
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
  dispatch::Decision decision = dispatch::decide(arguments.backend(), needs);
  torch::jit::drop(*stack, op.schema().arguments().size());
  stack->emplace_back(std::move(decision.path));
  stack->emplace_back(std::move(decision.sentences));
}

// The CPU and the CUDA kernel of an op whose kernel is not part of this version.
void flash_kda_not_built(const c10::OperatorHandle& op, Stack* stack) {
  FeatureSet needs{Feature::kKernel};
  Arguments(op, *stack).add_inference_needs(needs);
  TORCH_CHECK_NOT_IMPLEMENTED(false, "flaop::flash_kda_fwd cannot serve this call: ",
                              dispatch::missing(needs, dispatch::path_offer(Path::kFlash)));
}

// The autograd formula of a path: its _fwd op also returns residuals, which the _bwd op takes.
template <typename Op>
struct Formula : torch::autograd::Function<Op> {
  // The differentiable inputs come one by one, in the order of the gradients.
  static variable_list forward(AutogradContext* ctx, const Tensor& q, const Tensor& k,
                               const Tensor& v, const Tensor& g, const Tensor& beta,
                               const std::optional<Tensor>& A_log,
                               const std::optional<Tensor>& dt_bias,
                               const std::optional<Tensor>& initial_state, const Stack* arguments) {
    static const auto forward_op = find_op(Op::kForward);
    at::AutoDispatchBelowADInplaceOrView below;
    Stack stack(*arguments);
    forward_op.callBoxed(stack);

    const auto cu_seqlens = (*arguments)[kCuSeqlens].toOptional<Tensor>();
    variable_list saved{q, k, v, g, beta};
    for (const auto& x : {initial_state, cu_seqlens, A_log, dt_bias}) {
      saved.push_back(x.value_or(Tensor()));
    }
    for (size_t i = 2; i < stack.size(); ++i) saved.push_back(stack[i].toTensor());
    ctx->save_for_backward(std::move(saved));

    std::vector<c10::IValue> options{(*arguments)[kScale]};
    options.insert(options.end(), arguments->begin() + kL2Norm, arguments->end());
    ctx->saved_data["options"] = c10::ivalue::Tuple::create(std::move(options));
    ctx->set_materialize_grads(false);

    variable_list outputs{stack[0].toTensor(), stack[1].toTensor()};
    if (!(*arguments)[kOutputFinalState].toBool()) ctx->mark_non_differentiable({outputs[1]});
    return outputs;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    constexpr size_t kInputs = 8;
    // One entry for each argument of forward.
    variable_list result(kInputs + 1);
    if (!gradients[0].defined() && !gradients[1].defined()) return result;

    static const auto backward_op = find_op(Op::kBackward);
    const variable_list saved = ctx->get_saved_variables();
    const std::array<bool, kInputs> present{
        true, true, true, true, true, saved[7].defined(), saved[8].defined(), saved[5].defined()};
    c10::List<bool> mask;
    size_t edge = 0;  // an absent input has no edge
    for (bool is_present : present) {
      mask.push_back(is_present && ctx->needs_input_grad(edge));
      edge += is_present;
    }

    Stack stack;
    const auto push = [&stack](const Tensor& x) {
      stack.push_back(x.defined() ? c10::IValue(x) : c10::IValue());
    };
    push(gradients[0]);
    push(gradients[1]);
    for (const Tensor& x : saved) push(x);
    const auto& options = ctx->saved_data["options"].toTupleRef().elements();
    for (const c10::IValue& option : options) stack.push_back(option);
    stack.emplace_back(mask);
    backward_op.callBoxed(stack);
    for (size_t i = 0; i < kInputs; ++i) {
      if (mask[i]) result[i] = stack[i].toTensor();
    }
    return result;
  }

  // Inference must not pay for residuals: without a gradient the plain op runs.
  static void autograd(const c10::OperatorHandle& op, Stack* stack) {
    const size_t first = first_argument(op, *stack);
    if (!needs_grad(*stack, first)) return call_below_autograd(op, stack);
    const Stack arguments(stack->begin() + static_cast<std::ptrdiff_t>(first), stack->end());
    const auto optional = [&](Arg arg) { return arguments[arg].toOptional<Tensor>(); };
    variable_list outputs =
        Op::apply(arguments[kQ].toTensor(), arguments[kK].toTensor(), arguments[kV].toTensor(),
                  arguments[kG].toTensor(), arguments[kBeta].toTensor(), optional(kALog),
                  optional(kDtBias), optional(kInitialState), &arguments);
    torch::jit::drop(*stack, arguments.size());
    for (Tensor& output : outputs) stack->emplace_back(std::move(output));
  }
};

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

void refuse_chunk_fwd(const c10::OperatorHandle& op, Stack* stack) {
  refuse_gradient(op, stack, "call flaop::chunk_kda, whose backward uses its residuals");
}
void refuse_recurrent_fwd(const c10::OperatorHandle& op, Stack* stack) {
  refuse_gradient(op, stack, "call flaop::fused_recurrent_kda, whose backward uses its residuals");
}
void refuse_flash_fwd(const c10::OperatorHandle& op, Stack* stack) {
  refuse_gradient(op, stack, "it serves inference only; call flaop::chunk_kda for a gradient");
}
void refuse_double_backward(const c10::OperatorHandle& op, Stack* stack) {
  refuse_gradient(op, stack, "KDA has no double backward (create_graph=True)");
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
  m.def("fused_recurrent_kda(" KDA_ARGS ") -> (Tensor, Tensor)", tags);
  m.def("fused_recurrent_kda_fwd(" KDA_ARGS ") -> (Tensor o, Tensor final_state, Tensor u)", tags);
  m.def("fused_recurrent_kda_bwd(" BACKWARD_INPUTS "Tensor u" BACKWARD_OPTIONS
        "bool[8] grad_mask) -> " GRADIENTS,
        tags);
  m.def("flash_kda_fwd(" KDA_ARGS ", int pieces=0) -> (Tensor, Tensor)", tags);
  m.def("_explain_kda(" KDA_ARGS CHUNK_ARGS BACKEND_ARG ") -> (str, str[])", tags);
}

TORCH_LIBRARY_IMPL(flaop, CompositeImplicitAutograd, m) {
  m.impl("kda", flaop::boxed<&flaop::kda>());
  m.impl("_explain_kda", flaop::boxed<&flaop::explain_kda>());
}

TORCH_LIBRARY_IMPL(flaop, Autograd, m) {
  m.impl("chunk_kda", flaop::boxed<&flaop::ChunkKda::autograd>());
  m.impl("chunk_kda_fwd", flaop::boxed<&flaop::refuse_chunk_fwd>());
  m.impl("chunk_kda_bwd", flaop::boxed<&flaop::refuse_double_backward>());
  m.impl("fused_recurrent_kda", flaop::boxed<&flaop::FusedRecurrentKda::autograd>());
  m.impl("fused_recurrent_kda_fwd", flaop::boxed<&flaop::refuse_recurrent_fwd>());
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
  m.impl("flash_kda_fwd", flaop::boxed<&flaop::flash_kda_not_built>());
}
TORCH_LIBRARY_IMPL(flaop, CUDA, m) {
  m.impl("flash_kda_fwd", flaop::boxed<&flaop::flash_kda_not_built>());
}
