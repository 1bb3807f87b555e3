// Whether this build is under a sanitizer, which makes tests five to twenty times slower: the widest ones then take a
// part of their cases. All of them run in the release build.
#pragma once

namespace fedshard::testing_support {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

}  // namespace fedshard::testing_support
