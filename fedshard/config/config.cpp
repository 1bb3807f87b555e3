#include "fedshard/config/config.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <string_view>

#include "fedshard/base/error.h"
#include "fedshard/base/file.h"
#include "fedshard/config/keys.h"

namespace fedshard::config {
namespace {

using base::fail;
using base::UsageError;

// Edits (insert, delete, replace, swap of neighbours) that make one word from the other.
std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::vector<std::size_t>> d(a.size() + 1, std::vector<std::size_t>(b.size() + 1));
  for (std::size_t i = 0; i <= a.size(); ++i) d[i][0] = i;
  for (std::size_t j = 0; j <= b.size(); ++j) d[0][j] = j;
  for (std::size_t i = 1; i <= a.size(); ++i) {
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t replaced = d[i - 1][j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1);
      d[i][j] = std::min({d[i - 1][j] + 1, d[i][j - 1] + 1, replaced});
      const bool swapped = i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1];
      if (swapped) d[i][j] = std::min(d[i][j], d[i - 2][j - 2] + 1);
    }
  }
  return d[a.size()][b.size()];
}

// The known name that was probably meant, or nothing where none is near. A part of a name is near (`batch_size`).
std::string nearest(std::string_view name, const std::vector<std::string>& known) {
  std::string best;
  std::size_t least = std::string::npos;
  for (const auto& candidate : known) {
    const bool part = name.size() >= 3 && candidate.find(name) != std::string::npos;
    const std::size_t edits = part ? 1 : edit_distance(name, candidate);
    if (edits < least && 3 * edits <= std::max(name.size(), candidate.size())) {
      best = candidate;
      least = edits;
    }
  }
  return best;
}

std::vector<std::string> names_of_tables() {
  std::vector<std::string> names;
  for (const auto& table : tables()) {
    if (!table.resize) names.push_back(table.name);
  }
  return names;
}

// Null where `table` has no array of tables under that name.
const TableOfKeys* find_array(std::string_view table, std::string_view name) {
  for (const auto& array : tables()) {
    if (array.resize && array.name == fmt::format("{}.{}", table, name)) return &array;
  }
  return nullptr;
}

std::vector<std::string> names_of_keys(std::string_view table) {
  std::vector<std::string> names;
  for (const auto& key : keys()) {
    if (key.table == table) names.push_back(key.name);
  }
  for (const auto& array : tables()) {
    if (array.resize && array.name.starts_with(fmt::format("{}.", table))) {
      names.push_back(array.name.substr(table.size() + 1));
    }
  }
  return names;
}

// Tables that have a key of this name: the key may just stand in the wrong one.
std::vector<std::string> tables_with(std::string_view name) {
  std::vector<std::string> found;
  for (const auto& key : keys()) {
    if (key.name == name) found.push_back(heading_of(key.table));
  }
  return found;
}

void require_table(const std::string& source, std::string_view table) {
  const auto known = names_of_tables();
  if (std::find(known.begin(), known.end(), table) != known.end()) return;
  const std::string meant = nearest(table, known);
  const auto owners = tables_with(table);
  if (!owners.empty()) {
    fail<UsageError>("{}: '{}' is not a table but a key; it belongs to {}", source, table, fmt::join(owners, " or "));
  }
  if (!meant.empty()) fail<UsageError>("{}: there is no table [{}]; did you mean [{}]?", source, table, meant);
  fail<UsageError>("{}: there is no table [{}]; the tables are {}", source, table, fmt::join(known, ", "));
}

// `table` exists; it may be an array of tables.
const Key& find_key(const std::string& source, std::string_view table, std::string_view name) {
  for (const auto& key : keys()) {
    if (key.table == table && key.name == name) return key;
  }
  const auto known = names_of_keys(table);
  const std::string meant = nearest(name, known);
  const auto owners = tables_with(name);
  const std::string heading = heading_of(std::string(table));
  if (!owners.empty()) {
    fail<UsageError>("{}: {} has no key '{}'; it belongs to {}", source, heading, name, fmt::join(owners, " or "));
  }
  if (!meant.empty()) fail<UsageError>("{}: {} has no key '{}'; did you mean '{}'?", source, heading, name, meant);
  fail<UsageError>("{}: {} has no key '{}'; its keys are {}", source, heading, name, fmt::join(known, ", "));
}

// What is usual for the optimizer where the user said nothing.
void fill_in_momentum(OptimizerConfig& optimizer) {
  if (optimizer.name == OptimizerName::adamw) return;
  const bool muon = optimizer.name == OptimizerName::muon;
  if (!optimizer.momentum) optimizer.momentum = muon ? 0.95 : 0.0;
  if (!optimizer.nesterov) optimizer.nesterov = muon;
}

// The same for the outer optimizer; of what it has no use for nothing is set.
void fill_in_outer(FederationConfig& federation) {
  const plan::OuterOptions usual = plan::usual_options(federation.outer);
  const bool adaptive = plan::outer_moments_of(federation.outer) == 2;
  const auto fill = [](std::optional<double>& value, double fallback, bool has_meaning) {
    if (has_meaning && !value) value = fallback;
  };
  fill(federation.outer_lr, usual.lr, true);
  fill(federation.outer_momentum, usual.momentum, plan::outer_moments_of(federation.outer) == 1);
  fill(federation.outer_beta1, usual.beta1, adaptive);
  fill(federation.outer_beta2, usual.beta2, adaptive && federation.outer != plan::Outer::fedadagrad);
  fill(federation.outer_tau, usual.tau, adaptive);
}

// The same for compression.
void fill_in_compression(FederationConfig& federation) {
  const plan::Compression usual = plan::usual_compression(federation.compress);
  if (plan::has_blocks(federation.compress) && !federation.block) federation.block = usual.block;
  if (federation.compress == plan::Compression::Kind::topk && !federation.top_k) federation.top_k = usual.top_k;
}

// A config while it is read, and where each key was given.
class Reader {
 public:
  void read_file(const std::filesystem::path& path) {
    const std::string file = path.string();
    const std::string text = base::read_file(path);
    const toml::table root = parse_toml(text, file);
    const auto where = [&](const toml::node& node) { return fmt::format("{}:{}", file, node.source().begin.line); };
    for (const auto& [table, content] : root) {
      require_table(where(content), table.str());
      if (!content.is_table())
        fail<UsageError>("{}: '{}' is a table, write [{}]", where(content), table.str(), table.str());
      for (const auto& [name, node] : *content.as_table()) {
        if (const TableOfKeys* array = find_array(table.str(), name.str())) {
          read_array(*array, node, where);
        } else {
          read(find_key(where(node), table.str(), name.str()), node, where(node));
        }
      }
    }
  }

  void read_override(const std::string& text) {
    const std::string source = "--set " + text;
    const auto equals = text.find('=');
    const auto dot = text.find('.');
    if (equals == std::string::npos || dot == std::string::npos || dot > equals) {
      fail<UsageError>("{}: an override is written table.key=value", source);
    }
    const std::string table = text.substr(0, dot), name = text.substr(dot + 1, equals - dot - 1);
    const std::string value = text.substr(equals + 1);
    require_table(source, table);
    if (const TableOfKeys* array = find_array(table, name)) {
      read_override_array(*array, value, source);
    } else {
      read_override_value(find_key(source, table, name), value, source);
    }
  }

  Config finish() {
    for (const auto& key : keys()) {
      const auto given = given_at_.find(&key);
      if (given == given_at_.end() || key.applies(config_)) continue;
      fail<UsageError>("{}: {} has a meaning only with {}; remove it", given->second, key.full_name(),
                       key.applies_when);
    }
    fill_in_momentum(config_.optimizer);
    fill_in_outer(config_.federation);
    fill_in_compression(config_.federation);
    return config_;
  }

 private:
  void read(const Key& key, const toml::node& node, const std::string& source) {
    key.read(config_, node, {source, key.full_name()});
    given_at_[&key] = source;
  }

  // Replaces all tables of the array. `where` says where a node stands.
  void read_array(const TableOfKeys& array, const toml::node& node,
                  const std::function<std::string(const toml::node&)>& where) {
    const std::string name = array.name.substr(array.name.find('.') + 1);
    const toml::array* list = node.as_array();
    if (list == nullptr || !(list->empty() || list->is_homogeneous(toml::node_type::table))) {
      fail<UsageError>("{}: '{}' is a list of tables, write {}", where(node), name, heading_of(array.name));
    }
    array.resize(config_, 0);
    for (const toml::node& element : *list) {
      array.resize(config_, array.count(config_) + 1);
      for (const auto& [key, value] : *element.as_table()) {
        read(find_key(where(value), array.name, key.str()), value, where(value));
      }
    }
  }

  void read_override_array(const TableOfKeys& array, const std::string& value, const std::string& source) {
    const auto where = [&](const toml::node&) { return source; };
    try {
      const toml::table parsed = toml::parse("value = " + value);
      if (parsed.size() == 1) return read_array(array, *parsed.get("value"), where);
    } catch (const toml::parse_error&) {
    }
    read_array(array, toml::value<std::string>(value), where);  // says what is expected
  }

  void read_override_value(const Key& key, const std::string& value, const std::string& source) {
    const toml::value<std::string> bare(value);
    try {
      const toml::table parsed = toml::parse("value = " + value);
      const toml::node& node = *parsed.get("value");
      // `--set data.train=2024` names a file: only what is written as text or list in TOML is read as such.
      const bool as_toml = parsed.size() == 1 && (!key.takes_text || node.is_string() || node.is_array());
      read(key, as_toml ? node : bare, source);
    } catch (const toml::parse_error&) {
      read(key, bare, source);
    }
  }

  Config config_;
  std::map<const Key*, std::string> given_at_;
};

}  // namespace

Config load_config(const std::filesystem::path& path, const std::vector<std::string>& overrides) {
  Reader reader;
  reader.read_file(path);
  for (const auto& text : overrides) reader.read_override(text);
  Config config = reader.finish();
  if (config.metrics.folder.empty()) config.metrics.folder = "runs/" + path.stem().string();
  return config;
}

Config config_of(const std::vector<std::string>& overrides) {
  Reader reader;
  for (const auto& text : overrides) reader.read_override(text);
  return reader.finish();
}

std::string resolved_toml(const Config& config) {
  std::string text = "# The resolved configuration of a run: all keys that have a value, defaults among them.\n";
  for (const auto& table : tables()) {
    const std::size_t count = table.count ? table.count(config) : 1;
    for (std::size_t index = 0; index < count; ++index) {
      text += fmt::format("\n{}\n", heading_of(table.name));
      for (const auto& key : keys()) {
        if (key.table != table.name || !key.applies(config)) continue;
        const std::string value = key.write(config, index);
        if (!value.empty()) text += fmt::format("{} = {}\n", key.name, value);
      }
    }
  }
  return text;
}

}  // namespace fedshard::config
