#include "fedshard/comm/plain_words.h"

#include <string_view>

namespace fedshard::comm {

std::string plain_words(const std::exception& error) {
  std::string_view text = error.what();
  text = text.substr(0, text.find('\n'));
  text = text.substr(0, text.find(" This is typically caused by"));
  if (text.starts_with('[')) {
    const std::size_t end = text.find("] ");
    const bool is_position = end != std::string_view::npos && text.substr(0, end).find(".c") != std::string_view::npos;
    if (is_position) text.remove_prefix(end + 2);
  }
  while (text.ends_with('.') || text.ends_with(' ')) text.remove_suffix(1);
  return std::string(text);
}

}  // namespace fedshard::comm
