// The regular expressions of tokenizer files, matched with PCRE2's JIT compiler.
// Surprising: the files' patterns are written for Oniguruma, so each is translated. What the two libraries understand
// alike is kept, \s, \d and \p{..} are written out so that they match what Oniguruma matches, and the rest is refused.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

// PCRE2's types, so that its header stays in the source file.
extern "C" {
struct pcre2_real_code_8;
struct pcre2_real_match_data_8;
struct pcre2_real_match_context_8;
struct pcre2_real_jit_stack_8;
}

namespace fedshard::data {

// The PCRE2 pattern (for PCRE2_UTF | PCRE2_UCP) that matches what Oniguruma's `pattern` matches. Throws UsageError that
// names `file`, the pattern and the part that is not supported: back references, anchors, \w, \b, \h, nested classes,
// look-behind, possessive or lazy {n,m}, categories other than L, Lu, Ll, Lt, Lm, Lo, M, N, Nd, Nl, No, P, S.
// Not reproduced: case folds of several characters, as of Oniguruma's (?i:ss) for U+00DF.
std::string pcre2_of_oniguruma(std::string_view pattern, const std::string& file);

// A PCRE2 pattern that matches exactly `text`.
std::string pcre2_of_literal(std::string_view text);

struct Match {
  std::size_t begin;
  std::size_t end;  // one past the last byte
};

// One compiled pattern. Not safe for use by two threads at a time.
class Pattern {
 public:
  // `pcre2` in PCRE2's syntax; `file` is named in errors (UsageError). Throws RunError where PCRE2 has no JIT compiler.
  Pattern(const std::string& pcre2, const std::string& file);

  // The first match that begins at or after byte `from`; false where there is none. Bytes of `subject` that are not
  // valid UTF-8 match nothing and end what a match may see.
  bool find(std::string_view subject, std::size_t from, Match& match) const;

 private:
  struct Free {
    void operator()(pcre2_real_code_8* p) const;
    void operator()(pcre2_real_match_data_8* p) const;
    void operator()(pcre2_real_match_context_8* p) const;
    void operator()(pcre2_real_jit_stack_8* p) const;
  };
  std::string file_;
  std::unique_ptr<pcre2_real_code_8, Free> code_;
  std::unique_ptr<pcre2_real_match_data_8, Free> data_;
  std::unique_ptr<pcre2_real_jit_stack_8, Free> stack_;
  std::unique_ptr<pcre2_real_match_context_8, Free> context_;
};

}  // namespace fedshard::data
