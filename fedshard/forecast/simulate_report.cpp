#include "fedshard/forecast/simulate_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "fedshard/base/quantities.h"

namespace fedshard::forecast {
namespace {

using cost::Key;
using cost::Machine;
using Json = nlohmann::ordered_json;

// The parts of a step's seconds, with its share of the round; their sum is the step of the group that takes longest,
// its waiting for none, and what it waits for the others.
std::vector<std::pair<const char*, double>> parts_of(const SimulatedCase& simulated) {
  const cost::RoundTime& round = simulated.round;
  std::size_t slowest = 0;
  for (std::size_t g = 1; g < round.steps.size(); ++g) {
    const auto seconds = [&](std::size_t at) { return round.steps[at].total * static_cast<double>(round.counts[at]); };
    if (seconds(g) > seconds(slowest)) slowest = g;
  }
  const cost::StepTime& step = round.steps[slowest];
  const auto steps = static_cast<double>(round.most_steps());
  return {{"compute", step.compute},
          {"gather", step.gather},
          {"reduce", step.reduce},
          {"replica", step.replica},
          {"host", step.host},
          {"update", step.update},
          {"overhead", step.overhead},
          {"exchange", round.exposed / steps},
          {"wait", round.waiting / steps}};
}

double tokens_of_a_rank(const SimulatedCase& simulated) { return simulated.round.tokens_per_s() / simulated.ranks; }

std::string cases_text(const SimulateReport& report) {
  const bool profiles = !report.profiles.front().empty();
  const bool drawn = report.cases.front().spread.has_value();
  std::string text = profiles ? fmt::format("{:<12}", "profile") : "";
  text += fmt::format("{:>6} {:<14}{:>7}{:>7}{:>11}{:>9}", "ranks", "strategy", "groups", "shards", "memory", "step");
  if (drawn) text += fmt::format("{:>9}{:>9}{:>9}", "p5", "p50", "p95");
  for (const auto& [name, seconds] : parts_of(report.cases.front())) text += fmt::format("{:>9}", name);
  text += fmt::format("{:>12}{:>8}\n", "tokens/s", "ratio");
  for (const SimulatedCase& one : report.cases) {
    if (profiles) text += fmt::format("{:<12}", one.profile);
    text += fmt::format("{:>6} {:<14}{:>7}{:>7}{:>11}{:>9.3f}", one.ranks, one.strategy, one.groups, one.shards,
                        base::human(base::Bytes{one.memory}) + (one.fits ? "" : "!"), one.round.seconds_per_step());
    if (one.spread) text += fmt::format("{:>9.3f}{:>9.3f}{:>9.3f}", one.spread->p5, one.spread->p50, one.spread->p95);
    for (const auto& [name, seconds] : parts_of(one)) text += fmt::format("{:>9.3f}", seconds);
    text += fmt::format("{:>12.0f}{:>8}\n", tokens_of_a_rank(one), one.ratio ? fmt::format("{:.2f}", *one.ratio) : "");
  }
  if (std::any_of(report.cases.begin(), report.cases.end(), [](const SimulatedCase& one) { return !one.fits; })) {
    text += "! more than a rank's memory: this can't run\n";
  }
  return text;
}

std::string constants_text(const SimulateReport& report) {
  std::string text;
  for (int k = 0; k < cost::kKeys; ++k) {
    const Key key = static_cast<Key>(k);
    const cost::KeyText& about = cost::text_of(key);
    std::vector<std::pair<const cost::Constant*, std::string>> distinct;  // and the profiles that have it
    for (std::size_t i = 0; i < report.machines.size(); ++i) {
      const cost::Constant& constant = report.machines[i].at(key);
      const auto same = [&](const auto& other) {
        return other.first->value == constant.value && other.first->source == constant.source;
      };
      const auto found = std::find_if(distinct.begin(), distinct.end(), same);
      if (found == distinct.end()) {
        distinct.emplace_back(&constant, report.profiles[i]);
      } else {
        found->second += ", " + report.profiles[i];
      }
    }
    for (const auto& [constant, profiles] : distinct) {
      const std::string of = distinct.size() > 1 ? fmt::format(" ({})", profiles) : "";
      text += fmt::format("  {:<21}{:>11.5g} {:<8}{:<10} {}{}\n", constant == distinct[0].first ? about.name : "",
                          constant->value, about.unit, cost::name_of(constant->label), constant->source, of);
    }
  }
  return text;
}

std::string sensitivity_text(const SimulateReport& report) {
  std::string text = "\nseconds of a step with a constant halved and doubled\n";
  text += fmt::format("  {:<21}", "");
  for (const SimulatedCase& one : report.cases) {
    const std::string name = one.profile.empty() ? one.strategy : one.profile + " " + one.strategy;
    text += fmt::format("{:>28}", fmt::format("{} {}", one.ranks, name));
  }
  text += fmt::format("\n  {:<21}", "as it is");
  for (const SimulatedCase& one : report.cases) text += fmt::format("{:>28.3f}", one.round.seconds_per_step());
  text += '\n';
  for (const SensitivityRow& row : report.sensitivity) {
    text += fmt::format("  {:<21}", row.constant);
    for (std::size_t i = 0; i < row.halved.size(); ++i) {
      text += fmt::format("{:>28}", fmt::format("{:.3f} {:.3f}", row.halved[i], row.doubled[i]));
    }
    text += '\n';
  }
  return text;
}

Json json_of(const Machine& machine, const std::string& profile) {
  Json constants;
  for (int k = 0; k < cost::kKeys; ++k) {
    const Key key = static_cast<Key>(k);
    const cost::Constant& constant = machine.at(key);
    constants[cost::text_of(key).name] = {
        {"value", constant.value}, {"label", cost::name_of(constant.label)}, {"source", constant.source}};
  }
  return {{"name", machine.name},
          {"profile", profile},
          {"ranks_per_node", machine.placement.ranks_per_node},
          {"nodes_per_cell", machine.placement.nodes_per_cell},
          {"constants", constants}};
}

Json json_of(const SimulatedCase& one) {
  Json json = {{"profile", one.profile},   {"strategy", one.strategy},
               {"ranks", one.ranks},       {"groups", one.groups},
               {"group", one.group},       {"shards", one.shards},
               {"replicas", one.replicas}, {"memory_bytes", one.memory},
               {"fits", one.fits},         {"seconds_per_step", one.round.seconds_per_step()}};
  for (const auto& [name, seconds] : parts_of(one)) json["parts"][name] = seconds;
  json["steps"] = one.round.counts;
  json["exchange_s"] = one.round.exchange;
  json["exposed_exchange_s"] = one.round.exposed;
  json["tokens_per_s"] = one.round.tokens_per_s();
  json["tokens_per_s_and_rank"] = tokens_of_a_rank(one);
  json["ratio"] = one.ratio ? Json(*one.ratio) : Json(nullptr);
  if (one.spread) json["drawn"] = {{"p5", one.spread->p5}, {"p50", one.spread->p50}, {"p95", one.spread->p95}};
  return json;
}

}  // namespace

std::string text_of(const SimulateReport& report) {
  const Machine& machine = report.machines.front();
  std::string text = fmt::format("{} on {}; seconds of a step with its share of the round, tokens/s of a rank\n\n",
                                 report.model, machine.name);
  text += cases_text(report);
  if (!report.sensitivity.empty()) text += sensitivity_text(report);
  return text + "\nwhat this rests on\n" + constants_text(report);
}

std::string json_of(const SimulateReport& report) {
  Json json = {{"model", report.model}, {"machines", Json::array()}, {"cases", Json::array()}};
  for (std::size_t i = 0; i < report.machines.size(); ++i) {
    json["machines"].push_back(json_of(report.machines[i], report.profiles[i]));
  }
  for (const SimulatedCase& one : report.cases) json["cases"].push_back(json_of(one));
  for (const SensitivityRow& row : report.sensitivity) {
    json["sensitivity"].push_back({{"constant", row.constant}, {"halved", row.halved}, {"doubled", row.doubled}});
  }
  return json.dump(2) + "\n";
}

}  // namespace fedshard::forecast
