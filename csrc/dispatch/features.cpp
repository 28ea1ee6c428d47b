#include "features.h"

namespace flaop::dispatch {
namespace {

struct Text {
  const char* name;
  const char* clause;
};

// In the order of Feature.
constexpr Text kText[] = {
    {"kernel", "kernel not built"},
    {"long", "more than 64 tokens (packed: more than 64 per sequence or 1024 in all)"},
    {"short", "a short call (at most 64 tokens; packed: 64 per sequence and 1024 in all)"},
    {"gradient", "a gradient is needed"},
    {"other_device", "the device is not a CUDA device of compute capability 9.0"},
    {"other_dtype", "q, k, v and g are not bfloat16"},
    {"other_heads", "the head sizes are not K = V = 128"},
    {"grouped_heads", "HV is not H"},
    {"given_gate", "use_gate_in_kernel is False"},
    {"given_norm", "use_qk_l2norm_in_kernel is False"},
    {"given_beta", "use_beta_sigmoid_in_kernel is False"},
    {"neg_eigval", "allow_neg_eigval is True"},
    {"unsafe_gate", "no safe_gate with lower_bound in [-5, 0)"},
    {"state_k_first", "a state goes in or out and state_v_first is False"},
    {"other_family", "the family is not KDA"},
    {"value_gate", "a gate on the channels of the values (gv)"},
};
static_assert(sizeof(kText) / sizeof(kText[0]) == static_cast<size_t>(Feature::kCount));

}  // namespace

const char* feature_name(Feature feature) { return kText[static_cast<size_t>(feature)].name; }

const char* feature_clause(Feature feature) { return kText[static_cast<size_t>(feature)].clause; }

std::string missing(FeatureSet needs, FeatureSet offer) {
  const FeatureSet lacking = needs.without(offer);
  std::string clauses;
  for (size_t i = 0; i < static_cast<size_t>(Feature::kCount); ++i) {
    const auto feature = static_cast<Feature>(i);
    if (!lacking.has(feature)) continue;
    if (!clauses.empty()) clauses += "; ";
    clauses += feature_clause(feature);
  }
  return clauses;
}

}  // namespace flaop::dispatch
