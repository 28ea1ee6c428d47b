// What a call asks of a path, one bit each, and what each path offers. No tensors here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>

namespace flaop::dispatch {

enum class Feature : uint8_t {
  kKernel,        // asked by calls of KDA; offered by a path that is part of this build
  kLong,          // more tokens than the short threshold
  kShort,         // at most that many
  kGradient,      // grad mode, and an input requires grad
  kOtherDevice,   // not a CUDA device of compute capability 9.0
  kOtherDtype,    // q, k, v or g not bfloat16
  kOtherHeads,    // K or V not 128
  kGroupedHeads,  // HV != H
  kGivenGate,     // g computed by the caller
  kGivenNorm,     // q and k not normalised in the kernel
  kGivenBeta,     // beta activated by the caller
  kNegEigval,     // allow_neg_eigval
  kUnsafeGate,    // no safe_gate with lower_bound in [-5, 0)
  kStateKFirst,   // a state goes in or out as [N, HV, K, V]
  kOtherFamily,   // a family other than KDA
  kValueGate,     // gv, a gate on the channels of the values
  kCount
};

class FeatureSet {
 public:
  constexpr FeatureSet() = default;
  constexpr FeatureSet(std::initializer_list<Feature> features) {
    for (Feature feature : features) add(feature);
  }
  static constexpr FeatureSet all() {
    FeatureSet set;
    set.bits_ = (uint32_t{1} << static_cast<uint32_t>(Feature::kCount)) - 1;
    return set;
  }
  constexpr FeatureSet& add(Feature feature) {
    bits_ |= uint32_t{1} << static_cast<uint32_t>(feature);
    return *this;
  }
  constexpr void add_if(bool condition, Feature feature) {
    if (condition) add(feature);
  }
  constexpr bool has(Feature feature) const {
    return (bits_ >> static_cast<uint32_t>(feature)) & 1;
  }
  constexpr bool covers(FeatureSet needs) const { return (needs.bits_ & ~bits_) == 0; }
  constexpr FeatureSet without(FeatureSet other) const {
    FeatureSet set;
    set.bits_ = bits_ & ~other.bits_;
    return set;
  }

 private:
  uint32_t bits_ = 0;
};

// The name used by tests, e.g. "grouped_heads", and the clause of a sentence.
const char* feature_name(Feature feature);
const char* feature_clause(Feature feature);

// The clauses of the features that `needs` has and `offer` lacks, joined by "; ".
std::string missing(FeatureSet needs, FeatureSet offer);

}  // namespace flaop::dispatch
