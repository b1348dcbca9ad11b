#pragma once
#include <string>
#include <vector>

#include "arena.hpp"
#include "threads.hpp"
#include "types.hpp"

namespace terrazzo {

// The kernels that this machine runs, fastest first.
std::vector<const Kernels*> supported_kernels();

// Threads, the kernels they run and the memory of their weights.
struct Machine {
  Team team;
  Arena arena;
  const Kernels& kernels;

  // name: of an instruction set; throws std::invalid_argument where this machine lacks it.
  Machine(int num_threads, const std::string& name);
};

}  // namespace terrazzo
