#include "fedshard/nn/unit_module.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

namespace fedshard::nn {
namespace {

// With one row both halves would be contiguous views of one storage; masking the labels must not reach the inputs.
TEST(MicroBatch, InputsAndLabelsShareNoMemory) {
  for (const std::int64_t rows : {1, 3}) {
    const at::Tensor ids = at::arange(rows * 5, at::kInt).view({rows, 5});
    const MicroBatch batch = micro_batch_of(ids);
    batch.labels.fill_(-100);
    EXPECT_TRUE(at::equal(batch.tokens, ids.narrow(1, 0, 4).to(at::kLong)));
    EXPECT_EQ(ids.min().item<int>(), 0);
    EXPECT_EQ(batch.labels.sizes(), at::IntArrayRef({rows, 4}));
  }
}

}  // namespace
}  // namespace fedshard::nn
