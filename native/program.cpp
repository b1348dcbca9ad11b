#include "program.hpp"

#include <cmath>
#include <cstring>

namespace terrazzo {
namespace {

struct Range {
  int begin, end;
  Range(int64_t count, int member, int members)
      : begin(static_cast<int>(count * member / members)), end(static_cast<int>(count * (member + 1) / members)) {}
};

inline float* row_of(const Step& step, int buffer, int row) {
  return step.buffers[buffer] + static_cast<int64_t>(row) * step.widths[buffer];
}

bool same(const Places& a, const Places& b) {
  return a.in_features == b.in_features && a.places == b.places && a.block == b.block && a.quantum == b.quantum &&
         (a.lookup == b.lookup ||
          (a.lookup != nullptr && b.lookup != nullptr &&
           std::memcmp(a.lookup, b.lookup, sizeof(int32_t) * static_cast<size_t>(a.places)) == 0));
}

}  // namespace

void NormOperation::run(const Step& step, int member) {
  const Range rows(step.rows, member, step.team.size());
  for (int row = rows.begin; row < rows.end; ++row)
    step.kernels.rms_norm(row_of(step, src_, row), weight_.data(), eps_, step.widths[src_], row_of(step, dst_, row));
  step.team.meet();
}

void SettleOperation::run(const Step& step, int member) {
  const Range rows(step.rows, member, step.team.size());
  const int width = step.widths[residual_];
  for (int row = rows.begin; row < rows.end; ++row) {
    float *y = row_of(step, y_, row), *residual = row_of(step, residual_, row);
    if (!after_.empty()) step.kernels.rms_norm(y, after_.data(), eps_, width, y);
    step.kernels.scale_add(residual, y, multiplier_, width);
    if (!before_.empty()) step.kernels.rms_norm(residual, before_.data(), eps_, width, row_of(step, x_, row));
    else if (x_ != residual_) std::memcpy(row_of(step, x_, row), residual, sizeof(float) * width);
  }
  step.team.meet();
}

LinearOperation::LinearOperation(int src, int dst, std::vector<Segment> segments, Arithmetic arithmetic)
    : src_(src), dst_(dst), segments_(std::move(segments)) {
  for (const Segment& segment : segments_) {
    const Weight& weight = segment.weight->weight;
    const Arithmetic how = weight.bits == 0 ? Arithmetic::kFloat : arithmetic;
    int found = -1;
    for (size_t i = 0; i < stages_.size(); ++i)
      if (stages_[i].arithmetic == how && same(stages_[i].places, weight.places)) found = static_cast<int>(i);
    if (found < 0) {
      found = static_cast<int>(stages_.size());
      stages_.push_back(Stage{weight.places, how, {}, {}, {}, {}});
    }
    stage_of_.push_back(found);
  }
}

void LinearOperation::Stage::reserve(int rows) {
  const size_t values = static_cast<size_t>(rows) * places.places;
  if (arithmetic == Arithmetic::kInt8) {
    if (int8.size() < values) int8.resize(values);
    if (scales.size() < values / places.quantum) scales.resize(values / places.quantum);
  } else if (float32.size() < values) {
    float32.resize(values);
  }
  if (sums.size() < static_cast<size_t>(rows) * places.blocks) sums.resize(static_cast<size_t>(rows) * places.blocks);
}

void LinearOperation::Stage::fill(const Step& step, const float* x, int64_t stride, int begin, int end, int copy) {
  const Staged to = view(copy);
  if (arithmetic == Arithmetic::kInt8)
    step.kernels.stage_int8(x, stride, places, begin, end, const_cast<int8_t*>(to.int8), const_cast<float*>(to.scales),
                            const_cast<float*>(to.sums));
  else
    step.kernels.stage_float(x, stride, places, begin, end, const_cast<float*>(to.float32), const_cast<float*>(to.sums));
}

Staged LinearOperation::Stage::view(int copy) const {
  const int64_t values = static_cast<int64_t>(copy) * places.places;
  const float* block_sums = sums.data() + static_cast<int64_t>(copy) * places.blocks;
  if (arithmetic == Arithmetic::kInt8)
    return {int8.data() + values, nullptr, scales.data() + values / places.quantum, block_sums};
  return {nullptr, float32.data() + values, nullptr, block_sums};
}

void LinearOperation::prepare(int rows, int members) {
  // A single row is staged by every member for itself: that is quicker than to wait for another.
  for (Stage& stage : stages_) stage.reserve(rows == 1 ? members : rows);
}

void LinearOperation::run(const Step& step, int member) {
  multiply(step, member, step.rows, step.buffers[src_], step.widths[src_], step.buffers[dst_], step.widths[dst_]);
}

void LinearOperation::multiply(const Step& step, int member, int num_rows, const float* x, int64_t x_stride, float* y,
                               int64_t y_stride) {
  Team& team = step.team;
  const bool alone = num_rows == 1;
  const int copy = alone ? member : 0;
  const Range rows(num_rows, alone ? 0 : member, alone ? 1 : team.size());
  for (Stage& stage : stages_) stage.fill(step, x, x_stride, rows.begin, rows.end, copy);
  if (!alone) team.meet();
  for (size_t i = 0; i < segments_.size(); ++i) {
    const Segment& segment = segments_[i];
    const Weight& weight = segment.weight->weight;
    const Range strips((weight.out_features + step.kernels.strip - 1) / step.kernels.strip, member, team.size());
    step.kernels.matmul(weight, stages_[stage_of_[i]].view(copy), num_rows,
                        segment.bias.empty() ? nullptr : segment.bias.data(), y + segment.column, y_stride, strips.begin, strips.end, step.scratch[member]);
  }
  team.meet();
}

void GateOperation::run(const Step& step, int member) {
  const int width = step.widths[dst_], members = step.team.size();
  const Range rows(step.rows > 1 ? step.rows : 1, step.rows > 1 ? member : 0, step.rows > 1 ? members : 1);
  const Range columns(width / 16, step.rows > 1 ? 0 : member, step.rows > 1 ? 1 : members);
  const int begin = columns.begin * 16;
  const int end = columns.end == width / 16 ? width : columns.end * 16;
  for (int row = rows.begin; row < rows.end; ++row) {
    const float* from = row_of(step, src_, row);
    step.kernels.gate(from + begin, from + width + begin, activation_, end - begin, row_of(step, dst_, row) + begin);
  }
  step.team.meet();
}

void AttendOperation::normalize_projections(const Step& step, int row) {
  const int queries = shape_.num_heads * shape_.head_dim, keys = shape_.num_kv_heads * shape_.head_dim;
  float* x = row_of(step, src_, row);
  step.kernels.rms_norm(x, query_norm_.data(), eps_, queries, x);
  step.kernels.rms_norm(x + queries, key_norm_.data(), eps_, keys, x + queries);
}

// Normalizes and turns a query or key head; a key goes to its slot, and its value with it.
void AttendOperation::settle_head(const Step& step, int row, int head) {
  const int width = shape_.head_dim, heads = shape_.num_heads, kv_heads = shape_.num_kv_heads;
  float* x = row_of(step, src_, row) + head * width;
  if (norm_ == HeadNorm::kHead)
    step.kernels.rms_norm(x, (head < heads ? query_norm_ : key_norm_).data(), eps_, width, x);
  if (rope_ >= 0) {
    const std::vector<float>& angles = step.angles[rope_];
    const float* cos = angles.data() + static_cast<int64_t>(row) * (rotary_dim_ / 2);
    step.kernels.turn(x, cos, cos + angles.size() / 2, rotary_dim_, neighbours_);
  }
  if (head < heads) return;
  const int64_t page = step.slots[row] / shape_.page_size, offset = step.slots[row] % shape_.page_size;
  const int64_t token = (page * kv_heads + head - heads) * shape_.page_size + offset;
  const int64_t at = token * width * (shape_.element == Element::kF32 ? 4 : 2);
  step.kernels.store_kv(x, shape_.element, width, static_cast<uint8_t*>(kv_.keys) + at);
  step.kernels.store_kv(x + kv_heads * width, shape_.element, width, static_cast<uint8_t*>(kv_.values) + at);
}

// Rows of attention that share the keys they read.
constexpr int kRowsAtOnce = 64;

void AttendOperation::attend(const Step& step, int member) {
  const int group = shape_.num_heads / shape_.num_kv_heads;
  const int queries_at_once = group > kRowsAtOnce ? 1 : kRowsAtOnce / group;
  int task = 0;
  // Later queries see more keys, so neighbours go to different members.
  for (const Sequence& sequence : step.sequences)
    for (int begin = 0; begin < sequence.query_len; begin += queries_at_once) {
      const int end = begin + queries_at_once < sequence.query_len ? begin + queries_at_once : sequence.query_len;
      for (int head = 0; head < shape_.num_kv_heads; ++head)
        if (task++ % step.team.size() == member)
          step.kernels.attend(shape_, kv_, sequence, head, begin, end, step.buffers[src_], step.widths[src_],
                              step.buffers[dst_], step.widths[dst_], step.scratch[member]);
    }
}

void AttendOperation::run(const Step& step, int member) {
  if (norm_ == HeadNorm::kProjection) {
    const Range rows(step.rows, member, step.team.size());
    for (int row = rows.begin; row < rows.end; ++row) normalize_projections(step, row);
    step.team.meet();
  }
  const int heads = shape_.num_heads + shape_.num_kv_heads;
  const Range tasks(static_cast<int64_t>(step.rows) * heads, member, step.team.size());
  for (int task = tasks.begin; task < tasks.end; ++task) settle_head(step, task / heads, task % heads);
  step.team.meet();
  attend(step, member);
  step.team.meet();
}

int Program::buffer(int width) {
  widths_.push_back(width);
  memory_.emplace_back();
  return static_cast<int>(widths_.size()) - 1;
}

int Program::rope(Rope rope) {
  ropes_.push_back(std::move(rope));
  angles_.emplace_back();
  return static_cast<int>(ropes_.size()) - 1;
}

int Program::select(int src) {
  selecting_ = operations_.size();
  select_src_ = src;
  return select_dst_ = buffer(widths_[src]);
}

void Program::turn_positions(const Inputs& inputs) {
  for (size_t i = 0; i < ropes_.size(); ++i) {
    const Rope& rope = ropes_[i];
    const size_t pairs = rope.frequencies.size(), half = inputs.rows * pairs;
    angles_[i].resize(2 * half);
    for (int row = 0; row < inputs.rows; ++row)
      for (size_t pair = 0; pair < pairs; ++pair) {
        const float angle = static_cast<float>(inputs.positions[row]) * rope.frequencies[pair];
        angles_[i][row * pairs + pair] = std::cos(angle) * rope.magnitude;
        angles_[i][half + row * pairs + pair] = std::sin(angle) * rope.magnitude;
      }
  }
}

void Program::take_rows(const Step& step, const Inputs& inputs, int member) const {
  const Range rows(inputs.num_selected, member, step.team.size());
  for (int row = rows.begin; row < rows.end; ++row)
    std::memcpy(row_of(step, select_dst_, row), row_of(step, select_src_, static_cast<int>(inputs.selected[row])),
                sizeof(float) * step.widths[select_dst_]);
  step.team.meet();
}

void Program::run(const Inputs& inputs) {
  std::vector<float*> buffers = inputs.bound;
  for (size_t i = inputs.bound.size(); i < widths_.size(); ++i) {
    const size_t size = static_cast<size_t>(inputs.rows) * widths_[i];
    if (memory_[i].size() < size) memory_[i].resize(size);
    buffers.push_back(memory_[i].data());
  }
  turn_positions(inputs);
  Team& team = machine_->team;
  scratch_.resize(team.size());
  for (size_t i = 0; i < operations_.size(); ++i)
    operations_[i]->prepare(i < selecting_ ? inputs.rows : inputs.num_selected, team.size());
  const auto step = [&](int rows) {
    return Step{team, machine_->kernels, rows, buffers, widths_, inputs.slots, inputs.sequences, angles_, scratch_};
  };
  const Step all = step(inputs.rows), selected = step(inputs.num_selected);
  team.run([&](int member) {
    for (size_t i = 0; i < operations_.size(); ++i) {
      if (i == selecting_) {
        if (inputs.num_selected == 0) return;
        take_rows(all, inputs, member);
      }
      operations_[i]->run(i < selecting_ ? all : selected, member);
    }
  });
}

}  // namespace terrazzo
