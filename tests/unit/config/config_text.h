// Configs from text, for tests: loaded, or refused with a message.
#pragma once
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <functional>

#include "fedshard/base/error.h"
#include "fedshard/base/file.h"
#include "fedshard/config/config.h"

namespace fedshard::config {

inline const std::string smallest = "[model]\npreset = \"llama-tiny\"\n[data]\ntrain = \"a.txt\"\n";

inline std::filesystem::path written(const std::string& text, const std::string& name = "run.toml") {
  const auto folder = std::filesystem::path(testing::TempDir()) / fmt::format("fedshard-config-{}", ::getpid());
  std::filesystem::create_directories(folder);
  base::write_file_atomically(folder / name, text);
  return folder / name;
}

inline Config load(const std::string& text, const std::vector<std::string>& overrides = {}) {
  return load_config(written(text), overrides);
}

// The message of the UsageError that `act` ends in, without the scratch folder.
inline std::string refusal_of(const std::function<void()>& act) {
  try {
    act();
  } catch (const base::UsageError& e) {
    const std::string message = e.what();
    const auto at = message.find("run.toml");
    return at == std::string::npos ? message : message.substr(at);
  }
  ADD_FAILURE() << "was accepted";
  return "";
}
inline std::string refusal(const std::string& text, const std::vector<std::string>& overrides = {}) {
  return refusal_of([&] { load(text, overrides); });
}
inline std::string refusal_to_run(const std::string& text, int world) {
  const auto config = load(text);
  return refusal_of([&] { validate(config, world); });
}

}  // namespace fedshard::config
