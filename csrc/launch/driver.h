// The CUDA driver, opened when first asked for. No CUDA header, no link against libcuda.
#pragma once

namespace flaop::launch {

// Of cuda.h, whose values are stable. Handles are opaque pointers.
constexpr int kSuccess = 0;

struct Driver {
  int (*init)(unsigned) = nullptr;
  int (*device_get)(int*, int) = nullptr;
  int (*device_get_attribute)(int*, int, int) = nullptr;
  int (*ctx_get_current)(void**) = nullptr;
  int (*ctx_set_current)(void*) = nullptr;
  int (*device_primary_ctx_retain)(void**, int) = nullptr;
  int (*get_error_name)(int, const char**) = nullptr;
  int (*module_load_data)(void**, const void*) = nullptr;
  int (*module_get_function)(void**, void*, const char*) = nullptr;
  int (*func_set_attribute)(void*, int, int) = nullptr;
  int (*launch_kernel)(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                       unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared,
                       void* stream, void** parameters, void** extra) = nullptr;
};

// nullptr where there is no driver, or none that can be initialised. cuInit creates no context.
const Driver* driver();

}  // namespace flaop::launch
