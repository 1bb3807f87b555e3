// Linked into every unit test program that uses torch: seeds its random numbers before each test. Without it C++ takes
// a seed from the system, and a test that fails once in a thousand draws fails once in a thousand runs. Tests compute
// with one thread: on their few numbers a second one costs ten times what it brings.
#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

namespace {

class Seeder : public testing::EmptyTestEventListener {
  void OnTestStart(const testing::TestInfo&) override {
    at::manual_seed(1234);
    at::set_num_threads(1);
  }
};

// The list owns its listeners. It exists before main does.
[[maybe_unused]] const bool registered = [] {
  testing::UnitTest::GetInstance()->listeners().Append(new Seeder);
  return true;
}();

}  // namespace
