// The command line. The one file that includes CLI11, which takes 13 s to compile; each subcommand is a plain function
// in a file of its own.
#include <fcntl.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <iostream>

#include "fedshard/base/error.h"
#include "fedshard/cli/bench.h"
#include "fedshard/cli/data.h"
#include "fedshard/cli/train.h"
#include "fedshard/forecast/cost.h"
#include "fedshard/forecast/simulate.h"
#include "fedshard/train/version.h"

namespace {

using fedshard::cli::BenchAggregateArgs;
using fedshard::cli::DataEncodeArgs;
using fedshard::cli::DataInspectArgs;
using fedshard::cli::DataPrepareArgs;
using fedshard::cli::TrainArgs;
using fedshard::forecast::CostArgs;
using fedshard::forecast::Question;
using fedshard::forecast::SimulateArgs;

std::string from_1(const std::string& text) {
  int number = 0;
  const bool right = CLI::detail::lexical_cast(text, number) && number >= 1;
  return right ? "" : "must be a whole number from 1, not '" + text + "'";
}

// Bound to an optional, CLI11 makes a flag that is absent false.
void add_choice(CLI::App& app, const char* names, std::optional<bool>& value, const char* doc) {
  app.add_flag_function(
      names, [&value](std::int64_t count) { value = count > 0; }, doc);
}

// One word with commas; what follows it is not part of it.
CLI::Option* add_list(CLI::App& app, const char* name, auto& values, const char* doc) {
  return app.add_option(name, values, doc)->delimiter(',')->allow_extra_args(false);
}

void add_train(CLI::App& app, TrainArgs& args) {
  CLI::App* train = app.add_subcommand("train", "Train as a config file says, on local ranks or as one rank of a job");
  train->add_option("config", args.config, "The TOML file (docs/configuration.md)")->required();
  train->add_option("--ranks", args.ranks, "Start this many ranks here (default: the launcher's environment, else 1)")
      ->check(from_1);
  train
      ->add_option("--virtual-groups", args.virtual_groups,
                   "Train this many groups of so many ranks, a rank of each in every process, in turn")
      ->check(from_1);
  train->add_option("--set", args.overrides, "Override a key: table.key=value; may be repeated")
      ->allow_extra_args(false);
  train->add_flag("--dry-run", args.dry_run, "Print config, layout, memory and traffic; start nothing");
}

void add_data(CLI::App& app, DataPrepareArgs& prepare_args, DataInspectArgs& inspect_args,
              DataEncodeArgs& encode_args) {
  CLI::App* data = app.add_subcommand("data", "Turn text into token files and look at them");
  data->require_subcommand(1);
  CLI::App* prepare = data->add_subcommand("prepare", "Text (.txt, .jsonl) to one token file");
  prepare->add_option("inputs", prepare_args.inputs, "Files or globs, in this order")->required();
  prepare->add_option("-o,--output", prepare_args.output, "The token file")->required();
  prepare->add_option("--tokenizer", prepare_args.tokenizer, "'byte' or a tokenizer.json")->capture_default_str();
  prepare->add_option("--bad-records", prepare_args.bad_records, "What to do with unreadable JSON lines")
      ->check(CLI::IsMember({"fail", "skip"}))
      ->capture_default_str();
  CLI::App* inspect = data->add_subcommand("inspect", "Print and verify token files");
  inspect->add_option("files", inspect_args.files, "Token files")->required();
  inspect->add_option("--tokenizer", inspect_args.tokenizer, "Decode the beginning with this tokenizer");
  inspect->add_option("--head", inspect_args.head, "How many tokens of it")->capture_default_str();
  inspect->add_option("--order", inspect_args.order, "Print the first so many sequences in the order of consumption");
  inspect->add_option("--seed", inspect_args.seed, "[training] seed, for --order")->capture_default_str();
  inspect->add_option("--seq-len", inspect_args.seq_len, "[training] seq_len, for --order");
  CLI::App* encode = data->add_subcommand("encode", "Print the token ids of text");
  encode->add_option("input", encode_args.input, "A file, or - for standard input")->capture_default_str();
  encode->add_option("--tokenizer", encode_args.tokenizer, "'byte' or a tokenizer.json")->capture_default_str();
  encode->add_flag("--jsonl", encode_args.jsonl, "The input's lines are JSON records, each a document");
}

void add_bench(CLI::App& app, BenchAggregateArgs& args) {
  CLI::App* bench = app.add_subcommand("bench", "Measure what a run is made of");
  bench->require_subcommand(1);
  CLI::App* aggregate = bench->add_subcommand(
      "aggregate", "The exchange of a round, in every scheme, bucket and dtype, checked and timed");
  const auto list = [&](const char* name, auto& values, const char* doc) {
    add_list(*aggregate, name, values, doc)->capture_default_str();
  };
  aggregate
      ->add_option("--ranks", args.ranks, "Start this many ranks here (default: the launcher's environment, else 4)")
      ->check(from_1);
  list("--groups", args.groups, "How many groups, or the ranks of each");
  list("--shard", args.shard, "Shards of a group, or of each; its other ranks are replicas");
  aggregate->add_option("--model", args.model, "The preset whose parameters are exchanged")->capture_default_str();
  list("--units", args.units, "Elements of each unit, instead of a model");
  list("--schemes", args.schemes, "[federation] scheme");
  list("--buckets", args.buckets, "[federation] bucket");
  list("--concurrency", args.concurrency, "[federation] concurrency; whole exchanges have none");
  list("--dtypes", args.dtypes, "Of the parameters: fp32, bf16");
  aggregate->add_option("--repeat", args.repeat, "Timed exchanges of each case; the median counts")
      ->capture_default_str();
  aggregate->add_option("--csv", args.csv, "Write the table to this file too");
}

// What is asked about: a config file, or what stands for its keys, as text that the config's own rules read.
void add_question(CLI::App& command, Question& question) {
  command.add_option("config", question.config, "A TOML file; without one, flags");
  command.add_option("--model", question.model, "A preset, or a folder with Hugging Face's config.json");
  command.add_option("--groups", question.groups, "How many groups, or the ranks of each: 4,2,2");
  command.add_option("--shard", question.shard, "Shards of a group, or of each; its other ranks are replicas");
  command.add_option("--every", question.every, "A round: steps, of each group (8,4), tokens (1M tokens), time (30s)");
  command.add_option("--scheme", question.scheme, "[federation] scheme: split, leader, naive");
  command.add_option("--compress", question.compress, "[federation] compress: none, bf16, int8, int4, topk");
  command.add_option("--accum", question.accum, "Micro-steps of a step");
  command.add_option("--batch", question.batch, "Sequences a rank and micro-step");
  command.add_option("--seq", question.seq, "Tokens of a sequence");
  command.add_option("--bytes-gather", question.bytes_gather, "Of an element that is gathered: 2 (bf16) or 4 (fp32)");
  command.add_option("--bytes-reduce", question.bytes_reduce, "Of an element that is reduced: 2 or 4");
  command.add_option("--bytes-aggregate", question.bytes_aggregate, "Of a master parameter, as rounds send it: 2 or 4");
  add_choice(command, "--reshard,!--no-reshard", question.reshard, "Gather units again for their backward");
  add_choice(command, "--reduce-each-microstep,!--no-reduce-each-microstep", question.reduce_each_micro_step,
             "Reduce in every micro-step, not in the last alone");
  command.add_option("--set", question.settings, "Override a key: table.key=value; may be repeated")
      ->allow_extra_args(false);
}

void add_cost(CLI::App& app, CostArgs& args) {
  CLI::App* cost = app.add_subcommand("cost", "Bytes and messages of a layout, counted before anything runs");
  cost->add_option("--ranks", args.ranks, "Ranks in all (default: the sum of the listed groups)")->check(from_1);
  add_question(*cost, args.question);
  add_list(*cost, "--units", args.units, "Elements of each unit, instead of a model");
  add_choice(*cost, "--keep-root,!--no-keep-root", args.keep_root,
             "Gather the first and the last unit once, as the program does; of --units the first alone");
  cost->add_option("--algorithm", args.algorithm, "Of collectives; the program's own are rings")
      ->check(CLI::IsMember({"ring", "recursive"}))
      ->capture_default_str();
  cost->add_option("--ranks-per-node", args.ranks_per_node, "Ranks lie on nodes in order; none: all on one")
      ->check(from_1);
  cost->add_option("--nodes-per-cell", args.nodes_per_cell, "And nodes in cells")->check(from_1);
  cost->add_option("--view-group", args.view_group, "Count what crosses groups of so many ranks instead")
      ->check(from_1);
  cost->add_flag("--json", args.json, "One object for programs (docs/cost.md)");
}

void add_simulate(CLI::App& app, SimulateArgs& args) {
  CLI::App* simulate =
      app.add_subcommand("simulate", "Seconds of steps and rounds on a machine, from the engine's own schedule");
  const auto list = [&](const char* name, auto& values, const char* doc) {
    return add_list(*simulate, name, values, doc);
  };
  add_question(*simulate, args.question);
  simulate->add_option("--machine", args.machine, "A machine file, or the name of one of examples/machines");
  list("--profile", args.profiles, "Of the machine's profiles, one or several, or all");
  list("--constant", args.constants, "Another value for a constant of the machine: name=value; may be repeated");
  list("--ranks", args.ranks, "Ranks in all, one number or several (default: the sum of the listed groups)")
      ->check(from_1);
  list("--strategies", args.strategies, "fsdp, hsdp:SHARDS, fl+fsdp:GROUP, fl+hsdp:GROUP:SHARDS, to compare");
  list("--slow", args.slow, "GROUP:FACTOR, a group whose computations take so much longer; may be repeated");
  simulate->add_option("--seed", args.seed, "Draw every lateness, and tell the 5th, 50th and 95th percentile");
  simulate->add_option("--rounds", args.rounds, "So many times")->capture_default_str();
  simulate->add_flag("--sensitivity", args.sensitivity, "Halve and double each constant");
  simulate->add_option("--trace", args.trace, "Write the first case's step as Chrome trace events to this file");
  simulate->add_flag("--json", args.json, "One object for programs (docs/cost.md)");
}

// A daemon may start us with these closed. The first file we opened would then become standard output or error, and
// what is meant for a person would go into metrics.jsonl.
void open_standard_streams() {
  for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    // Opens the lowest number that is free, so this one.
    if (::fcntl(fd, F_GETFD) == -1 && ::open("/dev/null", O_RDWR) == -1) std::_Exit(1);
  }
}

std::string version_line() {
  std::string line;
  for (const auto& [name, version] : fedshard::train::versions())
    line += (line.empty() ? "" : ", ") + name + " " + version;
  return line;
}

// CLI11 misses a subcommand before it looks at the word that stands in its place.
std::string complaint(const CLI::App& app, const CLI::ParseError& error) {
  const CLI::App* level = &app;
  while (!level->get_subcommands().empty()) level = level->get_subcommands().front();
  std::string names;
  for (const CLI::App* sub : level->get_subcommands({})) names += (names.empty() ? "" : ", ") + sub->get_name();
  const auto rest = app.remaining(/*recurse=*/true);
  if (error.get_name() != "RequiredError" || names.empty()) return error.what();
  return (rest.empty() ? "a command is missing" : "there is no command '" + rest.front() + "'") + ": give one of " +
         names;
}

// A full disk shows only when the last buffer is written; what a caller reads would be cut short without a word.
int check_output(int status) {
  const bool written = std::cout.flush().good() && std::fflush(stdout) == 0 && std::ferror(stdout) == 0;
  if (written || status != 0) return status;
  std::cerr << "fedshard: standard output could not be written whole: is the disk full, or the reader gone?\n";
  return static_cast<int>(fedshard::base::ExitStatus::failed);
}

}  // namespace

int main(int argc, char** argv) {
  open_standard_streams();
  CLI::App app("fedshard: pre-training of language models with federated sharded data parallelism");
  app.set_version_flag("--version", version_line());
  app.require_subcommand(1);
  TrainArgs train;
  DataPrepareArgs prepare;
  DataInspectArgs inspect;
  DataEncodeArgs encode;
  BenchAggregateArgs aggregate;
  CostArgs cost;
  SimulateArgs simulate;
  add_train(app, train);
  add_data(app, prepare, inspect, encode);
  add_bench(app, aggregate);
  add_cost(app, cost);
  add_simulate(app, simulate);
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& e) {
    return check_output(app.exit(e));
  } catch (const CLI::ParseError& e) {
    std::cerr << "fedshard: " << complaint(app, e) << " (fedshard --help says what there is)\n";
    return static_cast<int>(fedshard::base::ExitStatus::usage);
  }
  try {
    if (app.got_subcommand("train")) {
      const int status = fedshard::cli::train(train);
      return train.dry_run ? check_output(status) : status;  // what a run leaves is in its folder, not there
    }
    if (app.got_subcommand("cost")) return check_output(fedshard::forecast::cost(cost));
    if (app.got_subcommand("simulate")) return check_output(fedshard::forecast::simulate(simulate));
    if (app.got_subcommand("bench")) return check_output(fedshard::cli::bench_aggregate(aggregate));
    const CLI::App* data = app.get_subcommand("data");
    if (data->got_subcommand("prepare")) return check_output(fedshard::cli::data_prepare(prepare));
    if (data->got_subcommand("inspect")) return check_output(fedshard::cli::data_inspect(inspect));
    return check_output(fedshard::cli::data_encode(encode));
  } catch (const fedshard::base::Error& e) {
    std::cerr << "fedshard: " << e.what() << "\n";
    return static_cast<int>(e.status());
  } catch (const std::exception& e) {
    std::cerr << "fedshard: " << e.what() << "\n";
    return static_cast<int>(fedshard::base::ExitStatus::failed);
  }
}
