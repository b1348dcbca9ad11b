#define TERRAZZO_ISA avx512
#include "simd_avx512.hpp"

namespace terrazzo::avx512 {
constexpr const char* kName = "avx512";
}
#include "kernels.inl"

const terrazzo::Kernels* terrazzo::avx512_kernels() { return &avx512::kKernels; }
