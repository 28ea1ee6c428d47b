#include "../kernels/flash_kda/sm90/flash_kda.h"

#include <ATen/DeviceAccelerator.h>
#include <ATen/DeviceGuard.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <dlfcn.h>

#include <cmath>
#include <string>

#include "../dispatch/device.h"
#include "flash.h"

namespace flaop {
namespace {

using at::Tensor;

constexpr int64_t kHead = 128;

// The library of CUDA kernels, which lies beside this one.
struct Kernels {
  decltype(&flaop_flash_kda_pieces) pieces = nullptr;
  decltype(&flaop_flash_kda_workspace) workspace = nullptr;
  decltype(&flaop_flash_kda_launch) launch = nullptr;
  decltype(&flaop_cuda_error) error = nullptr;
  std::string problem;  // empty if it is loaded

  Kernels() {
    Dl_info self;
    if (dladdr(reinterpret_cast<const void*>(&flash_kda), &self) == 0) {
      problem = "the directory of the package was not found";
      return;
    }
    std::string path = self.dli_fname;
    path = path.substr(0, path.rfind('/') + 1) + "_kernels.so";
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      problem = dlerror();
      return;
    }
    find(library, "flaop_flash_kda_pieces", pieces);
    find(library, "flaop_flash_kda_workspace", workspace);
    find(library, "flaop_flash_kda_launch", launch);
    find(library, "flaop_cuda_error", error);
  }

 private:
  template <typename Function>
  void find(void* library, const char* name, Function*& function) {
    function = reinterpret_cast<Function*>(dlsym(library, name));
    if (function == nullptr) problem = std::string("_kernels.so lacks ") + name;
  }
};

const Kernels& kernels() {
  static const Kernels loaded;
  TORCH_CHECK(loaded.problem.empty(), "the CUDA kernels could not be loaded: ", loaded.problem);
  return loaded;
}

int32_t dtype_of(const Tensor& x) {
  if (x.scalar_type() == at::kFloat) return FLAOP_F32;
  return x.scalar_type() == at::kBFloat16 ? FLAOP_BF16 : FLAOP_F16;
}

void check_shape(const char* name, const Tensor& x, at::IntArrayRef shape, const char* layout,
                 const Tensor& q) {
  TORCH_CHECK_VALUE(x.sizes() == shape, name, " must have shape ", layout, " = ", shape, ", got ",
                    x.sizes());
  TORCH_CHECK_VALUE(x.device() == q.device(), name, " must be on the device of q, ", q.device(),
                    ", got ", x.device());
}

// What kernels read: contiguous, aligned, and of a dtype of the C interface.
Tensor prepared(const char* name, const Tensor& x) {
  if (!x.defined()) return x;
  const at::ScalarType dtype = x.scalar_type();
  TORCH_CHECK_TYPE(at::isFloatingType(dtype), name, " must have a floating dtype, got ", dtype);
  Tensor y = dtype == at::kDouble ? x.to(at::kFloat) : x;
  y = y.contiguous();
  return reinterpret_cast<uintptr_t>(y.const_data_ptr()) % 16 == 0 ? y : y.clone();
}

const void* address(const Tensor& x) { return x.defined() ? x.const_data_ptr() : nullptr; }

// Returns N.
int64_t check(const FlashKdaCall& call) {
  const Tensor& q = call.q;
  TORCH_CHECK_VALUE(q.dim() == 4, "q must have 4 dimensions [B, T, H, K], got shape ", q.sizes());
  const int64_t B = q.size(0), T = q.size(1), H = q.size(2);
  check_shape("k", call.k, q.sizes(), "[B, T, H, K]", q);
  check_shape("v", call.v, q.sizes(), "[B, T, H, V]", q);
  check_shape("g", call.g, q.sizes(), "[B, T, H, K]", q);
  check_shape("beta", call.beta, {B, T, H}, "[B, T, H]", q);
  for (const auto& [name, x] : {std::pair{"k", call.k}, {"v", call.v}, {"g", call.g}}) {
    TORCH_CHECK_TYPE(x.scalar_type() == q.scalar_type(), name, " must have the dtype of q, ",
                     q.scalar_type(), ", got ", x.scalar_type());
  }
  if (call.A_log.defined()) check_shape("A_log", call.A_log, {H}, "[H]", q);
  if (call.dt_bias.defined() && call.dt_bias.dim() == 1) {
    check_shape("dt_bias", call.dt_bias, {H * kHead}, "[H * K]", q);
  } else if (call.dt_bias.defined()) {
    check_shape("dt_bias", call.dt_bias, {H, kHead}, "[H, K]", q);
  }
  int64_t N = B;
  if (call.cu_seqlens.defined()) {
    const Tensor& bounds = call.cu_seqlens;
    TORCH_CHECK_VALUE(bounds.dim() == 1 && bounds.numel() >= 1,
                      "cu_seqlens must have shape [N + 1], got ", bounds.sizes());
    TORCH_CHECK_VALUE(B == 1, "cu_seqlens needs a batch of one (packed sequences), got q of shape ",
                      q.sizes());
    TORCH_CHECK_VALUE(bounds.device() == q.device(), "cu_seqlens must be on the device of q, ",
                      q.device(), ", got ", bounds.device());
    TORCH_CHECK_TYPE(bounds.scalar_type() == at::kInt || bounds.scalar_type() == at::kLong,
                     "cu_seqlens must be int32 or int64, got ", bounds.scalar_type());
    N = bounds.numel() - 1;
  }
  if (call.initial_state.defined()) {
    check_shape("initial_state", call.initial_state, {N, H, kHead, kHead}, "[N, H, V, K]", q);
    const at::ScalarType dtype = call.initial_state.scalar_type();
    TORCH_CHECK_TYPE(dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf,
                     "initial_state must be float32, bfloat16 or float16, got ", dtype);
  }
  TORCH_CHECK_VALUE(!call.scale || std::isfinite(*call.scale), "scale must be finite, got ",
                    call.scale.value_or(0));
  TORCH_CHECK_VALUE(call.pieces >= 0, "pieces must be at least 0, got ", call.pieces);
  return N;
}

Tensor passed_state(const FlashKdaCall& call, int64_t N, const at::TensorOptions& options) {
  if (!call.output_final_state) return at::empty({0}, options);
  if (call.initial_state.defined()) return call.initial_state.to(at::kFloat, false, true);
  return at::zeros({N, call.q.size(2), kHead, kHead}, options);
}

}  // namespace

std::pair<Tensor, Tensor> flash_kda(FlashKdaCall call) {
  const int64_t N = check(call);
  const int64_t B = call.q.size(0), T = call.q.size(1), H = call.q.size(2);
  const at::DeviceGuard guard(call.q.device());
  const at::TensorOptions fp32 = call.q.options().dtype(at::kFloat);
  if (B == 0 || T == 0 || N == 0) {
    return {at::zeros(call.v.sizes(), call.v.options()), passed_state(call, N, fp32)};
  }
  const Kernels& library = kernels();
  const Tensor q = prepared("q", call.q), k = prepared("k", call.k), v = prepared("v", call.v);
  const Tensor g = prepared("g", call.g), beta = prepared("beta", call.beta);
  const Tensor A_log = prepared("A_log", call.A_log), dt_bias = prepared("dt_bias", call.dt_bias);
  const Tensor state = prepared("initial_state", call.initial_state);
  const bool packed = call.cu_seqlens.defined();
  const Tensor bounds = packed ? call.cu_seqlens.contiguous() : call.cu_seqlens;
  const int device = call.q.device().index();

  const Tensor o = at::empty(v.sizes(), v.options());
  const Tensor final_state =
      call.output_final_state ? at::empty({N, H, kHead, kHead}, fp32) : at::empty({0}, fp32);
  const int64_t pieces = call.pieces > 0
                             ? call.pieces
                             : library.pieces(T, N, H, packed, dispatch::multiprocessors(device));
  const int64_t bytes = library.workspace(N, H, pieces);
  const Tensor workspace = at::empty({bytes / 4}, fp32);

  flaop_flash_kda params{};
  params.q = address(q);
  params.k = address(k);
  params.v = address(v);
  params.g = address(g);
  params.beta = address(beta);
  params.A_log = address(A_log);
  params.dt_bias = address(dt_bias);
  params.initial_state = address(state);
  params.cu_seqlens = address(bounds);
  params.o = o.mutable_data_ptr();
  if (call.output_final_state) params.final_state = final_state.mutable_data_ptr<float>();
  if (bytes > 0) params.workspace = workspace.mutable_data_ptr<float>();
  params.scale = static_cast<float>(call.scale.value_or(1 / std::sqrt(double{kHead})));
  params.lower_bound = static_cast<float>(call.lower_bound);
  params.beta_bound = call.allow_neg_eigval ? 2.f : 1.f;
  params.T = static_cast<int32_t>(T);
  params.N = static_cast<int32_t>(N);
  params.H = static_cast<int32_t>(H);
  params.pieces = static_cast<int32_t>(pieces);
  params.long_seqlens = packed && bounds.scalar_type() == at::kLong;
  params.beta_dtype = dtype_of(beta);
  if (A_log.defined()) params.A_log_dtype = dtype_of(A_log);
  if (dt_bias.defined()) params.dt_bias_dtype = dtype_of(dt_bias);
  if (state.defined()) params.state_dtype = dtype_of(state);

  const c10::Stream stream = at::accelerator::getCurrentStream(device);
  const int code = library.launch(&params, stream.native_handle());
  TORCH_CHECK(code == 0, "flash_kda: ", library.error(code));
  return {o, final_state};
}

}  // namespace flaop
