// Mixture of experts: rows go to the experts that a router chose, and come back weighted.
#pragma once
#include <memory>
#include <vector>

#include "program.hpp"

namespace terrazzo {

enum class SharedExpert : int { kNone = 0, kGated = 1, kPlain = 2 };

// Which experts a token goes to. shared: how the one that every token sees counts.
struct Router {
  int top_k;
  bool sum_to_one;  // the weights of a token are divided by their sum
  float scale;      // and then multiplied
  SharedExpert shared;
};

// Both projections of one expert. gate_up: two halves side by side.
struct Expert {
  std::unique_ptr<LinearOperation> gate_up, down;
};

// dst = the weighted sum of what the chosen experts make of src, and of `shared`.
class ExpertsOperation final : public Operation {
 public:
  // logits: of each expert, and one more for the gate of a shared expert. width: of a gate.
  ExpertsOperation(int src, int logits, int shared, int dst, int width, Router router, Activation activation,
                   std::vector<Expert> experts)
      : src_(src), logits_(logits), shared_(shared), dst_(dst), width_(width), router_(router),
        activation_(activation), experts_(std::move(experts)) {}
  void prepare(int rows, int members) override;
  void run(const Step& step, int member) override;

 private:
  void choose(const Step& step, int token);
  void sort_rows(const Step& step);
  void project(const Step& step, int member);
  void gate(const Step& step, int member);
  void give_back(const Step& step, int member);
  void combine(const Step& step, int token);

  int src_, logits_, shared_, dst_;
  int width_;
  Router router_;
  Activation activation_;
  std::vector<Expert> experts_;
  // A choice is a token and one of its experts, in their order; a row is a choice in the order of experts.
  std::vector<int> expert_of_choice_, row_of_choice_, token_of_row_;
  std::vector<float> weight_of_choice_;
  std::vector<int> offsets_;
  std::vector<float> gathered_, projected_, gated_, returned_;
};

}  // namespace terrazzo
