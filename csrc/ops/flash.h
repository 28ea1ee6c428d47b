// The fused inference forward of KDA on a GPU: allocation and launch of the CUDA kernels.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <utility>

namespace flaop {

// One call that the kernel serves. Optional tensors are undefined where they are not given.
struct FlashKdaCall {
  at::Tensor q, k, v, g;     // [B, T, H, 128] bf16
  at::Tensor beta;           // [B, T, H]
  at::Tensor initial_state;  // [N, H, V, K]
  at::Tensor cu_seqlens;     // [N + 1]
  at::Tensor A_log;          // [H]
  at::Tensor dt_bias;        // [H, 128] or [H * 128]
  std::optional<double> scale;
  double lower_bound;
  bool output_final_state;
  bool allow_neg_eigval;
  int64_t pieces;  // 0: chosen
};

// o and the final state; the state is empty unless asked for. Raises on shapes and dtypes.
std::pair<at::Tensor, at::Tensor> flash_kda(FlashKdaCall call);

}  // namespace flaop
