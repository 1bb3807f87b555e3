// What a person at the terminal sees of a run: one line redrawn on a terminal, a plain line now and then elsewhere.
// A surprise: it knows no clock. All times are those of the records, so what it shows of a run is the same whenever
// and wherever it is shown.
#pragma once
#include <cstdint>
#include <map>
#include <optional>
#include <ostream>
#include <string>

#include "fedshard/metrics/records.h"
#include "fedshard/metrics/sink.h"

namespace fedshard::metrics {

struct ProgressOptions {
  std::int64_t steps = 0;   // of the whole run
  int groups = 1;           // with several, mean loss, bytes between groups and the slowest group are shown
  double time_limit_s = 0;  // 0: none
  std::optional<int> columns = std::nullopt;  // width of the terminal; empty: not a terminal, plain lines
  double plain_every_s = 10;                  // least time between two plain lines about steps
};

// The width of the terminal behind a file descriptor; nothing where it is no terminal.
std::optional<int> terminal_columns(int fd);

class Progress final : public Sink {
 public:
  // `out` outlives this.
  Progress(std::ostream& out, const ProgressOptions& options) : out_(out), options_(options) {}
  ~Progress() override { leave_line(); }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // Start, eval and end records, and rounds that leave out groups, leave a line that stays; step records redraw the
  // line of progress; the others update what it says.
  void write(const nlohmann::json& line) override;

  // Ends a line under way, so that an error message starts on a line of its own.
  void leave_line();

 private:
  void show(const StartRecord& record);
  void show(const StepRecord& record);
  void show(const RoundRecord& record);
  void show(const EvalRecord& record);
  void show(const TrafficRecord& record) { between_groups_ = record.inter_group; }
  void show(const EndRecord& record);

  void keep(const std::string& text);  // a line that stays
  std::string status() const;
  std::int64_t step() const;                   // that all groups have done
  std::optional<double> seconds_left() const;  // nothing before the second step
  const StepRecord& slowest() const;

  std::ostream& out_;
  ProgressOptions options_;
  std::map<int, StepRecord> latest_;  // by group
  std::int64_t first_step_ = 0;       // the first step shown, and when
  double first_time_s_ = 0;
  double now_s_ = 0;
  std::optional<double> last_plain_s_;
  std::int64_t between_groups_ = 0;
  bool on_line_ = false;
};

}  // namespace fedshard::metrics
