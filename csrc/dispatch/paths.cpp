#include "paths.h"

#include <stdexcept>

#include "policy.h"

namespace flaop::dispatch {
namespace {

constexpr const char* kNames[] = {"flash_kda", "fused_recurrent", "chunk"};
static_assert(sizeof(kNames) / sizeof(kNames[0]) == kPathCount);

Path parse_path(std::string_view name, std::string_view text) {
  for (size_t i = 0; i < kPathCount; ++i) {
    if (name == kNames[i]) return static_cast<Path>(i);
  }
  throw std::invalid_argument(
      "backend must be \"auto\", \"flash_kda\", \"fused_recurrent\", \"chunk\" or "
      "\"auto:\" and a list of these paths, got \"" +
      std::string(text) + "\"");
}

}  // namespace

const char* path_name(Path path) { return kNames[static_cast<size_t>(path)]; }

FeatureSet path_offer(Path path) {
  if (path == Path::kRecurrent) return FeatureSet::all();
  if (path == Path::kChunk) return FeatureSet::all().without({Feature::kValueGate});
  FeatureSet offer{Feature::kLong, Feature::kShort, Feature::kNegEigval};
  offer.add_if(kFlashBuilt, Feature::kKernel);
  return offer;
}

FeatureSet path_policy(Path path) {
  switch (path) {
    case Path::kFlash:
      return path_offer(path).without({Feature::kShort});
    case Path::kRecurrent:
      return path_offer(path).without({Feature::kLong, Feature::kGradient});
    default:
      return path_offer(path);
  }
}

Backend parse_backend(std::string_view text) {
  std::string_view rest = text.substr(0, text.find('@'));
  Backend backend;
  if (rest == "auto") return backend;
  constexpr std::string_view kList = "auto:";
  if (rest.substr(0, kList.size()) != kList) {
    backend.forced = true;
    backend.path = parse_path(rest, text);
    return backend;
  }
  rest.remove_prefix(kList.size());
  for (bool& allowed : backend.allowed) allowed = false;
  while (true) {
    const size_t comma = rest.find(',');
    backend.allowed[static_cast<size_t>(parse_path(rest.substr(0, comma), text))] = true;
    if (comma == std::string_view::npos) return backend;
    rest.remove_prefix(comma + 1);
  }
}

bool takes(const Backend& backend, Path path, FeatureSet needs) {
  if (backend.forced) return path == backend.path && path_offer(path).covers(needs);
  return backend.allowed[static_cast<size_t>(path)] && path_policy(path).covers(needs);
}

std::optional<Path> first(const Backend& backend, FeatureSet needs) {
  for (size_t i = 0; i < kPathCount; ++i) {
    const auto path = static_cast<Path>(i);
    if (takes(backend, path, needs)) return path;
  }
  return std::nullopt;
}

Decision decide(const Backend& backend, FeatureSet needs) {
  const std::optional<Path> chosen = first(backend, needs);
  Decision decision;
  if (chosen) decision.path = path_name(*chosen);
  bool passed_over = true;  // up to the path that is taken
  for (size_t i = 0; i < kPathCount; ++i) {
    const auto path = static_cast<Path>(i);
    if (path == chosen) {
      passed_over = false;
      continue;
    }
    std::string reasons;
    if (!passed_over) {
      reasons = missing(needs, path_offer(path));
      if (reasons.empty()) continue;
    } else if (backend.forced && path != backend.path) {
      reasons = "another path is forced by backend";
    } else {
      reasons = missing(needs, backend.forced ? path_offer(path) : path_policy(path));
      if (!backend.allowed[i]) {
        reasons += (reasons.empty() ? "" : "; ") + std::string("not in the list of backend");
      }
    }
    decision.sentences.push_back(std::string(path_name(path)) + ": " + reasons);
  }
  return decision;
}

}  // namespace flaop::dispatch
