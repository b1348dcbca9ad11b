// Numbers of 16 bits, one at a time.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

namespace terrazzo {

inline float half_to_float(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half >> 15) << 31, exponent = half >> 10 & 31, fraction = half & 1023;
  if (exponent == 0) return (sign != 0 ? -1.0f : 1.0f) * std::ldexp(static_cast<float>(fraction), -24);
  const uint32_t bits = sign | (exponent == 31 ? 255u : exponent + 112) << 23 | fraction << 13;
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
inline float bf16_to_float(uint16_t half) {
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

// To the nearest, ties to even; NaN stays NaN.
inline uint16_t float_to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>(bits >> 16 | 64);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

}  // namespace terrazzo
