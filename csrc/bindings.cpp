// The dispatcher's tables for Python: thresholds, and the tensor-free choice for tests.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <tuple>
#include <vector>

#include "dispatch/device.h"
#include "dispatch/paths.h"
#include "dispatch/policy.h"

namespace py = pybind11;
using namespace flaop::dispatch;

namespace {

std::vector<std::string> paths() {
  std::vector<std::string> names;
  for (size_t i = 0; i < kPathCount; ++i) names.emplace_back(path_name(static_cast<Path>(i)));
  return names;
}

std::vector<std::string> features() {
  std::vector<std::string> names;
  for (size_t i = 0; i < static_cast<size_t>(Feature::kCount); ++i) {
    names.emplace_back(feature_name(static_cast<Feature>(i)));
  }
  return names;
}

std::tuple<std::string, std::vector<std::string>> decide_by_name(
    const std::string& backend, const std::vector<std::string>& needs) {
  FeatureSet set;
  const std::vector<std::string> known = features();
  for (const std::string& need : needs) {
    size_t i = 0;
    while (i < known.size() && known[i] != need) ++i;
    if (i == known.size()) throw py::value_error("unknown feature: " + need);
    set.add(static_cast<Feature>(i));
  }
  Decision decision = decide(parse_backend(backend), set);
  return {std::move(decision.path), std::move(decision.sentences)};
}

}  // namespace

PYBIND11_MODULE(_bindings, m) {
  m.doc() = "Tables of flaop's dispatcher.";
  m.attr("SHORT_TOKENS") = kShortTokens;
  m.attr("SHORT_PACKED_TOKENS") = kShortPackedTokens;
  m.attr("FLASH_KDA_BUILT") = kFlashBuilt;
  m.def("paths", &paths, "Names of the paths, in order of preference.");
  m.def("features", &features, "Names of what a call may need of a path.");
  m.def("decide", &decide_by_name, py::arg("backend"), py::arg("needs"),
        "The path for a call with these needs, and a sentence for each path passed over.");
  m.def("compute_capability", &compute_capability, py::arg("device"),
        "10 * major + minor of a CUDA device, 0 if unknown.");
}
