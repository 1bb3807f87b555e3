#include "fedshard/forecast/simulate.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <utility>

#include "fedshard/base/clock.h"
#include "fedshard/base/error.h"
#include "fedshard/config/machine_file.h"
#include "fedshard/config/options.h"
#include "fedshard/forecast/forecast.h"
#include "fedshard/forecast/simulate_report.h"
#include "fedshard/forecast/strategies.h"
#include "fedshard/metrics/trace.h"

namespace fedshard::forecast {
namespace {

using base::fail;
using base::UsageError;
using cost::Machine;

constexpr const char* kAsAsked = "as asked";

cost::Job job_of(const config::Config& config, const topology::Layout& layout, const cost::Software& software) {
  const model::Dims dims = config::dims_of(config.model);
  plan::ModelPlan plan = config::plan_of(config, dims);
  cost::TrafficOptions traffic = config::traffic_options(config);
  if (software.prefetch) traffic.schedule.prefetch = *software.prefetch;
  return {.plan = software.root_unit ? cost::with_root_unit(std::move(plan)) : std::move(plan),
          .layout = layout,
          .traffic = traffic,
          .stage_flops = cost::stage_flops(dims, config.training.seq_len),
          .local_batch_size = config.training.local_batch_size,
          .seq_len = config.training.seq_len,
          .pace = config.federation.every,
          .delay = config.federation.delay,
          .fragments = config.federation.fragments};
}

// "1:2.5" of each group that is slow.
std::vector<double> slowness_of(const std::vector<std::string>& slow, int groups) {
  if (slow.empty()) return {};
  std::vector<double> slowness(static_cast<std::size_t>(groups), 1);
  for (const std::string& text : slow) {
    const char* const end = text.data() + text.size();
    int group = 0;
    double factor = 0;
    const auto [colon, error] = std::from_chars(text.data(), end, group);
    if (error != std::errc() || colon == end || *colon != ':' || std::from_chars(colon + 1, end, factor).ptr != end) {
      fail<UsageError>("--slow {}: write GROUP:FACTOR, as 1:2.5", text);
    }
    if (group < 0 || group >= groups) fail<UsageError>("--slow {}: there are groups 0 to {}", text, groups - 1);
    if (!(factor > 0 && factor < 1e6)) fail<UsageError>("--slow {}: a factor is above 0", text);
    slowness[static_cast<std::size_t>(group)] = factor;
  }
  return slowness;
}

// A question's cases: numbers of ranks and strategies, in that order.
struct Subject {
  config::Config config;
  topology::Layout layout;
  std::string strategy;
};

std::vector<Subject> subjects_of(const SimulateArgs& args) {
  const config::Config config = config_of(args.question);
  std::vector<int> ranks = args.ranks;
  if (ranks.empty()) ranks.push_back(world_of(config, std::nullopt));
  std::vector<Subject> subjects;
  for (const int world : ranks) {
    const auto add = [&](const config::Config& laid_out, const std::string& name) {
      subjects.push_back({laid_out, config::validate_without_data(laid_out, world), name});
    };
    if (args.strategies.empty()) add(config, kAsAsked);
    for (const std::string& text : args.strategies) {
      const Strategy strategy = parse_strategy(text);
      add(with_strategy(config, strategy, world), strategy.name);
    }
  }
  return subjects;
}

Spread spread_of(const cost::Simulator& simulator, std::uint64_t seed, int rounds) {
  cost::Noise noise(seed);
  std::vector<double> seconds;
  for (int r = 0; r < rounds; ++r) seconds.push_back(simulator.round(noise).seconds_per_step());
  std::sort(seconds.begin(), seconds.end());
  const auto at = [&](double part) { return seconds[static_cast<std::size_t>(part * (rounds - 1) + 0.5)]; };
  return {at(0.05), at(0.5), at(0.95)};
}

// A subject on a machine with one of its profiles.
struct Setup {
  const Subject& subject;
  const std::string& profile;
  const Machine& machine;
  cost::Job job;
};

std::vector<Setup> setups_of(const SimulateArgs& args, const std::vector<std::pair<std::string, Machine>>& machines,
                             const std::vector<Subject>& subjects) {
  std::vector<Setup> setups;
  for (const auto& [profile, machine] : machines) {
    for (const Subject& subject : subjects) {
      cost::Job job = job_of(subject.config, subject.layout, machine.software);
      job.slowness = slowness_of(args.slow, subject.layout.groups());
      setups.push_back({subject, profile, machine, std::move(job)});
    }
  }
  return setups;
}

cost::RoundTime mean_round(const cost::Job& job, const Machine& machine) {
  cost::Noise mean;
  return cost::Simulator(job, machine).round(mean);
}

SimulatedCase case_of(const SimulateArgs& args, const Setup& setup) {
  const topology::Layout& layout = setup.subject.layout;
  const topology::GroupShape& group = layout.group(0);
  const std::int64_t bytes = memory(setup.subject.config, layout).peak;
  SimulatedCase result{.profile = setup.profile,
                       .strategy = setup.subject.strategy,
                       .ranks = layout.world(),
                       .groups = layout.groups(),
                       .group = group.ranks,
                       .shards = group.shards,
                       .replicas = group.replicas,
                       .memory = bytes,
                       .fits = static_cast<double>(bytes) <= setup.machine[cost::Key::memory_bytes],
                       .round = mean_round(setup.job, setup.machine),
                       .spread = {},
                       .ratio = {}};
  if (args.seed) result.spread = spread_of(cost::Simulator(setup.job, setup.machine), *args.seed, args.rounds);
  return result;
}

void compare(std::vector<SimulatedCase>& cases) {
  for (std::size_t i = 0, first = 0; i < cases.size(); ++i) {
    if (cases[i].ranks != cases[first].ranks || cases[i].profile != cases[first].profile) first = i;
    if (i != first) cases[i].ratio = cases[i].round.tokens_per_s() / cases[first].round.tokens_per_s();
  }
}

// Each constant that matters, halved and doubled as far as its range goes.
std::vector<SensitivityRow> sensitivity_of(const std::vector<Setup>& setups) {
  std::vector<SensitivityRow> rows;
  for (int k = 0; k < cost::kKeys; ++k) {
    const auto key = static_cast<cost::Key>(k);
    const cost::KeyText& text = cost::text_of(key);
    SensitivityRow row{text.name, {}, {}};
    for (const Setup& setup : setups) {
      const auto seconds_with = [&](double factor) {
        Machine changed = setup.machine;
        changed.at(key).value = std::clamp(factor * setup.machine[key], text.at_least, text.at_most);
        return mean_round(setup.job, changed).seconds_per_step();
      };
      row.halved.push_back(seconds_with(0.5));
      row.doubled.push_back(seconds_with(2));
    }
    if (row.halved != row.doubled) rows.push_back(std::move(row));
  }
  return rows;
}

void write_trace(const std::string& path, const Setup& setup) {
  cost::Noise mean;
  std::vector<cost::Busy> busy;
  cost::Simulator(setup.job, setup.machine).step(0, mean, &busy);
  const base::SteadyClock clock;
  metrics::Trace trace(path, 0, clock);
  for (const cost::Busy& span : busy) {
    trace.add(cost::name_of(span.lane), span.what, cost::name_of(span.lane), span.begin, span.end);
  }
  trace.close();
}

// The machine with each profile that was asked for, under its name.
std::vector<std::pair<std::string, Machine>> machines_of(const SimulateArgs& args, const config::MachineFile& file) {
  const bool all = args.profiles == std::vector<std::string>{"all"};
  if (all && file.profiles.empty()) fail<UsageError>("--profile all: {} has none", file.machine.name);
  std::vector<std::pair<std::string, Machine>> machines;
  for (const std::string& profile : all ? file.profiles : args.profiles)
    machines.emplace_back(profile, file.with(profile));
  if (machines.empty()) machines.emplace_back("", file.machine);
  for (auto& [profile, machine] : machines) config::override_constants(machine, args.constants);
  return machines;
}

void check(const SimulateArgs& args) {
  if (args.question.config.empty() && args.question.model.empty()) {
    fail<UsageError>("simulate what? Give a config file or --model");
  }
  if (args.machine.empty())
    fail<UsageError>("--machine is missing: a machine file, or one of {}", fmt::join(config::machine_names(), ", "));
  if (!args.strategies.empty() && args.ranks.empty())
    fail<UsageError>("--strategies needs --ranks: how many are there?");
  if (!args.strategies.empty() && (args.question.groups || args.question.shard)) {
    fail<UsageError>("--strategies says how ranks are grouped and sharded; leave --groups and --shard out");
  }
  if (args.rounds < 1) fail<UsageError>("--rounds counts from 1, not {}", args.rounds);
}

}  // namespace

int simulate(const SimulateArgs& args) {
  check(args);
  const config::MachineFile file = config::load_machine(args.machine);
  const auto machines = machines_of(args, file);
  const std::vector<Subject> subjects = subjects_of(args);
  SimulateReport report;
  report.model = args.question.config.empty() ? args.question.model : args.question.config;
  for (const auto& [profile, machine] : machines) {
    report.machines.push_back(machine);
    report.profiles.push_back(profile);
  }
  const std::vector<Setup> setups = setups_of(args, machines, subjects);
  for (const Setup& setup : setups) report.cases.push_back(case_of(args, setup));
  compare(report.cases);
  if (args.sensitivity) report.sensitivity = sensitivity_of(setups);
  if (!args.trace.empty()) write_trace(args.trace, setups.front());
  fmt::print("{}", args.json ? json_of(report) : text_of(report));
  return 0;
}

}  // namespace fedshard::forecast
