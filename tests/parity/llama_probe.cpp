// For test_llama.py: runs our Llama on the weights of a Hugging Face folder and writes what transformers can be asked
// for too: the rotary frequencies, the logits, the loss and the gradient of every parameter.
//
//   llama_probe MODEL_DIR BATCH.safetensors OUT.safetensors fp32|bf16
//
// BATCH has "tokens" and "labels", I64 of one shape [B, T]. OUT has F32 tensors "inv_freq", "logits", "loss" and one
// "grad.<name>" a parameter.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/variable.h>

#include <cstdio>
#include <exception>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "fedshard/base/error.h"
#include "fedshard/checkpoint/hf.h"
#include "fedshard/checkpoint/safetensors.h"
#include "fedshard/model/hf_config.h"
#include "fedshard/nn/llama.h"
#include "fedshard/nn/ops/rotary.h"

namespace fedshard {
namespace {

using Tensors = std::map<std::string, at::Tensor>;  // contiguous fp32 on the CPU

at::Tensor read_ids(const checkpoint::SafetensorsFile& file, const std::string& name) {
  const checkpoint::TensorEntry& entry = file.at(name);
  base::require(entry.dtype == "I64", "{} is {}", name, entry.dtype);
  const at::Tensor ids = at::empty(entry.shape, at::kLong);
  std::memcpy(ids.data_ptr(), entry.bytes.data(), entry.bytes.size());
  return ids;
}

// The unit's parameters as leaves of one dtype. They are views into one flat buffer, as the engine's are.
std::vector<at::Tensor> load_unit(const checkpoint::HfWeights& weights, const plan::ModelPlan& plan, int unit,
                                  at::ScalarType dtype) {
  const plan::UnitSpec& spec = plan.units[unit];
  const at::Tensor wide = at::empty({spec.numel()}, at::kFloat);
  weights.read_slice(unit, 0, spec.numel(), {wide.data_ptr<float>(), static_cast<std::size_t>(spec.numel())});
  const at::Tensor flat = wide.to(dtype);
  std::vector<at::Tensor> parameters;
  for (std::size_t i = 0; i < spec.parameters.size(); ++i) {
    const at::Tensor part = flat.narrow(0, spec.offset_of(static_cast<int>(i)), spec.parameters[i].numel());
    parameters.push_back(part.view(spec.parameters[i].shape).detach().requires_grad_());
  }
  return parameters;
}

Tensors run(const model::Dims& dims, const checkpoint::HfWeights& weights, const nn::MicroBatch& batch,
            at::ScalarType dtype) {
  const nn::Model llama = nn::make_llama(dims);
  std::vector<std::vector<at::Tensor>> units;
  for (int unit = 0; unit < std::ssize(llama.plan.units); ++unit) {
    units.push_back(load_unit(weights, llama.plan, unit, dtype));
  }
  const std::size_t last = llama.stages.size() - 1;
  at::Tensor hidden;
  for (std::size_t stage = 0; stage < last; ++stage) {
    hidden = llama.stages[stage](units[llama.plan.stages[stage].units.at(0)], hidden, batch);
  }
  const std::vector<at::Tensor>& head = units[llama.plan.stages[last].units.at(0)];
  Tensors result;
  result["logits"] = nn::llama_logits(dims, head, hidden.detach()).detach().to(at::kFloat);
  const at::Tensor loss = llama.stages[last](head, hidden, batch);
  torch::autograd::backward({loss}, {});
  result["loss"] = loss.detach();
  result["inv_freq"] = nn::rotary_frequencies(dims);
  for (std::size_t unit = 0; unit < units.size(); ++unit) {
    for (std::size_t i = 0; i < units[unit].size(); ++i) {
      result["grad." + llama.plan.units[unit].parameters[i].name] = units[unit][i].grad().to(at::kFloat).contiguous();
    }
  }
  return result;
}

void write(const std::filesystem::path& path, const Tensors& tensors) {
  std::map<std::string, checkpoint::TensorEntry> entries;
  for (const auto& [name, tensor] : tensors) {
    base::require(tensor.is_contiguous() && tensor.scalar_type() == at::kFloat, "{} is not plain fp32", name);
    entries[name] = {
        "F32", tensor.sizes().vec(), {static_cast<const std::byte*>(tensor.const_data_ptr()), tensor.nbytes()}};
  }
  checkpoint::write_safetensors(path, entries);
}

void probe(const std::vector<std::string>& arguments) {
  const bool known = arguments.size() == 4 && (arguments[3] == "fp32" || arguments[3] == "bf16");
  if (!known) base::fail<base::UsageError>("usage: llama_probe MODEL_DIR BATCH OUT fp32|bf16");
  const model::Dims dims = model::read_hf_config(std::filesystem::path(arguments[0]) / "config.json");
  const checkpoint::HfWeights weights(arguments[0], nn::make_llama(dims).plan);
  const checkpoint::SafetensorsFile file(arguments[1]);
  const nn::MicroBatch batch{read_ids(file, "tokens"), read_ids(file, "labels")};
  write(arguments[2], run(dims, weights, batch, arguments[3] == "bf16" ? at::kBFloat16 : at::kFloat));
}

}  // namespace
}  // namespace fedshard

int main(int argc, char** argv) {
  try {
    fedshard::probe({argv + 1, argv + argc});
    return 0;
  } catch (const fedshard::base::Error& e) {
    std::fprintf(stderr, "llama_probe: %s\n", e.what());
    return static_cast<int>(e.status());
  } catch (const std::exception& e) {
    std::fprintf(stderr, "llama_probe: %s\n", e.what());
    return 1;
  }
}
