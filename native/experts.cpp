#include "experts.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

namespace terrazzo {
namespace {

void make_room(std::vector<float>& buffer, size_t size) {
  if (buffer.size() < size) buffer.resize(size);
}

// f with the share of a member of `count` things.
template <typename F>
void share(int64_t count, const Step& step, int member, F f) {
  const int64_t members = step.team.size(), end = count * (member + 1) / members;
  for (int64_t i = count * member / members; i < end; ++i) f(i);
}

}  // namespace

void ExpertsOperation::prepare(int rows, int /*members*/) {
  const size_t choices = static_cast<size_t>(rows) * router_.top_k;
  expert_of_choice_.resize(choices);
  weight_of_choice_.resize(choices);
  row_of_choice_.resize(choices);
  token_of_row_.resize(choices);
}

// Softmax over the experts, then the best of them; of equal ones the first.
void ExpertsOperation::choose(const Step& step, int token) {
  const float* logits = step.buffers[logits_] + static_cast<int64_t>(token) * step.widths[logits_];
  const int best = router_.top_k, first = token * best;
  std::vector<int> order(experts_.size());
  std::iota(order.begin(), order.end(), 0);
  std::partial_sort(order.begin(), order.begin() + best, order.end(),
                    [&](int a, int b) { return logits[a] > logits[b] || (logits[a] == logits[b] && a < b); });
  const float top = logits[order[0]];
  float total = 0.0f, kept = 0.0f;
  for (size_t expert = 0; expert < experts_.size(); ++expert) total += std::exp(logits[expert] - top);
  std::sort(order.begin(), order.begin() + best);
  for (int i = 0; i < best; ++i) {
    expert_of_choice_[first + i] = order[i];
    weight_of_choice_[first + i] = std::exp(logits[order[i]] - top) / total;
    kept += weight_of_choice_[first + i];
  }
  for (int i = 0; i < best; ++i) {
    float& weight = weight_of_choice_[first + i];
    if (router_.sum_to_one) weight /= kept;
    weight *= router_.scale;
  }
}

// Rows in the order of their experts, those of one expert in the order of their tokens; and room for them.
void ExpertsOperation::sort_rows(const Step& step) {
  offsets_.assign(experts_.size() + 1, 0);
  for (const int expert : expert_of_choice_) ++offsets_[expert + 1];
  std::partial_sum(offsets_.begin(), offsets_.end(), offsets_.begin());
  std::vector<int> next(offsets_.begin(), offsets_.end() - 1);
  const size_t rows = expert_of_choice_.size();
  for (size_t choice = 0; choice < rows; ++choice) {
    const int row = next[expert_of_choice_[choice]]++;
    row_of_choice_[choice] = row;
    token_of_row_[row] = static_cast<int>(choice) / router_.top_k;
  }
  make_room(gathered_, rows * step.widths[src_]);
  make_room(projected_, rows * 2 * width_);
  make_room(gated_, rows * width_);
  make_room(returned_, rows * step.widths[dst_]);
  for (size_t expert = 0; expert < experts_.size(); ++expert) {
    const int count = offsets_[expert + 1] - offsets_[expert];
    if (count == 0) continue;
    experts_[expert].gate_up->prepare(count, step.team.size());
    experts_[expert].down->prepare(count, step.team.size());
  }
}

void ExpertsOperation::project(const Step& step, int member) {
  const int64_t from = step.widths[src_], to = 2 * width_;
  for (size_t expert = 0; expert < experts_.size(); ++expert) {
    const int64_t row = offsets_[expert];
    const int count = offsets_[expert + 1] - offsets_[expert];
    if (count > 0)
      experts_[expert].gate_up->multiply(step, member, count, gathered_.data() + row * from, from,
                                         projected_.data() + row * to, to);
  }
}

void ExpertsOperation::gate(const Step& step, int member) {
  share(static_cast<int64_t>(token_of_row_.size()), step, member, [&](int64_t row) {
    const float* from = projected_.data() + row * 2 * width_;
    step.kernels.gate(from, from + width_, activation_, width_, gated_.data() + row * width_);
  });
}

void ExpertsOperation::give_back(const Step& step, int member) {
  const int64_t to = step.widths[dst_];
  for (size_t expert = 0; expert < experts_.size(); ++expert) {
    const int64_t row = offsets_[expert];
    const int count = offsets_[expert + 1] - offsets_[expert];
    if (count > 0)
      experts_[expert].down->multiply(step, member, count, gated_.data() + row * width_, width_,
                                      returned_.data() + row * to, to);
  }
}

// The outputs of a token's experts in the order of the experts, then the shared one.
void ExpertsOperation::combine(const Step& step, int token) {
  const int width = step.widths[dst_];
  float* to = step.buffers[dst_] + static_cast<int64_t>(token) * width;
  std::memset(to, 0, sizeof(float) * width);
  for (int choice = token * router_.top_k; choice < (token + 1) * router_.top_k; ++choice)
    step.kernels.scale_add(to, returned_.data() + static_cast<int64_t>(row_of_choice_[choice]) * width,
                           weight_of_choice_[choice], width);
  if (router_.shared == SharedExpert::kNone) return;
  const float* logits = step.buffers[logits_] + static_cast<int64_t>(token) * step.widths[logits_];
  const float opening =
      router_.shared == SharedExpert::kGated ? 1.0f / (1.0f + std::exp(-logits[experts_.size()])) : 1.0f;
  step.kernels.scale_add(to, step.buffers[shared_] + static_cast<int64_t>(token) * width, opening, width);
}

void ExpertsOperation::run(const Step& step, int member) {
  Team& team = step.team;
  share(step.rows, step, member, [&](int64_t token) { choose(step, static_cast<int>(token)); });
  team.meet();
  if (member == 0) sort_rows(step);
  team.meet();
  const int64_t width = step.widths[src_];
  share(static_cast<int64_t>(token_of_row_.size()), step, member, [&](int64_t row) {
    std::memcpy(gathered_.data() + row * width, step.buffers[src_] + token_of_row_[row] * width, sizeof(float) * width);
  });
  team.meet();
  project(step, member);
  gate(step, member);
  team.meet();
  give_back(step, member);
  share(step.rows, step, member, [&](int64_t token) { combine(step, static_cast<int>(token)); });
  team.meet();
}

}  // namespace terrazzo
