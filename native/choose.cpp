// Which instruction set this machine has.
#include "choose.hpp"

#include <stdexcept>

namespace terrazzo {

// CPU features are asked for at run time, so that one build serves every machine of an architecture.
std::vector<const Kernels*> supported_kernels() {
  std::vector<const Kernels*> supported;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"))
    supported.push_back(avx512_kernels());
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))
    supported.push_back(avx2_kernels());
#endif
  supported.push_back(portable_kernels());
  return supported;
}

namespace {

const Kernels& named(const std::string& name) {
  std::string known;
  for (const Kernels* kernels : supported_kernels()) {
    if (name == kernels->name) return *kernels;
    known += std::string(" ") + kernels->name;
  }
  throw std::invalid_argument("instruction set " + name + " is not there; this machine has" + known);
}

}  // namespace

Machine::Machine(int num_threads, const std::string& name) : team(num_threads), kernels(named(name)) {}

}  // namespace terrazzo
