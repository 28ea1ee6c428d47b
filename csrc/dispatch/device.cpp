#include "device.h"

#include <array>
#include <atomic>

#include "../launch/driver.h"

namespace flaop::dispatch {
namespace {

// From cuda.h, whose values are stable.
constexpr int kCapabilityMajor = 75;
constexpr int kCapabilityMinor = 76;

int query(int device) {
  const launch::Driver* driver = launch::driver();
  int handle = 0, major = 0, minor = 0;
  if (driver == nullptr || driver->device_get(&handle, device) != launch::kSuccess ||
      driver->device_get_attribute(&major, kCapabilityMajor, handle) != launch::kSuccess ||
      driver->device_get_attribute(&minor, kCapabilityMinor, handle) != launch::kSuccess) {
    return 0;
  }
  return 10 * major + minor;
}

}  // namespace

int compute_capability(int device) {
  // 0 in the cache: not asked yet. Unknown is stored as -1.
  static std::array<std::atomic<int>, 64> cache{};
  if (device < 0) device = 0;
  if (device >= static_cast<int>(cache.size())) return query(device);
  int capability = cache[device].load(std::memory_order_relaxed);
  if (capability == 0) {
    capability = query(device);
    cache[device].store(capability == 0 ? -1 : capability, std::memory_order_relaxed);
  }
  return capability < 0 ? 0 : capability;
}

}  // namespace flaop::dispatch
