// The figures of `fedshard simulate`, as tables for people and as JSON for programs.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "fedshard/cost/simulate.h"

namespace fedshard::forecast {

// Seconds of a step with its share of the round, over rounds with drawn lateness.
struct Spread {
  double p5 = 0, p50 = 0, p95 = 0;
};

struct SimulatedCase {
  std::string profile, strategy;  // profile: "" for none
  int ranks = 0, groups = 0;
  int group = 0, shards = 0, replicas = 0;  // of the first group: ranks, and how they share
  std::int64_t memory = 0;                  // bytes of the rank that needs most
  bool fits = true;                         // these in a rank's memory
  cost::RoundTime round;                    // with the mean lateness
  std::optional<Spread> spread;             // with a seed
  std::optional<double> ratio;              // of tokens a second, to the first strategy's of its profile and ranks
};

// One constant halved and doubled, and nothing else changed: the seconds of a step, by case. At a bound of its range
// where that is in the way.
struct SensitivityRow {
  std::string constant;
  std::vector<double> halved, doubled;
};

struct SimulateReport {
  std::string model;                    // what was asked about
  std::vector<cost::Machine> machines;  // with each profile, in the order of the cases
  std::vector<std::string> profiles;    // their names
  std::vector<SimulatedCase> cases;
  std::vector<SensitivityRow> sensitivity = {};
};

// Lines that end with a newline.
std::string text_of(const SimulateReport& report);

// One object; keys in docs/cost.md. Seconds are of a step with its share of the round.
std::string json_of(const SimulateReport& report);

}  // namespace fedshard::forecast
