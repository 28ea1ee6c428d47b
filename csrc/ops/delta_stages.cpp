// The stages of the delta families as ops of their own: schemas and autograd. CPU and CUDA kernels
// and the fakes are registered by flaop/ops/delta_stages.py.
#include "formula.h"

namespace flaop {
namespace {

using at::Tensor;

Tensor solve_tril_backward(const Tensor& d_X, const Tensor& X,
                           const std::optional<Tensor>& cu_seqlens) {
  static const auto op =
      find_op("flaop::solve_tril_bwd")
          .typed<Tensor(const Tensor&, const Tensor&, const std::optional<Tensor>&)>();
  return op.call(d_X, X, cu_seqlens);
}

}  // namespace

struct SolveTril : torch::autograd::Function<SolveTril> {
  using Context = torch::autograd::AutogradContext;
  using Tensors = torch::autograd::variable_list;

  static Tensor forward(Context* ctx, const Tensor& L, const std::optional<Tensor>& cu_seqlens) {
    static const auto op =
        find_op("flaop::solve_tril").typed<Tensor(const Tensor&, const std::optional<Tensor>&)>();
    at::AutoDispatchBelowADInplaceOrView below;
    Tensor X = op.call(L, cu_seqlens);
    ctx->save_for_backward({X, cu_seqlens.value_or(Tensor())});
    return X;
  }

  static Tensors backward(Context* ctx, const Tensors& incoming) {
    const Tensors saved = ctx->get_saved_variables();
    const auto& cu_seqlens = saved[1];
    return {solve_tril_backward(incoming[0], saved[0],
                                cu_seqlens.defined() ? std::optional(cu_seqlens) : std::nullopt),
            Tensor()};
  }

  static Tensor autograd(const Tensor& L, const std::optional<Tensor>& cu_seqlens) {
    return apply(L, cu_seqlens);
  }
};

namespace {

void refuse_delta_stage(const c10::OperatorHandle& op, Stack* stack) {
  refuse_gradient(op, stack,
                  "a stage has no backward of its own; call flaop::chunk_gated_delta_rule or "
                  "flaop::chunk_kda for a gradient");
}

}  // namespace
}  // namespace flaop

TORCH_LIBRARY_FRAGMENT(flaop, m) {
  m.set_python_module("flaop.ops.delta_stages");
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  m.def("solve_tril(Tensor L, Tensor? cu_seqlens=None) -> Tensor", tags);
  m.def("solve_tril_bwd(Tensor d_X, Tensor X, Tensor? cu_seqlens=None) -> Tensor", tags);
  m.def(
      "recompute_w_u(Tensor k, Tensor v, Tensor beta, Tensor A, Tensor? g=None, Tensor? gk=None, "
      "Tensor? cu_seqlens=None) -> (Tensor w, Tensor u)",
      tags);
  m.def(
      "chunk_delta_fwd_h(Tensor k, Tensor w, Tensor u, Tensor? g=None, Tensor? gk=None, "
      "Tensor? initial_state=None, bool output_final_state=False, Tensor? cu_seqlens=None, "
      "int chunk_size=64, bool state_v_first=False) "
      "-> (Tensor h, Tensor v_new, Tensor final_state)",
      tags);
}

TORCH_LIBRARY_IMPL(flaop, Autograd, m) {
  m.impl("solve_tril", &flaop::SolveTril::autograd);
  m.impl("solve_tril_bwd", flaop::boxed<&flaop::refuse_double_backward>());
  m.impl("recompute_w_u", flaop::boxed<&flaop::refuse_delta_stage>());
  m.impl("chunk_delta_fwd_h", flaop::boxed<&flaop::refuse_delta_stage>());
}
