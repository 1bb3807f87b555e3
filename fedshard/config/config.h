// What a run is told: one struct a table of the TOML file, with torchtitan's names where the meaning is the same.
// A surprise: the defaults live here, as member initialisers, and nowhere else; the table of keys (keys.cpp)
// points to these members, and parsing, the resolved config.toml and docs/configuration.md all come from that table.
// No torch header is needed to read a config, so the launcher checks one before any rank starts.
#pragma once
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "fedshard/model/activations.h"
#include "fedshard/model/dims.h"
#include "fedshard/plan/compression.h"
#include "fedshard/plan/group_local.h"
#include "fedshard/plan/outer.h"
#include "fedshard/plan/pace.h"
#include "fedshard/plan/rounds.h"
#include "fedshard/plan/updates.h"
#include "fedshard/topology/layout.h"

namespace fedshard::config {

enum class Dtype { fp32, bf16 };
enum class OptimizerName { adamw, sgd, muon };
enum class Decay { cosine, linear, none };
enum class WeightsBy { tokens, uniform };
using GroupWeights = std::variant<WeightsBy, std::vector<double>>;  // a list: by group
enum class InnerState { keep, average, reset };
enum class BackendChoice { automatic, gloo, nccl };  // "auto", "gloo", "nccl"
enum class NonFinite { stop, skip };
using model::ActivationCheckpoint;

// Exactly one of preset and hf is set; what is set below them overrides it.
struct ModelConfig {
  std::string preset;
  std::string hf;  // a folder with config.json, and weights to go on from them
  std::optional<std::int64_t> hidden_size;
  std::optional<std::int64_t> intermediate_size;
  std::optional<std::int64_t> num_hidden_layers;
  std::optional<std::int64_t> num_attention_heads;
  std::optional<std::int64_t> num_key_value_heads;
  std::optional<std::int64_t> head_dim;
  std::optional<std::int64_t> vocab_size;
  std::optional<std::int64_t> max_position_embeddings;
  std::optional<double> rope_theta;
  std::optional<model::RopeScaling> rope_scaling;
  std::optional<double> rms_norm_eps;
  std::optional<double> initializer_range;
  std::optional<bool> tie_word_embeddings;
  bool operator==(const ModelConfig&) const = default;
};

// Paths and patterns as given: relative to the folder the program was started in.
struct DataConfig {
  std::vector<std::string> train;
  std::vector<std::string> eval;  // empty: no evaluation
  std::string tokenizer = "byte";
  bool operator==(const DataConfig&) const = default;
};

struct TrainingConfig {
  Dtype dtype = Dtype::bf16;
  Dtype reduce_dtype = Dtype::fp32;
  Dtype master_dtype = Dtype::fp32;
  std::int64_t local_batch_size = 8;
  std::int64_t seq_len = 512;
  std::int64_t steps = 1000;
  std::int64_t gradient_accumulation_steps = 1;
  bool reduce_each_micro_step = true;
  double max_norm = 1.0;  // 0: no clipping
  NonFinite nonfinite = NonFinite::stop;
  ActivationCheckpoint activation_checkpoint = ActivationCheckpoint::none;
  bool document_mask = false;
  std::vector<std::string> freeze;  // patterns of parameter names
  std::int64_t seed = 0;
  int threads = 0;          // 0: the cores of the node divided by its ranks
  double time_limit_s = 0;  // 0: none
  bool operator==(const TrainingConfig&) const = default;
};

struct OptimizerConfig {
  OptimizerName name = OptimizerName::adamw;
  double lr = 8e-4;
  double weight_decay = 0.1;
  double beta1 = 0.9;                        // adamw, muon
  double beta2 = 0.95;                       // adamw, muon
  double eps = 1e-8;                         // adamw, muon
  std::optional<double> momentum;            // sgd, muon; load_config fills in what is usual for the name: 0, 0.95
  std::optional<bool> nesterov;              // sgd, muon; load_config fills in false, true
  std::vector<plan::ParameterGroup> groups;  // [[optimizer.group]], the first that matches a parameter counts
  bool fused_backward = false;
  bool offload = false;  // moments in the host's memory; GPUs only
  bool operator==(const OptimizerConfig&) const = default;
};

struct LrSchedulerConfig {
  std::int64_t warmup_steps = 0;
  Decay decay = Decay::cosine;
  std::int64_t stable_steps = 0;  // at lr, between warm-up and decay
  std::int64_t decay_steps = 0;   // 0: to the last step
  double min_lr_factor = 0;       // of optimizer.lr
  bool operator==(const LrSchedulerConfig&) const = default;
};

struct ParallelismConfig {
  topology::NumberOrList groups = 1;
  topology::NumberOrList data_parallel_shard_degree = topology::rest_of_group;
  topology::NumberOrList data_parallel_replicate_degree = 1;
  bool fsdp_reshard_after_forward = true;
  int prefetch = 1;  // units gathered ahead of the one that computes
  bool operator==(const ParallelismConfig&) const = default;
};

struct FederationConfig {
  plan::Pace every;             // how long a round is
  std::int64_t start_step = 0;  // the steps up to this one are synchronous over all groups; 0: none
  double prox_mu = 0;           // of FedProx's proximal term; 0: none
  GroupWeights weights = WeightsBy::tokens;
  plan::Outer outer = plan::Outer::fedavg;
  std::optional<double> outer_lr;        // load_config fills in what is usual for `outer` (plan::usual_options)
  std::optional<double> outer_momentum;  // fedavgm, nesterov; likewise
  std::optional<double> outer_beta1;     // fedadam, fedyogi, fedadagrad; likewise
  std::optional<double> outer_beta2;     // fedadam, fedyogi; likewise
  std::optional<double> outer_tau;       // fedadam, fedyogi, fedadagrad; likewise
  double outer_max_norm = 0;             // 0: no clipping
  plan::Compression::Kind compress = plan::Compression::Kind::none;
  std::optional<std::int64_t> block;                  // int8, int4, topk; load_config fills in what is usual
  std::optional<std::int64_t> top_k;                  // topk; likewise
  topology::Scheme scheme = topology::Scheme::split;  // how replicas share an exchange
  topology::Buckets bucket;                           // what of it travels together
  int concurrency = topology::ExchangeRules{}.concurrency;
  double guard = 10;  // 0: only what is not finite is left out
  InnerState inner_state = InnerState::keep;
  std::int64_t delay = 0;            // steps from an exchange's begin to its application
  double mix = 0;                    // what a group keeps of its own where it applies one; with a delay
  std::int64_t fragments = 1;        // parts of the model that are exchanged apart
  bool measures = false;             // keep an anchor also where only the measures of a round need one
  std::vector<std::string> include;  // patterns of parameter names; empty: all
  std::vector<std::string> exclude;
  bool operator==(const FederationConfig&) const = default;
};

struct CommConfig {
  BackendChoice backend = BackendChoice::automatic;
  double timeout_s = 60;
  std::string interface;  // empty: the one that the coordinator is reached through
  bool operator==(const CommConfig&) const = default;
};

struct ValidationConfig {
  std::int64_t interval = 0;  // steps; 0: only at the end
  std::int64_t steps = 0;     // batches of local_batch_size sequences a rank; 0: the whole set
  bool operator==(const ValidationConfig&) const = default;
};

struct MetricsConfig {
  std::string folder;         // load_config fills in runs/<name of the config file>
  std::int64_t interval = 1;  // steps between records
  bool progress = true;
  bool trace = false;  // trace.json of each rank, in the run folder
  bool operator==(const MetricsConfig&) const = default;
};

struct Config {
  ModelConfig model;
  DataConfig data;
  TrainingConfig training;
  OptimizerConfig optimizer;
  LrSchedulerConfig lr_scheduler;
  ParallelismConfig parallelism;
  FederationConfig federation;
  CommConfig comm;
  ValidationConfig validation;
  MetricsConfig metrics;
  bool operator==(const Config&) const = default;
};

// Reads `path` and then each override `table.key=value`, the later winning. A value is TOML; where a key takes text,
// text that is no TOML string or list is taken as it stands (`--set optimizer.name=sgd`).
// Throws UsageError with file:line (or the override) and what to do: for what is not TOML, for tables and keys that
// don't exist (with the nearest that does), wrong types, values out of range, keys given twice, and keys that have no
// meaning beside the others (`beta1` with sgd).
Config load_config(const std::filesystem::path& path, const std::vector<std::string>& overrides = {});

// A config of overrides alone, without a file. Throws likewise.
Config config_of(const std::vector<std::string>& overrides);

// Checks what needs no data: that nothing required is missing, that values fit together, that the model exists and
// `world` ranks can be laid out. Returns that layout. Throws UsageError naming the keys or numbers.
topology::Layout validate(const Config& config, int world);

// The same where nothing is to be trained: [data] may be missing.
topology::Layout validate_without_data(const Config& config, int world);

// The same where the model is not the config's: only that the ranks can be laid out, and that rounds fit the layout.
topology::Layout validate_layout(const Config& config, int world);

// `config` for --virtual-groups: with that many groups. Throws UsageError naming both numbers where [parallelism]
// groups says otherwise (it may be 1, `groups`, or a list of so many equal sizes), and where ranks would need GPUs.
Config with_virtual_groups(Config config, int groups);

// What is allowed and rarely meant, a sentence each, for people to read before the first step.
std::vector<std::string> warnings_of(const Config& config);

// The config as TOML with every key that has a value; load_config reads it back to an equal Config. `config` must be
// one that load_config returned, or have no values in keys that mean nothing beside the others.
// Throws UsageError for text that is not UTF-8.
std::string resolved_toml(const Config& config);

// docs/configuration.md: every key with its type, default, range and meaning.
std::string configuration_page();

}  // namespace fedshard::config
