// The stages of the chunk paths as ops of their own: schemas and autograd. CPU and CUDA kernels and
// the fakes are registered by flaop/ops/stages.py.
#include <torch/csrc/autograd/custom_function.h>

#include "boxed.h"

namespace flaop {
namespace {

using at::Tensor;

Tensor local_cumsum(const Tensor& g, int64_t chunk_size, bool reverse, double scale,
                    const std::optional<Tensor>& cu_seqlens) {
  static const auto op =
      find_op("flaop::chunk_local_cumsum")
          .typed<Tensor(const Tensor&, int64_t, bool, double, const std::optional<Tensor>&)>();
  return op.call(g, chunk_size, reverse, scale, cu_seqlens);
}

}  // namespace

// A sum over the past of a chunk has a sum over its future as its backward.
struct ChunkLocalCumsum : torch::autograd::Function<ChunkLocalCumsum> {
  using Context = torch::autograd::AutogradContext;
  using Tensors = torch::autograd::variable_list;

  static Tensor forward(Context* ctx, const Tensor& g, int64_t chunk_size, bool reverse,
                        double scale, const std::optional<Tensor>& cu_seqlens) {
    ctx->save_for_backward({cu_seqlens.value_or(Tensor())});
    ctx->saved_data["chunk_size"] = chunk_size;
    ctx->saved_data["reverse"] = reverse;
    ctx->saved_data["scale"] = scale;
    ctx->saved_data["dtype"] = g.scalar_type();
    at::AutoDispatchBelowADInplaceOrView below;
    return local_cumsum(g, chunk_size, reverse, scale, cu_seqlens);
  }

  static Tensors backward(Context* ctx, const Tensors& incoming) {
    Tensors result(5);
    const Tensor cu_seqlens = ctx->get_saved_variables()[0];
    auto& options = ctx->saved_data;
    result[0] = local_cumsum(incoming[0], options["chunk_size"].toInt(),
                             !options["reverse"].toBool(), options["scale"].toDouble(),
                             cu_seqlens.defined() ? std::optional(cu_seqlens) : std::nullopt)
                    .to(options["dtype"].toScalarType());
    return result;
  }

  static Tensor autograd(const Tensor& g, int64_t chunk_size, bool reverse, double scale,
                         const std::optional<Tensor>& cu_seqlens) {
    return apply(g, chunk_size, reverse, scale, cu_seqlens);
  }
};

namespace {

void refuse_stage(const c10::OperatorHandle& op, Stack* stack) {
  refuse_gradient(op, stack,
                  "a stage has no backward of its own; call flaop::chunk_simple_gla or "
                  "flaop::chunk_gla for a gradient");
}

}  // namespace
}  // namespace flaop

TORCH_LIBRARY_FRAGMENT(flaop, m) {
  m.set_python_module("flaop.ops.stages");
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  m.def(
      "chunk_local_cumsum(Tensor g, int chunk_size, bool reverse=False, float scale=1.0, "
      "Tensor? cu_seqlens=None) -> Tensor",
      tags);
  m.def(
      "chunk_fwd_h(Tensor k, Tensor v, Tensor? g=None, Tensor? g_gamma=None, Tensor? gk=None, "
      "Tensor? gv=None, Tensor? initial_state=None, bool output_final_state=False, "
      "Tensor? cu_seqlens=None, int chunk_size=64, int split_size=0, bool states_in_fp32=False, "
      "bool state_v_first=False) -> (Tensor h, Tensor final_state)",
      tags);
  m.def(
      "chunk_fwd_o(Tensor q, Tensor k, Tensor v, Tensor h, Tensor? g=None, Tensor? g_gamma=None, "
      "float? scale=None, Tensor? cu_seqlens=None, int chunk_size=64, bool state_v_first=False) "
      "-> Tensor",
      tags);
}

TORCH_LIBRARY_IMPL(flaop, Autograd, m) {
  m.impl("chunk_local_cumsum", &flaop::ChunkLocalCumsum::autograd);
  m.impl("chunk_fwd_h", flaop::boxed<&flaop::refuse_stage>());
  m.impl("chunk_fwd_o", flaop::boxed<&flaop::refuse_stage>());
}
