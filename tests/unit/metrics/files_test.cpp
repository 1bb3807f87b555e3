#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cmath>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <thread>

#include "fedshard/base/error.h"
#include "fedshard/base/file.h"
#include "fedshard/metrics/jsonl.h"
#include "fedshard/metrics/records.h"
#include "fedshard/metrics/run_folder.h"
#include "fedshard/metrics/trace.h"

namespace fedshard::metrics {
namespace {

using nlohmann::json;

std::filesystem::path scratch(const std::string& name) {
  const auto folder = std::filesystem::path(testing::TempDir()) / fmt::format("fedshard-metrics-{}", ::getpid());
  std::filesystem::create_directories(folder);
  std::filesystem::remove_all(folder / name);
  return folder / name;
}

std::vector<json> lines_of(const std::filesystem::path& path) {
  std::istringstream text(base::read_file(path));
  std::vector<json> lines;
  for (std::string line; std::getline(text, line);) lines.push_back(json::parse(line));
  return lines;
}

template <class Error>
std::string refusal_of(const std::function<void()>& act) {
  try {
    act();
  } catch (const Error& e) {
    return e.what();
  }
  ADD_FAILURE() << "did not fail";
  return "";
}

TEST(Jsonl, AppendsOneStrictLineARecord) {
  const auto path = scratch("metrics.jsonl");
  const json nan_line = {{"kind", "step"}, {"loss", std::nan("")}, {"text", "a\nb\xff"}};
  JsonlSink(path).write(to_json(StepRecord{1, 0.5, 0, 2.0, 1.0, 1e-3, 10, 20}));
  JsonlSink(path).write(nan_line);  // a second sink goes on where the first one ended
  const auto lines = lines_of(path);
  ASSERT_EQ(lines.size(), 2u);
  EXPECT_EQ(lines[0]["loss"], 2.0);
  EXPECT_TRUE(lines[1]["loss"].is_null());
  EXPECT_EQ(lines[1]["nonfinite"], json::array({"loss"}));
  EXPECT_EQ(lines[1]["text"], "a\nb\xef\xbf\xbd");
}

TEST(Jsonl, ErrorsNameTheFileAndTheReason) {
  EXPECT_EQ(refusal_of<base::RunError>([] { JsonlSink("/nowhere/metrics.jsonl"); }),
            "/nowhere/metrics.jsonl: cannot open for appending: No such file or directory");
  JsonlSink full("/dev/full");
  EXPECT_EQ(refusal_of<base::RunError>([&] {
              full.write({{"kind", "end"}});
            }),
            "/dev/full: cannot append a record: No space left on device");
}

TEST(Jsonl, ALineThatFitsOnlyInPartIsTakenBack) {
  const auto path = scratch("short.jsonl");
  JsonlSink sink(path);
  sink.write({{"kind", "step"}});
  const auto before = base::read_file(path);
  rlimit old{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &old), 0);
  const rlimit small{before.size() + 5, old.rlim_max};  // as on a full disk, write() takes what fits
  const auto old_handler = std::signal(SIGXFSZ, SIG_IGN);
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  const auto message = refusal_of<base::RunError>([&] { sink.write({{"kind", "step"}}); });
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &old), 0);
  std::signal(SIGXFSZ, old_handler);
  EXPECT_EQ(message, path.string() + ": cannot append a record: no space left for the whole line");
  EXPECT_EQ(base::read_file(path), before);
  sink.write({{"kind", "end"}});
  EXPECT_EQ(lines_of(path).size(), 2u);
}

TEST(RunFolder, HoldsTheConfigAndNamesItsFiles) {
  const auto path = scratch("a") / "b";
  const auto folder = RunFolder::create(path, "[training]\n");
  EXPECT_EQ(base::read_file(folder.config()), "[training]\n");
  EXPECT_TRUE(std::filesystem::is_directory(path / "ranks"));
  EXPECT_EQ(folder.metrics(), path / "metrics.jsonl");
  EXPECT_EQ(folder.log(0), path / "log.txt");
  EXPECT_EQ(folder.log(3), path / "ranks/3.log.txt");
  EXPECT_EQ(folder.trace(0), path / "ranks/0.trace.json");
}

TEST(RunFolder, WithRecordsIsRefusedAndLeftAlone) {
  const auto path = scratch("used");
  RunFolder::create(path, "first");
  const auto folder = RunFolder::create(path, "second");  // without records there was no run
  JsonlSink sink(folder.metrics());
  sink.write({{"kind", "start"}});
  const auto message = refusal_of<base::UsageError>([&] { RunFolder::create(path, "third"); });
  EXPECT_EQ(message.substr(0, path.string().size() + 24), path.string() + ": holds a run already; g");
  EXPECT_EQ(base::read_file(folder.config()), "second");
}

TEST(RunFolder, HasOneOwnerAtATime) {
  const auto path = scratch("owned");
  {
    const RunFolder copy = RunFolder::create(path, "first");
    const auto message = refusal_of<base::UsageError>([&] { RunFolder::create(path, "second"); });
    EXPECT_NE(message.find(": another run has just begun there"), std::string::npos) << message;
    EXPECT_EQ(base::read_file(copy.config()), "first");
  }
  EXPECT_EQ(base::read_file(RunFolder::create(path, "third").config()), "third");
}

TEST(RunFolder, ThatCannotBeMadeIsNamed) {
  const auto path = scratch("file");
  std::ofstream(path) << "x";
  const auto message = refusal_of<base::UsageError>([&] { RunFolder::create(path / "run", ""); });
  EXPECT_EQ(message, (path / "run").string() +
                         ": cannot make the run folder: Not a directory; give the run another one (--set "
                         "metrics.folder=...)");
}

TEST(Trace, IsAListOfEventsThatAnyParserReads) {
  const auto path = scratch("trace.json");
  base::ManualClock clock;
  Trace trace(path, 3, clock);
  clock.advance(1.5);
  {
    const Span outer(&trace, "compute", "forward \"0\"", "forward");
    clock.advance(0.25);
    const Span inner(&trace, "communication", "gather 1", "gather");
    clock.advance(0.5);
  }
  { const Span off(nullptr, "compute", "x", "x"); }
  trace.close();
  const json events = json::parse(base::read_file(path));
  std::vector<json> complete;
  std::map<int, std::string> lanes;
  for (const auto& event : events) {
    EXPECT_EQ(event["pid"], 3);
    if (event["ph"] == "X") complete.push_back(event);
    if (event["name"] == "thread_name") lanes[event["tid"]] = event["args"]["name"];
    if (event["name"] == "process_name") {
      EXPECT_EQ(event["args"]["name"], "rank 3");
    }
  }
  ASSERT_EQ(complete.size(), 2u);
  EXPECT_EQ(complete[0]["name"], "gather 1");
  EXPECT_EQ(complete[0]["ts"], 1750000.0);
  EXPECT_EQ(complete[0]["dur"], 500000.0);
  EXPECT_EQ(lanes.at(complete[0]["tid"]), "communication");
  EXPECT_EQ(complete[1]["name"], "forward \"0\"");
  EXPECT_EQ(complete[1]["cat"], "forward");
  EXPECT_EQ(complete[1]["dur"], 750000.0);
  EXPECT_EQ(lanes.at(complete[1]["tid"]), "compute");
}

TEST(Trace, TakesEventsFromSeveralThreads) {
  const auto path = scratch("threads.json");
  base::ManualClock clock;
  Trace trace(path, 0, clock);
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 1000; ++i) trace.add(fmt::format("lane {}", t), fmt::format("{} {}", t, i), "c", 0, 1);
    });
  }
  for (auto& thread : threads) thread.join();
  trace.close();
  std::set<std::string> names;
  for (const auto& event : json::parse(base::read_file(path))) {
    if (event["ph"] == "X") names.insert(event["name"].get<std::string>());
  }
  EXPECT_EQ(names.size(), 3000u);
}

TEST(Trace, ErrorsNameTheFileAtTheLatestWhenItIsClosed) {
  base::ManualClock clock;
  EXPECT_EQ(refusal_of<base::RunError>([&] { Trace("/nowhere/t.json", 0, clock); }),
            "/nowhere/t.json: cannot open the trace: No such file or directory");
  Trace full("/dev/full", 0, clock);
  full.add("compute", "x", "x", 0, 1);
  EXPECT_EQ(refusal_of<base::RunError>([&] { full.close(); }),
            "/dev/full: cannot write the trace: No space left on device");
  EXPECT_THROW(full.add("compute", "x", "x", 0, 1), base::RunError);
}

TEST(Trace, UnclosedHoldsTheEventsSoFar) {
  const auto path = scratch("open.json");
  base::ManualClock clock;
  { Trace(path, 1, clock).add("compute", "x", "x", 0, 1); }
  EXPECT_EQ(json::parse(base::read_file(path) + "]").size(), 3u);
}

}  // namespace
}  // namespace fedshard::metrics
