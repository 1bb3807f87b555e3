#include "fedshard/data/loader.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <set>
#include <vector>

#include "fedshard/data/permutation.h"
#include "tests/unit/data/scratch.h"

namespace fedshard::data {
namespace {

using base::RunError;
using base::UsageError;
using Ids = std::vector<std::int32_t>;
using Indices = std::vector<std::int64_t>;

// A token file of `tokens` ids 0, 1, 2, ... from `first`, the last of them the end-of-text id.
std::filesystem::path count_up(const std::string& name, std::int32_t first, std::int32_t tokens) {
  const auto path = scratch(name);
  TokenFileWriter writer(path, ByteTokenizer());
  Ids ids(static_cast<std::size_t>(tokens - 1));
  std::iota(ids.begin(), ids.end(), first);
  writer.add_document(ids);
  writer.finish(0);
  return path;
}

// A tokenizer with another fingerprint.
class OtherTokenizer final : public Tokenizer {
 public:
  Ids encode(std::string_view) const override { return {}; }
  std::string decode(std::span<const std::int32_t>) const override { return ""; }
  std::int64_t vocab_size() const override { return 1; }
  std::int32_t end_of_text() const override { return 0; }
  std::string fingerprint() const override { return "0123456789abcdef"; }
};

TEST(Permutation, IsABijection) {
  for (const std::int64_t n : {1, 2, 3, 4, 5, 7, 16, 17, 1000, 65537}) {
    for (const std::int64_t epoch : {0, 1, 2}) {
      const Permutation permutation(n, 42, epoch);
      std::vector<bool> seen(static_cast<std::size_t>(n));
      for (std::int64_t i = 0; i < n; ++i) {
        const std::int64_t image = permutation(i);
        ASSERT_TRUE(image >= 0 && image < n);
        ASSERT_FALSE(seen[static_cast<std::size_t>(image)]) << n;
        seen[static_cast<std::size_t>(image)] = true;
      }
    }
  }
}

TEST(Permutation, TakesBillionsOfThings) {
  const std::int64_t n = 40'000'000'007;
  const Permutation permutation(n, 3, 5);
  std::set<std::int64_t> images;
  for (std::int64_t i = 0; i < 10'000; ++i) images.insert(permutation(n - 1 - i));
  EXPECT_EQ(images.size(), 10'000u);
  EXPECT_GE(*images.begin(), 0);
  EXPECT_LT(*images.rbegin(), n);
  EXPECT_LT(*images.begin(), n / 100);
  EXPECT_GT(*images.rbegin(), n - n / 100);
}

TEST(Permutation, EveryPlaceIsEquallyLikely) {
  const int trials = 20'000;
  for (const std::int64_t n : {2, 3, 5, 7, 16, 23}) {
    for (const bool by_epoch : {false, true}) {
      std::vector<int> counts(static_cast<std::size_t>(n * n));
      for (int t = 0; t < trials; ++t) {
        const Permutation permutation(n, by_epoch ? 1 : static_cast<std::uint64_t>(t), by_epoch ? t : 0);
        for (std::int64_t i = 0; i < n; ++i) ++counts[static_cast<std::size_t>(i * n + permutation(i))];
      }
      // Chi-square with (n-1)^2 degrees of freedom, mean d and variance 2 d; 6 standard deviations.
      const double expected = static_cast<double>(trials) / static_cast<double>(n);
      double chi_square = 0;
      for (const int count : counts) chi_square += (count - expected) * (count - expected) / expected;
      const double d = static_cast<double>((n - 1) * (n - 1));
      EXPECT_LT(chi_square, d + 6 * std::sqrt(2 * d) + 6) << "n " << n << (by_epoch ? " by epoch" : " by seed");
    }
  }
}

TEST(Permutation, AllOrdersOfThreeComeUpEquallyOften) {
  std::map<Indices, int> orders;
  for (std::uint64_t seed = 0; seed < 6'000; ++seed) {
    const Permutation permutation(3, seed, 0);
    ++orders[{permutation(0), permutation(1), permutation(2)}];
  }
  EXPECT_EQ(orders.size(), 6u);
  for (const auto& [order, count] : orders) EXPECT_NEAR(count, 1'000, 200);
}

TEST(Permutation, NeighboursAreTornApart) {
  const std::int64_t n = 65'537;
  const Permutation permutation(n, 9, 0);
  int stayed_neighbours = 0;
  double distance = 0;
  for (std::int64_t i = 0; i + 1 < n; ++i) {
    const std::int64_t gap = std::abs(permutation(i) - permutation(i + 1));
    stayed_neighbours += gap == 1 ? 1 : 0;
    distance += static_cast<double>(gap) / static_cast<double>(n - 1);
  }
  EXPECT_LT(stayed_neighbours, 20);  // 2 expected
  EXPECT_NEAR(distance, static_cast<double>(n) / 3, static_cast<double>(n) / 100);
}

// Resumed runs of later versions rely on these.
TEST(Permutation, NeverChangesBetweenVersions) {
  const Permutation permutation(1000, 1234, 2);
  EXPECT_EQ((Indices{permutation(0), permutation(1), permutation(2), permutation(999)}), (Indices{245, 61, 874, 733}));
}

TEST(TokenDataset, CutsWindowsThatShareOneToken) {
  const TokenDataset dataset({count_up("a", 0, 12)}, 5);  // 12 tokens: two windows of 6, one token left over
  ASSERT_EQ(dataset.size(), 2);
  Ids out(6);
  dataset.read(0, out);
  EXPECT_EQ(out, (Ids{0, 1, 2, 3, 4, 5}));
  dataset.read(1, out);
  EXPECT_EQ(out, (Ids{5, 6, 7, 8, 9, 10}));
}

TEST(TokenDataset, CountsSequencesByTheContract) {
  for (std::int32_t tokens = 2; tokens <= 30; ++tokens) {
    const auto path = count_up("t" + std::to_string(tokens), 0, tokens);
    for (const std::int64_t seq_len : {1, 2, 3, 7}) {
      std::int64_t windows = 0;
      while (windows * seq_len + seq_len + 1 <= tokens) ++windows;
      if (windows == 0) {
        EXPECT_THROW(TokenDataset({path}, seq_len), UsageError);
      } else {
        EXPECT_EQ(TokenDataset({path}, seq_len).size(), windows) << tokens << " by " << seq_len;
      }
    }
  }
}

TEST(TokenDataset, ReadsAcrossFilesInTheGivenOrder) {
  // Streams: 10 11 E | E | 20 E | 30 31 32 E
  const auto a = count_up("a", 10, 3), empty = count_up("b", 0, 1), c = count_up("c", 20, 2), d = count_up("d", 30, 4);
  const Ids stream{10, 11, 256, 256, 20, 256, 30, 31, 32, 256};
  for (std::int64_t seq_len = 1; seq_len < 10; ++seq_len) {
    const TokenDataset dataset({a, empty, c, d}, seq_len);
    EXPECT_EQ(dataset.tokens(), 10);
    for (std::int64_t i = 0; i < dataset.size(); ++i) {
      Ids out(static_cast<std::size_t>(seq_len + 1));
      dataset.read(i, out);
      EXPECT_TRUE(std::equal(out.begin(), out.end(), stream.begin() + i * seq_len)) << seq_len << " " << i;
    }
  }
  const TokenDataset reversed({d, a}, 2);
  Ids out(3);
  reversed.read(1, out);
  EXPECT_EQ(out, (Ids{32, 256, 10}));
}

TEST(TokenDataset, RefusesWhatCannotBeTrainedOn) {
  const auto a = count_up("a", 0, 5), b = count_up("b", 0, 3);
  expect_error<UsageError>(
      [&] {
        TokenDataset({a, b}, 8);
      },
      {"8 tokens in", a.string(), b.string(), "seq_len 8 needs 9"});
  expect_error<UsageError>([&] { TokenDataset({}, 8); }, {"no data"});
  expect_error<UsageError>([&] { TokenDataset({a}, 0); }, {"seq_len is 0"});
  const auto other = scratch("other");
  TokenFileWriter writer(other, OtherTokenizer());
  writer.add_document({});
  writer.finish(0);
  expect_error<UsageError>([&] { TokenDataset({a, other}, 1); }, {other.string(), "0123456789abcdef", a.string()});
}

TEST(TokenDataset, RefusesIdsBeyondTheVocabulary) {
  const TokenDataset dataset({count_up("a", 0, 5)}, 2);
  EXPECT_EQ(dataset.max_id(), 256);
  dataset.require_vocab_size(257);
  expect_error<UsageError>([&] { dataset.require_vocab_size(256); },
                           {"/a: holds the token id 256", "vocab_size is 256"});
}

std::shared_ptr<const TokenDataset> sequences(std::int32_t n) {
  return std::make_shared<TokenDataset>(std::vector{count_up("n" + std::to_string(n), 0, 2 * n + 1)}, 2);
}

// What all ranks together take in `steps` steps.
Indices consume(const std::shared_ptr<const TokenDataset>& dataset, const std::vector<std::int64_t>& counts, int steps,
                std::int64_t& position) {
  const std::int64_t batch = std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
  Indices all;
  std::int64_t end = position;
  for (int step = 0; step < steps; ++step) {
    std::int64_t offset = 0;
    for (const std::int64_t count : counts) {
      Loader loader(dataset, 77, {batch, offset, count}, position + step * batch);
      const Indices indices = loader.indices();
      all.insert(all.end(), indices.begin(), indices.end());
      Ids out(static_cast<std::size_t>(loader.ids_per_step()));
      loader.next(out);
      for (std::int64_t i = 0; i < count; ++i) {
        EXPECT_EQ(out[static_cast<std::size_t>(3 * i)], 2 * indices[static_cast<std::size_t>(i)]);
      }
      offset += count;
      end = loader.position();
    }
  }
  position = end;
  return all;
}

TEST(Loader, EveryLayoutConsumesTheSameSequences) {
  const auto dataset = sequences(23);
  std::int64_t position = 0;
  const Indices one = consume(dataset, {12}, 4, position);
  EXPECT_EQ(position, 48);
  for (const std::vector<std::int64_t>& counts : std::vector<Indices>{{3, 3, 3, 3}, {6, 6}, {1, 11}, {5, 0, 7}}) {
    position = 0;
    EXPECT_EQ(consume(dataset, counts, 4, position), one);
  }
}

TEST(Loader, AnEpochHasEverySequenceOnceAndTheNextAnotherOrder) {
  const auto dataset = sequences(23);
  std::int64_t position = 0;
  const Indices all = consume(dataset, {4, 4}, 9, position);
  const Indices first(all.begin(), all.begin() + 23), second(all.begin() + 23, all.begin() + 46);
  EXPECT_EQ(std::set(first.begin(), first.end()).size(), 23u);
  EXPECT_EQ(std::set(second.begin(), second.end()).size(), 23u);
  EXPECT_NE(first, second);
}

TEST(Loader, AStepLargerThanTheDataRunsOverIntoTheNextEpochs) {
  const auto dataset = sequences(3);
  std::int64_t position = 0;
  const Indices all = consume(dataset, {4, 4}, 3, position);
  std::map<std::int64_t, int> times;
  for (const std::int64_t index : all) ++times[index];
  EXPECT_EQ(times, (std::map<std::int64_t, int>{{0, 8}, {1, 8}, {2, 8}}));
}

TEST(Loader, AChangeOfTheDealingRepeatsAndSkipsNothing) {
  const auto dataset = sequences(101);
  std::int64_t position = 0;
  const Indices reference = consume(dataset, {1}, 101, position);
  position = 0;
  Indices all;
  for (const std::vector<std::int64_t>& counts : std::vector<Indices>{{3, 4}, {1, 1, 1}, {5}, {2, 0, 9, 4}}) {
    const Indices part = consume(dataset, counts, 3, position);
    all.insert(all.end(), part.begin(), part.end());
  }
  ASSERT_EQ(position, 90);
  EXPECT_TRUE(std::equal(all.begin(), all.end(), reference.begin()));
}

TEST(Loader, RanksThatMakeUnlikeNumbersOfStepsNeverTakeTheSameSequence) {
  const auto dataset = sequences(97);
  const std::vector<int> steps{12, 3, 7};  // 12 of 8 sequences are less than an epoch
  const Indices counts{3, 1, 4};
  std::set<std::int64_t> taken;
  std::int64_t offset = 0, all = 0;
  for (std::size_t rank = 0; rank < counts.size(); ++rank) {
    Loader loader(dataset, 5, {8, offset, counts[rank]});
    for (int step = 0; step < steps[rank]; ++step) {
      for (const std::int64_t index : loader.indices()) taken.insert(index);
      Ids out(static_cast<std::size_t>(loader.ids_per_step()));
      loader.next(out);
    }
    offset += counts[rank];
    all += counts[rank] * steps[rank];
  }
  EXPECT_EQ(std::ssize(taken), all);
}

TEST(Loader, GoesOnFromASavedPosition) {
  const auto dataset = sequences(11);
  Loader straight(dataset, 5, {4, 1, 2});
  Ids a(6), b(6);
  for (int i = 0; i < 7; ++i) straight.next(a);
  Loader resumed(dataset, 5, {4, 1, 2}, straight.position());
  Loader moved(dataset, 5, {9, 0, 9});
  moved.set_position(straight.position());
  moved.set_dealing({4, 1, 2});
  for (int i = 0; i < 7; ++i) {
    straight.next(a);
    resumed.next(b);
    EXPECT_EQ(a, b);
    moved.next(b);
    EXPECT_EQ(a, b);
  }
}

TEST(Loader, TheSeedMakesTheOrder) {
  const auto dataset = sequences(50);
  EXPECT_EQ(Loader(dataset, 1, {50, 0, 50}).indices(), Loader(dataset, 1, {50, 0, 50}).indices());
  EXPECT_NE(Loader(dataset, 1, {50, 0, 50}).indices(), Loader(dataset, 2, {50, 0, 50}).indices());
}

TEST(Loader, RefusesImpossibleDealings) {
  const auto dataset = sequences(5);
  for (const Dealing dealing : {Dealing{0, 0, 0}, Dealing{4, 3, 2}, Dealing{4, -1, 2}, Dealing{4, 0, -1}}) {
    EXPECT_THROW(Loader(dataset, 1, dealing), RunError);
  }
  EXPECT_THROW(Loader(dataset, 1, {1, 0, 1}, -1), RunError);
}

TEST(EvalSlice, SlicesAreContiguousCompleteAndEven) {
  for (std::int64_t n = 0; n < 12; ++n) {
    for (std::int64_t ranks = 1; ranks < 7; ++ranks) {
      for (const std::int64_t batch : {1, 2, 5}) {
        std::int64_t next = 0, most = 0;
        for (std::int64_t rank = 0; rank < ranks; ++rank) {
          const EvalSlice slice = eval_slice(n, ranks, rank, batch);
          EXPECT_EQ(slice.first, next);
          EXPECT_TRUE(slice.count == n / ranks || slice.count == (n + ranks - 1) / ranks);
          EXPECT_GE(slice.passes * batch, slice.count);
          next += slice.count;
          most = std::max(most, slice.count);
        }
        EXPECT_EQ(next, n);
        for (std::int64_t rank = 0; rank < ranks; ++rank) {
          EXPECT_EQ(eval_slice(n, ranks, rank, batch).passes, (most + batch - 1) / batch);
        }
      }
    }
  }
}

}  // namespace
}  // namespace fedshard::data
