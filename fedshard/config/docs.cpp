// docs/configuration.md from the table of keys. A test compares the file with this text.
#include <fmt/format.h>

#include "fedshard/config/keys.h"

namespace fedshard::config {
namespace {

constexpr const char* introduction = R"(# Configuration

<!-- Made from fedshard/config/keys.cpp; edit there. The tests say how to make it anew. -->

`fedshard train CONFIG` reads one [TOML](https://toml.io) file. Names are torchtitan's where the meaning is the same.
A smallest one:

```toml
[model]
preset = "llama-tiny"

[data]
train = "text/*.txt"
```

- `--set table.key=value` replaces or adds a key, as often as you like; the last one counts. The value is TOML; text may
  go without its quotes: `--set training.steps=200 --set optimizer.name=sgd --set 'parallelism.groups=[2, 2]'`.
- A key or table that does not exist is an error, and so are a wrong type, a value out of range, a key given twice, and a
  key that has no meaning beside the others (`beta1` with `sgd`). All of it is checked before any rank starts.
- A float may be written as an integer (`lr = 1`), an integer not as a float (`steps = 1e3` is refused).
- `[[table.key]]` begins one table of a list of them. On the command line the list is given whole:
  `--set 'optimizer.group=[{params = "*norm*", lr_factor = 0.5}]'`.
- Relative paths start from the folder that `fedshard` is started in, not from the file's, in the file as on the command
  line.
- The run folder gets the resolved configuration as `config.toml`: every key that has a value, defaults among
  them. It is a configuration like any other: with the same number of ranks,
  `fedshard train runs/x/config.toml --ranks N --set metrics.folder=runs/y` repeats a run.
)";

// A cell of a Markdown table must not hold a bar.
std::string cell(const std::string& text) {
  std::string escaped;
  for (const char c : text) escaped += c == '|' ? std::string("\\|") : std::string(1, c);
  return escaped;
}

std::string default_of(const Key& key) {
  if (!key.fallback.empty()) return "`" + key.fallback + "`";
  return key.table == "model" && key.name != "preset" && key.name != "hf" ? "the model's" : "none";
}

std::string row(const Key& key) {
  std::string type = key.type;
  if (!key.allowed.empty()) type += ": " + key.allowed;
  const std::string condition = key.applies_when.empty() ? "" : fmt::format(" Only where `{}`.", key.applies_when);
  return fmt::format("| `{}` | {} | {} | {} |\n", key.name, cell(type), cell(default_of(key)),
                     cell(key.doc + condition));
}

}  // namespace

std::string configuration_page() {
  std::string page = introduction;
  for (const auto& table : tables()) {
    page += fmt::format("\n## {}\n\n{}\n\n| key | type | default | meaning |\n|---|---|---|---|\n",
                        heading_of(table.name), table.doc);
    for (const auto& key : keys()) {
      if (key.table == table.name) page += row(key);
    }
  }
  return page;
}

}  // namespace fedshard::config
