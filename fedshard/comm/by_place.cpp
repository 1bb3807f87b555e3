#include "fedshard/comm/by_place.h"

#include <algorithm>
#include <utility>

namespace fedshard::comm {
namespace {

class BackendByPlace final : public Backend {
 public:
  BackendByPlace(std::vector<int> here, std::unique_ptr<Backend> inside, std::unique_ptr<Backend> between)
      : here_(std::move(here)), inside_(std::move(inside)), between_(std::move(between)) {}

  std::unique_ptr<Transport> connect(const Members& members) override {
    const bool all_here = std::all_of(members.ranks.begin(), members.ranks.end(), [&](int rank) {
      return std::find(here_.begin(), here_.end(), rank) != here_.end();
    });
    return (all_here ? inside_ : between_)->connect(members);
  }

 private:
  std::vector<int> here_;
  std::unique_ptr<Backend> inside_;
  std::unique_ptr<Backend> between_;
};

}  // namespace

std::unique_ptr<Backend> make_backend_by_place(std::vector<int> here, std::unique_ptr<Backend> inside,
                                               std::unique_ptr<Backend> between) {
  return std::make_unique<BackendByPlace>(std::move(here), std::move(inside), std::move(between));
}

}  // namespace fedshard::comm
