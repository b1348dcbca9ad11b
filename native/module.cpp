// The Python face of the kernels: weights, programs and one product at a time.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <stdexcept>
#include <tuple>

#include "pack.hpp"
#include "experts.hpp"
#include "program.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace terrazzo {
namespace {

template <typename T, size_t kDims>
using Array = nb::ndarray<T, nb::ndim<kDims>, nb::device::cpu, nb::c_contig>;
using AnyArray = nb::ndarray<nb::device::cpu, nb::c_contig>;
using Rows = nb::ndarray<float, nb::ndim<2>, nb::device::cpu>;

void expect(bool holds, const char* what) {
  if (!holds) throw std::invalid_argument(what);
}

Element element_of(const AnyArray& values) {
  if (values.dtype() == nb::dtype<float>()) return Element::kF32;
  const nb::dlpack::dtype dtype = values.dtype();
  expect(dtype.bits == 16 && dtype.lanes == 1, "elements must be float32, float16 or bfloat16");
  if (dtype.code == static_cast<uint8_t>(nb::dlpack::dtype_code::Float)) return Element::kF16;
  expect(dtype.code == static_cast<uint8_t>(nb::dlpack::dtype_code::Bfloat),
         "elements must be float32, float16 or bfloat16");
  return Element::kBF16;
}

size_t padded(size_t bytes) { return (bytes + 63) / 64 * 64; }

// Outputs with those that fill the last strip.
size_t padded_outputs(const Machine& machine, int out_features) {
  const size_t strip = machine.kernels.strip;
  return (out_features + strip - 1) / strip * strip;
}

size_t dense_bytes(const Machine& machine, int out_features, int places, int element_bytes) {
  return padded(padded_outputs(machine, out_features) * places * element_bytes);
}

size_t quantized_bytes(const Machine& machine, int bits, int out_features, int places, int blocks, int scale_bytes,
                       bool zeros) {
  const size_t outputs = padded_outputs(machine, out_features);
  return padded(outputs * places * bits / 8) + padded(outputs * blocks * scale_bytes) +
         (zeros ? padded(outputs * blocks) : 0);
}

std::shared_ptr<PackedWeight> quantized(Machine& machine, Array<const int32_t, 2> words, int bits, int in_features,
                                        int block, int quantum, const std::vector<int32_t>& lookup,
                                        const std::vector<int32_t>& groups, AnyArray scales,
                                        std::optional<Array<const uint8_t, 2>> zeros, float zero) {
  const int out_features = static_cast<int>(words.shape(1)), blocks = static_cast<int>(groups.size());
  const int places = (blocks * block + 31) / 32 * 32;
  expect(bits >= 2 && bits <= 8, "bits must be 2 to 8");
  expect(quantum == 16 || quantum == 32, "quantum must be 16 or 32");
  expect(block > 0 && block % quantum == 0 && blocks > 0 && places == blocks * block,
         "blocks must be whole quanta and fill tiles of 32 places");
  expect(words.shape(0) == (static_cast<size_t>(in_features) * bits + 31) / 32, "words must hold in_features codes");
  expect(lookup.empty() ? in_features <= places : lookup.size() == static_cast<size_t>(places),
         "lookup must name an input for every place");
  for (const int32_t input : lookup) expect(input >= -1 && input < in_features, "lookup names no input");
  expect(scales.ndim() == 2 && scales.shape(1) == words.shape(1), "scales must be [groups, out_features]");
  for (const int32_t group : groups)
    expect(group >= 0 && static_cast<size_t>(group) < scales.shape(0), "groups must have scales");
  expect(!zeros || (zeros->shape(0) == scales.shape(0) && zeros->shape(1) == words.shape(1)),
         "zeros must be [groups, out_features]");
  const Element element = element_of(scales);
  const int scale_bytes = element == Element::kF32 ? 4 : 2, strip = machine.kernels.strip;
  auto packed = std::make_shared<PackedWeight>(PackedWeight{machine.kernels, {}, {}, {}});
  packed->lookup = lookup;
  packed->memory = machine.arena.take(quantized_bytes(machine, bits, out_features, places, blocks, scale_bytes, zeros.has_value()));
  const size_t outputs = padded_outputs(machine, out_features);
  uint8_t* codes = packed->memory.data;
  uint8_t* packed_scales = codes + padded(outputs * places * bits / 8);
  uint8_t* packed_zeros = packed_scales + padded(outputs * blocks * scale_bytes);
  const Places where{in_features, places,  block,
                     blocks,      quantum, packed->lookup.empty() ? nullptr : packed->lookup.data()};
  packed->weight = {bits, out_features,  where, element, codes, packed_scales, zeros ? packed_zeros : nullptr, zero};
  nb::gil_scoped_release unlocked;
  pack_codes(machine.team, words.data(), bits, out_features, where, machine.kernels.lanes, strip, codes);
  pack_groups(scales.data(), scale_bytes, out_features, groups.data(), blocks, strip, packed_scales);
  if (zeros) pack_groups(zeros->data(), 1, out_features, groups.data(), blocks, strip, packed_zeros);
  return packed;
}

std::shared_ptr<PackedWeight> dense(Machine& machine, AnyArray values) {
  expect(values.ndim() == 2, "a dense weight is [out_features, in_features]");
  const Element element = element_of(values);
  const int out_features = static_cast<int>(values.shape(0)), in_features = static_cast<int>(values.shape(1));
  const int places = (in_features + 31) / 32 * 32, element_bytes = element == Element::kF32 ? 4 : 2;
  auto packed = std::make_shared<PackedWeight>(PackedWeight{machine.kernels, {}, {}, {}});
  packed->memory = machine.arena.take(dense_bytes(machine, out_features, places, element_bytes));
  uint8_t* codes = packed->memory.data;
  packed->weight = {0, out_features, {in_features, places, places, 1, 32, nullptr}, element, codes, nullptr, nullptr, 0};
  nb::gil_scoped_release unlocked;
  pack_dense(machine.team, values.data(), element_bytes, out_features, packed->weight.places, machine.kernels.strip, codes);
  return packed;
}

std::shared_ptr<PackedWeight> rounded(Machine& machine, AnyArray values) {
  expect(values.ndim() == 2, "a dense weight is [out_features, in_features]");
  const Element element = element_of(values);
  const int out_features = static_cast<int>(values.shape(0)), in_features = static_cast<int>(values.shape(1));
  const int places = (in_features + 31) / 32 * 32, blocks = places / 32;
  auto packed = std::make_shared<PackedWeight>(PackedWeight{machine.kernels, {}, {}, {}});
  packed->memory = machine.arena.take(quantized_bytes(machine, 8, out_features, places, blocks, 2, false));
  uint8_t* codes = packed->memory.data;
  uint8_t* scales = codes + padded(padded_outputs(machine, out_features) * places);
  packed->weight = {8,      out_features, {in_features, places, 32, blocks, 32, nullptr}, Element::kBF16, codes,
                    scales, nullptr,      128.0f};
  nb::gil_scoped_release unlocked;
  pack_rounded(machine.team, values.data(), element, out_features, packed->weight.places, machine.kernels.lanes,
               machine.kernels.strip, codes, reinterpret_cast<uint16_t*>(scales));
  return packed;
}

void expect_rows(const Rows& rows, int width, const char* what) {
  expect(static_cast<int>(rows.shape(1)) == width && rows.stride(1) == 1, what);
}

void multiply(Machine& machine, std::shared_ptr<PackedWeight> weight, Arithmetic arithmetic, Rows x, Rows out) {
  const int rows = static_cast<int>(x.shape(0));
  expect(&weight->kernels == &machine.kernels, "the weight was packed for another instruction set");
  expect_rows(x, weight->weight.places.in_features, "x must be [M, in_features] with adjacent columns");
  expect_rows(out, weight->weight.out_features, "out must be [M, out_features] with adjacent columns");
  expect(out.shape(0) == x.shape(0), "x and out must have the same rows");
  LinearOperation linear(0, 1, {Segment{weight, 0, {}}}, arithmetic);
  const std::vector<float*> buffers{x.data(), out.data()};
  const std::vector<int> strides{static_cast<int>(x.stride(0)), static_cast<int>(out.stride(0))};
  std::vector<std::vector<uint8_t>> scratch(machine.team.size());
  std::vector<std::vector<float>> no_angles;
  const std::vector<Sequence> no_sequences;
  const Step step{machine.team, machine.kernels, rows, buffers, strides, nullptr, no_sequences, no_angles, scratch};
  linear.prepare(rows, machine.team.size());
  nb::gil_scoped_release unlocked;
  machine.team.run([&](int member) { linear.run(step, member); });
}

std::vector<float> floats(const Array<const float, 1>& values) {
  return {values.data(), values.data() + values.size()};
}

// A program and the tensors that its operations point to.
struct Compiled {
  std::shared_ptr<Machine> machine;
  Program program;
  std::vector<int> bound_widths;
  std::vector<AnyArray> kept;

  Compiled(const Compiled&) = delete;
  explicit Compiled(std::shared_ptr<Machine> runs_on) : machine(runs_on), program(std::move(runs_on)) {}

  using Numbers = std::vector<int64_t>;
  void run(const std::vector<Array<float, 2>>& bound, const Numbers& positions, const Numbers& slots,
           const std::vector<std::tuple<int, int, int, Numbers>>& spans, const Numbers& selected) {
    expect(!bound.empty() && bound.size() == bound_widths.size(), "a program needs its bound buffers");
    Program::Inputs inputs{static_cast<int>(bound[0].shape(0)), {}, positions.data(), slots.data(), {},
                           selected.data(), static_cast<int>(selected.size())};
    const size_t rows = bound[0].shape(0);
    expect(positions.size() == rows && slots.size() == rows, "every row needs a position and a slot");
    for (size_t i = 0; i < bound.size(); ++i) {
      expect(static_cast<int>(bound[i].shape(1)) == bound_widths[i], "bound buffers must be as wide as declared");
      inputs.bound.push_back(bound[i].data());
    }
    for (const int64_t row : selected) expect(row >= 0 && row < inputs.rows, "selected rows must be there");
    for (const auto& [start, length, kv_len, pages] : spans) {
      expect(start >= 0 && length >= 0 && start + length <= inputs.rows && kv_len >= length, "spans must be of rows");
      inputs.sequences.push_back({start, length, kv_len, pages.data()});
    }
    nb::gil_scoped_release unlocked;
    program.run(inputs);
  }
};

using SegmentTuple = std::tuple<std::shared_ptr<PackedWeight>, int, std::vector<float>>;
using ExpertTuple = std::tuple<std::vector<SegmentTuple>, Arithmetic, std::vector<SegmentTuple>, Arithmetic>;

std::unique_ptr<LinearOperation> linear_of(const Machine& machine, int src, int dst,
                                           const std::vector<SegmentTuple>& parts, Arithmetic arithmetic) {
  std::vector<Segment> segments;
  for (const auto& [weight, column, bias] : parts) {
    expect(&weight->kernels == &machine.kernels, "the weight was packed for another instruction set");
    segments.push_back({weight, column, bias});
  }
  return std::make_unique<LinearOperation>(src, dst, std::move(segments), arithmetic);
}

void append_experts(Compiled& self, int src, int logits, int shared, int dst, int width,
                    const std::tuple<int, bool, float, SharedExpert>& router, Activation activation,
                    const std::vector<ExpertTuple>& parts) {
  const auto [top_k, sum_to_one, scale, shared_expert] = router;
  expect(top_k > 0 && static_cast<size_t>(top_k) <= parts.size(), "a token goes to one expert or more, at most to all");
  std::vector<Expert> experts;
  for (const auto& [gate_up, gate_up_arithmetic, down, down_arithmetic] : parts)
    experts.push_back({linear_of(*self.machine, 0, 0, gate_up, gate_up_arithmetic),
                       linear_of(*self.machine, 0, 0, down, down_arithmetic)});
  self.program.append(std::make_unique<ExpertsOperation>(src, logits, shared, dst, width,
                                                         Router{top_k, sum_to_one, scale, shared_expert}, activation,
                                                         std::move(experts)));
}

void define_program(nb::module_& m) {
  nb::class_<Compiled>(m, "Program")
      .def(nb::init<std::shared_ptr<Machine>>())
      .def("bind", [](Compiled& self, int width) { self.bound_widths.push_back(width); return self.program.buffer(width); })
      .def("buffer", [](Compiled& self, int width) { return self.program.buffer(width); })
      .def("select", [](Compiled& self, int src) { return self.program.select(src); })
      .def("rope", [](Compiled& self, Array<const float, 1> frequencies, float magnitude, bool neighbours) {
        return self.program.rope({floats(frequencies), magnitude, neighbours});
      })
      .def("norm", [](Compiled& self, int src, int dst, Array<const float, 1> weight, float eps) {
        self.program.append(std::make_unique<NormOperation>(src, dst, floats(weight), eps));
      })
      .def("settle", [](Compiled& self, int y, int residual, int x, Array<const float, 1> after, float multiplier,
                        Array<const float, 1> before, float eps) {
        self.program.append(std::make_unique<SettleOperation>(y, residual, x, floats(after), multiplier, floats(before), eps));
      })
      .def("linear", [](Compiled& self, int src, int dst, const std::vector<SegmentTuple>& parts, Arithmetic arithmetic) {
        self.program.append(linear_of(*self.machine, src, dst, parts, arithmetic));
      })
      .def("experts", &append_experts)
      .def("gate", [](Compiled& self, int src, int dst, Activation activation) {
        self.program.append(std::make_unique<GateOperation>(src, dst, activation));
      })
      .def("attend", [](Compiled& self, int src, int dst, AnyArray keys, AnyArray values, int num_heads, float scale,
                        float softcap, int64_t window, HeadNorm norm, Array<const float, 1> query_norm,
                        Array<const float, 1> key_norm, float eps, int rope, int rotary_dim, bool neighbours) {
        expect(keys.ndim() == 4 && values.ndim() == 4 && keys.shape(2) == values.shape(2) && keys.shape(3) == values.shape(3),
               "pages are [pages, kv_heads, page_size, head_dim]");
        AttentionShape shape{num_heads, static_cast<int>(keys.shape(1)), static_cast<int>(keys.shape(3)),
                             static_cast<int>(keys.shape(2)), element_of(keys), scale, softcap, window};
        expect(shape.page_size % 32 == 0, "pages must hold whole units of 32 tokens");
        expect(shape.element != Element::kF16, "keys and values are float32 or bfloat16");
        expect(shape.head_dim <= 512 && num_heads / shape.num_kv_heads <= 32, "at most 512 features and 32 heads a group");
        self.kept.push_back(keys);
        self.kept.push_back(values);
        self.program.append(std::make_unique<AttendOperation>(
            src, dst, shape, KVLayer{keys.data(), values.data()}, norm, floats(query_norm), floats(key_norm), eps, rope,
            rotary_dim, neighbours));
      })
      .def("run", &Compiled::run);
}

}  // namespace

NB_MODULE(_native, m) {
  m.doc() = "CPU kernels of Terrazzo";
  nb::enum_<Arithmetic>(m, "Arithmetic").value("FLOAT", Arithmetic::kFloat).value("INT8", Arithmetic::kInt8);
  nb::enum_<Activation>(m, "Activation").value("SILU", Activation::kSilu).value("GELU_TANH", Activation::kGeluTanh);
  nb::enum_<HeadNorm>(m, "HeadNorm")
      .value("NONE", HeadNorm::kNone)
      .value("HEAD", HeadNorm::kHead)
      .value("PROJECTION", HeadNorm::kProjection);
  nb::enum_<SharedExpert>(m, "SharedExpert")
      .value("NONE", SharedExpert::kNone)
      .value("GATED", SharedExpert::kGated)
      .value("PLAIN", SharedExpert::kPlain);
  nb::class_<Machine>(m, "Machine")
      .def(nb::init<int, const std::string&>(), "num_threads"_a, "instruction_set"_a)
      .def_prop_ro("num_threads", [](const Machine& self) { return self.team.size(); })
      .def_prop_ro("instruction_set", [](const Machine& self) { return std::string(self.kernels.name); });
  nb::class_<PackedWeight>(m, "Weight")
      .def_prop_ro("num_bytes", &PackedWeight::num_bytes)
      .def_prop_ro("out_features", [](const PackedWeight& self) { return self.weight.out_features; })
      .def_prop_ro("in_features", [](const PackedWeight& self) { return self.weight.places.in_features; });
  m.def("quantized", &quantized, "machine"_a, "words"_a, "bits"_a, "in_features"_a, "block"_a, "quantum"_a, "lookup"_a,
        "groups"_a, "scales"_a, "zeros"_a.none(), "zero"_a);
  m.def("dense", &dense, "machine"_a, "values"_a);
  m.def("rounded", &rounded, "machine"_a, "values"_a);
  m.def("quantized_bytes", &quantized_bytes);
  m.def("dense_bytes", &dense_bytes);
  m.def("multiply", &multiply, "machine"_a, "weight"_a, "arithmetic"_a, "x"_a, "out"_a);
  m.def("instruction_sets", [] {
    std::vector<std::string> names;
    for (const Kernels* kernels : supported_kernels()) names.emplace_back(kernels->name);
    return names;
  });
  define_program(m);
}

}  // namespace terrazzo
