// Vectors of AVX2 + FMA + F16C: 8 floats, or 8 lanes of 4 bytes.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace terrazzo::TERRAZZO_ISA {

constexpr int kLanes = 8;
// Rows whose sums fit into the registers, beside codes that are unpacked and beside a panel.
constexpr int kRowsAtOnce = 4, kPanelRowsAtOnce = 6;
using Floats = __m256;
using Bytes = __m256i;

inline Floats broadcast(float x) { return _mm256_set1_ps(x); }
inline Floats load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, Floats x) { _mm256_storeu_ps(p, x); }
inline Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
inline Floats sub(Floats a, Floats b) { return _mm256_sub_ps(a, b); }
inline Floats mul(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
inline Floats div(Floats a, Floats b) { return _mm256_div_ps(a, b); }
inline Floats max(Floats a, Floats b) { return _mm256_max_ps(a, b); }
inline Floats min(Floats a, Floats b) { return _mm256_min_ps(a, b); }
inline Floats absolute(Floats a) { return _mm256_andnot_ps(broadcast(-0.0f), a); }
// a * b + c, rounded once.
inline Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
// c - a * b, rounded once.
inline Floats fnma(Floats a, Floats b, Floats c) { return _mm256_fnmadd_ps(a, b, c); }
// x where at > limit, 0 elsewhere.
inline Floats keep_above(Floats x, Floats at, Floats limit) {
  return _mm256_and_ps(x, _mm256_cmp_ps(at, limit, _CMP_GT_OQ));
}
inline Floats round_even(Floats a) {
  return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
// 2 ** a for whole a in [-126, 127].
inline Floats power_of_two(Floats a) {
  const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(a), _mm256_set1_epi32(127));
  return _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
}
inline float reduce_add(Floats a) {
  __m128 half = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  half = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}
inline float reduce_max(Floats a) {
  __m128 half = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  half = _mm_max_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}

inline Floats load_f16(const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline Floats load_bf16(const uint16_t* p) {
  const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}
inline Floats load_u8(const uint8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
// The nearest whole numbers of values in [-127, 127], as signed bytes.
inline void store_s8(int8_t* p, Floats x) {
  const __m256i whole = _mm256_cvtps_epi32(x);
  const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(words, words));
}

inline Bytes load_bytes(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline void store_bytes(uint8_t* p, Bytes x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x); }
// Bits [kShift, kShift + log2(kMask + 1)) of every byte.
template <int kShift, int kMask>
inline Bytes field(Bytes x) {
  if constexpr (kShift > 0) x = _mm256_srli_epi16(x, kShift);
  return _mm256_and_si256(x, _mm256_set1_epi8(kMask));
}
// x | y << kShift, for fields of y that stay within their bytes.
template <int kShift>
inline Bytes merge(Bytes x, Bytes y) {
  return _mm256_or_si256(x, _mm256_slli_epi16(y, kShift));
}
inline Bytes broadcast4(const int8_t* p) {
  int32_t four;
  std::memcpy(&four, p, 4);
  return _mm256_set1_epi32(four);
}
// Byte kByte of every lane, as a float.
template <int kByte>
inline Floats byte_of(Bytes x) {
  if constexpr (kByte == 3) return _mm256_cvtepi32_ps(_mm256_srli_epi32(x, 24));
  if constexpr (kByte > 0) x = _mm256_srli_epi32(x, 8 * kByte);
  return _mm256_cvtepi32_ps(_mm256_and_si256(x, _mm256_set1_epi32(0xff)));
}

// Compilers that see a chain of integer additions make all products first and run out of registers.
inline void keep_order(__m256i& sum) { asm("" : "+x"(sum)); }

// Sums of code * activation over 4 bytes a lane and several steps, exact. The products of a pair are
// 16-bit; kRun steps may be added before they could overflow: 15 * 127 * 2 * 8 < 2 ** 15.
template <int kBits>
struct Dot {
  static constexpr bool kSplit = kBits == 8;
  static constexpr int kRun = kBits <= 4 || kSplit ? 8 : kBits == 5 ? 4 : kBits == 6 ? 2 : 1;
  __m256i low, high;

  inline void start(Bytes codes, Bytes x) {
    if constexpr (kSplit) {
      low = _mm256_maddubs_epi16(field<0, 15>(codes), x);
      high = _mm256_maddubs_epi16(field<4, 15>(codes), x);
    } else {
      low = _mm256_maddubs_epi16(codes, x);
    }
  }
  inline void step(Bytes codes, Bytes x) {
    if constexpr (kSplit) {
      low = _mm256_add_epi16(low, _mm256_maddubs_epi16(field<0, 15>(codes), x));
      high = _mm256_add_epi16(high, _mm256_maddubs_epi16(field<4, 15>(codes), x));
    } else {
      low = _mm256_add_epi16(low, _mm256_maddubs_epi16(codes, x));
    }
    keep_order(low);
    if constexpr (kSplit) keep_order(high);
  }
  inline __m256i sum() const {
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i total = _mm256_madd_epi16(low, ones);
    if constexpr (kSplit) total = _mm256_add_epi32(total, _mm256_madd_epi16(high, _mm256_set1_epi16(16)));
    return total;
  }
};
using Sums = __m256i;
inline Sums add_sums(Sums a, Sums b) { return _mm256_add_epi32(a, b); }
inline Floats to_floats(Sums a) { return _mm256_cvtepi32_ps(a); }

}  // namespace terrazzo::TERRAZZO_ISA
