#include "device.h"

#include <dlfcn.h>

#include <array>
#include <atomic>

namespace flaop::dispatch {
namespace {

// From cuda.h, whose values are stable.
constexpr int kSuccess = 0;
constexpr int kCapabilityMajor = 75;
constexpr int kCapabilityMinor = 76;

struct Driver {
  int (*init)(unsigned) = nullptr;
  int (*device_get)(int*, int) = nullptr;
  int (*get_attribute)(int*, int, int) = nullptr;

  Driver() {
    void* library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
    if (library == nullptr) return;
    init = reinterpret_cast<decltype(init)>(dlsym(library, "cuInit"));
    device_get = reinterpret_cast<decltype(device_get)>(dlsym(library, "cuDeviceGet"));
    get_attribute =
        reinterpret_cast<decltype(get_attribute)>(dlsym(library, "cuDeviceGetAttribute"));
    // cuInit creates no context.
    if (device_get == nullptr || get_attribute == nullptr || init == nullptr ||
        init(0) != kSuccess) {
      device_get = nullptr;
    }
  }
};

int query(int device) {
  static const Driver driver;
  int handle = 0, major = 0, minor = 0;
  if (driver.device_get == nullptr || driver.device_get(&handle, device) != kSuccess ||
      driver.get_attribute(&major, kCapabilityMajor, handle) != kSuccess ||
      driver.get_attribute(&minor, kCapabilityMinor, handle) != kSuccess) {
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
