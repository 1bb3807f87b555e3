#include "fedshard/config/keys.h"

#include <fmt/ranges.h>

#include "fedshard/config/key_adder.h"

namespace fedshard::config {
namespace {

std::string preset_doc() {
  return fmt::format("A model by name: `{}`. Exactly one of `preset` and `hf` is given.",
                     fmt::join(model::preset_names(), "`, `"));
}

bool is_not_sgd(const Config& c) { return c.optimizer.name != OptimizerName::sgd; }
bool is_not_adamw(const Config& c) { return c.optimizer.name != OptimizerName::adamw; }
bool decays(const Config& c) { return c.lr_scheduler.decay != Decay::none; }
bool sends_top_k(const Config& c) { return c.federation.compress == plan::Compression::Kind::topk; }
bool has_buckets(const Config& c) { return c.federation.bucket.by != topology::Buckets::By::whole; }
bool has_delay(const Config& c) { return c.federation.delay > 0; }
bool has_blocks(const Config& c) { return plan::has_blocks(c.federation.compress); }
bool is_adaptive(const Config& c) { return plan::outer_moments_of(c.federation.outer) == 2; }
bool has_outer_momentum(const Config& c) { return plan::outer_moments_of(c.federation.outer) == 1; }
bool has_outer_beta2(const Config& c) { return is_adaptive(c) && c.federation.outer != plan::Outer::fedadagrad; }
constexpr const char* kAdamWOrMuon = "name = \"adamw\" or \"muon\"";
constexpr const char* kSgdOrMuon = "name = \"sgd\" or \"muon\"";
constexpr const char* kFalls = "decay = \"cosine\" or \"linear\"";

void add_model(std::vector<Key>& keys) {
  using M = ModelConfig;
  Adder<M>(keys, "model", &Config::model)
      .key("preset", &M::preset, any, preset_doc().c_str())
      .key("hf", &M::hf, any,
           "A folder with a Hugging Face `config.json` and safetensors weights, from which training goes on.")
      .key("hidden_size", &M::hidden_size, at_least(1), "Width of the residual stream.")
      .key("intermediate_size", &M::intermediate_size, at_least(1), "Width of the feed-forward layers.")
      .key("num_hidden_layers", &M::num_hidden_layers, at_least(1), "Number of blocks.")
      .key("num_attention_heads", &M::num_attention_heads, at_least(1), "Query heads of a block.")
      .key("num_key_value_heads", &M::num_key_value_heads, at_least(1),
           "Key and value heads of a block; divides `num_attention_heads`.")
      .key("head_dim", &M::head_dim, at_least(1), "Width of a head.")
      .key("vocab_size", &M::vocab_size, at_least(1),
           "Rows of the embedding and the head. May be larger than the tokenizer's vocabulary, not smaller.")
      .key("max_position_embeddings", &M::max_position_embeddings, at_least(1), "The longest sequence it is meant for.")
      .key("rope_theta", &M::rope_theta, more_than(0), "Base of the rotary frequencies.")
      .key("rope_scaling", &M::rope_scaling, any,
           "Scaling of the rotary frequencies: `rope_type` (only `\"llama3\"`), `factor`, `low_freq_factor`, "
           "`high_freq_factor` and `original_max_position_embeddings`, all of them.")
      .key("rms_norm_eps", &M::rms_norm_eps, more_than(0), "Added to the mean square in RMSNorm.")
      .key("initializer_range", &M::initializer_range, at_least(0), "Standard deviation of initial weights.")
      .key("tie_word_embeddings", &M::tie_word_embeddings, any, "The head uses the embedding's weights.");
}

void add_data(std::vector<Key>& keys) {
  using D = DataConfig;
  Adder<D>(keys, "data", &Config::data)
      .key("train", &D::train, not_empty,
           "Training text or token files: paths, or patterns with `*`, `?` and `[...]`. Required.")
      .key("eval", &D::eval, not_empty,
           "Evaluation text or token files, given like `train`. Without it nothing is "
           "evaluated.")
      .key("tokenizer", &D::tokenizer, not_empty,
           "`byte` (ids 0 to 255 for bytes, 256 for end of text) or the path of a Hugging Face `tokenizer.json`.");
}

void add_training(std::vector<Key>& keys) {
  using T = TrainingConfig;
  Adder<T>(keys, "training", &Config::training)
      .key("dtype", &T::dtype, any, "What is computed with. Gradients are added up, and updates computed, in fp32.")
      .key("reduce_dtype", &T::reduce_dtype, any, "What gradients are accumulated and reduced in.")
      .key("master_dtype", &T::master_dtype, any,
           "What parameters are kept in, and averaged over groups; moments are always fp32. `bf16` saves 2 bytes a "
           "parameter and loses every update that is less than about a 500th of its parameter: small learning rates "
           "then train nothing.")
      .key("local_batch_size", &T::local_batch_size, between(1, 1 << 30), "Sequences a rank and micro-step.")
      .key("seq_len", &T::seq_len, between(1, 1 << 24), "Tokens of a sequence.")
      .key("steps", &T::steps, at_least(1), "Optimizer updates of the run.")
      .key("gradient_accumulation_steps", &T::gradient_accumulation_steps, between(1, 1 << 20),
           "Micro-steps of a step.")
      .key("reduce_each_micro_step", &T::reduce_each_micro_step, any,
           "Reduce gradients in every micro-step, which needs the least memory; false: keep each unit's whole gradient "
           "and reduce it in the last one, which sends the least.")
      .key("max_norm", &T::max_norm, at_least(0),
           "Gradients of a larger norm (over the whole model, per group) are scaled down to it; 0 turns clipping off.")
      .key("nonfinite", &T::nonfinite, any,
           "What a loss or gradient norm that is not finite does: `stop` the run, or `skip` the step on all ranks of "
           "the group. A hundred skipped steps in a row stop the run too.")
      .key(
          "activation_checkpoint", &T::activation_checkpoint, any,
          "`none` keeps activations for the backward pass, `selective` only the products of matrices and of attention, "
          "`full` only what enters each block, whose forward then runs twice. Gradients are the same to the bit.")
      .key("document_mask", &T::document_mask, any,
           "Attention and positions stop at the end of each document (its end-of-text token), also in evaluation.")
      .key(
          "freeze", &T::freeze, any,
          "Patterns (`*`, `?`, `[...]`) of the names of parameters that are left as they are: no gradient, no moments, "
          "no part in the averages over groups.")
      .key("seed", &T::seed, at_least(0), "Of the initial weights and the order of the data.")
      .key("threads", &T::threads, between(0, 1024),
           "Threads a rank computes with; 0: the cores of its machine divided by the ranks there.")
      .key("time_limit_s", &T::time_limit_s, at_least(0),
           "Seconds after which the run ends with the step it is in; 0: none.");
}

void add_optimizer(std::vector<Key>& keys) {
  using O = OptimizerConfig;
  Adder<O>(keys, "optimizer", &Config::optimizer)
      .key("name", &O::name, any, "The optimizer of a group.")
      .key("lr", &O::lr, at_least(0), "Learning rate at its peak.")
      .key("weight_decay", &O::weight_decay, at_least(0),
           "Decoupled from the gradient under AdamW and Muon; on matrices only, not on norms and other vectors.")
      .key("beta1", &O::beta1, from_below(0, 1), "Decay of the first moment.")
      .only_when(kAdamWOrMuon, is_not_sgd)
      .key("beta2", &O::beta2, from_below(0, 1), "Decay of the second moment.")
      .only_when(kAdamWOrMuon, is_not_sgd)
      .key("eps", &O::eps, at_least(0), "Added to the root of the second moment.")
      .only_when(kAdamWOrMuon, is_not_sgd)
      .key("momentum", &O::momentum, from_below(0, 1), "Momentum; 0 is plain gradient descent.")
      .by_default("0.0 (sgd), 0.95 (muon)")
      .only_when(kSgdOrMuon, is_not_adamw)
      .key("nesterov", &O::nesterov, any, "Nesterov's momentum; with `sgd` it needs a momentum that is more than 0.")
      .by_default("false (sgd), true (muon)")
      .only_when(kSgdOrMuon, is_not_adamw)
      .key("fused_backward", &O::fused_backward, any,
           "Update a unit as soon as its gradient is reduced and free the gradient. Only with one micro-step, "
           "`max_norm = 0` and `nonfinite = \"stop\"`.")
      .key("offload", &O::offload, any,
           "Keep the moments in the host's memory and update there: the GPU is spared them (adamw: 8 bytes a parameter "
           "of its shard), and gradients and parameters cross its bus once a step. Only with `comm.backend = "
           "\"nccl\"`, and like that not yet run on a GPU.");
  using G = plan::ParameterGroup;
  Adder<G, ParameterGroupAt>(keys, "optimizer.group", {})
      .key(
          "params", &G::params, not_empty,
          "Names of parameters (`model.layers.0.mlp.up_proj.weight`), or patterns with `*`, `?` and `[...]`; `*` takes "
          "dots too. Each must match some parameter. Required.")
      .key("lr_factor", &G::lr_factor, at_least(0), "Part of the learning rate that these parameters get.")
      .key("weight_decay", &G::weight_decay, at_least(0),
           "Of all these parameters, also of norms and other vectors. Without it `optimizer.weight_decay` holds, on "
           "matrices only.");
}

void add_lr_scheduler(std::vector<Key>& keys) {
  using L = LrSchedulerConfig;
  Adder<L>(keys, "lr_scheduler", &Config::lr_scheduler)
      .key("warmup_steps", &L::warmup_steps, at_least(0), "Steps over which the learning rate rises linearly to `lr`.")
      .key("decay", &L::decay, any, "Shape of the fall from `lr`.")
      .key("stable_steps", &L::stable_steps, at_least(0),
           "Steps at `lr` between the warm-up and the fall (warm-up, stable, decay).")
      .only_when(kFalls, decays)
      .key("decay_steps", &L::decay_steps, at_least(0),
           "Steps that the fall takes, counted from the end of the stable steps; 0: to the last step. As torch's "
           "schedulers count, the first of them is still at `lr`, and `min_lr_factor` is reached one step after the "
           "last.")
      .only_when(kFalls, decays)
      .key("min_lr_factor", &L::min_lr_factor, between(0, 1), "Where the fall ends, as a part of `lr`.")
      .only_when(kFalls, decays);
}

void add_parallelism(std::vector<Key>& keys) {
  using P = ParallelismConfig;
  Adder<P>(keys, "parallelism", &Config::parallelism)
      .key("groups", &P::groups, at_least(1),
           "Federation groups: a number of equal ones, or a list of their sizes in ranks.")
      .key("data_parallel_shard_degree", &P::data_parallel_shard_degree, at_least(topology::rest_of_group),
           "Shards of a group; -1: what the other degree leaves of the group. A list gives one number by group.")
      .key("data_parallel_replicate_degree", &P::data_parallel_replicate_degree, at_least(topology::rest_of_group),
           "Replicas of a group; -1: what the other degree leaves of the group. A list gives one number by group.")
      .key("fsdp_reshard_after_forward", &P::fsdp_reshard_after_forward, any,
           "Release a gathered unit after its forward and gather it again for its backward: less memory, more traffic.")
      .key("prefetch", &P::prefetch, between(0, 2), "Units gathered ahead of the one that computes.");
}

void add_federation_and_comm(std::vector<Key>& keys) {
  using F = FederationConfig;
  using C = CommConfig;
  Adder<F>(keys, "federation", &Config::federation)
      .key("every", &F::every, at_least(1),
           "How long a round is, from average to average over the groups: K steps, a list by group (`[8, 4]`), steps "
           "with so many tokens of a group (`\"250000 tokens\"`; also `k`, `M`, `G`), or time (`\"30s\"`, `m`, `h`). "
           "Where groups make unlike numbers of steps, all go on from the most that one has made.")
      .key("start_step", &F::start_step, at_least(0),
           "A warm-up: in the steps up to this one all groups are trained as one, by the gradient of all their tokens, "
           "which is summed over the groups in every step. Rounds are counted from there. 0: none.")
      .key("prox_mu", &F::prox_mu, at_least(0),
           "FedProx: between rounds each group minimises its loss + mu/2 times the squared distance of its parameters "
           "from those at the end of the last round (of the warm-up; at first the initial ones), which are kept. 0: "
           "its loss.")
      .key("weights", &F::weights, at_least(0),
           "What a group counts in an average: `tokens`, those it trained on since the last one; `uniform`, the same "
           "for all; or a list of numbers by group. A group that counts nothing receives the average of the others. "
           "Where nobody counts (no group has trained, or the guard left out all that do), those left count alike.")
      .key("outer", &F::outer, any,
           "What becomes of the average: the new parameters (`fedavg`), or the end of a pseudo-gradient from the last "
           "round's, which an outer optimizer follows.")
      .key("outer_lr", &F::outer_lr, at_least(0), "Learning rate of the outer optimizer.")
      .by_default("1.0 (fedavg, fedavgm), 0.7 (nesterov), 0.01 (others)")
      .key("outer_momentum", &F::outer_momentum, from_below(0, 1), "Its momentum.")
      .by_default("0.9")
      .only_when("outer = \"fedavgm\" or \"nesterov\"", has_outer_momentum)
      .key("outer_beta1", &F::outer_beta1, from_below(0, 1), "Decay of its first moment.")
      .by_default("0.9 (fedadam, fedyogi), 0.0 (fedadagrad)")
      .only_when("outer = \"fedadam\", \"fedyogi\" or \"fedadagrad\"", is_adaptive)
      .key("outer_beta2", &F::outer_beta2, from_below(0, 1), "Decay of its second moment.")
      .by_default("0.99")
      .only_when("outer = \"fedadam\" or \"fedyogi\"", has_outer_beta2)
      .key("outer_tau", &F::outer_tau, more_than(0), "Added to the root of its second moment.")
      .by_default("0.001")
      .only_when("outer = \"fedadam\", \"fedyogi\" or \"fedadagrad\"", is_adaptive)
      .key("outer_max_norm", &F::outer_max_norm, at_least(0),
           "A pseudo-gradient of a larger norm (over the whole model) is scaled down to it; 0 turns clipping off.")
      .key("compress", &F::compress, any,
           "What groups have changed since the last round travels as fp32 (`none`), `bf16`, blocks of `int8` or `int4` "
           "with a scale each, or the largest of each block in 2 bits and an index (`topk`), in both directions; what "
           "an encoding loses is added to the next one. All but `none` keep an anchor and residuals.")
      .key("block", &F::block, between(1, 1 << 24), "Elements of a block.")
      .by_default("256 (int8, int4), 4096 (topk)")
      .only_when("compress = \"int8\", \"int4\" or \"topk\"", has_blocks)
      .key("top_k", &F::top_k, between(1, 1 << 24), "Elements of a block that are sent.")
      .by_default("64")
      .only_when("compress = \"topk\"", sends_top_k)
      .key("scheme", &F::scheme, any,
           "How the R replicas of a shard share an exchange: each brings 1/R of it and they gather the result "
           "(`split`), one brings all and sends the result on (`leader`), or each brings all, which takes R times the "
           "bytes between groups and as many replicas in each (`naive`).")
      .key("bucket", &F::bucket, not_empty,
           "What travels together: the `whole` exchange, each `unit` of the model by itself, or so many bytes of fp32 "
           "elements (`25MiB`; B, KiB, MiB, GiB). Smaller buckets take less memory, and overlap packing, the wire and "
           "summing; without `compress` they change no bit.")
      .key("concurrency", &F::concurrency, between(1, 1024), "Buckets under way at once.")
      .only_when("bucket is not \"whole\"", has_buckets)
      .key(
          "guard", &F::guard, at_least(0),
          "A group is left out of an average, and receives it, if it brings numbers that are not finite, if its "
          "replicas differ, or if the norm of what it brings is more than so many times the median of the others': of "
          "its parameters, or where an anchor is kept (any `outer` but plain `fedavg`, any `compress`) of their change "
          "since the last round. Its own optimizer then starts anew. 0: whatever norm is finite; otherwise at least 1.")
      .key("inner_state", &F::inner_state, any,
           "What a round does with the moments of a group's own optimizer: `keep`, `average` over the groups as the "
           "parameters are, or `reset` to nothing.")
      .key("delay", &F::delay, between(0, 1 << 30),
           "Steps that groups train on while an exchange runs beside them, on communicators and a thread of its own, "
           "before they apply what it has brought; at most those between two exchanges. Costs a copy of the rank's "
           "slice and of its shard.")
      .key("mix", &F::mix, from_below(0, 1),
           "What a group keeps of its own parameters where it applies an exchange: they become `mix` times these plus "
           "1 - `mix` times the new ones. 0 drops what it has trained during the delay.")
      .only_when("delay is more than 0", has_delay)
      .key("fragments", &F::fragments, between(1, 1 << 20),
           "Parts of the model that are exchanged apart, one after another over the `every` steps: as many bytes, but "
           "never all at once. Units are dealt to them in turn. At most `every`, and at most the model's units.")
      .key("measures", &F::measures, any,
           "Keep an anchor even where only `change_norm` and `cosine` of the `round` records need one.")
      .key("include", &F::include, any,
           "Patterns (`*`, `?`, `[...]`) of the names of parameters that rounds exchange; empty: all.")
      .key("exclude", &F::exclude, any,
           "Patterns of those that they do not. What is left out stays local to its group, which trains it.");
  Adder<C>(keys, "comm", &Config::comm)
      .key("backend", &C::backend, any,
           "What moves tensors between ranks: `gloo` between CPUs, `nccl` between GPUs, one a rank, which then compute "
           "too (only in a build with CUDA); `auto` takes Gloo.")
      .key("timeout_s", &C::timeout_s, between(0.1, 604800),
           "Seconds after which a collective without an answer ends the run.")
      .key("interface", &C::interface, any,
           "Network interface (`eth0`) that ranks talk over; empty: the one the coordinator is reached through.");
}

void add_validation_and_metrics(std::vector<Key>& keys) {
  using V = ValidationConfig;
  using M = MetricsConfig;
  Adder<V>(keys, "validation", &Config::validation)
      .key("interval", &V::interval, at_least(0), "Steps between evaluations; 0: only at the end.")
      .key("steps", &V::steps, at_least(0),
           "Batches of `local_batch_size` sequences a rank that an evaluation takes; 0: all of `data.eval`.");
  Adder<M>(keys, "metrics", &Config::metrics)
      .key("folder", &M::folder, any,
           "The run folder; without it, `runs/` and the name of the config file. A folder that holds a run already is "
           "refused.")
      .key("interval", &M::interval, at_least(1), "Steps between `step` records; the last step has one.")
      .key("progress", &M::progress, any, "Show progress on standard error.")
      .key("trace", &M::trace, any,
           "Write what each rank did when, as Chrome trace events, to `ranks/` in the run folder.");
}

std::vector<Key> all_keys() {
  std::vector<Key> keys;
  add_model(keys);
  add_data(keys);
  add_training(keys);
  add_optimizer(keys);
  add_lr_scheduler(keys);
  add_parallelism(keys);
  add_federation_and_comm(keys);
  add_validation_and_metrics(keys);
  return keys;
}

}  // namespace

std::string heading_of(const std::string& table) {
  return table.find('.') == std::string::npos ? "[" + table + "]" : "[[" + table + "]]";
}

const std::vector<TableOfKeys>& tables() {
  static const std::vector<TableOfKeys> tables = {
      {"model", "What is trained: a preset or a Hugging Face folder, and the keys of its config that differ."},
      {"data", "What it is trained and evaluated on."},
      {"training", "Numbers, sizes and length of the run."},
      {"optimizer",
       "The update that every group makes by itself. `muon` orthogonalises the momentum of the blocks' matrices; "
       "embedding, head and all vectors get AdamW's update, with the same `lr`."},
      {"optimizer.group",
       "Parameters with a learning rate or weight decay of their own, as many tables as you like: the first that "
       "matches a parameter counts. The others have `optimizer.weight_decay` if they are matrices, and none if they "
       "are norms or other vectors.",
       [](const Config& config) { return config.optimizer.groups.size(); },
       [](Config& config, std::size_t count) { config.optimizer.groups.resize(count); }},
      {"lr_scheduler", "The learning rate over the run."},
      {"parallelism",
       "How the ranks are split into groups, replicas and shards. The strategy's name (ddp, fsdp, hsdp, "
       "and with several groups fl+ddp, fl+fsdp, fl+hsdp) follows from the numbers."},
      {"federation", "What the groups do together. With one group there is nothing to do."},
      {"comm", "How ranks reach one another."},
      {"validation", "When and on how much the model is evaluated."},
      {"metrics", "What a run leaves behind and shows."},
  };
  return tables;
}

const std::vector<Key>& keys() {
  static const std::vector<Key> keys = all_keys();
  return keys;
}

}  // namespace fedshard::config
