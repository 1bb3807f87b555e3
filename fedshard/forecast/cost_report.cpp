#include "fedshard/forecast/cost_report.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <nlohmann/json.hpp>

#include "fedshard/base/quantities.h"

namespace fedshard::forecast {
namespace {

using cost::Fraction;
using cost::Sum;
using cost::Tally;
using cost::Tier;
using cost::Use;
using Json = nlohmann::ordered_json;

constexpr Use kAllUses[] = {Use::gather, Use::reduce, Use::replica, Use::aggregate};
constexpr Tier kAllTiers[] = {Tier::node, Tier::cell, Tier::between_cells};

std::string human(std::int64_t bytes) { return base::human(base::Bytes{bytes}); }

std::string human(const std::optional<Fraction>& bytes) {
  return bytes ? human(static_cast<std::int64_t>(bytes->value())) : "?";
}

const char* label_of(Tier tier) {
  constexpr const char* kLabels[] = {"inside a node", "inside a cell", "between cells"};
  return kLabels[static_cast<int>(tier)];
}

bool has_tiers(const cost::Setting& setting) { return setting.placement.ranks_per_node > 0; }

// What all ranks send, by purpose and by where it goes.
std::string table_of(const char* title, const Tally& tally, bool tiers) {
  std::string text = fmt::format("\n{:<22}{:>12}{:>24}{:>16}\n", title, "", "bytes, all ranks", "messages");
  const auto row = [&](const std::string& label, const Sum& sum) {
    text += fmt::format("  {:<20}{:>12}{:>24}{:>16}\n", label, human(sum.bytes), sum.bytes, sum.messages);
  };
  for (const Use use : kAllUses) {
    if (tally.total(use).messages > 0) row(cost::name_of(use), tally.total(use));
  }
  for (const Tier tier : kAllTiers) {
    if (tiers && tally.total(tier).messages > 0) row(label_of(tier), tally.total(tier));
  }
  row("all", tally.total());
  return text;
}

std::string most_line(const char* what, const Tally& tally, bool tiers) {
  std::string text =
      fmt::format("{:<22}{} in {} messages", what, human(tally.most_of_a_rank()), tally.most_messages_of_a_rank());
  if (tiers) {
    text += fmt::format("; {} leave a node, {} go between two cells", human(tally.most_out_of_a_node()),
                        human(tally.most_between_two_cells()));
  }
  return text + "\n";
}

std::string rounds_text(const CostReport& report) {
  const cost::Summary& summary = report.summary;
  const bool tiers = has_tiers(report.setting);
  std::string text = table_of("the end of a round", summary.round, tiers);
  text += most_line("  a rank, at most", summary.round, tiers);
  text += fmt::format("  {:<20}{} a rank", "of each step", human(summary.aggregate_per_step()));
  text += summary.steps ? fmt::format(", a round being {} steps\n", *summary.steps)
                        : fmt::format(": with rounds of {}, only the run shows\n", plan::describe(report.setting.pace));
  return text;
}

std::string crossing_text(const CostReport& report) {
  const cost::Summary& summary = report.summary;
  const auto ratio = summary.ratio_to_flat();
  std::string text = fmt::format("\nbetween groups{}\n", report.setting.view_group > 0
                                                             ? fmt::format(" of {} ranks", report.setting.view_group)
                                                             : std::string());
  text += fmt::format("  {:<20}{} a step\n", "this layout", human(summary.crossing_per_step()));
  text += fmt::format("  {:<20}{} a step; no order of its ranks needs less than {}\n", "FSDP over all ranks",
                      human(summary.flat.between_groups()), human(summary.flat_lower_bound));
  if (ratio) text += fmt::format("  {:<20}{} = {:.4g}\n", "ratio", ratio->text(), ratio->value());
  return text;
}

std::string batch_text(const CostReport& report) {
  const cost::Summary& summary = report.summary;
  const std::int64_t tokens = report.setting.seq_len;
  const auto said = [&](std::int64_t sequences) {
    return fmt::format("{} sequences, {} tokens", sequences,
                       base::human_count(static_cast<double>(sequences * tokens)));
  };
  std::vector<std::int64_t> updates = summary.sequences;
  if (report.setting.layout.equal_groups()) updates.resize(1);
  std::string text = "\nbatch\n";
  for (std::size_t group = 0; group < updates.size(); ++group) {
    text += fmt::format("  {:<20}{}\n", updates.size() == 1 ? "of an update" : fmt::format("update of group {}", group),
                        said(updates[group]));
  }
  if (report.setting.layout.groups() > 1 && summary.round_sequences) {
    text += fmt::format("  {:<20}{}\n", "of a round", said(*summary.round_sequences));
  }
  return text;
}

Json json_of(const Sum& sum) { return {{"bytes", sum.bytes}, {"messages", sum.messages}}; }

Json json_of(const std::optional<Fraction>& fraction) { return fraction ? Json(fraction->text()) : Json(nullptr); }

Json json_of(const Tally& tally) {
  Json uses, tiers;
  for (const Use use : kAllUses) uses[cost::name_of(use)] = json_of(tally.total(use));
  for (const Tier tier : kAllTiers) tiers[cost::name_of(tier)] = json_of(tally.total(tier));
  return {{"all", json_of(tally.total())},
          {"purpose", uses},
          {"tier", tiers},
          {"between_groups", tally.between_groups()},
          {"rank_bytes", tally.most_of_a_rank()},
          {"rank_messages", tally.most_messages_of_a_rank()},
          {"node_egress", tally.most_out_of_a_node()},
          {"cell_pair", tally.most_between_two_cells()}};
}

Json json_of(const topology::Layout& layout) {
  Json groups = Json::array(), shards = Json::array(), replicas = Json::array();
  for (const topology::GroupShape& group : layout.shapes()) {
    groups.push_back(group.ranks);
    shards.push_back(group.shards);
    replicas.push_back(group.replicas);
  }
  return {{"strategy", layout.strategy()},
          {"ranks", layout.world()},
          {"groups", groups},
          {"shards", shards},
          {"replicas", replicas}};
}

Json json_of(const plan::MemoryTable& memory) {
  Json json;
  for (const plan::MemoryRow& row : memory.rows) json[plan::name_of(row.purpose)] = row.bytes;
  json["peak"] = memory.peak;
  json["host"] = memory.host_total();
  return json;
}

Json json_of(const cost::Bytes& bytes) {
  return {{"gather", bytes.gather},        {"reduce", bytes.reduce},
          {"replica", bytes.replica},      {"aggregate", bytes.aggregate_inside + bytes.aggregate_between},
          {"intra_group", bytes.inside()}, {"inter_group", bytes.between()}};
}

}  // namespace

std::string text_of(const CostReport& report) {
  const cost::Setting& setting = report.setting;
  const cost::Summary& summary = report.summary;
  const bool tiers = has_tiers(setting);
  std::string text = fmt::format("{}, {} parameters in {} units\n", setting.layout.describe(), setting.plan.numel(),
                                 setting.plan.units.size());
  text += table_of("a step", summary.step, tiers);
  text += most_line("  a rank, at most", summary.step, tiers);
  text += fmt::format("  {:<20}{}\n", "collectives a rank", summary.collectives);
  if (setting.layout.groups() > 1) text += rounds_text(report);
  text += crossing_text(report) + batch_text(report);
  if (report.run) {
    text += fmt::format("\nall steps and rounds of the run, without evaluations\n  {:<20}{}\n  {:<20}{}\n",
                        "inside groups", human(report.run->inside()), "between groups", human(report.run->between()));
  }
  if (report.memory) text += "\nmemory of a rank\n" + plan::describe(*report.memory);
  return text;
}

std::string json_of(const CostReport& report) {
  const cost::Setting& setting = report.setting;
  const cost::Summary& summary = report.summary;
  Json json = json_of(setting.layout);
  json["params"] = setting.plan.numel();
  json["units"] = setting.plan.units.size();
  json["algorithm"] = setting.algorithm == cost::Algorithm::ring ? "ring" : "recursive";
  json["scheme"] = topology::name_of(setting.traffic.exchange.scheme);
  json["every"] = summary.steps ? Json(*summary.steps) : Json(nullptr);
  json["train_sent"] = summary.step.most_of_a_rank();
  json["train_msgs"] = summary.step.most_messages_of_a_rank();
  json["shard_sent"] = summary.step.most_of_a_rank({Use::gather, Use::reduce});
  json["replica_sent"] = summary.step.most_of_a_rank({Use::replica});
  json["colls"] = summary.collectives;
  json["agg_sent"] = json["agg_sent_max"] = summary.round.most_of_a_rank();
  json["agg_msgs"] = summary.round.most_messages_of_a_rank();
  json["agg_total"] = summary.round.total().bytes;
  json["agg_cross"] = summary.round.between_groups();
  json["agg_per_step"] = json_of(summary.aggregate_per_step());
  json["node_egress"] = summary.step.most_out_of_a_node();
  json["agg_node_egress"] = summary.round.most_out_of_a_node();
  json["step_cross"] = json["fl"] = json_of(summary.crossing_per_step());
  json["flat"] = summary.flat.between_groups();
  json["flat_lower_bound"] = summary.flat_lower_bound;
  json["ratio"] = json_of(summary.ratio_to_flat());
  json["batch_update"] = summary.sequences;
  json["batch_round"] = summary.round_sequences ? Json(*summary.round_sequences) : Json(nullptr);
  json["tokens_per_sequence"] = setting.seq_len;
  json["step"] = json_of(summary.step);
  json["round"] = json_of(summary.round);
  if (report.run) json["run"] = json_of(*report.run);
  if (report.memory) json["memory"] = json_of(*report.memory);
  return json.dump(2) + "\n";
}

}  // namespace fedshard::forecast
