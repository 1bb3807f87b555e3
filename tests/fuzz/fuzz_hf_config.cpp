// A model's config.json: refused in words, or dims that are valid and whose totals can be computed.
#include <cstdlib>
#include <string_view>

#include "fedshard/base/error.h"
#include "fedshard/model/hf_config.h"

extern "C" int LLVMFuzzerTestOneInput(const unsigned char* data, std::size_t size) {
  fedshard::model::Dims dims;
  try {
    dims = fedshard::model::parse_hf_config({reinterpret_cast<const char*>(data), size}, "config.json");
  } catch (const fedshard::base::Error&) {
    return 0;
  }
  dims.validate();
  if (dims.parameter_count() < dims.matmul_parameter_count() && !dims.tie_word_embeddings) std::abort();
  if (!(dims.training_flops_per_token(dims.max_position_embeddings) > 0)) std::abort();
  return 0;
}
