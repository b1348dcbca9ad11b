// A card of one block at a time: threads are fibers of one host thread, and what a warp does together
// happens when its last lane arrives. Stands in for intrinsics.cuh.
#pragma once

#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#define DEVICE inline
#define __device__
#define __global__
#define __shared__
#define __align__(bytes)
#define __launch_bounds__(...)
#define __expf expf

struct Index {
  int x, y, z;
};
inline Index threadIdx, blockIdx, blockDim, gridDim;
struct uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};

namespace emulator {

// Threads that wait for each other; what the last one computes is done before any goes on.
struct Meeting {
  int size = 0, arrived = 0;
  long generation = 0;
};

struct Fiber {
  ucontext_t context;
  std::vector<char> stack;
  bool done = false;
};

inline std::vector<Fiber> fibers;
inline ucontext_t scheduler;
inline int running;
inline Meeting block_meeting;
inline std::vector<Meeting> warp_meetings;
inline std::function<void()> kernel;

inline void yield() {
  const int self = running;
  swapcontext(&fibers[self].context, &scheduler);
}

template <class Last>
void meet(Meeting& meeting, Last last) {
  const long generation = meeting.generation;
  if (++meeting.arrived == meeting.size) {
    last();
    meeting.arrived = 0;
    ++meeting.generation;
  }
  while (meeting.generation == generation) yield();
}

inline int lane() { return running % 32; }
inline int warp() { return running / 32; }

// What each lane brings to, and takes from, an operation of its warp.
struct Exchange {
  const void* rows[32];
  uint32_t a[32][4], b[32][2], out[32][4];
  float c[32][4];
};
inline std::vector<Exchange> exchanges;

inline uint8_t* shared_memory;
inline size_t shared_size;

inline void entry() {
  kernel();
  fibers[running].done = true;
  for (;;) yield();
}

// Runs every block of the grid after the other. Ends the process where no thread can go on.
inline void launch(Index grid, int threads, std::function<void()> function) {
  kernel = std::move(function);
  gridDim = grid;
  blockDim = {threads, 1, 1};
  for (int y = 0; y < grid.y; ++y)
    for (int x = 0; x < grid.x; ++x) {
      blockIdx = {x, y, 0};
      std::memset(shared_memory, 0xFF, shared_size);  // NaN in every float type
      block_meeting = {threads};
      warp_meetings.assign(threads / 32, Meeting{32});
      exchanges.resize(threads / 32);
      fibers.resize(threads);
      for (Fiber& fiber : fibers) {
        fiber.done = false;
        fiber.stack.resize(1 << 16);
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.data();
        fiber.context.uc_stack.ss_size = fiber.stack.size();
        makecontext(&fiber.context, entry, 0);
      }
      for (int left = threads, rounds = 0; left > 0; ++rounds) {
        left = 0;
        for (running = 0; running < threads; ++running) {
          if (fibers[running].done) continue;
          threadIdx = {running, 0, 0};
          swapcontext(&scheduler, &fibers[running].context);
          left += !fibers[running].done;
        }
        if (rounds > 10000000) std::abort();
      }
    }
}

}  // namespace emulator

inline void __syncthreads() { emulator::meet(emulator::block_meeting, [] {}); }
inline void __syncwarp() { emulator::meet(emulator::warp_meetings[emulator::warp()], [] {}); }
inline void __threadfence() {}

namespace terrazzo {

inline uint8_t shared[227 * 1024] __attribute__((aligned(1024)));
inline const bool shared_is_known = [] {
  emulator::shared_memory = shared;
  emulator::shared_size = sizeof shared;
  return true;
}();

inline void launch_dependents() {}
inline void wait_for_predecessor() {}

// Copies end at once: bit 63 of a barrier is its phase.
inline void barrier_init(uint64_t* barrier, uint32_t) { *barrier = 0; }
inline void barrier_init_fence() {}
inline void barrier_expect(uint64_t*, uint32_t) {}
inline void barrier_wait(uint64_t* barrier, uint32_t parity) {
  while ((*barrier >> 63) == parity) emulator::yield();
}
inline uint64_t read_once_policy() { return 0; }
inline void copy_bulk(void* to, const void* from, uint32_t bytes, uint64_t* barrier, uint64_t) {
  if (bytes % 16 || reinterpret_cast<uintptr_t>(to) % 16 || reinterpret_cast<uintptr_t>(from) % 16)
    std::abort();
  std::memcpy(to, from, bytes);
  *barrier ^= 1ull << 63;
}
inline void copy_async(void* to, const void* from, uint32_t valid) {
  if (reinterpret_cast<uintptr_t>(to) % 16 || reinterpret_cast<uintptr_t>(from) % 16) std::abort();
  valid ? static_cast<void>(std::memcpy(to, from, 16)) : static_cast<void>(std::memset(to, 0, 16));
}
inline void copy_async_commit() {}
template <int PENDING>
void copy_async_wait() {}

inline uint32_t and_or(uint32_t a, uint32_t mask, uint32_t bits) { return (a & mask) | bits; }

inline float widen_half(uint16_t bits) {
  _Float16 value;
  std::memcpy(&value, &bits, 2);
  return value;
}
inline float widen_bfloat(uint16_t bits) {
  const uint32_t word = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &word, 4);
  return value;
}

template <class F>
struct Pairs {
  template <class Function>
  static uint32_t each(Function function) {
    return F::round(function(0)) | static_cast<uint32_t>(F::round(function(16))) << 16;
  }
  static float half(uint32_t pair, int shift) { return F::widen(static_cast<uint16_t>(pair >> shift)); }
  static uint32_t sub(uint32_t a, uint32_t b) {
    return each([&](int i) { return half(a, i) - half(b, i); });
  }
  static uint32_t mul(uint32_t a, uint32_t b) {
    return each([&](int i) { return half(a, i) * half(b, i); });
  }
  static uint32_t fma(uint32_t a, uint32_t b, uint32_t c) {
    return each([&](int i) { return std::fma(half(a, i), half(b, i), half(c, i)); });
  }
  static uint32_t pack(float low, float high) {
    return F::round(low) | static_cast<uint32_t>(F::round(high)) << 16;
  }
  static void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    emulator::Exchange& all = emulator::exchanges[emulator::warp()];
    const int lane = emulator::lane();
    std::memcpy(all.a[lane], a, 16);
    all.b[lane][0] = b0, all.b[lane][1] = b1;
    std::memcpy(all.c[lane], d, 16);
    emulator::meet(emulator::warp_meetings[emulator::warp()], [&all] { multiply(all); });
    std::memcpy(d, all.c[lane], 16);
    __syncwarp();
  }
  // The fragments of mma.m16n8k16 (PTX ISA): row-major A, column-major B.
  static void multiply(emulator::Exchange& all) {
    float a[16][16], b[16][8];
    for (int lane = 0; lane < 32; ++lane) {
      const int g = lane / 4, t = lane % 4;
      for (int i = 0; i < 4; ++i)
        for (int e = 0; e < 2; ++e)
          a[g + 8 * (i % 2)][2 * t + e + 8 * (i / 2)] = half(all.a[lane][i], 16 * e);
      for (int i = 0; i < 2; ++i)
        for (int e = 0; e < 2; ++e) b[2 * t + e + 8 * i][g] = half(all.b[lane][i], 16 * e);
    }
    for (int lane = 0; lane < 32; ++lane)
      for (int i = 0; i < 4; ++i)
        for (int k = 0; k < 16; ++k)
          all.c[lane][i] += a[lane / 4 + 8 * (i / 2)][k] * b[k][2 * (lane % 4) + i % 2];
  }
};

struct BFloat16 : Pairs<BFloat16> {
  static constexpr uint32_t kMagic = 0x43004300;
  static constexpr int kMagicValue = 128;
  static constexpr int kMagicBits = 7;
  static float widen(uint16_t bits) { return widen_bfloat(bits); }
  static uint16_t round(float value) {
    uint32_t word;
    std::memcpy(&word, &value, 4);
    return static_cast<uint16_t>((word + 0x7FFF + ((word >> 16) & 1)) >> 16);
  }
};

struct Float16 : Pairs<Float16> {
  static constexpr uint32_t kMagic = 0x64006400;
  static constexpr int kMagicValue = 1024;
  static constexpr int kMagicBits = 10;
  static float widen(uint16_t bits) { return widen_half(bits); }
  static uint16_t round(float value) {
    const _Float16 rounded = static_cast<_Float16>(value);
    uint16_t bits;
    std::memcpy(&bits, &rounded, 2);
    return bits;
  }
};

inline void load_matrices(uint32_t (&d)[4], const void* row) {
  emulator::Exchange& all = emulator::exchanges[emulator::warp()];
  const int lane = emulator::lane();
  if (reinterpret_cast<uintptr_t>(row) % 16) std::abort();
  all.rows[lane] = row;
  emulator::meet(emulator::warp_meetings[emulator::warp()], [&all] {
    for (int l = 0; l < 32; ++l)
      for (int i = 0; i < 4; ++i)
        std::memcpy(&all.out[l][i], static_cast<const char*>(all.rows[8 * i + l / 4]) + 4 * (l % 4), 4);
  });
  std::memcpy(d, all.out[lane], 16);
  __syncwarp();
}

inline int count_arrival(int* counter) { return (*counter)++; }
inline float load_uncached(const float* pointer) { return *pointer; }

}  // namespace terrazzo
