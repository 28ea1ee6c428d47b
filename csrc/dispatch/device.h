// Facts about CUDA devices, from the driver. No CUDA header, no context, no torch.
#pragma once

namespace flaop::dispatch {

// 10 * major + minor of a device, or 0 if there is no driver or no such device. Cached.
int compute_capability(int device);

// Multiprocessors of a device, or 0. Cached.
int multiprocessors(int device);

}  // namespace flaop::dispatch
