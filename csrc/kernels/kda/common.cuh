// What the forward and the backward kernel of one chunk share: sizes, gates, tiles.
#pragma once
#include <type_traits>

#include "../mma.cuh"
#include "kda.h"

namespace flaop {

constexpr int kTokens = 64, kHead = 128, kBlock = 16, kBlocks = 4;
constexpr int kRow = kHead + 8;  // bf16 row of a [., 128] tile in shared memory: no bank conflicts
constexpr int kPairRow = kTokens + 8;  // 16-bit row of a [., 64] tile
constexpr float kFloor = -150.f;       // 2^-150 is zero in fp32
constexpr float kCentre = 57.7f;       // half the range of 16 gates of -5 in base 2
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kNormEps = 1e-6f;
constexpr float kAmplitudeCap = 80.f;  // exp(80) saturates every gate that is not zero

__device__ __forceinline__ float load_number(const void* x, int64_t i, int dtype) {
  if (dtype == FLAOP_F32) return static_cast<const float*>(x)[i];
  if (dtype == FLAOP_BF16) return __bfloat162float(static_cast<const __nv_bfloat16*>(x)[i]);
  return __half2float(static_cast<const __half*>(x)[i]);
}

__device__ __forceinline__ float sigmoid_base2(float x) {
  return __fdividef(1.f, 1.f + exp2_approx(-x));
}

__device__ __forceinline__ float softplus_base2(float x) {
  const float e = exp2_approx(-fabsf(x));
  return fmaxf(x, 0.f) + (e < 1e-3f ? e * kLog2e * (1.f - 0.5f * e) : log2_approx(1.f + e));
}

// What the gate of a head needs.
struct Gate {
  int kind;
  float amplitude, bound;  // exp(A_log); lower bound in base 2

  __device__ Gate(const flaop_kda_call& p, int head)
      : kind(p.gate),
        amplitude(
            p.A_log ? exp2_approx(fminf(load_number(p.A_log, head, p.A_log_dtype), kAmplitudeCap) *
                                  kLog2e)
                    : 1.f),
        bound(p.lower_bound * kLog2e) {}

  // The log gate in base 2. x: its input plus bias, times log2 e. NaN stays.
  template <int KIND>
  __device__ __forceinline__ float activate(float x) const {
    float y = x;
    if constexpr (KIND == FLAOP_GATE_BOUNDED) y = bound * sigmoid_base2(amplitude * x);
    if constexpr (KIND == FLAOP_GATE_SOFTPLUS) y = -amplitude * softplus_base2(x);
    return y < kFloor ? kFloor : y;
  }

  // Derivative: (gradient of the input, term of the gradient of A_log). dg: gradient of the
  // natural-log gate.
  template <int KIND>
  __device__ __forceinline__ float2 derivative(float dg, float x) const {
    if constexpr (KIND == FLAOP_GATE_BOUNDED) {
      const float z = amplitude * x, e = exp2_approx(-fabsf(z));
      const float dz = dg * (bound / kLog2e) * __fdividef(e, (1.f + e) * (1.f + e));
      return make_float2(dz * amplitude, dz * z * (1.f / kLog2e));
    } else {
      const float y = -amplitude * softplus_base2(x);
      const float live = y > kFloor ? dg : 0.f;
      return make_float2(-live * amplitude * sigmoid_base2(x),
                         live * fmaxf(y, kFloor) * (1.f / kLog2e));
    }
  }
};

// Calls f with the kind as a compile-time constant: one branch for all elements.
template <typename F>
__device__ __forceinline__ void with_kind(int kind, F f) {
  if (kind == FLAOP_GATE_BOUNDED) f(std::integral_constant<int, FLAOP_GATE_BOUNDED>());
  if (kind == FLAOP_GATE_SOFTPLUS) f(std::integral_constant<int, FLAOP_GATE_SOFTPLUS>());
  if (kind == FLAOP_GATE_LOG) f(std::integral_constant<int, FLAOP_GATE_LOG>());
}

__device__ __forceinline__ float load_bias(const flaop_kda_call& p, int head, int channel) {
  return p.dt_bias ? load_number(p.dt_bias, head * kHead + channel, p.dt_bias_dtype) : 0.f;
}

__device__ __forceinline__ float load_beta(const flaop_kda_call& p, int64_t token, int head) {
  const float beta = load_number(p.beta, token * p.HV + head, p.beta_dtype);
  return p.beta_kind > 0 ? p.beta_kind * sigmoid_base2(beta * kLog2e) : beta;
}

// The chunk of a row of the grid: its first token in the flattened tensor and its tokens; none: no
// chunk.
struct Chunk {
  int64_t token;
  int length;

  __device__ Chunk(const flaop_kda_call& p, int row) {
    int64_t end;
    if (p.table) {
      const int sequence = p.table[2 * row];
      if (sequence < 0) {
        token = length = 0;
        return;
      }
      token = p.bounds[sequence] + static_cast<int64_t>(p.table[2 * row + 1]) * kTokens;
      end = p.bounds[sequence + 1];
    } else {
      const int64_t start = static_cast<int64_t>(row % p.B) * p.T;
      token = start + static_cast<int64_t>(row / p.B) * kTokens;
      end = start + p.T;
    }
    length = static_cast<int>(end - token < kTokens ? end - token : kTokens);
  }
};

__device__ __forceinline__ float2 add(float2 a, float2 b) {
  return make_float2(a.x + b.x, a.y + b.y);
}
__device__ __forceinline__ float2 subtract(float2 a, float2 b) {
  return make_float2(a.x - b.x, a.y - b.y);
}
__device__ __forceinline__ float2 multiply(float2 a, float2 b) {
  return make_float2(a.x * b.x, a.y * b.y);
}
__device__ __forceinline__ float2 exp2_pair(float2 a) {
  return make_float2(exp2_approx(a.x), exp2_approx(a.y));
}
__device__ __forceinline__ float2 load2(const float* x) {
  return *reinterpret_cast<const float2*>(x);
}
__device__ __forceinline__ uint32_t pack_bf16(float2 x) { return pack_bf16(x.x, x.y); }

__device__ __forceinline__ void store8(void* to, const float (&x)[8]) {
  *static_cast<uint4*>(to) = make_uint4(pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]),
                                        pack_bf16(x[4], x[5]), pack_bf16(x[6], x[7]));
}

// Rows of a [.., heads, 128] tensor to shared memory; zeros past the sequence's end.
template <int THREADS>
__device__ void load_tile(__nv_bfloat16 (*to)[kRow], const void* from, int64_t token, int heads,
                          int head, int length) {
  const __nv_bfloat16* x = static_cast<const __nv_bfloat16*>(from);
#pragma unroll
  for (int i = 0; i < kTokens * kHead / 8 / THREADS; ++i) {
    const int t = (i * THREADS + threadIdx.x) / 16, c = 8 * (threadIdx.x % 16);
    const int row = t < length ? t : 0;
    copy_async(&to[t][c], x + ((token + row) * heads + head) * kHead + c, t < length);
  }
}

// Rows [0, length) of a tile to memory, 16 bytes a thread.
template <int THREADS>
__device__ void store_tile(const __nv_bfloat16 (*from)[kRow], __nv_bfloat16* to, int64_t stride,
                           int length) {
#pragma unroll
  for (int i = 0; i < kTokens * kHead / 8 / THREADS; ++i) {
    const int t = (i * THREADS + threadIdx.x) / 16, c = 8 * (threadIdx.x % 16);
    if (t < length)
      *reinterpret_cast<uint4*>(to + t * stride + c) = *reinterpret_cast<const uint4*>(&from[t][c]);
  }
}

// 1 / norm of the rows of q and k: one row of one of them a thread, 128 threads.
__device__ __forceinline__ void row_norms(const __nv_bfloat16 (*q)[kRow],
                                          const __nv_bfloat16 (*k)[kRow], float* q_norm,
                                          float* k_norm, bool normalise) {
  const int row = threadIdx.x % kTokens;
  const bool is_k = threadIdx.x >= kTokens;
  const __nv_bfloat16* x = is_k ? k[row] : q[row];
  float sum = 0.f;
#pragma unroll
  for (int c = 0; c < kHead; c += 8) {
    const uint4 four = *reinterpret_cast<const uint4*>(x + c);
    for (uint32_t word : {four.x, four.y, four.z, four.w}) {
      const float2 pair = unpack_bf16(word);
      sum += pair.x * pair.x + pair.y * pair.y;
    }
  }
  (is_k ? k_norm : q_norm)[row] = normalise ? rsqrtf(sum + kNormEps) : 1.f;
}

}  // namespace flaop
