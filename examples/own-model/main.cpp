// A language model of dilated causal convolutions over bytes, written as units and trained on a text by groups of ranks
// that shard it and average it every 10 steps. docs/library.md walks through this file.
#include <ATen/ATen.h>

#include <fstream>
#include <iterator>

#include "fedshard/base/error.h"
#include "fedshard/comm/gloo.h"
#include "fedshard/control/place.h"
#include "fedshard/federation/exchange.h"
#include "fedshard/nn/init.h"
#include "fedshard/optim/optimizer.h"
#include "fedshard/shard/digest.h"
#include "fedshard/shard/engine.h"

using namespace fedshard;

constexpr std::int64_t kBytes = 256, kWidth = 48, kTaps = 3, kBlocks = 4, kBatch = 8, kLength = 64;
constexpr int kSteps = 60, kEvery = 10;
constexpr auto kTimeout = std::chrono::seconds(60);

// Each part is a unit (what is gathered and reduced together) and a stage (what is computed with it).
nn::Model convolutions() {
  nn::Model model;
  const auto add = [&](const plan::UnitSpec& unit, bool backward_reads_parameters, nn::StageFunction function) {
    model.plan.stages.push_back({unit.name, {static_cast<int>(model.plan.units.size())}, backward_reads_parameters});
    model.plan.units.push_back(unit);
    model.stages.push_back(std::move(function));
  };
  const plan::Initializer normal{plan::Initializer::Kind::normal, 0.08}, zero{plan::Initializer::Kind::constant, 0};
  add({"embedding", {{"embedding", {kBytes, kWidth}, normal}}}, false,
      [](nn::Parameters p, const at::Tensor&, const nn::MicroBatch& b) { return at::embedding(p[0], b.tokens); });
  for (int i = 0; i < kBlocks; ++i) {
    const std::string name = "block" + std::to_string(i);
    add({name, {{name + ".taps", {kWidth, kWidth, kTaps}, normal}, {name + ".bias", {kWidth}, zero}}}, true,
        [dilation = std::int64_t{1} << i](nn::Parameters p, const at::Tensor& x, const nn::MicroBatch&) {
          const at::Tensor past = at::constant_pad_nd(x.transpose(1, 2), {(kTaps - 1) * dilation, 0});
          return x + at::gelu(at::convolution(past, p[0], p[1], {1}, {0}, {dilation}, false, {0}, 1)).transpose(1, 2);
        });
  }
  add({"head", {{"head", {kBytes, kWidth}, normal}}}, true,
      [](nn::Parameters p, const at::Tensor& x, const nn::MicroBatch& b) {
        return at::cross_entropy_loss(at::linear(x, p[0]).flatten(0, 1), b.labels.flatten(), {}, at::Reduction::Sum);
      });
  return model;
}

void train(const at::Tensor& text, int groups, const control::Place& place) {
  // Who is where, and the connections along each axis. torchrun serves the store.
  const topology::Layout layout = topology::Layout::make(place.world_size, {.groups = groups});
  const topology::Coordinates me = layout.at(place.rank);
  const auto store = comm::Store::connect(place.master_address, place.master_port, kTimeout);
  const std::string address = comm::address_towards(place.master_address, place.master_port);
  const auto backend = comm::make_gloo_backend(store, {"", address, kTimeout});
  comm::TrafficCounter traffic(comm::groups_by_rank(layout));
  comm::Axes axes = comm::make_axes(layout, place.rank, *backend, traffic);

  // This rank's shard of the model, its optimizer, and its part in a round.
  const nn::Model model = convolutions();
  shard::StateRegistry registry;
  shard::Engine engine(model, layout.group(me.group).shards, me.shard, axes, {.max_norm = 1.0}, registry);
  engine.fill([&](int unit, topology::Range held, std::span<float> out) {
    nn::initialize_slice(model.plan, /*seed=*/1, unit, held.begin, held.end, out);
  });
  const auto optimizer = optim::make_optimizer({}, engine, axes, registry);
  federation::Exchange exchange(layout, place.rank, model.plan, engine.map(), axes);
  const std::vector<double> weights(static_cast<std::size_t>(groups), 1.0 / groups);

  at::manual_seed(static_cast<std::uint64_t>(place.rank));  // each rank draws windows of its own
  for (int step = 1; step <= kSteps; ++step) {
    const at::Tensor starts = at::randint(text.numel() - kLength, {kBatch, 1}, at::kLong);
    const nn::MicroBatch batch = nn::micro_batch_of(at::take(text, starts + at::arange(kLength + 1)));
    const shard::StepResult result = engine.step({&batch, 1}, [&](int unit) { optimizer->step(unit, step, 3e-3); });
    if (step % kEvery != 0) continue;
    // A round: the groups' mean becomes everybody's model, and all must hold the same bits.
    const at::Tensor mean = exchange.mean_of(engine.parameters(), weights, comm::Purpose::aggregate);
    exchange.spread(mean, engine.parameters(), comm::Purpose::aggregate);
    const std::uint64_t digest = shard::agreed_digest(model.plan, engine.parameters(), axes);
    if (me.local == 0) fmt::print("step {} group {} loss {:.3f} digest {:x}\n", step, me.group, result.loss, digest);
  }
}

int main(int argc, char** argv) try {
  const auto place = control::place_from_environment(control::process_environment);
  if (argc != 3 || !place) base::fail<base::UsageError>("start `own-model TEXT GROUPS` with torchrun");
  std::ifstream file(argv[1], std::ios::binary);
  std::string bytes(std::istreambuf_iterator<char>(file), {});
  const auto size = static_cast<std::int64_t>(bytes.size());
  if (size <= kLength) base::fail<base::UsageError>("'{}' has {} bytes, needed are {}", argv[1], size, kLength + 1);
  train(at::from_blob(bytes.data(), {size}, at::kByte).to(at::kLong), std::stoi(argv[2]), *place);
} catch (const std::exception& e) {
  fmt::print(stderr, "own-model: {}\n", e.what());
  return 1;
}
