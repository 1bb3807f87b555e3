// The table of keys: the one list from which configs are parsed, written and documented.
// A surprise: a key may have no meaning beside the values of others (`beta1` with sgd). Such a key is refused when it
// is given and left out when a config is written; `applies` says when it counts.
#pragma once
#include <toml++/toml.h>

#include <functional>
#include <string>
#include <vector>

#include "fedshard/train/config.h"
#include "fedshard/train/config_values.h"

namespace fedshard::train {

struct Key {
  std::string table;
  std::string name;
  std::string doc;          // one sentence or two, for docs/configuration.md
  std::string type;         // for docs
  std::string allowed;      // choices or range, for docs; empty where everything goes
  std::string fallback;     // the default as TOML; empty where there is none
  bool takes_text = false;  // a bare string on the command line stands for itself
  std::function<void(Config&, const toml::node&, const Place&)> read;
  std::function<std::string(const Config&)> write;  // TOML, or empty where not set
  std::function<bool(const Config&)> applies;
  std::string applies_when;  // for messages and docs: "name = \"adamw\""; empty where it always counts

  std::string full_name() const { return "[" + table + "] " + name; }
};

struct TableOfKeys {
  std::string name;
  std::string doc;
};

const std::vector<TableOfKeys>& tables();  // in the order of files and docs
const std::vector<Key>& keys();            // those of a table together, in the order of tables()

}  // namespace fedshard::train
