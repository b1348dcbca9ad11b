#define TERRAZZO_ISA avx2
#include "simd_avx2.hpp"

namespace terrazzo::avx2 {
constexpr const char* kName = "avx2";
}
#include "kernels.inl"

const terrazzo::Kernels* terrazzo::avx2_kernels() { return &avx2::kKernels; }
