// Vectors of AVX-512 (F, BW, VL, VNNI): 16 floats, or 16 lanes of 4 bytes.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace terrazzo::TERRAZZO_ISA {

constexpr int kLanes = 16;
// Rows whose sums fit into the registers, beside codes that are unpacked and beside a panel.
constexpr int kRowsAtOnce = 4, kPanelRowsAtOnce = 6;
using Floats = __m512;
using Bytes = __m512i;

inline Floats broadcast(float x) { return _mm512_set1_ps(x); }
inline Floats load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Floats x) { _mm512_storeu_ps(p, x); }
inline Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
inline Floats sub(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
inline Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats div(Floats a, Floats b) { return _mm512_div_ps(a, b); }
inline Floats max(Floats a, Floats b) { return _mm512_max_ps(a, b); }
inline Floats min(Floats a, Floats b) { return _mm512_min_ps(a, b); }
inline Floats absolute(Floats a) { return _mm512_abs_ps(a); }
// a * b + c, rounded once.
inline Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
// c - a * b, rounded once.
inline Floats fnma(Floats a, Floats b, Floats c) { return _mm512_fnmadd_ps(a, b, c); }
// x where at > limit, 0 elsewhere.
inline Floats keep_above(Floats x, Floats at, Floats limit) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(at, limit, _CMP_GT_OQ), x);
}
inline Floats round_even(Floats a) {
  return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
// 2 ** a for whole a in [-126, 127].
inline Floats power_of_two(Floats a) {
  const __m512i exponent = _mm512_add_epi32(_mm512_cvtps_epi32(a), _mm512_set1_epi32(127));
  return _mm512_castsi512_ps(_mm512_slli_epi32(exponent, 23));
}
inline float reduce_add(Floats a) { return _mm512_reduce_add_ps(a); }
inline float reduce_max(Floats a) { return _mm512_reduce_max_ps(a); }

inline Floats load_f16(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline Floats load_bf16(const uint16_t* p) {
  const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}
inline Floats load_u8(const uint8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
// The nearest whole numbers of values in [-127, 127], as signed bytes.
inline void store_s8(int8_t* p, Floats x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x)));
}

inline Bytes load_bytes(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline void store_bytes(uint8_t* p, Bytes x) { _mm512_storeu_si512(p, x); }
// Bits [kShift, kShift + log2(kMask + 1)) of every byte.
template <int kShift, int kMask>
inline Bytes field(Bytes x) {
  if constexpr (kShift > 0) x = _mm512_srli_epi16(x, kShift);
  return _mm512_and_si512(x, _mm512_set1_epi8(kMask));
}
// x | y << kShift, for fields of y that stay within their bytes.
template <int kShift>
inline Bytes merge(Bytes x, Bytes y) {
  return _mm512_or_si512(x, _mm512_slli_epi16(y, kShift));
}
inline Bytes broadcast4(const int8_t* p) {
  int32_t four;
  std::memcpy(&four, p, 4);
  return _mm512_set1_epi32(four);
}
// Byte kByte of every lane, as a float.
template <int kByte>
inline Floats byte_of(Bytes x) {
  if constexpr (kByte > 0) x = _mm512_srli_epi32(x, 8 * kByte);
  return _mm512_cvtepi32_ps(_mm512_and_si512(x, _mm512_set1_epi32(0xff)));
}

// Sums of code * activation over 4 bytes a lane and several steps, exact in 32 bits.
template <int kBits>
struct Dot {
  static constexpr int kRun = 8;
  __m512i total;
  inline void start(Bytes codes, Bytes x) { total = _mm512_dpbusd_epi32(_mm512_setzero_si512(), codes, x); }
  inline void step(Bytes codes, Bytes x) {
    total = _mm512_dpbusd_epi32(total, codes, x);
  }
  inline __m512i sum() const { return total; }
};
using Sums = __m512i;
inline Sums add_sums(Sums a, Sums b) { return _mm512_add_epi32(a, b); }
inline Floats to_floats(Sums a) { return _mm512_cvtepi32_ps(a); }

}  // namespace terrazzo::TERRAZZO_ISA
