// The paths of the dispatchers, the `backend` argument, and the choice between them. No tensors
// here.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "features.h"

namespace flaop::dispatch {

// In order of preference. The last one is the general path of KDA.
enum class Path : uint8_t { kFlash, kRecurrent, kChunk, kCount };
inline constexpr size_t kPathCount = static_cast<size_t>(Path::kCount);

const char* path_name(Path path);
// What a path can serve when it is asked for by name.
FeatureSet path_offer(Path path);
// What the dispatcher hands to it by itself; a subset of path_offer.
FeatureSet path_policy(Path path);

// "auto", "auto:chunk,fused_recurrent", or the name of a path; then optionally "@" and a version,
// which only keeps compile caches of different installs apart. Throws std::invalid_argument.
struct Backend {
  bool forced = false;
  Path path = Path::kChunk;  // when forced
  bool allowed[kPathCount] = {true, true, true};
};
Backend parse_backend(std::string_view text);

// Whether the dispatcher may take `path` for a call with these needs.
bool takes(const Backend& backend, Path path, FeatureSet needs);

// The path for a call with these needs.
std::optional<Path> first(const Backend& backend, FeatureSet needs);

struct Decision {
  std::string path;                    // empty if no path serves the call
  std::vector<std::string> sentences;  // one for each path passed over, or unable to serve
};
Decision decide(const Backend& backend, FeatureSet needs);

}  // namespace flaop::dispatch
