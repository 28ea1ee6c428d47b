#include "driver.h"

#include <dlfcn.h>

namespace flaop::launch {
namespace {

template <typename Function>
bool find(void* library, const char* name, Function*& function) {
  function = reinterpret_cast<Function*>(dlsym(library, name));
  return function != nullptr;
}

bool open(Driver& driver) {
  void* library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
  return library != nullptr && find(library, "cuInit", driver.init) &&
         find(library, "cuDeviceGet", driver.device_get) &&
         find(library, "cuDeviceGetAttribute", driver.device_get_attribute) &&
         find(library, "cuCtxGetCurrent", driver.ctx_get_current) &&
         find(library, "cuCtxSetCurrent", driver.ctx_set_current) &&
         find(library, "cuDevicePrimaryCtxRetain", driver.device_primary_ctx_retain) &&
         find(library, "cuGetErrorName", driver.get_error_name) &&
         find(library, "cuModuleLoadData", driver.module_load_data) &&
         find(library, "cuModuleGetFunction", driver.module_get_function) &&
         find(library, "cuFuncSetAttribute", driver.func_set_attribute) &&
         find(library, "cuLaunchKernel", driver.launch_kernel) && driver.init(0) == kSuccess;
}

}  // namespace

const Driver* driver() {
  static Driver functions;
  static const bool usable = open(functions);
  return usable ? &functions : nullptr;
}

}  // namespace flaop::launch
