// For test_optim.py: runs our optimizers on given gradients, and prints our learning rates.
//
//   optim_probe run IN OUT key=value...
//   optim_probe rates STEPS LR WARMUP STABLE none|linear|cosine DECAY_STEPS MIN_LR_FACTOR
//
// Keys of `run`: update (adamw|sgd|sgd_momentum|muon), shards, lr, weight_decay, beta1, beta2, eps, momentum, nesterov
// (0|1), master (fp32|bf16: what parameters are kept in), offload (0|1), resume_at (a step after which all is saved
// through the registry and restored into a new optimizer; 0: never), group (PATTERN,LR_FACTOR,WEIGHT_DECAY with an
// empty last part for none; repeatedly).
//
// IN is a safetensors file of F32 tensors: each parameter "p.<unit>/<name>", and its gradients of all steps "g.<same>"
// with the step as first dimension. OUT has each parameter after the last step, flat. Units come in order of their
// names, and are cut into shards.
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

// The optimizers' side of a model.
nn::Model model_of(const checkpoint::SafetensorsFile& file) {
  nn::Model model;
  for (const auto& [name, entry] : file.tensors()) {
    if (!name.starts_with("p.")) continue;
    const std::string unit = name.substr(2, name.find('/') - 2);
    std::vector<plan::UnitSpec>& units = model.plan.units;
    if (units.empty() || units.back().name != unit) units.push_back({unit, {}});
    units.back().parameters.push_back({name.substr(2), entry.shape, {}});
  }
  for (int u = 0; u < static_cast<int>(model.plan.units.size()); ++u) {
    model.plan.stages.push_back({model.plan.units[u].name, {u}});
    model.stages.push_back([](nn::Parameters, const at::Tensor& x, const nn::MicroBatch&) { return x; });
  }
  return model;
}

// Copies between a rank's shards and the parameters' own memory, whichever way `copy` goes; it sees fp32.
template <class Copy>
void for_each_piece(const shard::Engine& engine, const shard::Arena& arena, const Copy& copy) {
  for (int u = 0; u < engine.map().units(); ++u) {
    const topology::Range held = engine.map().range(u);
    std::int64_t begin = 0;
    for (const plan::ParameterSpec& parameter : engine.plan().units[u].parameters) {
      const topology::Range piece{std::max(begin, held.begin), std::min(begin + parameter.numel(), held.end)};
      if (piece.size() > 0) {
        const at::Tensor ours = arena.slice(u, piece), as_fp32 = ours.to(at::kFloat);
        copy(parameter, as_fp32.mutable_data_ptr<float>(), piece.begin - begin, piece.size());
        ours.copy_(as_fp32);
      }
      begin += parameter.numel();
    }
  }
}

struct Problem {
  optim::OptimizerOptions options;
  int shards = 1;
  double lr = 0;
  std::int64_t resume_at = 0;
  at::ScalarType master = at::kFloat;
  shard::EngineOptions engine() const {
    shard::EngineOptions engine_options;
    engine_options.dtypes.master = master;
    return engine_options;
  }
};

using Saved = std::vector<std::pair<std::string, at::Tensor>>;

// Steps `first` to `last` of one rank. `saved`: the state before them, empty at the start; then the state after them.
void run_steps(const checkpoint::SafetensorsFile& file, const Problem& problem, const nn::Model& model, int rank,
               comm::Axes& axes, std::int64_t first, std::int64_t last, Saved& saved) {
  shard::StateRegistry registry;
  shard::Engine engine(model, problem.shards, rank, axes, problem.engine(), registry);
  for_each_piece(engine, engine.parameters(), [&](const auto& parameter, float* ours, auto offset, auto count) {
    read(file, "p." + parameter.name, offset, count, ours);
  });
  const auto optimizer = optim::make_optimizer(problem.options, engine, axes, registry);
  for (const auto& [name, values] : saved) {
    for (const shard::State& state : registry.all()) {
      if (state.name == name) state.arena->flat().copy_(values);
    }
  }
  for (std::int64_t step = first; step <= last; ++step) {
    for_each_piece(engine, engine.gradients(), [&](const auto& parameter, float* ours, auto offset, auto count) {
      read(file, "g." + parameter.name, (step - 1) * parameter.numel() + offset, count, ours);
    });
    for (int u = 0; u < engine.map().units(); ++u) optimizer->step(u, step, problem.lr);
  }
  saved.clear();
  for (const shard::State& state : registry.all()) {
    if (state.role != shard::Role::gradients) saved.emplace_back(state.name, state.arena->flat().clone());
  }
}

void optimize(const std::string& in, const std::string& out, const Problem& problem) {
  const checkpoint::SafetensorsFile file(in);
  const nn::Model model = model_of(file);
  const std::int64_t steps = file.at("g." + model.plan.units[0].parameters[0].name).shape[0];
  std::map<std::string, std::vector<float>> results;
  for (const plan::UnitSpec& unit : model.plan.units) {
    for (const auto& p : unit.parameters) results[p.name].resize(static_cast<std::size_t>(p.numel()));
  }
  testing_support::on_ranks(topology::Layout::make(problem.shards, {}), [&](int rank, comm::Axes& axes) {
    Saved state;
    if (problem.resume_at > 0) run_steps(file, problem, model, rank, axes, 1, problem.resume_at, state);
    run_steps(file, problem, model, rank, axes, problem.resume_at + 1, steps, state);
    shard::StateRegistry registry;
    shard::Engine engine(model, problem.shards, rank, axes, problem.engine(), registry);
    engine.parameters().flat().copy_(state.at(0).second);
    for_each_piece(engine, engine.parameters(), [&](const auto& parameter, float* ours, auto offset, auto count) {
      std::copy_n(ours, count, results.at(parameter.name).data() + offset);
    });
  });
  std::map<std::string, checkpoint::TensorEntry> entries;
  for (const auto& [name, values] : results) {
    entries[name] = {"F32", {static_cast<std::int64_t>(values.size())}, std::as_bytes(std::span(values))};
  }
  checkpoint::write_safetensors(out, entries);
}

plan::ParameterGroup group_of(const std::string& text) {
  const auto first = text.find(','), second = text.find(',', first + 1);
  plan::ParameterGroup group{{text.substr(0, first)}, number(text.substr(first + 1, second - first - 1)), {}};
  if (second + 1 < text.size()) group.weight_decay = number(text.substr(second + 1));
  return group;
}

void set(Problem& problem, const std::string& key, const std::string& value) {
  const std::map<std::string, plan::Update> updates{{"adamw", plan::Update::adamw},
                                                    {"sgd", plan::Update::sgd},
                                                    {"sgd_momentum", plan::Update::sgd_momentum},
                                                    {"muon", plan::Update::muon}};
  optim::OptimizerOptions& options = problem.options;
  const std::map<std::string, double*> numbers{
      {"lr", &problem.lr},       {"weight_decay", &options.updates.weight_decay},
      {"beta1", &options.beta1}, {"beta2", &options.beta2},
      {"eps", &options.eps},     {"momentum", &options.momentum}};
  if (key == "update") {
    options.updates.update = updates.at(value);
  } else if (key == "group") {
    options.updates.groups.push_back(group_of(value));
  } else if (key == "nesterov") {
    options.nesterov = number(value) != 0;
  } else if (key == "master") {
    problem.master = value == "bf16" ? at::kBFloat16 : at::kFloat;
  } else if (key == "offload") {
    options.offload = number(value) != 0;
  } else if (key == "shards") {
    problem.shards = static_cast<int>(number(value));
  } else if (key == "resume_at") {
    problem.resume_at = static_cast<std::int64_t>(number(value));
  } else {
    *numbers.at(key) = number(value);
  }
}

void print_rates(const Arguments& arguments) {
  using Decay = optim::LrSchedule::Decay;
  const std::map<std::string, Decay> decays{
      {"none", Decay::none}, {"linear", Decay::linear}, {"cosine", Decay::cosine}};
  optim::LrSchedule schedule;
  schedule.lr = number(arguments[2]);
  schedule.warmup_steps = static_cast<std::int64_t>(number(arguments[3]));
  schedule.stable_steps = static_cast<std::int64_t>(number(arguments[4]));
  schedule.decay = decays.at(arguments[5]);
  schedule.decay_steps = static_cast<std::int64_t>(number(arguments[6]));
  schedule.min_lr_factor = number(arguments[7]);
  const auto steps = static_cast<std::int64_t>(number(arguments[1]));
  for (std::int64_t step = 1; step <= steps; ++step) std::printf("%.17g\n", schedule.at(step));
}

void probe(const Arguments& arguments) {
  const std::string what = arguments.empty() ? "" : arguments[0];
  if (what == "run" && arguments.size() >= 3) {
    Problem problem;
    for (std::size_t i = 3; i < arguments.size(); ++i) {
      const auto equals = arguments[i].find('=');
      if (equals == std::string::npos) base::fail<base::UsageError>("'{}' is not key=value", arguments[i]);
      set(problem, arguments[i].substr(0, equals), arguments[i].substr(equals + 1));
    }
    optimize(arguments[1], arguments[2], problem);
  } else if (what == "rates" && arguments.size() == 8) {
    print_rates(arguments);
  } else {
    base::fail<base::UsageError>("usage: optim_probe run|rates ...; the source says which arguments follow");
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
