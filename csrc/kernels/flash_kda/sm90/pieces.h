// Into how many pieces the fused kernel cuts a sequence, and what that costs. Host only.
//
// Pieces run side by side. A first pass makes the state that a piece leaves when it starts from
// zero and, but for the first and last piece, its transfer matrix; these are joined in order; a
// second pass makes the outputs from the states that enter. One piece needs none of this.
#pragma once
#include <stdint.h>

#include <algorithm>
#include <cmath>

namespace flaop::flash {

// Microseconds on an H200, fitted to measured times of 26 shapes and numbers of pieces.
struct Costs {
  double output;  // a chunk with outputs, one block on a multiprocessor
  double state;   // a chunk of the first pass
  double pass;    // a launch, start and end of its blocks: barriers, first loads, the state
  double join;    // one piece joined, all heads at once
};
constexpr Costs kCosts = {4.67, 3.53, 10.5, 10.5};
constexpr double kGain = 0.9;  // share of the time in one piece that more must stay below
constexpr int64_t kMostPieces = 16;
constexpr int64_t kChunk = 64;
constexpr int64_t kStateBytes = 128 * 128 * 4;
// Workspace that the choice may ask for; a forced number of pieces is not held to it.
constexpr int64_t kMostWorkspace = int64_t{448} << 20;

inline int64_t ceil_divide(int64_t a, int64_t b) { return (a + b - 1) / b; }

// States kept of each sequence and head: that of each piece but the last, and the transfer
// matrices of those between the first and the last.
inline int64_t summaries(int64_t pieces) { return pieces > 1 ? 2 * pieces - 3 : 0; }

inline int64_t workspace_bytes(int64_t sequences_heads, int64_t pieces) {
  return summaries(pieces) * sequences_heads * kStateBytes;
}

// Microseconds. chunks: of one sequence, on average if packed.
inline double cost(int64_t sequences_heads, double chunks, int64_t pieces, int64_t processors) {
  const double piece = std::ceil(chunks / pieces);  // the longest
  const auto pass = [&](int64_t blocks, double step) {
    return ceil_divide(blocks, processors) * (piece * step + kCosts.pass);
  };
  const double time = pass(sequences_heads * pieces, kCosts.output);
  if (pieces == 1) return time;
  return time + pass(sequences_heads * summaries(pieces), kCosts.state) +
         (pieces - 2) * kCosts.join;
}

inline int64_t choose(int64_t T, int64_t N, int64_t H, bool packed, int64_t processors) {
  const int64_t sequences_heads = N * H;
  if (sequences_heads == 0 || T == 0 || processors <= 0) return 1;
  const double chunks = packed ? static_cast<double>(T) / (N * kChunk) + 0.5
                               : static_cast<double>(ceil_divide(T, kChunk));
  int64_t best = 1;
  double least = kGain * cost(sequences_heads, chunks, 1, processors);
  for (int64_t pieces = 2; pieces <= std::min<int64_t>(kMostPieces, chunks); ++pieces) {
    if (workspace_bytes(sequences_heads, pieces) > kMostWorkspace) break;
    const double time = cost(sequences_heads, chunks, pieces, processors);
    if (time < least) {
      least = time;
      best = pieces;
    }
  }
  return best;
}

}  // namespace flaop::flash
