// A record: 16 outputs x 128 inputs of a weight in the order in which one warp multiplies them.
//
// Codes come in planes of 4, 2 or 1 bits (2 = 2, 3 = 2 + 1, 4 = 4, 5 = 4 + 1, 6 = 4 + 2, 7 = 4 + 2 + 1,
// 8 = 4 + 4; low bits first), each [lane] of a warp, so that lane l finds its part of the A fragments of
// mma.m16n8k16 by loads of up to 16 bytes. Slice s covers inputs 16 s .. 16 s + 15. Lane 4 g + t owns of
// a slice four pairs of codes:
//
//   pair 0: output g,     inputs 2 t, 2 t + 1        pair 2: output g,     inputs 2 t + 8, 2 t + 9
//   pair 1: output g + 8, inputs 2 t, 2 t + 1        pair 3: output g + 8, inputs 2 t + 8, 2 t + 9
//
// Pair p stands at nibbles p and p + 4 of a 32-bit container. A word of a 4-bit plane is the container
// of one slice; one of a 2-bit plane interleaves those of two slices, one of a 1-bit plane of four.
// Behind the codes: for every GROUP inputs eight pairs of float16 scales (outputs g and g + 8), then,
// where zero points differ, for every GROUP inputs eight pairs of 8-bit zero points.
#pragma once

#ifdef EMULATED
#include "emulator.hpp"
#else
#include "intrinsics.cuh"
#endif

namespace terrazzo {

constexpr int kOutputs = 16;
constexpr int kInputs = 128;
constexpr int kSlices = 8;

template <int BITS, int GROUP, bool SYM>
struct Record {
  static constexpr int kBlocks = kInputs / GROUP;  // with a scale of their own
  static constexpr int kBlockSlices = kSlices / kBlocks;
  static constexpr int kScales = 256 * BITS;
  static constexpr int kZeros = kScales + 32 * kBlocks;
  static constexpr int kBytes = kZeros + (SYM ? 0 : 16 * kBlocks);
  static constexpr bool kHasLow2 = BITS == 2 || BITS == 3;
  static constexpr bool kHasHigh2 = BITS == 6 || BITS == 7;
  static constexpr bool kHas1 = BITS == 3 || BITS == 5 || BITS == 7;
  static constexpr int kWords4 = BITS == 8 ? 16 : BITS >= 4 ? 8 : 0;
  static constexpr int kWords2 = kHasLow2 || kHasHigh2 ? 4 : 0;
  static constexpr int kWords1 = kHas1 ? 2 : 0;

  uint32_t four[kWords4 + 1];
  uint32_t two[kWords2 + 1];
  uint32_t one[kWords1 + 1];
  uint32_t scales[kBlocks];  // float16: of output g low, of output g + 8 high
  uint32_t zeros[kBlocks];   // 8 bits: of output g in byte 0, of output g + 8 in byte 1

  // record: in shared or global memory, 16 bytes aligned.
  DEVICE void load(const uint8_t* record, int lane) {
#pragma unroll
    for (int chunk = 0; chunk < kWords4 / 4; ++chunk) {
      const uint4 words = *reinterpret_cast<const uint4*>(record + 512 * chunk + 16 * lane);
      four[4 * chunk] = words.x, four[4 * chunk + 1] = words.y;
      four[4 * chunk + 2] = words.z, four[4 * chunk + 3] = words.w;
    }
    const uint8_t* rest = record + 128 * kWords4;
    if constexpr (kWords2 > 0) {
      const uint4 words = *reinterpret_cast<const uint4*>(rest + 16 * lane);
      two[0] = words.x, two[1] = words.y, two[2] = words.z, two[3] = words.w;
      rest += 512;
    }
    if constexpr (kWords1 > 0) {
      const uint2 words = *reinterpret_cast<const uint2*>(rest + 8 * lane);
      one[0] = words.x, one[1] = words.y;
    }
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      const int pair = 8 * block + lane / 4;
      scales[block] = *reinterpret_cast<const uint32_t*>(record + kScales + 4 * pair);
      if constexpr (!SYM) zeros[block] = *reinterpret_cast<const uint16_t*>(record + kZeros + 2 * pair);
    }
  }

  DEVICE float scale(int block, int half) const {
    return widen_half(static_cast<uint16_t>(half ? scales[block] >> 16 : scales[block]));
  }

  DEVICE uint32_t high2(int slice) const {
    return (two[slice / 2] >> (2 * (slice % 2))) & 0x33333333u;
  }
  DEVICE uint32_t plane1(int slice, int place) const {  // at bit `place` of each nibble
    const int shift = slice % 4 - place;
    const uint32_t word = one[slice / 4];
    return (shift < 0 ? word << -shift : word >> shift) & (0x11111111u << place);
  }
  // The container of the low bits, at most four, and that of the others.
  DEVICE uint32_t low(int slice) const {
    if constexpr (BITS == 3) return high2(slice) | plane1(slice, 2);
    if constexpr (BITS == 2) return two[slice / 2];
    return four[slice];
  }
  DEVICE uint32_t high(int slice) const {
    if constexpr (BITS == 5) return plane1(slice, 0);
    if constexpr (BITS == 6) return high2(slice);
    if constexpr (BITS == 7) return high2(slice) | plane1(slice, 2);
    if constexpr (BITS == 8) return four[8 + slice];
    return 0;
  }

  // What to subtract from `magic + zero` of output g + 8 * half, twice.
  template <class F>
  DEVICE uint32_t zero_pair(int block, int half, int shift, uint32_t mask) const {
    uint32_t zero = SYM ? 1u << (BITS - 1) : (zeros[block] >> (8 * half)) & 0xFFu;
    zero = (zero >> shift) & mask;
    return F::kMagic | zero | zero << 16;
  }

  // a: the A fragment of a slice, `code - zero` as exact 16-bit floats.
  template <class F>
  DEVICE void fragment(int slice, uint32_t (&a)[4]) const {
    const int block = slice / kBlockSlices;
    const uint32_t lows = low(slice), highs = high(slice);
    if constexpr (BITS > F::kMagicBits) {  // 8 bits in bfloat16: two exact halves
      const uint32_t sixteen = F::pack(16.0f, 16.0f);
      const uint32_t low0 = zero_pair<F>(block, 0, 0, 15), low1 = zero_pair<F>(block, 1, 0, 15);
      const uint32_t high0 = zero_pair<F>(block, 0, 4, 15), high1 = zero_pair<F>(block, 1, 4, 15);
#pragma unroll
      for (int p = 0; p < 4; ++p) {
        const uint32_t u = F::sub(and_or(lows >> (4 * p), 0x000F000Fu, F::kMagic), p % 2 ? low1 : low0);
        const uint32_t v = F::sub(and_or(highs >> (4 * p), 0x000F000Fu, F::kMagic), p % 2 ? high1 : high0);
        a[p] = F::fma(v, sixteen, u);
      }
      return;
    }
    const uint32_t zero0 = zero_pair<F>(block, 0, 0, 255), zero1 = zero_pair<F>(block, 1, 0, 255);
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      const int first = BITS == 2 ? 4 * p + 2 * (slice % 2) : 4 * p;
      uint32_t codes = and_or(lows >> first, BITS == 2 ? 0x00030003u : 0x000F000Fu, F::kMagic);
      if constexpr (BITS > 4) {
        const uint32_t moved = p == 0 ? highs << 4 : highs >> (4 * p - 4);
        codes = and_or(moved, 0x00F000F0u, codes);
      }
      a[p] = F::sub(codes, p % 2 ? zero1 : zero0);
    }
  }
};

// Weights that are not quantized: the fragments as they are.
template <int GROUP, bool SYM>
struct Record<16, GROUP, SYM> {
  static constexpr int kBlocks = 1;
  static constexpr int kBlockSlices = kSlices;
  static constexpr int kBytes = 4096;

  uint32_t words[32];

  DEVICE void load(const uint8_t* record, int lane) {
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      const uint4 pairs = *reinterpret_cast<const uint4*>(record + 512 * slice + 16 * lane);
      words[4 * slice] = pairs.x, words[4 * slice + 1] = pairs.y;
      words[4 * slice + 2] = pairs.z, words[4 * slice + 3] = pairs.w;
    }
  }
  DEVICE float scale(int, int) const { return 1.0f; }
  template <class F>
  DEVICE void fragment(int slice, uint32_t (&a)[4]) const {
#pragma unroll
    for (int p = 0; p < 4; ++p) a[p] = words[4 * slice + p];
  }
};

// 16 outputs of one weight. records: the first of them, one for every 128 inputs.
struct Tile {
  const uint8_t* records;
  int column;             // of the first output
  uint16_t record_bytes;
  uint8_t kind;           // number of the record type, see KINDS
  uint8_t outputs;        // up to 16: the others are padding
};

}  // namespace terrazzo
