// Decode on a pool of states, for every family with kernels of its own: schemas, autograd and
// version counters. CPU and CUDA kernels and the fakes are registered by flaop/ops/steps.py.
#include <string>
#include <vector>

#include "boxed.h"

namespace flaop {
namespace {

// What every op takes behind the inputs of its family, and where it reads states.
#define POOL ", Tensor(a!) state, Tensor state_indices"
#define FROZEN_POOL ", Tensor state, Tensor state_indices"
#define SHARED ", float? scale=None, Tensor? cu_seqlens=None"
#define STEP_SLOTS                                                    \
  ", bool state_v_first=False, Tensor? write_indices=None, "          \
  "Tensor? has_initial_state=None, Tensor? num_accepted_tokens=None)" \
  " -> Tensor"
#define CHUNK_SLOTS                                                                             \
  ", bool state_v_first=False, int chunk_size=64, Tensor? write_indices=None, "                 \
  "Tensor? has_initial_state=None, int checkpoint_interval=0, Tensor? checkpoint_indices=None)" \
  " -> Tensor"
#define VERIFY_SLOTS                                            \
  ", bool state_v_first=False, Tensor? has_initial_state=None)" \
  " -> (Tensor o, Tensor k, Tensor u, Tensor g)"
#define COMMIT_ARGS                                                                           \
  "(Tensor(a!) state, Tensor state_indices, Tensor num_accepted_tokens, Tensor k, Tensor u, " \
  "Tensor g, bool state_v_first=False, Tensor? cu_seqlens=None, "                             \
  "Tensor? has_initial_state=None) -> ()"
#define DELTA_FLAGS                                                                  \
  ", Tensor? A_log=None, Tensor? dt_bias=None, bool use_qk_l2norm_in_kernel=False, " \
  "bool use_gate_in_kernel=False, bool use_beta_sigmoid_in_kernel=False, "           \
  "bool allow_neg_eigval=False"

struct Family {
  std::string name;
  std::string inputs;
  std::string flags;        // behind what all take
  std::string chunk_flags;  // of the chunk op alone
  std::string last_flags;
};

const std::vector<Family>& families() {
  static const std::vector<Family> all{
      {"kda", "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta", DELTA_FLAGS,
       ", bool safe_gate=False", ", float? lower_bound=None"},
      {"gated_delta_rule", "Tensor q, Tensor k, Tensor v, Tensor? g, Tensor beta", DELTA_FLAGS, "",
       ""},
      {"simple_gla", "Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? g_gamma", "", "", ""},
      {"gla", "Tensor q, Tensor k, Tensor v, Tensor g", "", "", ""},
  };
  return all;
}

// The tensor that the op mutates.
at::Tensor mutated(const c10::OperatorHandle& op, const Stack& stack) {
  const auto& arguments = op.schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    const c10::AliasInfo* alias = arguments[i].alias_info();
    if (alias != nullptr && alias->isWrite())
      return stack[first_argument(op, stack) + i].toTensor();
  }
  TORCH_INTERNAL_ASSERT(false, op.operator_name().name, " mutates nothing");
}

constexpr char kAdvice[] =
    "decode serves inference only: call it under torch.no_grad() or detach its inputs";

void refuse(const c10::OperatorHandle& op, Stack* stack) { refuse_gradient(op, stack, kAdvice); }

// The same, on the way to bump_version.
void refuse_mutating(const c10::OperatorHandle& op, Stack* stack) {
  check_no_gradient(op, *stack, kAdvice);
  at::AutoDispatchBelowAutograd below;
  op.callBoxed(*stack);
}

// A kernel writes behind autograd's back: what was saved of the pool must be seen as changed. A key
// of its own, because inference mode skips Autograd for tensors that still have a version.
void bump_version(const c10::OperatorHandle& op, Stack* stack) {
  const at::Tensor state = mutated(op, *stack);
  call_below_autograd(op, stack);
  if (!state.is_inference()) state.unsafeGetTensorImpl()->bump_version();
}

}  // namespace
}  // namespace flaop

TORCH_LIBRARY_FRAGMENT(flaop, m) {
  m.set_python_module("flaop.ops.steps");
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  const auto define = [&](const std::string& schema) { m.def(schema.c_str(), tags); };
  for (const auto& f : flaop::families()) {
    define(f.name + "_step_(" + f.inputs + POOL SHARED + f.flags + f.last_flags + STEP_SLOTS);
    define("chunk_" + f.name + "_pool_(" + f.inputs + POOL SHARED + f.flags + f.chunk_flags +
           f.last_flags + CHUNK_SLOTS);
    define(f.name + "_verify(" + f.inputs + FROZEN_POOL SHARED + f.flags + f.last_flags +
           VERIFY_SLOTS);
    define(f.name + "_commit_" COMMIT_ARGS);
  }
}

// The launchers in Python of the ops whose CUDA kernel is in C++ (remembered.cpp).
TORCH_LIBRARY_FRAGMENT(flaop_launch, m) {
  for (const auto& f : flaop::families()) {
    m.def((f.name + "_step_(" + f.inputs + POOL SHARED + f.flags + f.last_flags + STEP_SLOTS)
              .c_str());
  }
}

TORCH_LIBRARY_IMPL(flaop, Autograd, m) {
  for (const auto& f : flaop::families()) {
    m.impl((f.name + "_step_").c_str(), flaop::boxed<&flaop::refuse_mutating>());
    m.impl(("chunk_" + f.name + "_pool_").c_str(), flaop::boxed<&flaop::refuse_mutating>());
    m.impl((f.name + "_verify").c_str(), flaop::boxed<&flaop::refuse>());
    m.impl((f.name + "_commit_").c_str(), flaop::boxed<&flaop::refuse_mutating>());
  }
}

TORCH_LIBRARY_IMPL(flaop, ADInplaceOrView, m) {
  for (const auto& f : flaop::families()) {
    m.impl((f.name + "_step_").c_str(), flaop::boxed<&flaop::bump_version>());
    m.impl(("chunk_" + f.name + "_pool_").c_str(), flaop::boxed<&flaop::bump_version>());
    m.impl((f.name + "_commit_").c_str(), flaop::boxed<&flaop::bump_version>());
  }
}
