// What must hold between keys, and between them and the world.
#include <fmt/ranges.h>

#include <algorithm>
#include <functional>

#include "fedshard/base/error.h"
#include "fedshard/config/options.h"
#include "fedshard/plan/freeze.h"
#include "fedshard/plan/llama_units.h"

namespace fedshard::config {
namespace {

using base::fail;
using base::UsageError;

void check_data(const Config& config) {
  if (config.data.train.empty()) fail<UsageError>("[data] train is missing: what is trained on?");
  if (config.data.eval.empty() && (config.validation.interval > 0 || config.validation.steps > 0)) {
    fail<UsageError>("[validation] is set, but [data] eval is missing: what is evaluated on?");
  }
}

void check_model(const Config& config) {
  const auto dims = dims_of(config.model);
  if (config.training.seq_len > dims.max_position_embeddings) {
    fail<UsageError>(
        "[training] seq_len ({}) must not be more than the model's max_position_embeddings ({}); set "
        "[model] max_position_embeddings to train on longer sequences",
        config.training.seq_len, dims.max_position_embeddings);
  }
  plan::ModelPlan plan = plan::llama_plan(dims);
  try {
    plan = plan::freeze(plan, config.training.freeze);
  } catch (const UsageError& e) {
    fail<UsageError>("[training] freeze: {}", e.what());
  }
  try {
    plan::keep_in_groups(plan, exchange_patterns(config.federation));
  } catch (const UsageError& e) {
    fail<UsageError>("[federation] include and exclude: {}", e.what());
  }
}

void check_fused_backward(const Config& config) {
  if (!config.optimizer.fused_backward) return;
  if (config.training.gradient_accumulation_steps > 1) {
    fail<UsageError>(
        "[optimizer] fused_backward updates a unit in its backward, but with [training] gradient_accumulation_steps = "
        "{} other micro-steps are still to come; set one of them otherwise",
        config.training.gradient_accumulation_steps);
  }
  if (config.training.max_norm > 0) {
    fail<UsageError>(
        "[optimizer] fused_backward updates units before the norm of the whole gradient is known, so it cannot be "
        "clipped: set [training] max_norm = 0");
  }
  if (config.training.nonfinite == NonFinite::skip) {
    fail<UsageError>(
        "[optimizer] fused_backward updates units before it is known whether the gradient is finite, so a step cannot "
        "be skipped: set [training] nonfinite = \"stop\"");
  }
  if (config.federation.start_step > 0) {
    fail<UsageError>(
        "[optimizer] fused_backward updates units before the whole gradient is there, so it cannot be summed over the "
        "groups: set [federation] start_step = 0");
  }
}

void check_optimizer(const Config& config) {
  const OptimizerConfig& o = config.optimizer;
  if (o.offload && config.comm.backend != BackendChoice::nccl) {
    fail<UsageError>(
        "[optimizer] offload keeps the moments in the host's memory, where ranks that compute on CPUs have them "
        "anyway; it needs [comm] backend = \"nccl\"");
  }
  if (o.offload && o.name == OptimizerName::sgd && o.momentum.value_or(0) == 0) {
    fail<UsageError>("[optimizer] offload keeps the moments in the host's memory, but sgd without momentum has none");
  }
  if (o.name == OptimizerName::sgd && o.nesterov.value_or(false) && o.momentum.value_or(0) == 0) {
    fail<UsageError>("[optimizer] nesterov = true needs a momentum that is more than 0");
  }
  for (std::size_t g = 0; g < o.groups.size(); ++g) {
    if (o.groups[g].params.empty()) {
      fail<UsageError>("[[optimizer.group]] number {} lacks params: which parameters are in it?", g + 1);
    }
  }
  try {
    plan::update_rules(plan::llama_plan(dims_of(config.model)), update_options(o));
  } catch (const UsageError& e) {
    fail<UsageError>("[[optimizer.group]] {}", e.what());
  }
}

void check_schedule(const Config& config) {
  const auto& s = config.lr_scheduler;
  const std::int64_t steps = config.training.steps;
  if (s.warmup_steps > steps) {
    fail<UsageError>("[lr_scheduler] warmup_steps ({}) must not be more than [training] steps ({})", s.warmup_steps,
                     steps);
  }
  // By differences: the sum of two large numbers may not exist.
  const std::int64_t after_warmup = steps - s.warmup_steps;
  if (s.stable_steps > after_warmup || s.decay_steps > after_warmup - s.stable_steps) {
    fail<UsageError>(
        "[lr_scheduler] warmup_steps ({}), stable_steps ({}) and decay_steps ({}) must not sum to more "
        "than [training] steps ({})",
        s.warmup_steps, s.stable_steps, s.decay_steps, steps);
  }
}

void check_rounds(const Config& config, const topology::Layout& layout) {
  const FederationConfig& f = config.federation;
  if (f.start_step > config.training.steps) {
    fail<UsageError>("[federation] start_step ({}) must not be more than [training] steps ({})", f.start_step,
                     config.training.steps);
  }
  try {
    plan::check_pace(f.every, layout.groups(), config.training.steps - f.start_step, f.delay, f.fragments);
    plan::check_rounds(round_options(f));
  } catch (const UsageError& e) {
    fail<UsageError>("[federation] {}", e.what());
  }
  if (f.inner_state != InnerState::keep && (f.delay > 0 || f.fragments > 1)) {
    fail<UsageError>(
        "[federation] inner_state = \"{}\" needs rounds of the whole model at once: set delay = 0 and fragments = 1",
        f.inner_state == InnerState::reset ? "reset" : "average");
  }
  if (f.inner_state == InnerState::average && plan::moments_of(update_options(config.optimizer).update) == 0) {
    fail<UsageError>(
        "[federation] inner_state = \"average\" needs an optimizer that has moments, which sgd without momentum has "
        "not: set inner_state = \"keep\"");
  }
  if (f.start_step > 0 && !(f.include.empty() && f.exclude.empty())) {
    fail<UsageError>(
        "[federation] start_step: in the warm-up all groups make the same steps, which leaves nothing local to a "
        "group; set start_step = 0, or no include and exclude");
  }
}

void check_fragments(const Config& config, const topology::Layout& layout) {
  if (layout.groups() == 1) return;
  const plan::ModelPlan trained = plan::freeze(plan::llama_plan(dims_of(config.model)), config.training.freeze);
  try {
    plan::fragment_plans(plan::keep_in_groups(trained, exchange_patterns(config.federation)),
                         static_cast<int>(config.federation.fragments));
  } catch (const UsageError& e) {
    fail<UsageError>("[federation] {}", e.what());
  }
}

void check_federation(const FederationConfig& config, const topology::Layout& layout) {
  if (config.guard > 0 && config.guard < 1) {
    fail<UsageError>(
        "[federation] guard ({:g}) must be 0 or at least 1: below 1, groups that bring alike would all be left out",
        config.guard);
  }
  if (config.top_k.value_or(0) > config.block.value_or(0)) {
    fail<UsageError>("[federation] top_k ({}) must not be more than block ({})", *config.top_k,
                     config.block.value_or(0));
  }
  try {
    topology::check_scheme(config.scheme, layout);
  } catch (const UsageError& e) {
    fail<UsageError>("[federation] {}", e.what());
  }
  const auto* weights = std::get_if<std::vector<double>>(&config.weights);
  if (weights == nullptr) return;
  if (static_cast<int>(weights->size()) != layout.groups()) {
    fail<UsageError>("[federation] weights has {} numbers, but the number of groups is {}; give one for each",
                     weights->size(), layout.groups());
  }
  if (std::all_of(weights->begin(), weights->end(), [](double w) { return w == 0; })) {
    fail<UsageError>("[federation] weights are all 0; at least one group must count");
  }
}

topology::Layout lay_out(const ParallelismConfig& p, int world) {
  try {
    return topology::Layout::make(world, {p.groups, p.data_parallel_shard_degree, p.data_parallel_replicate_degree});
  } catch (const UsageError& e) {
    fail<UsageError>("[parallelism] {}", e.what());
  }
}

}  // namespace

std::vector<std::string> warnings_of(const Config& config) {
  std::vector<std::string> warnings;
  if (config.training.master_dtype == Dtype::bf16) {
    warnings.push_back(fmt::format(
        "[training] master_dtype = \"bf16\" loses every update that is less than about a 500th of its parameter, at a "
        "learning rate of {:g} as at any other; fp32 (the default) loses none",
        config.optimizer.lr));
  }
  if (config.federation.delay > 0 && config.federation.mix == 0) {
    warnings.push_back(fmt::format(
        "[federation] delay = {} with mix = 0 drops what groups train in these steps of every round; Streaming DiLoCo "
        "keeps half (mix = 0.5)",
        config.federation.delay));
  }
  return warnings;
}

Config with_virtual_groups(Config config, int groups) {
  constexpr int kMostGroups = 4096;  // each is a thread in every process
  if (groups > kMostGroups) fail<UsageError>("--virtual-groups must be at most {}, not {}", kMostGroups, groups);
  auto& given = config.parallelism.groups;
  if (const auto* sizes = std::get_if<std::vector<int>>(&given)) {
    const bool equal = std::adjacent_find(sizes->begin(), sizes->end(), std::not_equal_to{}) == sizes->end();
    if (!equal || std::ssize(*sizes) != groups) {
      fail<UsageError>("--virtual-groups {} makes {} equal groups, but [parallelism] groups is [{}]", groups, groups,
                       fmt::join(*sizes, ", "));
    }
  } else if (const int number = std::get<int>(given); number != 1 && number != groups) {
    fail<UsageError>("--virtual-groups {} makes {} groups, but [parallelism] groups is {}", groups, groups, number);
  } else {
    given = groups;
  }
  if (config.comm.backend == BackendChoice::nccl && groups > 1) {
    fail<UsageError>(
        "--virtual-groups runs several ranks in a process, and [comm] backend = \"nccl\" gives each a GPU "
        "of its own: choose another backend");
  }
  if (config.federation.every.by == plan::Pace::By::seconds && groups > 1) {
    fail<UsageError>(
        "--virtual-groups trains groups in turn, so what each gets done in a time says nothing of real ones, but "
        "[federation] every is \"{}\": set it to steps or tokens",
        plan::describe(config.federation.every));
  }
  return config;
}

topology::Layout validate_layout(const Config& config, int world) {
  topology::Layout layout = lay_out(config.parallelism, world);
  check_federation(config.federation, layout);
  check_rounds(config, layout);
  return layout;
}

topology::Layout validate_without_data(const Config& config, int world) {
  check_model(config);
  check_optimizer(config);
  check_schedule(config);
  check_fused_backward(config);
  topology::Layout layout = validate_layout(config, world);
  check_fragments(config, layout);
  return layout;
}

topology::Layout validate(const Config& config, int world) {
  check_model(config);  // what is wrong with the model is said first
  check_data(config);
  return validate_without_data(config, world);
}

}  // namespace fedshard::config
