#include "fedshard/train/host.h"

#include <unistd.h>

#include <algorithm>
#include <iostream>

#include "fedshard/forecast/forecast.h"
#include "fedshard/metrics/jsonl.h"
#include "fedshard/metrics/progress.h"

namespace fedshard::train {
namespace {

constexpr double kLeastSilenceS = 5;

metrics::ProgressOptions progress_options(const config::Config& config, const topology::Layout& layout) {
  metrics::ProgressOptions options;
  options.steps = config.training.steps;
  options.groups = layout.groups();
  options.time_limit_s = config.training.time_limit_s;
  options.columns = metrics::terminal_columns(STDERR_FILENO);
  return options;
}

}  // namespace

// Written to from the coordinator's thread only, until it has stopped.
class RunHost::Records {
 public:
  Records(const metrics::RunFolder& folder, const config::Config& config, const topology::Layout& layout)
      : file_(folder.metrics()) {
    if (config.metrics.progress) progress_.emplace(std::cerr, progress_options(config, layout));
  }
  void write(const nlohmann::json& line) {
    file_.write(line);
    if (progress_) progress_->write(line);
  }
  void leave_line() {
    if (progress_) progress_->leave_line();
  }

 private:
  metrics::JsonlSink file_;
  std::optional<metrics::Progress> progress_;
};

double silence_s(const config::Config& config) {
  return std::clamp(config.comm.timeout_s, kLeastSilenceS, control::Deadlines{}.silence);
}

RunHost::RunHost(const config::Config& config, const topology::Layout& layout, const std::string& bind_address)
    : folder_(metrics::RunFolder::create(config.metrics.folder, config::resolved_toml(config))) {
  records_ = std::make_unique<Records>(folder_, config, layout);
  if (config.metrics.progress) {
    std::cerr << "memory of a rank:\n" << plan::describe(forecast::memory(config, layout)) << std::flush;
  }
  control::CoordinatorOptions options;
  options.group_sizes = layout.sizes();
  options.bind_address = bind_address;
  options.deadlines.silence = silence_s(config);
  // A group may have made its last step when the time of a round has just begun, and waits for the others.
  options.deadlines.round += config.federation.every.seconds;
  options.sink = [records = records_.get()](const nlohmann::json& line) { records->write(line); };
  run_token_ = options.token.format();
  coordinator_ = std::make_unique<control::Coordinator>(std::move(options));
}

RunHost::~RunHost() = default;

const std::string& RunHost::endpoint() const { return coordinator_->endpoint(); }

control::CoordinatorStatus RunHost::status() const { return coordinator_->status(); }

void RunHost::finish(double patience_s) {
  coordinator_->wait_until_over(patience_s);
  coordinator_->stop();
  records_->leave_line();
}

}  // namespace fedshard::train
