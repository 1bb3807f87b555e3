#include "fedshard/data/pattern.h"

#include <pcre2.h>

#include <cctype>
#include <limits>
#include <vector>

#include "fedshard/base/error.h"
#include "fedshard/data/unicode_additions.h"

namespace fedshard::data {
namespace {

constexpr std::size_t kFirstJitStack = 32 << 10;
constexpr std::size_t kLargestJitStack = 64 << 20;

// The members of \p{category} as class content; empty for a category that is not supported.
std::string category_content(std::string_view category) {
  static constexpr std::string_view kKnown[] = {"L", "Lu", "Ll", "Lt", "Lm", "Lo", "M",
                                                "N", "Nd", "Nl", "No", "P",  "S"};
  std::string content;
  for (const std::string_view known : kKnown) {
    if (known != category) continue;
    content = fmt::format("\\p{{{}}}", category);
    for (const CategoryAddition& addition : kCategoryAdditions) {
      if (addition.category.starts_with(category)) content += addition.ranges;
    }
  }
  return content;
}

// Walks an Oniguruma pattern once from left to right.
class Translator {
 public:
  Translator(std::string_view pattern, const std::string& file) : pattern_(pattern), file_(file) {}

  std::string run() {
    while (at_ < pattern_.size()) {
      const char c = pattern_[at_];
      if (c == '\\') {
        escape(false);
      } else if (c == '[') {
        character_class();
      } else if (c == '(') {
        open_group();
      } else if (c == ')') {
        if (!caseless_.empty()) caseless_.pop_back();  // PCRE2 reports one too many
        copy(1);
      } else if (c == '{') {
        repeat();
      } else if (c == '.' || c == '^' || c == '$') {
        refuse(1);
      } else {
        copy(1);
      }
    }
    return std::move(out_);
  }

 private:
  void copy(std::size_t n) {
    out_ += pattern_.substr(at_, n);
    at_ += n;
  }

  [[noreturn]] void refuse(std::size_t n) const {
    base::fail<base::UsageError>("{}: the pattern {} has \"{}\" at byte {}, which fedshard does not support", file_,
                                 pattern_, pattern_.substr(at_, n), at_);
  }

  void escape(bool in_class) {
    const char c = at_ + 1 < pattern_.size() ? pattern_[at_ + 1] : '\0';
    const bool negated = c == 'S' || c == 'D' || c == 'P';
    if (c == 's' || c == 'S' || c == 'd' || c == 'D') {
      if (in_class && negated) refuse(2);
      at_ += 2;
      write_set(c == 's' || c == 'S' ? std::string(kWhiteSpace) : category_content("Nd"), negated, in_class);
    } else if (c == 'p' || c == 'P') {
      const std::size_t close = pattern_.find('}', at_);
      if (at_ + 2 >= pattern_.size() || pattern_[at_ + 2] != '{' || close == std::string_view::npos) refuse(2);
      const std::size_t length = close + 1 - at_;
      const std::string content = category_content(pattern_.substr(at_ + 3, length - 4));
      const bool caseless = !caseless_.empty() && caseless_.back();  // where the libraries disagree about \p{Lu}
      if (content.empty() || caseless || (in_class && negated)) refuse(length);
      at_ += length;
      write_set(content, negated, in_class);
    } else if (c == 'r' || c == 'n' || c == 't' || c == 'f' || std::ispunct(static_cast<unsigned char>(c)) != 0) {
      copy(2);
    } else {
      refuse(2);
    }
  }

  void write_set(const std::string& content, bool negated, bool in_class) {
    out_ += in_class ? content : fmt::format("[{}{}]", negated ? "^" : "", content);
  }

  void character_class() {
    copy(1);
    if (at_ < pattern_.size() && pattern_[at_] == '^') copy(1);
    const std::size_t first = at_;
    while (at_ < pattern_.size() && (pattern_[at_] != ']' || at_ == first)) {
      const char c = pattern_[at_];
      // Oniguruma reads these as a nested class, an intersection, and (first in a class) an empty class.
      if (c == '[' || c == ']') refuse(1);
      if (pattern_.substr(at_, 2) == "&&") refuse(2);
      if (c == '\\') {
        escape(true);
      } else {
        copy(1);
      }
    }
    if (at_ == pattern_.size()) base::fail<base::UsageError>("{}: the pattern {} lacks a \"]\"", file_, pattern_);
    copy(1);
  }

  void open_group() {
    const std::string_view rest = pattern_.substr(at_);
    const bool outer = !caseless_.empty() && caseless_.back();
    for (const std::string_view start : {"(?:", "(?=", "(?!", "(?>", "(?i:"}) {
      if (!rest.starts_with(start)) continue;
      caseless_.push_back(outer || start == "(?i:");
      return copy(start.size());
    }
    if (rest.starts_with("(?") || rest.starts_with("(*")) refuse(3);
    caseless_.push_back(outer);
    copy(1);
  }

  // {n}, {n,} and {n,m}. Ruby's syntax reads a + or ? behind them as a second quantifier, Perl's as a mode.
  void repeat() {
    std::size_t end = at_ + 1;
    while (end < pattern_.size() &&
           (std::isdigit(static_cast<unsigned char>(pattern_[end])) != 0 || (pattern_[end] == ',' && end > at_ + 1))) {
      ++end;
    }
    if (end == at_ + 1 || end >= pattern_.size() || pattern_[end] != '}') refuse(end - at_ + 1);
    if (end + 1 < pattern_.size() && (pattern_[end + 1] == '+' || pattern_[end + 1] == '?')) refuse(end + 2 - at_);
    copy(end + 1 - at_);
  }

  std::string_view pattern_;
  const std::string& file_;
  std::size_t at_ = 0;
  std::string out_;
  std::vector<bool> caseless_;  // of each open group
};

std::string message_of(int error) {
  PCRE2_UCHAR text[256];
  pcre2_get_error_message(error, text, sizeof(text));
  return reinterpret_cast<const char*>(text);
}

}  // namespace

std::string pcre2_of_oniguruma(std::string_view pattern, const std::string& file) {
  return Translator(pattern, file).run();
}

std::string pcre2_of_literal(std::string_view text) {
  std::string pattern;
  for (const char c : text) {
    if (std::ispunct(static_cast<unsigned char>(c)) != 0) pattern += '\\';
    pattern += c;
  }
  return pattern;
}

Pattern::Pattern(const std::string& pcre2, const std::string& file) : file_(file) {
  int error = 0;
  PCRE2_SIZE offset = 0;
  code_.reset(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pcre2.data()), pcre2.size(),
                            PCRE2_UTF | PCRE2_UCP | PCRE2_MATCH_INVALID_UTF, &error, &offset, nullptr));
  if (code_ == nullptr) {
    base::fail<base::UsageError>("{}: PCRE2 cannot compile the pattern {} (at byte {}): {}", file, pcre2, offset,
                                 message_of(error));
  }
  // Without JIT every search would validate the whole rest of the text again.
  if (const int rc = pcre2_jit_compile(code_.get(), PCRE2_JIT_COMPLETE); rc != 0) {
    base::fail<base::RunError>("PCRE2 cannot compile to machine code ({}); install a PCRE2 built with JIT support",
                               message_of(rc));
  }
  data_.reset(pcre2_match_data_create_from_pattern(code_.get(), nullptr));
  stack_.reset(pcre2_jit_stack_create(kFirstJitStack, kLargestJitStack, nullptr));
  context_.reset(pcre2_match_context_create(nullptr));
  base::require(data_ != nullptr && stack_ != nullptr && context_ != nullptr, "no memory for matching");
  // A run of a hundred million spaces is backtracked into once a character.
  pcre2_set_match_limit(context_.get(), std::numeric_limits<std::uint32_t>::max());
  pcre2_jit_stack_assign(context_.get(), nullptr, stack_.get());
}

bool Pattern::find(std::string_view subject, std::size_t from, Match& match) const {
  const int rc = pcre2_match(code_.get(), reinterpret_cast<PCRE2_SPTR>(subject.data()), subject.size(), from, 0,
                             data_.get(), context_.get());
  if (rc == PCRE2_ERROR_NOMATCH) return false;
  if (rc < 0) {
    base::fail<base::RunError>("{}: matching its pattern at byte {} of a text of {} bytes failed: {}", file_, from,
                               subject.size(), message_of(rc));
  }
  const PCRE2_SIZE* const offsets = pcre2_get_ovector_pointer(data_.get());
  match = {offsets[0], offsets[1]};
  return true;
}

void Pattern::Free::operator()(pcre2_real_code_8* p) const { pcre2_code_free(p); }
void Pattern::Free::operator()(pcre2_real_match_data_8* p) const { pcre2_match_data_free(p); }
void Pattern::Free::operator()(pcre2_real_match_context_8* p) const { pcre2_match_context_free(p); }
void Pattern::Free::operator()(pcre2_real_jit_stack_8* p) const { pcre2_jit_stack_free(p); }

}  // namespace fedshard::data
