#include "device.h"

#include <array>
#include <atomic>

#include "../launch/driver.h"

namespace flaop::dispatch {
namespace {

// From cuda.h, whose values are stable.
constexpr int kMultiprocessors = 16;
constexpr int kCapabilityMajor = 75;
constexpr int kCapabilityMinor = 76;

int attribute(int device, int which) {
  const launch::Driver* driver = launch::driver();
  int handle = 0, value = 0;
  if (driver == nullptr || driver->device_get(&handle, device) != launch::kSuccess ||
      driver->device_get_attribute(&value, which, handle) != launch::kSuccess) {
    return 0;
  }
  return value;
}

int query_capability(int device) {
  const int major = attribute(device, kCapabilityMajor);
  return major == 0 ? 0 : 10 * major + attribute(device, kCapabilityMinor);
}

int query_multiprocessors(int device) { return attribute(device, kMultiprocessors); }

template <int (*query)(int)>
int cached(int device) {
  // 0 in the cache: not asked yet. Unknown is stored as -1.
  static std::array<std::atomic<int>, 64> cache{};
  if (device < 0) device = 0;
  if (device >= static_cast<int>(cache.size())) return query(device);
  int value = cache[device].load(std::memory_order_relaxed);
  if (value == 0) {
    value = query(device);
    cache[device].store(value == 0 ? -1 : value, std::memory_order_relaxed);
  }
  return value < 0 ? 0 : value;
}

}  // namespace

int compute_capability(int device) { return cached<query_capability>(device); }

int multiprocessors(int device) { return cached<query_multiprocessors>(device); }

}  // namespace flaop::dispatch
