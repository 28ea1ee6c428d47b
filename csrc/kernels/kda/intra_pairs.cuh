// Shared memory of the within-chunk forward of KDA, gate sums and products of token pairs (see
// intra.cu).
#pragma once
#include "common.cuh"

namespace flaop {
namespace {

constexpr int kThreads = 128;
constexpr int kGateRow = kHead + 8;  // fp32 row of gate sums

struct Shared {
  __nv_bfloat16 q[kTokens][kRow];  // later the strictly lower matrix L (fp32), then the tiles on
                                   // their way out
  __nv_bfloat16 k[kTokens][kRow];  // later k exp2(G)
  union {
    float gate[kTokens][kGateRow];  // sums within blocks of 16
    struct {
      __half X[kTokens][kPairRow];         // the inverse
      __nv_bfloat16 A[kTokens][kPairRow];  // the inverse times beta of its columns
      __nv_bfloat16 v[kTokens][kRow];
    } late;
  };
  float total[kBlocks][kHead];  // gate sums of whole blocks
  float beta[kTokens], q_norm[kTokens], k_norm[kTokens];
};
constexpr int kLRow = kRow / 2;  // fp32 row of L in the place of q

// Gates of two channels over half a chunk: sums within blocks of 16, and the blocks' totals.
template <typename G>
__device__ __forceinline__ void sum_gates(const flaop_kda_call& p, Shared& s, int64_t token,
                                          int length, int head) {
  const int channel = 2 * (threadIdx.x % 64), first = 32 * (threadIdx.x / 64);
  const G* g = static_cast<const G*>(p.g) + (token * p.HV + head) * kHead + channel;
  const int64_t step = static_cast<int64_t>(p.HV) * kHead;
  const float2 bias = make_float2(load_bias(p, head, channel), load_bias(p, head, channel + 1));
  const Gate gate(p, head);
  // every load is under way before the first is used
  using Raw = std::conditional_t<sizeof(G) == 4, float2, uint32_t>;
  Raw raw[2 * kBlock];
#pragma unroll
  for (int i = 0; i < 2 * kBlock; ++i) {
    raw[i] = Raw();
    if (first + i < length) raw[i] = *reinterpret_cast<const Raw*>(g + (first + i) * step);
  }
  with_kind(p.gate, [&](auto kind) {
    float2 sum = make_float2(0.f, 0.f);
#pragma unroll
    for (int i = 0; i < 2 * kBlock; ++i) {
      if (i % kBlock == 0) sum = make_float2(0.f, 0.f);
      float2 x;
      if constexpr (sizeof(G) == 4) {
        x = raw[i];
      } else {
        x = unpack_bf16(raw[i]);
      }
      const float y0 = gate.activate<kind>((x.x + bias.x) * kLog2e);
      const float y1 = gate.activate<kind>((x.y + bias.y) * kLog2e);
      const bool inside = first + i < length;
      sum.x += inside ? y0 : 0.f;
      sum.y += inside ? y1 : 0.f;
      *reinterpret_cast<float2*>(&s.gate[first + i][channel]) = sum;
      if (i % kBlock == kBlock - 1)
        *reinterpret_cast<float2*>(&s.total[(first + i) / kBlock][channel]) = sum;
    }
  });
}

// Sums over the channels for one 16 x 16 block of pairs.
struct PairSums {
  float qk[2][4], kk[2][4];  // per 8 columns
  __device__ void clear() {
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) qk[n][i] = kk[n][i] = 0.f;
  }
};

__device__ __forceinline__ float2 load_pair(const __nv_bfloat16* x) {
  return unpack_bf16(*reinterpret_cast<const uint32_t*>(x));
}

// One step of 16 channels: products of scaled rows (q and k) with scaled columns (k).
__device__ __forceinline__ void accumulate(PairSums& sums, const uint32_t (&q)[4],
                                           const uint32_t (&k)[4], const uint32_t (&column)[2][2]) {
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    mma(sums.qk[n], q, column[n][0], column[n][1], __nv_bfloat16());
    mma(sums.kk[n], k, column[n][0], column[n][1], __nv_bfloat16());
  }
}

__device__ __forceinline__ uint32_t scaled(float2 x, float2 exponent) {
  return pack_bf16(multiply(x, exp2_pair(exponent)));
}
// Blocks I > J: rows through the start of I, columns from after them to the start of I.
__device__ void pairs_between(const Shared& s, PairSums& sums, int I, int J) {
  const int lane = threadIdx.x % 32, r = lane / 4, p = 2 * (lane % 4);
  const int row = I * kBlock + r, column = J * kBlock + r;
#pragma unroll 2
  for (int c = 0; c < kHead; c += 16) {
    uint32_t q[4], k[4], b[2][2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int channel = c + 8 * half + p;
      float2 rest = make_float2(0.f, 0.f);
      for (int m = J; m < I; ++m) rest = add(rest, load2(&s.total[m][channel]));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float2 e = load2(&s.gate[row + 8 * i][channel]);
        const float2 f = make_float2(exp2_approx(e.x), exp2_approx(e.y));
        const float2 x = load_pair(&s.q[row + 8 * i][channel]),
                     y = load_pair(&s.k[row + 8 * i][channel]);
        q[2 * half + i] = pack_bf16(x.x * f.x, x.y * f.y);
        k[2 * half + i] = pack_bf16(y.x * f.x, y.y * f.y);
        b[i][half] = scaled(load_pair(&s.k[column + 8 * i][channel]),
                            subtract(rest, load2(&s.gate[column + 8 * i][channel])));
      }
    }
    accumulate(sums, q, k, b);
  }
}

// One block with itself, gates in [-5, 0].
__device__ void pairs_within_bounded(const Shared& s, PairSums& sums, int I) {
  const int lane = threadIdx.x % 32, r = lane / 4, p = 2 * (lane % 4);
  const int row = I * kBlock + r;
#pragma unroll 2
  for (int c = 0; c < kHead; c += 16) {
    uint32_t q[4], k[4], b[2][2];
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int channel = c + 8 * half + p;
        const float2 e = load2(&s.gate[row + 8 * i][channel]);
        const float2 f = make_float2(exp2_approx(e.x + kCentre), exp2_approx(e.y + kCentre));
        const float2 x = load_pair(&s.q[row + 8 * i][channel]),
                     y = load_pair(&s.k[row + 8 * i][channel]);
        q[2 * half + i] = pack_bf16(x.x * f.x, x.y * f.y);
        k[2 * half + i] = pack_bf16(y.x * f.x, y.y * f.y);
        b[i][half] = scaled(y, make_float2(-kCentre - e.x, -kCentre - e.y));
      }
    accumulate(sums, q, k, b);
  }
}

// One level of one block: rows in upper, columns in lower halves of blocks of 2 LEVEL tokens.
template <int LEVEL>
__device__ void pairs_level(const Shared& s, PairSums& sums, int I) {
  const int lane = threadIdx.x % 32, r = lane / 4, p = 2 * (lane % 4);
  PairSums level;
  level.clear();
#pragma unroll 2
  for (int c = 0; c < kHead; c += 16) {
    uint32_t q[4], k[4], b[2][2];
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int channel = c + 8 * half + p, local = r + 8 * i, row = I * kBlock + local;
        const bool upper = local & LEVEL;
        const int reference = I * kBlock + ((local & ~(2 * LEVEL - 1)) | (LEVEL - 1));
        float2 e = subtract(load2(&s.gate[row][channel]), load2(&s.gate[reference][channel]));
        e = make_float2(exp2_approx(-fabsf(e.x)), exp2_approx(-fabsf(e.y)));
        const float2 x = load_pair(&s.q[row][channel]), y = load_pair(&s.k[row][channel]);
        const uint32_t scaled_k = pack_bf16(y.x * e.x, y.y * e.y);
        q[2 * half + i] = upper ? pack_bf16(x.x * e.x, x.y * e.y) : 0u;
        k[2 * half + i] = upper ? scaled_k : 0u;
        b[i][half] = upper ? 0u : scaled_k;
      }
    accumulate(level, q, k, b);
  }
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = r + 8 * (i / 2), column = 8 * n + p + i % 2;
      const bool together = row / (2 * LEVEL) == column / (2 * LEVEL);
      sums.qk[n][i] += together ? level.qk[n][i] : 0.f;
      sums.kk[n][i] += together ? level.kk[n][i] : 0.f;
    }
}

// One block with itself, any gate. The diagonal of A_qk is a plain product of rows.
__device__ void pairs_within(const Shared& s, PairSums& sums, int I) {
  pairs_level<8>(s, sums, I);
  pairs_level<4>(s, sums, I);
  pairs_level<2>(s, sums, I);
  pairs_level<1>(s, sums, I);
  const int lane = threadIdx.x % 32, r = lane / 4, p = 2 * (lane % 4);
  PairSums plain;
  plain.clear();
#pragma unroll 2
  for (int c = 0; c < kHead; c += 16) {
    uint32_t q[4], b[2][2];
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int channel = c + 8 * half + p, row = I * kBlock + r + 8 * i;
        q[2 * half + i] = *reinterpret_cast<const uint32_t*>(&s.q[row][channel]);
        b[i][half] = *reinterpret_cast<const uint32_t*>(&s.k[row][channel]);
      }
#pragma unroll
    for (int n = 0; n < 2; ++n) mma(plain.qk[n], q, b[n][0], b[n][1], __nv_bfloat16());
  }
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (r + 8 * (i / 2) == 8 * n + p + i % 2) sums.qk[n][i] += plain.qk[n][i];
}

}  // namespace
}  // namespace flaop
