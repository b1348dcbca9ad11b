// The vectors of every machine, in the vector types of GCC and Clang: the definition of what the others
// compute, and what runs where none of them does. Compilers make NEON or SSE of it.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "half.hpp"

namespace terrazzo::TERRAZZO_ISA {

constexpr int kLanes = 8;
// One by one: what is portable should above all be small.
constexpr int kRowsAtOnce = 1, kPanelRowsAtOnce = 1;
using Floats = float __attribute__((vector_size(4 * kLanes)));
using Ints = int32_t __attribute__((vector_size(4 * kLanes)));
using Bytes = uint8_t __attribute__((vector_size(4 * kLanes)));

inline Floats broadcast(float x) { return Floats{} + x; }
inline Floats load(const float* p) {
  Floats out;
  std::memcpy(&out, p, sizeof out);
  return out;
}
inline void store(float* p, Floats x) { std::memcpy(p, &x, sizeof x); }
inline Floats add(Floats a, Floats b) { return a + b; }
inline Floats sub(Floats a, Floats b) { return a - b; }
inline Floats mul(Floats a, Floats b) { return a * b; }
inline Floats div(Floats a, Floats b) { return a / b; }
inline Floats max(Floats a, Floats b) { return a > b ? a : b; }
inline Floats min(Floats a, Floats b) { return a < b ? a : b; }
inline Floats absolute(Floats a) { return reinterpret_cast<Floats>(reinterpret_cast<Ints>(a) & 0x7fffffff); }
// a * b + c, rounded twice where the others round once.
inline Floats fma(Floats a, Floats b, Floats c) { return a * b + c; }
// c - a * b.
inline Floats fnma(Floats a, Floats b, Floats c) { return c - a * b; }
// x where at > limit, 0 elsewhere.
inline Floats keep_above(Floats x, Floats at, Floats limit) { return at > limit ? x : Floats{}; }
// Whole numbers stay, others go to the nearest, ties to even; for |a| < 2 ** 22.
inline Floats round_even(Floats a) {
  const Floats shift = broadcast(12582912.0f);  // 1.5 * 2 ** 23: its last bit is worth 1
  return (a + shift) - shift;
}
// 2 ** a for whole a in [-126, 127].
inline Floats power_of_two(Floats a) {
  return reinterpret_cast<Floats>((__builtin_convertvector(a, Ints) + 127) << 23);
}
inline float reduce_add(Floats a) {
  return ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7]));
}
inline float reduce_max(Floats a) {
  float top = a[0];
  for (int i = 1; i < kLanes; ++i) top = a[i] > top ? a[i] : top;
  return top;
}

inline Floats load_f16(const uint16_t* p) {
  Floats out;
  for (int i = 0; i < kLanes; ++i) out[i] = half_to_float(p[i]);
  return out;
}
inline Floats load_bf16(const uint16_t* p) {
  Floats out;
  for (int i = 0; i < kLanes; ++i) out[i] = bf16_to_float(p[i]);
  return out;
}
inline Floats load_u8(const uint8_t* p) {
  Floats out;
  for (int i = 0; i < kLanes; ++i) out[i] = static_cast<float>(p[i]);
  return out;
}
// The nearest whole numbers of values in [-127, 127], as signed bytes.
inline void store_s8(int8_t* p, Floats x) {
  const Ints whole = __builtin_convertvector(round_even(x), Ints);
  for (int i = 0; i < kLanes; ++i) p[i] = static_cast<int8_t>(whole[i]);
}

inline Bytes load_bytes(const uint8_t* p) {
  Bytes out;
  std::memcpy(&out, p, sizeof out);
  return out;
}
inline void store_bytes(uint8_t* p, Bytes x) { std::memcpy(p, &x, sizeof x); }
// Bits [kShift, kShift + log2(kMask + 1)) of every byte.
template <int kShift, int kMask>
inline Bytes field(Bytes x) {
  return (x >> kShift) & static_cast<uint8_t>(kMask);
}
// x | y << kShift, for fields of y that stay within their bytes.
template <int kShift>
inline Bytes merge(Bytes x, Bytes y) {
  return x | (y << kShift);
}
inline Bytes broadcast4(const int8_t* p) {
  int32_t four;
  std::memcpy(&four, p, 4);
  return reinterpret_cast<Bytes>(Ints{} + four);
}
// Byte kByte of every lane, on machines that store the low byte first.
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__);
template <int kByte>
inline Floats byte_of(Bytes x) {
  return __builtin_convertvector((reinterpret_cast<Ints>(x) >> (8 * kByte)) & 0xff, Floats);
}

using Sums = Ints;
inline Sums add_sums(Sums a, Sums b) { return a + b; }
inline Floats to_floats(Sums a) { return __builtin_convertvector(a, Floats); }

// Sums of code * activation over 4 bytes a lane and several steps, exact in 32 bits.
template <int kBits>
struct Dot {
  static constexpr int kRun = 8;
  Sums total;
  inline void start(Bytes codes, Bytes x) {
    total = Sums{};
    step(codes, x);
  }
  inline void step(Bytes codes, Bytes x) {
    const Ints c = reinterpret_cast<Ints>(codes), a = reinterpret_cast<Ints>(x);
    total += (c & 0xff) * ((a << 24) >> 24);
    total += ((c >> 8) & 0xff) * ((a << 16) >> 24);
    total += ((c >> 16) & 0xff) * ((a << 8) >> 24);
    total += ((c >> 24) & 0xff) * (a >> 24);
  }
  inline Sums sum() const { return total; }
};

}  // namespace terrazzo::TERRAZZO_ISA
