#include "fedshard/metrics/progress.h"

#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <sstream>

namespace fedshard::metrics {
namespace {

StepRecord step(std::int64_t n, double time_s, int group = 0, double loss = 2.0, double tokens_per_s = 1500) {
  return {n, time_s, group, loss, 1.0, 1e-3, n * 100, tokens_per_s};
}

std::string shown(const ProgressOptions& options, const std::vector<Record>& records) {
  std::ostringstream out;
  Progress progress(out, options);
  for (const auto& record : records) progress.write(to_json(record));
  return out.str();
}

TEST(Progress, RedrawsOneLineOnATerminal) {
  const auto text = shown({.steps = 10, .columns = 200}, {step(1, 1.0), step(2, 3.0)});
  EXPECT_EQ(text,
            "\rstep 1/10  loss 2.0000  1.50k tokens/s\x1b[K"
            "\rstep 2/10  loss 2.0000  1.50k tokens/s  16.0s left\x1b[K");
}

TEST(Progress, CutsTheLineToTheTerminal) {
  EXPECT_EQ(shown({.steps = 10, .columns = 10}, {step(1, 1.0)}), "\rstep 1/10\x1b[K");
  EXPECT_EQ(shown({.steps = 10, .columns = 1}, {step(1, 1.0)}), "\rs\x1b[K");
}

TEST(Progress, WritesAPlainLineNowAndThenElsewhere) {
  std::vector<Record> records;
  for (int n = 1; n <= 25; ++n) records.push_back(step(n, n));
  const auto text = shown({.steps = 25}, records);
  EXPECT_EQ(text,
            "step 1/25  loss 2.0000  1.50k tokens/s\n"
            "step 11/25  loss 2.0000  1.50k tokens/s  14.0s left\n"
            "step 21/25  loss 2.0000  1.50k tokens/s  4.00s left\n"
            "step 25/25  loss 2.0000  1.50k tokens/s  0.00s left\n");
}

TEST(Progress, OfSeveralGroupsShowsMeanLossBytesBetweenAndTheSlowest) {
  const ProgressOptions options{.steps = 10, .groups = 2, .columns = 200};
  const auto last = [&](const std::vector<Record>& records) {
    const auto text = shown(options, records);
    return text.substr(text.rfind('\r') + 1);
  };
  TrafficRecord traffic;
  traffic.inter_group = 3 << 20;
  EXPECT_EQ(last({traffic, step(4, 1, 0, 2.0, 100), step(3, 1, 1, 4.0, 900)}),
            "step 3/10  loss 3.0000  1.00k tokens/s  3.00 MiB between groups  slowest: group 1 (900 tokens/s)\x1b[K");
  EXPECT_EQ(last({step(4, 1, 0, 2.0, 100), step(4, 1, 1, 4.0, 900)}),
            "step 4/10  loss 3.0000  1.00k tokens/s  0 B between groups  slowest: group 0 (100 tokens/s)\x1b[K");
}

TEST(Progress, KeepsALineAboutGroupsLeftOut) {
  RoundRecord round;
  round.round = 3;
  EXPECT_EQ(shown({.steps = 10}, {round}), "");
  round.left_out = {1};
  EXPECT_EQ(shown({.steps = 10}, {round}), "round 3 leaves out group 1: log.txt says why\n");
  round.left_out = {0, 2};
  EXPECT_EQ(shown({.steps = 10}, {round}), "round 3 leaves out groups 0, 2: log.txt says why\n");
}

TEST(Progress, TimeLeftHeedsTheLimit) {
  const auto text = shown({.steps = 1000, .time_limit_s = 5, .columns = 200}, {step(1, 1), step(2, 2)});
  EXPECT_NE(text.find("  3.00s left"), std::string::npos) << text;
  const auto late = shown({.steps = 1000, .time_limit_s = 5, .columns = 200}, {step(1, 1), step(2, 9)});
  EXPECT_NE(late.find("  0.00s left"), std::string::npos) << late;
}

TEST(Progress, WhatStaysStandsOnLinesOfItsOwn) {
  StartRecord start;
  start.strategy = "fl+fsdp";
  start.world = 4;
  start.groups = {2, 2};
  start.params = 474000;
  const EvalRecord eval{2, 2.5, 2.0, 7.389056, 10, EvalModel::mean, std::nullopt};
  const EvalRecord own{2, 2.5, 2.0, 7.389056, 10, EvalModel::group, 1};
  const EndRecord end{2, 3, 2, 4096, 1, 3, 1365.3, 1, 3 << 20};
  const auto text = shown({.steps = 2, .groups = 2, .columns = 10}, {start, step(1, 1), eval, own, step(2, 2), end});
  EXPECT_EQ(text,
            "fl+fsdp on 4 ranks in groups of 2, 2: 474k parameters\n"
            "\rstep 1/2 \x1b[K"
            "\r\x1b[Kstep 2: evaluation loss 2.0000, perplexity 7.389 (mean of the groups)\n"
            "step 2: evaluation loss 2.0000, perplexity 7.389 (group 1)\n"
            "\rstep 2/2 \x1b[K"
            "\r\x1b[K2 steps (1 skipped), 4.10k tokens in 3.00s: 1.37k tokens/s; tensors took up to 3.00 MiB a rank\n");
  const auto plain = shown({.steps = 2}, {eval});
  EXPECT_EQ(plain, "step 2: evaluation loss 2.0000, perplexity 7.389\n");
}

TEST(Progress, ShowsALossThatIsNotFinite) {
  const auto text = shown({.steps = 2}, {step(1, 1, 0, std::nan(""))});
  EXPECT_EQ(text, "step 1/2  loss nan  1.50k tokens/s\n");
}

TEST(Progress, EndsTheLineUnderWay) {
  std::ostringstream out;
  {
    Progress progress(out, {.steps = 2, .columns = 8});
    progress.write(to_json(step(1, 1)));
    progress.leave_line();
    progress.leave_line();
    EXPECT_EQ(out.str(), "\rstep 1/\x1b[K\n");
    progress.write(to_json(step(2, 1)));
  }
  EXPECT_EQ(out.str(), "\rstep 1/\x1b[K\n\rstep 2/\x1b[K\n");
}

}  // namespace
}  // namespace fedshard::metrics
