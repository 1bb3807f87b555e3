#include "fedshard/metrics/records.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "fedshard/base/error.h"

namespace fedshard::metrics {
namespace {

using nlohmann::json;
constexpr double nan = std::numeric_limits<double>::quiet_NaN();
constexpr double inf = std::numeric_limits<double>::infinity();

std::vector<Record> one_of_each() {
  return {
      StartRecord{
          0, 0.5, "fl+fsdp", 4, {2, 2}, 2, 1, 474000, {{"parameters", 1 << 20}}, 1 << 19, {{"torch", "2.13.0"}}},
      StepRecord{3, 1.25, 1, 5.5, 0.75, 1e-3, (std::int64_t{1} << 53) + 1, 1234.5},
      RoundRecord{8,
                  2.5,
                  1,
                  2,
                  0.1,
                  0.05,
                  {0, 1},
                  {4, 2},
                  {0.25, 0.75},
                  {1},
                  {1.5, 0.5},
                  {2, 3},
                  {0.5, -1},
                  2000,
                  "00ff00ff00ff00ff"},
      EvalRecord{8, 3, 2.0, 7.389, 1000, EvalModel::mean, std::nullopt},
      EvalRecord{8, 3, 2.0, 7.389, 1000, EvalModel::group, 1},
      TrafficRecord{8, 3, 1, 2, 3, 4, 5, 6, 7, 8},
      EndRecord{100, 60, 100, 4096, 2, 59.5, 68.8, 1 << 30, 1 << 29},
  };
}

TEST(Records, ComeBackEqualFromTheirText) {
  for (const auto& record : one_of_each()) {
    const json line = to_json(record);
    EXPECT_EQ(record_from_json(json::parse(line.dump())), record) << line;
    EXPECT_FALSE(line.contains("nonfinite"));
  }
}

TEST(Records, HaveTheFieldsOfTheContract) {
  const auto names = [](const Record& record) {
    std::vector<std::string> found;
    const json line = to_json(record);
    for (const auto& [name, value] : line.items()) found.push_back(name);
    return found;
  };
  const auto records = one_of_each();
  using Names = std::vector<std::string>;
  EXPECT_EQ(names(records[0]), (Names{"groups", "kind", "memory", "memory_peak", "params", "replicas", "shard", "step",
                                      "strategy", "time_s", "versions", "world"}));
  EXPECT_EQ(names(records[1]),
            (Names{"grad_norm", "group", "kind", "loss", "lr", "step", "time_s", "tokens", "tokens_per_s"}));
  EXPECT_EQ(names(records[2]),
            (Names{"change_norm", "cosine", "digest", "drift", "exposed_seconds", "fragment", "kind", "left_out",
                   "participants", "round", "seconds", "step", "steps", "time_s", "tokens_per_s", "weights"}));
  EXPECT_EQ(names(records[3]), (Names{"kind", "loss", "model", "perplexity", "step", "time_s", "tokens"}));
  EXPECT_EQ(names(records[4]), (Names{"group", "kind", "loss", "model", "perplexity", "step", "time_s", "tokens"}));
  EXPECT_EQ(names(records[5]), (Names{"aggregate", "control", "gather", "inter_group", "intra_group", "kind", "reduce",
                                      "replica", "state", "step", "time_s"}));
  EXPECT_EQ(names(records[6]), (Names{"kind", "peak_rss_bytes", "peak_tensor_bytes", "seconds", "skipped", "step",
                                      "steps", "time_s", "tokens", "tokens_per_s"}));
  EXPECT_EQ(to_json(records[4])["model"], "group");
}

TEST(Records, NumbersThatAreNotFiniteBecomeNullAndAreNamed) {
  const json line = to_json(StepRecord{1, 1, 0, nan, -inf, 1e-3, 10, 5});
  EXPECT_TRUE(line["loss"].is_null());
  EXPECT_TRUE(line["grad_norm"].is_null());
  EXPECT_EQ(line["nonfinite"], (json{"grad_norm", "loss"}));
  const auto back = std::get<StepRecord>(record_from_json(json::parse(line.dump())));
  EXPECT_TRUE(std::isnan(back.loss));
  EXPECT_EQ(back.lr, 1e-3);

  const json round = to_json(RoundRecord{8, 1, 1, 0, 0, 0, {0, 1}, {}, {0.5, 0.5}, {}, {1.0, inf}, {}, {}, 1, ""});
  EXPECT_EQ(round["drift"], (json{1.0, nullptr}));
  EXPECT_EQ(round["nonfinite"], json::array({"drift"}));
}

TEST(Finite, ReachesInsideAndAddsToTheNamesThereAre) {
  const json line = finite({{"a", {{"b", {1.0, nan}}}}, {"c", 2}, {"d", inf}, {"nonfinite", {"x", "d"}}});
  EXPECT_EQ(line["nonfinite"], (json{"x", "d", "a"}));
  EXPECT_EQ(line["a"]["b"], (json{1.0, nullptr}));
  EXPECT_EQ(finite(line), line);
  EXPECT_EQ(finite(json::object()), json::object());
}

TEST(Records, ThatCannotBeReadAreNamed) {
  const auto refusal = [](const json& line) -> std::string {
    try {
      record_from_json(line);
    } catch (const base::RunError& e) {
      return e.what();
    }
    return "accepted";
  };
  json line = to_json(StepRecord{});
  line.erase("loss");
  EXPECT_NE(refusal(line).find("kind 'step'"), std::string::npos);
  EXPECT_NE(refusal(line).find("loss"), std::string::npos);
  EXPECT_EQ(refusal({{"kind", "stop"}}), "a record of the unknown kind 'stop' cannot be read");
  EXPECT_NE(refusal(json::array()).find("cannot be read"), std::string::npos);
  EXPECT_NE(refusal(nullptr).find("cannot be read"), std::string::npos);
  json eval = to_json(EvalRecord{});
  eval["model"] = "both";
  EXPECT_NE(refusal(eval).find("'both'"), std::string::npos);
  eval["model"] = "mean";
  eval["unknown"] = 1;
  EXPECT_EQ(refusal(eval), "accepted");
}

}  // namespace
}  // namespace fedshard::metrics
