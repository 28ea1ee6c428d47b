// The delta rule: gated_delta_rule without a gate. Composites: compiled graphs hold its ops.
#include "boxed.h"

namespace flaop {
namespace {

#define DELTA_RULE_ARGS                                                                  \
  "Tensor q, Tensor k, Tensor v, Tensor beta, float? scale=None, "                       \
  "Tensor? initial_state=None, bool output_final_state=False, Tensor? cu_seqlens=None, " \
  "bool use_qk_l2norm_in_kernel=False, bool use_beta_sigmoid_in_kernel=False, "          \
  "bool allow_neg_eigval=False, bool state_v_first=False, int chunk_size=64, "           \
  "int split_size=0, bool disable_recompute=False"
#define BACKEND_ARG ", str backend=\"auto\""

constexpr char kDispatcher[] = "flaop::gated_delta_rule";
constexpr char kChunk[] = "flaop::chunk_gated_delta_rule";
constexpr char kRecurrent[] = "flaop::fused_recurrent_gated_delta_rule";
constexpr char kExplain[] = "flaop::_explain_gated_delta_rule";

// Where gated_delta_rule has arguments more, in the order of its schema.
constexpr size_t kG = 3, kALog = 9, kDtBias = 10, kGate = 12;

template <const char* target>
void delta_rule(const c10::OperatorHandle& op, Stack* stack) {
  static const auto gated_delta_rule = find_op(target);
  const auto first = static_cast<std::ptrdiff_t>(first_argument(op, *stack));
  for (const size_t tensor : {kG, kALog, kDtBias}) {
    stack->insert(stack->begin() + first + static_cast<std::ptrdiff_t>(tensor), c10::IValue());
  }
  stack->insert(stack->begin() + first + static_cast<std::ptrdiff_t>(kGate), c10::IValue(false));
  gated_delta_rule.callBoxed(*stack);
}

}  // namespace
}  // namespace flaop

TORCH_LIBRARY_FRAGMENT(flaop, m) {
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  m.def("delta_rule(" DELTA_RULE_ARGS BACKEND_ARG ") -> (Tensor, Tensor)", tags);
  m.def("chunk_delta_rule(" DELTA_RULE_ARGS ") -> (Tensor, Tensor)", tags);
  m.def("fused_recurrent_delta_rule(" DELTA_RULE_ARGS ") -> (Tensor, Tensor)", tags);
  m.def("_explain_delta_rule(" DELTA_RULE_ARGS BACKEND_ARG ") -> (str, str[])", tags);
}

TORCH_LIBRARY_IMPL(flaop, CompositeImplicitAutograd, m) {
  m.impl("delta_rule", flaop::boxed<&flaop::delta_rule<flaop::kDispatcher>>());
  m.impl("chunk_delta_rule", flaop::boxed<&flaop::delta_rule<flaop::kChunk>>());
  m.impl("fused_recurrent_delta_rule", flaop::boxed<&flaop::delta_rule<flaop::kRecurrent>>());
  m.impl("_explain_delta_rule", flaop::boxed<&flaop::delta_rule<flaop::kExplain>>());
}
