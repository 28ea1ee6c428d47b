// Within one chunk, for KDA (intra.cu) and GLA (../gla/intra.cu): shared memory, gate sums,
// products of token pairs, decayed operands.
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

// Sums over the channels for one 16 x 16 block of pairs: of q and k, with KK of k and k too.
template <bool KK>
struct PairSums {
  float qk[2][4], kk[KK ? 2 : 1][4];  // per 8 columns
  __device__ void clear() {
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        qk[n][i] = 0.f;
        if constexpr (KK) kk[n][i] = 0.f;
      }
  }
};

__device__ __forceinline__ float2 load_pair(const __nv_bfloat16* x) {
  return unpack_bf16(*reinterpret_cast<const uint32_t*>(x));
}

// One step of 16 channels: products of scaled rows (q and k) with scaled columns (k).
template <bool KK>
__device__ __forceinline__ void accumulate(PairSums<KK>& sums, const uint32_t (&q)[4],
                                           const uint32_t (&k)[4], const uint32_t (&column)[2][2]) {
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    mma(sums.qk[n], q, column[n][0], column[n][1], __nv_bfloat16());
    if constexpr (KK) mma(sums.kk[n], k, column[n][0], column[n][1], __nv_bfloat16());
  }
}

__device__ __forceinline__ uint32_t scaled(float2 x, float2 exponent) {
  return pack_bf16(multiply(x, exp2_pair(exponent)));
}

// Blocks I > J: rows through the start of I, columns from after them to the start of I.
template <bool KK>
__device__ void pairs_between(const Shared& s, PairSums<KK>& sums, int I, int J) {
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
template <bool KK>
__device__ void pairs_within_bounded(const Shared& s, PairSums<KK>& sums, int I) {
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
template <int LEVEL, bool KK>
__device__ void pairs_level(const Shared& s, PairSums<KK>& sums, int I) {
  const int lane = threadIdx.x % 32, r = lane / 4, p = 2 * (lane % 4);
  PairSums<KK> level;
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
      if constexpr (KK) sums.kk[n][i] += together ? level.kk[n][i] : 0.f;
    }
}

// One block with itself, any gate. The diagonal of A_qk is a plain product of rows.
template <bool KK>
__device__ void pairs_within(const Shared& s, PairSums<KK>& sums, int I) {
  pairs_level<8>(s, sums, I);
  pairs_level<4>(s, sums, I);
  pairs_level<2>(s, sums, I);
  pairs_level<1>(s, sums, I);
  const int lane = threadIdx.x % 32, r = lane / 4, p = 2 * (lane % 4);
  PairSums<false> plain;
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

// Where decayed operands go; tile counts chunks and value heads.
struct DecayedOperands {
  __nv_bfloat16 *qg, *kg;  // [tile, 64, 128]
  float* decay;            // [tile, 128]
  float scale;
  int64_t tile;
};

// qg, kg and decay go out; with KEEP k becomes k exp2(G) in place.
template <bool KEEP>
__device__ void decayed_operands(const DecayedOperands& p, Shared& s) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int channel = 8 * (lane % 16);
  float before[8], after[8], all[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    before[j] = after[j] = 0.f;
    for (int m = 0; m < kBlocks; ++m) {
      const float total = s.total[m][channel + j];
      if (m < warp) before[j] += total;
      if (m > warp) after[j] += total;
    }
    const float own = s.total[warp][channel + j];
    all[j] = before[j] + own + after[j];
    after[j] += own;
  }
  if (warp == 0 && lane < 16) {
#pragma unroll
    for (int j = 0; j < 8; ++j) p.decay[p.tile * kHead + channel + j] = exp2_approx(all[j]);
  }
  __nv_bfloat16* qg = p.qg + p.tile * kTokens * kHead;
  __nv_bfloat16* kg = p.kg + p.tile * kTokens * kHead;
#pragma unroll 2
  for (int i = 0; i < kBlock; i += 2) {
    const int t = warp * kBlock + i + lane / 16;
    const float q_scale = s.q_norm[t] * p.scale, k_scale = s.k_norm[t];
    const uint4 q4 = *reinterpret_cast<const uint4*>(&s.q[t][channel]);
    const uint4 k4 = *reinterpret_cast<const uint4*>(&s.k[t][channel]);
    const uint32_t qs[4] = {q4.x, q4.y, q4.z, q4.w}, ks[4] = {k4.x, k4.y, k4.z, k4.w};
    float out_q[8], out_g[8], out_k[8];
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      const float2 x = unpack_bf16(qs[j / 2]), y = unpack_bf16(ks[j / 2]);
      const float2 e = load2(&s.gate[t][channel + j]);
      const float f0 = exp2_approx(before[j] + e.x), f1 = exp2_approx(before[j + 1] + e.y);
      out_q[j] = x.x * q_scale * f0;
      out_q[j + 1] = x.y * q_scale * f1;
      out_k[j] = y.x * k_scale * f0;
      out_k[j + 1] = y.y * k_scale * f1;
      out_g[j] = y.x * k_scale * exp2_approx(after[j] - e.x);
      out_g[j + 1] = y.y * k_scale * exp2_approx(after[j + 1] - e.y);
    }
    store8(qg + t * kHead + channel, out_q);
    store8(kg + t * kHead + channel, out_g);
    if constexpr (KEEP) store8(&s.k[t][channel], out_k);
  }
}

}  // namespace
}  // namespace flaop
