// Families that are simple_gla with a constant gate or none. Composites: compiled graphs hold the
// arithmetic of the gate and the op of simple_gla.
#include <ATen/ATen.h>

#include "boxed.h"

namespace flaop {
namespace {

using at::Tensor;

#define SHARED_ARGS                                                                \
  "float? scale=None, Tensor? initial_state=None, bool output_final_state=False, " \
  "Tensor? cu_seqlens=None, bool state_v_first=False, int chunk_size=64, int split_size=0"
#define QKV_ARGS "Tensor q, Tensor k, Tensor v, "
#define LAYER_ARGS "int layer_idx, int num_layers, "
#define BACKEND_ARG ", str backend=\"auto\""
#define NORMALIZE_ARG ", bool normalize=False"

constexpr char kDispatcher[] = "flaop::simple_gla";
constexpr char kChunk[] = "flaop::chunk_simple_gla";
constexpr char kRecurrent[] = "flaop::fused_recurrent_simple_gla";
constexpr char kExplain[] = "flaop::_explain_simple_gla";

// Added to the denominator of normalised linear attention.
constexpr double kEpsilon = 1e-10;

at::ScalarType wide_dtype(const Tensor& x) {
  return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

const Tensor& value_argument(const c10::OperatorHandle& op, const Stack& stack) {
  const Tensor& v = stack[first_argument(op, stack) + 2].toTensor();
  TORCH_CHECK_VALUE(v.dim() == 4, "v must have 4 dimensions [B, T, HV, V], got shape ",
                    v.sym_sizes());
  return v;
}

// Puts g = None and g_gamma behind v, in the place of `replaced` arguments.
template <const char* target>
void call_simple_gla(Stack* stack, size_t first, size_t replaced, c10::IValue g_gamma) {
  static const auto simple_gla = find_op(target);
  const auto gates = stack->begin() + static_cast<std::ptrdiff_t>(first) + 3;
  stack->erase(gates, gates + static_cast<std::ptrdiff_t>(replaced));
  stack->insert(stack->begin() + static_cast<std::ptrdiff_t>(first) + 3,
                {c10::IValue(), std::move(g_gamma)});
  simple_gla.callBoxed(*stack);
}

// log1p(-2^(-5-h)) for value head h. log(1 - 2^(-5-h)) is exactly 0 in fp32 from head 20 on.
template <const char* target>
void retention(const c10::OperatorHandle& op, Stack* stack) {
  const size_t first = first_argument(op, *stack);
  const Tensor& v = value_argument(op, *stack);
  c10::IValue g_gamma;
  if (target != kExplain) {
    const auto options = v.options().dtype(wide_dtype(v));
    g_gamma = at::arange(-5, c10::Scalar(-5 - v.sym_size(2)), -1, options).exp2().neg().log1p();
  }
  call_simple_gla<target>(stack, first, 0, std::move(g_gamma));
}

// -(8 / HV) (1 - layer_idx / num_layers) h for value head h.
template <const char* target>
void lightning_attn(const c10::OperatorHandle& op, Stack* stack) {
  const size_t first = first_argument(op, *stack);
  const Tensor& v = value_argument(op, *stack);
  const int64_t layer_idx = (*stack)[first + 3].toInt();
  const int64_t num_layers = (*stack)[first + 4].toInt();
  TORCH_CHECK_VALUE(0 <= layer_idx && layer_idx < num_layers,
                    "layer_idx must be in [0, num_layers), got layer_idx = ", layer_idx,
                    " and num_layers = ", num_layers);
  c10::IValue g_gamma;
  if (target != kExplain) {
    const double slope =
        -8 * (1 - static_cast<double>(layer_idx) / static_cast<double>(num_layers));
    const c10::Scalar heads(v.sym_size(2));
    const auto options = v.options().dtype(wide_dtype(v));
    g_gamma = at::arange(heads, options).mul(slope).div(heads);
  }
  call_simple_gla<target>(stack, first, 2, std::move(g_gamma));
}

// With `normalize` a column of ones behind the values makes the running sum of the keys the last
// column of the state, and the denominator the last channel of the output.
template <const char* target>
void linear_attn(const c10::OperatorHandle& op, Stack* stack) {
  const size_t first = first_argument(op, *stack);
  const Tensor v = value_argument(op, *stack);
  const bool normalize = torch::jit::pop(*stack).toBool();
  if (!normalize || target == kExplain) return call_simple_gla<target>(stack, first, 0, {});
  (*stack)[first + 2] = at::constant_pad_nd(v, {0, 1}, 1);
  call_simple_gla<target>(stack, first, 0, {});
  c10::IValue& o = (*stack)[stack->size() - 2];
  const Tensor both = o.toTensor();
  const Tensor denominator =
      both.narrow_symint(3, v.sym_size(3), 1).to(wide_dtype(both)).add(kEpsilon);
  o = both.narrow_symint(3, 0, v.sym_size(3)).div(denominator).to(both.scalar_type());
}

}  // namespace
}  // namespace flaop

TORCH_LIBRARY_FRAGMENT(flaop, m) {
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  const auto define = [&](const std::string& name, const std::string& first,
                          const std::string& last) {
    const std::string path_args = "(" + first + SHARED_ARGS + last + ") -> (Tensor, Tensor)";
    m.def(("chunk_" + name + path_args).c_str(), tags);
    m.def(("fused_recurrent_" + name + path_args).c_str(), tags);
    const std::string args = "(" + first + SHARED_ARGS BACKEND_ARG + last + ") -> ";
    m.def((name + args + "(Tensor, Tensor)").c_str(), tags);
    m.def(("_explain_" + name + args + "(str, str[])").c_str(), tags);
  };
  define("retention", QKV_ARGS, "");
  define("lightning_attn", QKV_ARGS LAYER_ARGS, "");
  define("linear_attn", QKV_ARGS, NORMALIZE_ARG);
}

TORCH_LIBRARY_IMPL(flaop, CompositeImplicitAutograd, m) {
  m.impl("retention", flaop::boxed<&flaop::retention<flaop::kDispatcher>>());
  m.impl("chunk_retention", flaop::boxed<&flaop::retention<flaop::kChunk>>());
  m.impl("fused_recurrent_retention", flaop::boxed<&flaop::retention<flaop::kRecurrent>>());
  m.impl("_explain_retention", flaop::boxed<&flaop::retention<flaop::kExplain>>());
  m.impl("lightning_attn", flaop::boxed<&flaop::lightning_attn<flaop::kDispatcher>>());
  m.impl("chunk_lightning_attn", flaop::boxed<&flaop::lightning_attn<flaop::kChunk>>());
  m.impl("fused_recurrent_lightning_attn",
         flaop::boxed<&flaop::lightning_attn<flaop::kRecurrent>>());
  m.impl("_explain_lightning_attn", flaop::boxed<&flaop::lightning_attn<flaop::kExplain>>());
  m.impl("linear_attn", flaop::boxed<&flaop::linear_attn<flaop::kDispatcher>>());
  m.impl("chunk_linear_attn", flaop::boxed<&flaop::linear_attn<flaop::kChunk>>());
  m.impl("fused_recurrent_linear_attn", flaop::boxed<&flaop::linear_attn<flaop::kRecurrent>>());
  m.impl("_explain_linear_attn", flaop::boxed<&flaop::linear_attn<flaop::kExplain>>());
}
