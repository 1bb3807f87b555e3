// Weights from a Hugging Face model folder: model.safetensors, or the shards that model.safetensors.index.json lists.
//
// Every rank opens the folder itself and reads only the slices it holds; nobody gathers a whole model. All names and
// shapes are checked when the folder is opened, before any training, against the plan: a file that fits only in part is
// refused, because a parameter that keeps its random start looks like a bad loss and not like an error.
#pragma once
#include <cstdint>
#include <filesystem>
#include <span>
#include <vector>

#include "fedshard/checkpoint/safetensors.h"
#include "fedshard/plan/units.h"

namespace fedshard::checkpoint {

class HfWeights {
 public:
  // Throws UsageError where the folder or a file it lists can't be opened, DamagedError naming the tensor where a
  // parameter of the plan is missing, has another shape or is not F32, BF16 or F16, or where a file has a tensor that
  // the plan has not. Allowed beyond the plan: rotary inv_freq buffers, and in a tied model a copy of the embedding
  // under lm_head's name (a different lm_head is refused: the config's tie_word_embeddings would be wrong).
  HfWeights(const std::filesystem::path& folder, const plan::ModelPlan& plan);

  // Elements [begin, end) of a unit, counted in the order of its parameters, as fp32 (exact for all three dtypes).
  // Safe from several threads. Throws RunError where the slice does not lie in the unit (a bug of the caller's).
  void read_slice(int unit, std::int64_t begin, std::int64_t end, std::span<float> out) const;

 private:
  std::vector<SafetensorsFile> files_;
  std::vector<std::vector<const TensorEntry*>> units_;  // of each unit's parameters, in order; they live in files_
};

}  // namespace fedshard::checkpoint
