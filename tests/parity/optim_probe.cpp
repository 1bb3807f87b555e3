// For test_optim.py: runs our optimizers on given gradients, and prints our learning rates.
//
//   optim_probe adamw IN OUT SHARDS LR WEIGHT_DECAY BETA1 BETA2 EPS
//   optim_probe sgd IN OUT SHARDS LR WEIGHT_DECAY MOMENTUM
//   optim_probe rates STEPS LR WARMUP none|linear|cosine DECAY_STEPS MIN_LR_FACTOR
//
// IN is a safetensors file of F32 tensors: each parameter "p.<name>", and its gradients of all steps "g.<name>" with
// the step as first dimension. OUT has each parameter after the last step, flat. All are one unit, cut into SHARDS.
#include <ATen/ATen.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <map>
#include <string>
#include <vector>

#include "fedshard/base/error.h"
#include "fedshard/checkpoint/safetensors.h"
#include "fedshard/optim/lr_schedule.h"
#include "fedshard/optim/optimizer.h"
#include "tests/support/rank_threads.h"

namespace fedshard {
namespace {

using Arguments = std::vector<std::string>;

double number(const std::string& text) {
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  if (text.empty() || *end != '\0') base::fail<base::UsageError>("'{}' is no number", text);
  return value;
}

// `count` elements of a tensor, from `first` on.
void read(const checkpoint::SafetensorsFile& file, const std::string& name, std::int64_t first, std::int64_t count,
          float* out) {
  const checkpoint::TensorEntry& entry = file.at(name);
  base::require(entry.dtype == "F32" && first + count <= entry.numel(), "{} is {} and has {} elements", name,
                entry.dtype, entry.numel());
  std::memcpy(out, entry.bytes.data() + first * sizeof(float), static_cast<std::size_t>(count) * sizeof(float));
}

// The optimizers' side of a model: one unit of all parameters of the file, in the order of their names.
nn::Model model_of(const checkpoint::SafetensorsFile& file) {
  nn::Model model;
  plan::UnitSpec unit{"unit", {}};
  for (const auto& [name, entry] : file.tensors()) {
    if (name.starts_with("p.")) unit.parameters.push_back({name.substr(2), entry.shape, {}});
  }
  model.plan.units = {unit};
  model.plan.stages = {{"stage", 0}};
  model.stages = {[](nn::Parameters, const at::Tensor& x, const nn::MicroBatch&) { return x; }};
  return model;
}

// Copies between a shard of the unit and the parameters' own memory, whichever way `copy` goes.
template <class Copy>
void for_each_piece(const shard::Engine& engine, const shard::Arena& arena, const Copy& copy) {
  const plan::UnitSpec& unit = engine.plan().units[0];
  const topology::Range held = engine.map().range(0);
  std::int64_t begin = 0;
  for (const plan::ParameterSpec& parameter : unit.parameters) {
    const topology::Range piece{std::max(begin, held.begin), std::min(begin + parameter.numel(), held.end)};
    if (piece.size() > 0) {
      copy(parameter, arena.slice(0, piece).mutable_data_ptr<float>(), piece.begin - begin, piece.size());
    }
    begin += parameter.numel();
  }
}

void optimize(const Arguments& arguments, const optim::OptimizerOptions& options) {
  const checkpoint::SafetensorsFile file(arguments[1]);
  const nn::Model model = model_of(file);
  const int shards = static_cast<int>(number(arguments[3]));
  const double lr = number(arguments[4]);
  const std::vector<plan::ParameterSpec>& parameters = model.plan.units[0].parameters;
  const std::int64_t steps = file.at("g." + parameters[0].name).shape[0];
  std::map<std::string, std::vector<float>> results;
  for (const auto& parameter : parameters) results[parameter.name].resize(static_cast<std::size_t>(parameter.numel()));
  testing_support::on_ranks(topology::Layout::make(shards, {}), [&](int rank, comm::Axes& axes) {
    shard::StateRegistry registry;
    shard::Engine engine(model, shards, rank, axes, {}, registry);
    for_each_piece(engine, engine.parameters(), [&](const auto& parameter, float* ours, auto offset, auto count) {
      read(file, "p." + parameter.name, offset, count, ours);
    });
    const auto optimizer = optim::make_optimizer(options, engine, registry);
    for (std::int64_t step = 1; step <= steps; ++step) {
      for_each_piece(engine, engine.gradients(), [&](const auto& parameter, float* ours, auto offset, auto count) {
        read(file, "g." + parameter.name, (step - 1) * parameter.numel() + offset, count, ours);
      });
      optimizer->step(0, step, lr);
    }
    for_each_piece(engine, engine.parameters(), [&](const auto& parameter, float* ours, auto offset, auto count) {
      std::copy_n(ours, count, results[parameter.name].data() + offset);
    });
  });
  std::map<std::string, checkpoint::TensorEntry> entries;
  for (const auto& [name, values] : results) {
    entries[name] = {"F32", {static_cast<std::int64_t>(values.size())}, std::as_bytes(std::span(values))};
  }
  checkpoint::write_safetensors(arguments[2], entries);
}

void print_rates(const Arguments& arguments) {
  using Decay = optim::LrSchedule::Decay;
  const std::map<std::string, Decay> decays{
      {"none", Decay::none}, {"linear", Decay::linear}, {"cosine", Decay::cosine}};
  const optim::LrSchedule schedule{number(arguments[2]), static_cast<std::int64_t>(number(arguments[3])),
                                   decays.at(arguments[4]), static_cast<std::int64_t>(number(arguments[5])),
                                   number(arguments[6])};
  const auto steps = static_cast<std::int64_t>(number(arguments[1]));
  for (std::int64_t step = 1; step <= steps; ++step) std::printf("%.17g\n", schedule.at(step));
}

void probe(const Arguments& arguments) {
  optim::OptimizerOptions options;
  const std::string what = arguments.empty() ? "" : arguments[0];
  if (what == "adamw" && arguments.size() == 9) {
    options.weight_decay = number(arguments[5]);
    options.beta1 = number(arguments[6]);
    options.beta2 = number(arguments[7]);
    options.eps = number(arguments[8]);
    optimize(arguments, options);
  } else if (what == "sgd" && arguments.size() == 7) {
    options.name = optim::OptimizerOptions::Name::sgd;
    options.weight_decay = number(arguments[5]);
    options.momentum = number(arguments[6]);
    optimize(arguments, options);
  } else if (what == "rates" && arguments.size() == 7) {
    print_rates(arguments);
  } else {
    base::fail<base::UsageError>("usage: optim_probe adamw|sgd|rates ...; the source says which arguments follow");
  }
}

}  // namespace
}  // namespace fedshard

int main(int argc, char** argv) {
  try {
    fedshard::probe({argv + 1, argv + argc});
    return 0;
  } catch (const fedshard::base::Error& e) {
    std::fprintf(stderr, "optim_probe: %s\n", e.what());
    return static_cast<int>(e.status());
  } catch (const std::exception& e) {
    std::fprintf(stderr, "optim_probe: %s\n", e.what());
    return 1;
  }
}
