#define TERRAZZO_ISA portable
#include "simd_portable.hpp"

namespace terrazzo::portable {
constexpr const char* kName = "portable";
}
#include "kernels.inl"

const terrazzo::Kernels* terrazzo::portable_kernels() { return &portable::kKernels; }
