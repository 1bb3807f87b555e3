#include "fedshard/metrics/progress.h"

#include <fmt/ranges.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "fedshard/base/quantities.h"

namespace fedshard::metrics {

using base::human_count;
using base::human_seconds;

std::optional<int> terminal_columns(int fd) {
  if (::isatty(fd) == 0) return std::nullopt;
  winsize size{};
  const bool known = ::ioctl(fd, TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
  return known ? size.ws_col : 80;
}

void Progress::write(const nlohmann::json& line) {
  const Record record = record_from_json(line);
  std::visit([&](const auto& r) { now_s_ = std::max(now_s_, r.time_s), show(r); }, record);
  out_.flush();
}

void Progress::leave_line() {
  if (on_line_) out_ << '\n' << std::flush;
  on_line_ = false;
}

void Progress::show(const StartRecord& r) {
  const bool several = r.groups.size() > 1;
  const std::string groups = several ? fmt::format(" in groups of {}", fmt::join(r.groups, ", ")) : "";
  keep(fmt::format("{} on {} {}{}: {} parameters", r.strategy, r.world, r.world == 1 ? "rank" : "ranks", groups,
                   human_count(static_cast<double>(r.params))));
}

void Progress::show(const StepRecord& r) {
  latest_[r.group] = r;
  if (first_step_ == 0) first_step_ = r.step, first_time_s_ = r.time_s;
  if (options_.columns) {
    const auto room = static_cast<std::size_t>(std::max(1, *options_.columns - 1));  // a full line would wrap
    out_ << '\r' << status().substr(0, room) << "\x1b[K";
    on_line_ = true;
  } else if (!last_plain_s_ || now_s_ - *last_plain_s_ >= options_.plain_every_s || step() >= options_.steps) {
    last_plain_s_ = now_s_;
    out_ << status() << '\n';
  }
}

void Progress::show(const EvalRecord& r) {
  std::string whose;
  if (options_.groups > 1) whose = r.group ? fmt::format(" (group {})", *r.group) : " (mean of the groups)";
  keep(fmt::format("step {}: evaluation loss {:.4f}, perplexity {:.4g}{}", r.step, r.loss, r.perplexity, whose));
}

void Progress::show(const RoundRecord& r) {
  if (r.left_out.empty()) return;
  keep(fmt::format("round {} leaves out group{} {}: log.txt says why", r.round, r.left_out.size() > 1 ? "s" : "",
                   fmt::join(r.left_out, ", ")));
}

void Progress::show(const EndRecord& r) {
  const std::string skipped = r.skipped > 0 ? fmt::format(" ({} skipped)", r.skipped) : "";
  keep(fmt::format("{} steps{}, {} tokens in {}: {} tokens/s; tensors took up to {} a rank", r.steps, skipped,
                   human_count(static_cast<double>(r.tokens)), human_seconds(r.seconds), human_count(r.tokens_per_s),
                   base::human(base::Bytes{r.peak_tensor_bytes})));
}

void Progress::keep(const std::string& text) {
  if (on_line_) out_ << "\r\x1b[K";
  out_ << text << '\n';
  on_line_ = false;
}

std::int64_t Progress::step() const { return slowest().step; }

const StepRecord& Progress::slowest() const {
  const auto slower = [](const auto& a, const auto& b) {
    if (a.second.step != b.second.step) return a.second.step < b.second.step;
    return a.second.tokens_per_s < b.second.tokens_per_s;
  };
  return std::min_element(latest_.begin(), latest_.end(), slower)->second;
}

std::optional<double> Progress::seconds_left() const {
  if (step() <= first_step_) return std::nullopt;
  const double a_step = (now_s_ - first_time_s_) / static_cast<double>(step() - first_step_);
  const double left = a_step * static_cast<double>(std::max<std::int64_t>(0, options_.steps - step()));
  if (options_.time_limit_s <= 0) return left;
  return std::min(left, std::max(0.0, options_.time_limit_s - now_s_));
}

std::string Progress::status() const {
  double loss = 0;
  double tokens_per_s = 0;
  for (const auto& [group, record] : latest_) loss += record.loss, tokens_per_s += record.tokens_per_s;
  loss /= static_cast<double>(latest_.size());
  std::string text =
      fmt::format("step {}/{}  loss {:.4f}  {} tokens/s", step(), options_.steps, loss, human_count(tokens_per_s));
  if (const auto left = seconds_left()) text += fmt::format("  {} left", human_seconds(*left));
  if (options_.groups > 1) {
    const StepRecord& last = slowest();
    text += fmt::format("  {} between groups  slowest: group {} ({} tokens/s)",
                        base::human(base::Bytes{between_groups_}), last.group, human_count(last.tokens_per_s));
  }
  return text;
}

}  // namespace fedshard::metrics
