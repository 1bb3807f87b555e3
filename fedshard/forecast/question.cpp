#include "fedshard/forecast/question.h"

#include <fmt/ranges.h>

#include <filesystem>
#include <numeric>

#include "fedshard/base/error.h"
#include "fedshard/config/options.h"

namespace fedshard::forecast {
namespace {

using base::fail;
using base::UsageError;

// "4,2,2" as TOML's list, anything else as it is.
std::string one_or_list(const std::string& text) {
  return text.find(',') == std::string::npos || text.starts_with('[') ? text : "[" + text + "]";
}

// The dtype whose elements are so large.
std::string dtype_of(const char* flag, const std::string& bytes) {
  if (bytes == "2") return "bf16";
  if (bytes == "4") return "fp32";
  fail<UsageError>("{} {}: elements are of 2 bytes (bf16) or 4 (fp32)", flag, bytes);
}

std::string model_setting(const std::string& model) {
  const std::filesystem::path path(model);
  if (std::filesystem::is_directory(path)) return "model.hf=" + model;
  if (std::filesystem::is_regular_file(path)) {
    if (path.filename() != "config.json") {
      fail<UsageError>("--model {}: a file must be named config.json, as Hugging Face has it", model);
    }
    return "model.hf=" + (path.has_parent_path() ? path.parent_path().string() : ".");
  }
  return "model.preset=" + model;
}

// The flags as settings, and what the user set after them, so that the latter win.
std::vector<std::string> settings_of(const Question& question) {
  std::vector<std::string> settings;
  const auto set = [&](const char* key, const std::optional<std::string>& value) {
    if (value) settings.push_back(fmt::format("{}={}", key, *value));
  };
  const auto set_list = [&](const char* key, const std::optional<std::string>& value) {
    if (value) set(key, one_or_list(*value));
  };
  const auto set_dtype = [&](const char* key, const char* flag, const std::optional<std::string>& value) {
    if (value) set(key, dtype_of(flag, *value));
  };
  const auto set_bool = [&](const char* key, const std::optional<bool>& value) {
    if (value) set(key, *value ? "true" : "false");
  };
  if (!question.model.empty()) settings.push_back(model_setting(question.model));
  set_list("parallelism.groups", question.groups);
  set_list("parallelism.data_parallel_shard_degree", question.shard);
  if (question.shard) set("parallelism.data_parallel_replicate_degree", "-1");
  set_list("federation.every", question.every);
  set("federation.scheme", question.scheme);
  set("federation.compress", question.compress);
  set("training.gradient_accumulation_steps", question.accum);
  set("training.local_batch_size", question.batch);
  set("training.seq_len", question.seq);
  set_dtype("training.dtype", "--bytes-gather", question.bytes_gather);
  set_dtype("training.reduce_dtype", "--bytes-reduce", question.bytes_reduce);
  set_dtype("training.master_dtype", "--bytes-aggregate", question.bytes_aggregate);
  set_bool("parallelism.fsdp_reshard_after_forward", question.reshard);
  set_bool("training.reduce_each_micro_step", question.reduce_each_micro_step);
  settings.insert(settings.end(), question.settings.begin(), question.settings.end());
  return settings;
}

}  // namespace

config::Config config_of(const Question& question) {
  const std::vector<std::string> settings = settings_of(question);
  if (!question.config.empty()) return config::load_config(question.config, settings);
  config::Config config = config::config_of(settings);
  // A list of steps asks that a run ends with a round; no run is meant here.
  if (config.federation.every.by == plan::Pace::By::group_steps) {
    config.training.steps = config.federation.start_step + plan::most_steps(config.federation.every);
  }
  return config;
}

int world_of(const config::Config& config, std::optional<int> ranks) {
  if (ranks) return *ranks;
  const auto* sizes = std::get_if<std::vector<int>>(&config.parallelism.groups);
  if (sizes == nullptr) fail<UsageError>("--ranks is missing: how many ranks are there?");
  const std::int64_t sum = std::accumulate(sizes->begin(), sizes->end(), std::int64_t{0});
  constexpr std::int64_t kMost = 1 << 20;
  if (sum < 1 || sum > kMost)
    fail<UsageError>("groups of {} are {} ranks; it must be 1 to {}", fmt::join(*sizes, ", "), sum, kMost);
  return static_cast<int>(sum);
}

}  // namespace fedshard::forecast
