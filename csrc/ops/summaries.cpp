// What a shard of a sequence does to the state that enters it, for context parallelism: schemas and
// autograd. CPU and CUDA kernels and the fakes are registered by flaop/ops/summaries.py.
#include <string>
#include <vector>

#include "boxed.h"

namespace flaop {
namespace {

#define DELTA_FLAGS                                                                  \
  ", Tensor? A_log=None, Tensor? dt_bias=None, bool use_qk_l2norm_in_kernel=False, " \
  "bool use_gate_in_kernel=False, bool use_beta_sigmoid_in_kernel=False, "           \
  "bool allow_neg_eigval=False"

// Of the family's _fwd op; computed again where absent.
#define RESIDUALS ", Tensor? A=None, Tensor? A_qk=None"
#define KDA_RESIDUALS \
  RESIDUALS ", Tensor? w=None, Tensor? qg=None, Tensor? kg=None, Tensor? decay=None"

struct Family {
  std::string name;
  std::string forward_inputs;
  std::string backward_inputs;  // behind d_o
  std::string flags;
  bool delta;
};

const std::vector<Family>& families() {
  static const std::vector<Family> all{
      {"kda", "Tensor k, Tensor v, Tensor g, Tensor beta",
       "Tensor q, Tensor k, Tensor g, Tensor beta" KDA_RESIDUALS,
       DELTA_FLAGS ", bool safe_gate=False, float? lower_bound=None", true},
      {"gated_delta_rule", "Tensor k, Tensor v, Tensor? g, Tensor beta",
       "Tensor q, Tensor k, Tensor? g, Tensor beta" RESIDUALS, DELTA_FLAGS, true},
      {"simple_gla", "Tensor k, Tensor v, Tensor? g=None, Tensor? g_gamma=None",
       "Tensor q, Tensor? g=None, Tensor? g_gamma=None", "", false},
      {"gla", "Tensor k, Tensor v, Tensor g", "Tensor q, Tensor g", "", false},
  };
  return all;
}

void refuse_summary(const c10::OperatorHandle& op, Stack* stack) {
  refuse_gradient(op, stack,
                  "a summary has no gradient of its own; the functions of flaop.distributed "
                  "carry gradients between ranks");
}

}  // namespace
}  // namespace flaop

TORCH_LIBRARY_FRAGMENT(flaop, m) {
  m.set_python_module("flaop.ops.summaries");
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  for (const auto& f : flaop::families()) {
    const std::string name = "chunk_" + f.name + "_summary";
    const std::string shared = ", Tensor? cu_seqlens=None" + f.flags + ", int chunk_size=64)";
    m.def((name + "(" + f.forward_inputs + shared + " -> (Tensor state, Tensor transfer)").c_str(),
          tags);
    m.def((name + "_bwd(Tensor d_o, " + f.backward_inputs + ", float? scale=None" + shared +
           " -> (Tensor d_state, Tensor transfer)")
              .c_str(),
          tags);
    if (!f.delta) continue;
    m.def((name + "_fwd(Tensor q, " + f.forward_inputs + ", float? scale=None" + f.flags +
           ", int chunk_size=64) -> (Tensor o, Tensor read, Tensor state, Tensor transfer, "
           "Tensor A, Tensor A_qk)")
              .c_str(),
          tags);
  }
}

TORCH_LIBRARY_IMPL(flaop, Autograd, m) {
  for (const auto& f : flaop::families()) {
    const std::string name = "chunk_" + f.name + "_summary";
    m.impl(name.c_str(), flaop::boxed<&flaop::refuse_summary>());
    m.impl((name + "_bwd").c_str(), flaop::boxed<&flaop::refuse_summary>());
    if (f.delta) m.impl((name + "_fwd").c_str(), flaop::boxed<&flaop::refuse_summary>());
  }
}
