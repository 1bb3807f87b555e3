// Cuts a text into the pieces inside which BPE merges: the `pre_tokenizer` of a tokenizer file as a chain of stages.
// Surprising: pieces stay raw bytes. The package maps every byte to a printable character here; fedshard maps the
// vocabulary back to bytes instead, once, when it is loaded.
#pragma once
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "fedshard/data/pattern.h"

namespace fedshard::data {

class PreTokenizer {
 public:
  // Adds a stage that makes every match of `pattern` a piece of its own, and every stretch between two matches one.
  void add_split(Pattern pattern) { stages_.push_back({std::move(pattern)}); }

  // Adds a stage that puts a space before every piece that does not begin with one.
  void add_prefix_space() { stages_.push_back({std::nullopt}); }

  // Calls `emit(std::string_view)` for each piece of `text` in order; none is empty. A piece is valid in the call only.
  template <class Emit>
  void split(std::string_view text, const Emit& emit) const {
    run(0, text, emit);
  }

 private:
  struct Stage {
    std::optional<Pattern> pattern;  // none: the prefix space
  };

  template <class Emit>
  void run(std::size_t stage, std::string_view piece, const Emit& emit) const {
    if (piece.empty()) return;
    if (stage == stages_.size()) return emit(piece);
    const std::optional<Pattern>& pattern = stages_[stage].pattern;
    if (!pattern) {
      if (piece.front() == ' ') return run(stage + 1, piece, emit);
      return run(stage + 1, " " + std::string(piece), emit);
    }
    std::size_t done = 0;
    Match match{};
    for (std::size_t from = 0; from <= piece.size() && pattern->find(piece, from, match);) {
      run(stage + 1, piece.substr(done, match.begin - done), emit);
      run(stage + 1, piece.substr(match.begin, match.end - match.begin), emit);
      done = match.end;
      from = match.end;
      if (match.end == match.begin) {  // go on behind the next character
        ++from;
        while (from < piece.size() && (static_cast<unsigned char>(piece[from]) & 0xC0) == 0x80) ++from;
      }
    }
    run(stage + 1, piece.substr(done), emit);
  }

  std::vector<Stage> stages_;
};

}  // namespace fedshard::data
