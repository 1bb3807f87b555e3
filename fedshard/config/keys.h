// The table of keys: the one list from which configs are parsed, written and documented.
// A surprise: a key may have no meaning beside the values of others (`beta1` with sgd). Such a key is refused when it
// is given and left out when a config is written; `applies` says when it counts.
#pragma once
#include <toml++/toml.h>

#include <functional>
#include <string>
#include <vector>

#include "fedshard/config/config.h"
#include "fedshard/config/values.h"

namespace fedshard::config {

// "[optimizer]", or "[[optimizer.group]]" for an array of tables, whose name has a dot.
std::string heading_of(const std::string& table);

struct Key {
  std::string table;  // "optimizer"; of an array of tables "optimizer.group"
  std::string name;
  std::string doc;          // one sentence or two, for docs/configuration.md
  std::string type;         // for docs
  std::string allowed;      // choices or range, for docs; empty where everything goes
  std::string fallback;     // the default, for docs; empty where there is none
  bool takes_text = false;  // a bare string on the command line stands for itself
  // In an array of tables: into its last table.
  std::function<void(Config&, const toml::node&, const Place&)> read;
  // TOML, or empty where not set. `index`: of the table in an array of tables.
  std::function<std::string(const Config&, std::size_t index)> write;
  std::function<bool(const Config&)> applies;
  std::string applies_when;  // for messages and docs: "name = \"adamw\""; empty where it always counts

  std::string full_name() const { return heading_of(table) + " " + name; }
};

struct TableOfKeys {
  std::string name;
  std::string doc;
  // Of an array of tables, how many there are: read and set. Null for all others.
  std::function<std::size_t(const Config&)> count = nullptr;
  std::function<void(Config&, std::size_t)> resize = nullptr;
};

const std::vector<TableOfKeys>& tables();  // in the order of files and docs
const std::vector<Key>& keys();            // those of a table together, in the order of tables()

}  // namespace fedshard::config
