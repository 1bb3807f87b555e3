#include "fedshard/checkpoint/hf.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <gtest/gtest.h>

#include <cstring>
#include <numeric>

#include "fedshard/base/error.h"
#include "fedshard/base/file.h"
#include "fedshard/plan/llama_units.h"
#include "tests/unit/checkpoint/scratch.h"

namespace fedshard::checkpoint {
namespace {

using base::DamagedError;
using base::UsageError;

plan::ModelPlan small_plan(bool tied) {
  model::Dims dims = model::preset("llama-tiny");
  dims.num_hidden_layers = 1;
  dims.hidden_size = 8;
  dims.intermediate_size = 6;
  dims.vocab_size = 5;
  dims.tie_word_embeddings = tied;
  return plan::llama_plan(dims);
}

// The tensors of a file to be, with their bytes.
class Weights {
 public:
  template <class T>
  void add(const std::string& name, const std::vector<std::int64_t>& shape, const std::string& dtype, float first) {
    std::vector<T> values;
    const std::int64_t numel = std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>());
    for (std::int64_t i = 0; i < numel; ++i) values.push_back(static_cast<T>(first + static_cast<float>(i) / 4));
    std::vector<std::byte>& bytes = bytes_[name];
    bytes.resize(values.size() * sizeof(T));
    std::memcpy(bytes.data(), values.data(), bytes.size());
    entries_[name] = {dtype, shape, bytes};
  }
  void remove(const std::string& name) { entries_.erase(name); }
  TensorEntry& operator[](const std::string& name) { return entries_.at(name); }
  void write(const std::filesystem::path& path) const { write_safetensors(path, entries_); }
  const std::map<std::string, TensorEntry>& entries() const { return entries_; }

 private:
  std::map<std::string, std::vector<std::byte>> bytes_;
  std::map<std::string, TensorEntry> entries_;
};

// Parameter p of the plan counts up in quarters from p; dtypes take turns.
Weights weights_of(const plan::ModelPlan& plan) {
  Weights weights;
  int p = 0;
  for (const plan::UnitSpec& unit : plan.units) {
    for (const plan::ParameterSpec& parameter : unit.parameters) {
      const auto first = static_cast<float>(p);
      if (p % 3 == 0) weights.add<float>(parameter.name, parameter.shape, "F32", first);
      if (p % 3 == 1) weights.add<c10::BFloat16>(parameter.name, parameter.shape, "BF16", first);
      if (p % 3 == 2) weights.add<c10::Half>(parameter.name, parameter.shape, "F16", first);
      ++p;
    }
  }
  return weights;
}

// What weights_of() puts into a unit.
std::vector<float> expected_unit(const plan::ModelPlan& plan, int unit) {
  std::vector<float> values;
  int p = 0;
  for (int u = 0; u <= unit; ++u) {
    for (const plan::ParameterSpec& parameter : plan.units[u].parameters) {
      for (std::int64_t i = 0; u == unit && i < parameter.numel(); ++i) {
        values.push_back(static_cast<float>(p) + static_cast<float>(i) / 4);
      }
      ++p;
    }
  }
  return values;
}

template <class Kind>
void expect_refused(const std::filesystem::path& folder, const plan::ModelPlan& plan, const std::string& part) {
  try {
    const HfWeights weights(folder, plan);
    ADD_FAILURE() << "accepted; expected: " << part;
  } catch (const Kind& e) {
    EXPECT_NE(std::string(e.what()).find(part), std::string::npos) << e.what();
  }
}

TEST(HfWeights, EverySliceOfEveryUnit) {
  for (const bool tied : {false, true}) {
    const Scratch scratch;
    const plan::ModelPlan plan = small_plan(tied);
    weights_of(plan).write(scratch / "model.safetensors");
    const HfWeights weights(scratch.folder(), plan);
    for (int u = 0; u < std::ssize(plan.units); ++u) {
      const std::vector<float> whole = expected_unit(plan, u);
      const std::int64_t size = std::ssize(whole);
      for (const std::int64_t step : {std::int64_t{1}, std::int64_t{7}, std::int64_t{64}, size}) {
        std::vector<float> pieces(whole.size());
        for (std::int64_t begin = 0; begin < size; begin += step) {
          const std::int64_t end = std::min(begin + step, size);
          weights.read_slice(u, begin, end, std::span(pieces).subspan(begin, end - begin));
        }
        EXPECT_EQ(pieces, whole) << plan.units[u].name << " in steps of " << step;
      }
    }
    EXPECT_NO_THROW(weights.read_slice(0, 3, 3, {}));
    std::vector<float> out(2);
    EXPECT_THROW(weights.read_slice(0, plan.units[0].numel() - 1, plan.units[0].numel() + 1, out), base::RunError);
    EXPECT_THROW(weights.read_slice(9, 0, 2, out), base::RunError);
    EXPECT_THROW(weights.read_slice(0, 0, 1, out), base::RunError);
  }
}

// Tied or not, with lm_head in the file or not.
TEST(HfWeights, TheFourCasesOfTheHead) {
  const plan::ModelPlan tied = small_plan(true);
  const plan::ModelPlan untied = small_plan(false);
  const Scratch scratch;
  const auto path = scratch / "model.safetensors";
  weights_of(tied).write(path);
  EXPECT_NO_THROW(HfWeights(scratch.folder(), tied));
  expect_refused<DamagedError>(scratch.folder(), untied, "no tensor 'lm_head.weight'");
  Weights both = weights_of(tied);
  both.add<c10::BFloat16>("lm_head.weight", {5, 8}, "BF16", 0.0f);  // the embedding's values in another dtype
  both.write(path);
  EXPECT_NO_THROW(HfWeights(scratch.folder(), tied));
  EXPECT_NO_THROW(HfWeights(scratch.folder(), untied));
  both.add<float>("lm_head.weight", {5, 8}, "F32", 1.0f);
  both.write(path);
  expect_refused<DamagedError>(scratch.folder(), tied, "set tie_word_embeddings to false");
  both.add<float>("lm_head.weight", {4, 8}, "F32", 0.0f);
  both.write(path);
  expect_refused<DamagedError>(scratch.folder(), tied, "'lm_head.weight' differs");
}

TEST(HfWeights, TensorsThatDoNotFitTheModelAreNamed) {
  const plan::ModelPlan plan = small_plan(false);
  const Scratch scratch;
  const auto path = scratch / "model.safetensors";
  const std::string name = "model.layers.0.mlp.up_proj.weight";
  Weights weights = weights_of(plan);
  weights.remove(name);
  weights.write(path);
  expect_refused<DamagedError>(scratch.folder(), plan, "no tensor '" + name + "'");
  weights.add<float>(name, {8, 6}, "F32", 0.0f);
  weights.write(path);
  expect_refused<DamagedError>(scratch.folder(), plan, name + "' has shape [8, 6], but the model's config says [6, 8]");
  weights.add<double>(name, {6, 8}, "F64", 0.0f);
  weights.write(path);
  expect_refused<DamagedError>(scratch.folder(), plan, name + "' is F64; weights must be");
  weights.add<float>(name, {6, 8}, "F32", 0.0f);
  weights.add<float>("model.layers.1.mlp.up_proj.weight", {6, 8}, "F32", 0.0f);
  weights.write(path);
  expect_refused<DamagedError>(scratch.folder(), plan, "'model.layers.1.mlp.up_proj.weight' belongs to no parameter");
}

TEST(HfWeights, OldRotaryBuffersAreNoParameters) {
  const plan::ModelPlan plan = small_plan(false);
  const Scratch scratch;
  Weights weights = weights_of(plan);
  weights.add<float>("model.layers.0.self_attn.rotary_emb.inv_freq", {1}, "F32", 1.0f);
  weights.write(scratch / "model.safetensors");
  EXPECT_NO_THROW(HfWeights(scratch.folder(), plan));
}

// Splits the weights over two files by name and writes their index.
void write_shards(const Scratch& scratch, const Weights& weights) {
  std::map<std::string, TensorEntry> parts[2];
  std::string map;
  for (const auto& [name, entry] : weights.entries()) {
    const int part = name.size() % 2;
    parts[part][name] = entry;
    map += fmt::format("{}\"{}\": \"{}.safetensors\"", map.empty() ? "" : ", ", name, part);
  }
  for (int part = 0; part < 2; ++part) write_safetensors(scratch / fmt::format("{}.safetensors", part), parts[part]);
  base::write_file_atomically(scratch / "model.safetensors.index.json", "{\"weight_map\": {" + map + "}}");
}

TEST(HfWeights, ShardsReadAsOneFileDoes) {
  const plan::ModelPlan plan = small_plan(false);
  const Scratch scratch;
  write_shards(scratch, weights_of(plan));
  const HfWeights weights(scratch.folder(), plan);
  for (int u = 0; u < std::ssize(plan.units); ++u) {
    std::vector<float> values(plan.units[u].numel());
    weights.read_slice(u, 0, std::ssize(values), values);
    EXPECT_EQ(values, expected_unit(plan, u));
  }
}

TEST(HfWeights, ShardsAndIndexMustAgree) {
  const plan::ModelPlan plan = small_plan(false);
  const Scratch scratch;
  write_shards(scratch, weights_of(plan));
  const auto index = scratch / "model.safetensors.index.json";
  const std::string good = base::read_file(index);
  const auto changed = [&](const std::string& from, const std::string& to) {
    std::string text = good;
    text.replace(text.find(from), from.size(), to);
    base::write_file_atomically(index, text);
  };
  changed("\"model.norm.weight\": \"1", "\"model.norm.weight\": \"0");
  expect_refused<DamagedError>(scratch.folder(), plan, "'model.norm.weight'");
  changed("\"lm_head.weight\"", "\"other.weight\"");
  expect_refused<DamagedError>(scratch.folder(), plan, "has tensor 'lm_head.weight', which");
  changed("0.safetensors", "../0.safetensors");
  expect_refused<DamagedError>(scratch.folder(), plan, "which is no file name");
  changed("weight_map", "weights");
  expect_refused<DamagedError>(scratch.folder(), plan, "no 'weight_map'");
  base::write_file_atomically(index, good);
  std::filesystem::remove(scratch / "1.safetensors");
  expect_refused<UsageError>(scratch.folder(), plan, "1.safetensors: cannot open");
}

TEST(HfWeights, AFolderWithoutWeights) {
  const Scratch scratch;
  expect_refused<UsageError>(scratch.folder(), small_plan(false), "has neither model.safetensors nor");
  expect_refused<UsageError>(scratch / "missing", small_plan(false), "has neither");
}

}  // namespace
}  // namespace fedshard::checkpoint
