#include "fedshard/control/place.h"

#include <gtest/gtest.h>

#include <map>

#include "fedshard/base/error.h"
#include "fedshard/control/host_list.h"
#include "tests/unit/control/expect_error.h"

namespace fedshard::control {
namespace {

using base::UsageError;
using Hosts = std::vector<std::string>;
using Map = std::map<std::string, std::string>;

Environment lookup(const Map& map) {
  return [map](const std::string& name) {
    const auto found = map.find(name);
    return found == map.end() ? std::nullopt : std::optional(found->second);
  };
}

std::optional<Place> place(const Map& map) { return place_from_environment(lookup(map)); }

Map operator+(Map a, const Map& b) {
  for (const auto& [name, value] : b) a[name] = value;
  return a;
}

void refused(const Map& map, const std::string& part) {
  expect_error<UsageError>([&] { place(map); }, part);
}

const Map kTorchrun{{"RANK", "3"},        {"WORLD_SIZE", "4"},    {"LOCAL_RANK", "1"}, {"LOCAL_WORLD_SIZE", "2"},
                    {"MASTER_ADDR", "t"}, {"MASTER_PORT", "1234"}};
const Map kSlurm{{"SLURM_JOB_ID", "70001"},
                 {"SLURM_STEP_ID", "0"},
                 {"SLURM_PROCID", "5"},
                 {"SLURM_NTASKS", "7"},
                 {"SLURM_STEP_NUM_TASKS", "7"},
                 {"SLURM_LOCALID", "1"},
                 {"SLURM_NODEID", "2"},
                 {"SLURM_STEP_TASKS_PER_NODE", "2(x3),1"},
                 {"SLURM_STEP_NODELIST", "n[09-12]"}};
const Map kOpenMpi{{"OMPI_COMM_WORLD_RANK", "2"},
                   {"OMPI_COMM_WORLD_SIZE", "7"},
                   {"OMPI_COMM_WORLD_LOCAL_RANK", "2"},
                   {"OMPI_COMM_WORLD_LOCAL_SIZE", "7"}};

TEST(HostList, ReadsEveryFormOfSlurm) {
  EXPECT_EQ(expand_hosts(""), Hosts{});
  EXPECT_EQ(expand_hosts("jean-zay-ia810"), Hosts{"jean-zay-ia810"});
  EXPECT_EQ(expand_hosts("alpha,beta"), (Hosts{"alpha", "beta"}));
  EXPECT_EQ(expand_hosts("linux[1,2]"), (Hosts{"linux1", "linux2"}));
  EXPECT_EQ(expand_hosts("n[01-03,7]"), (Hosts{"n01", "n02", "n03", "n7"}));
  EXPECT_EQ(expand_hosts("n[9-11]"), (Hosts{"n9", "n10", "n11"}));
  EXPECT_EQ(expand_hosts("n[5]"), Hosts{"n5"});
  EXPECT_EQ(expand_hosts("a,b[001,003],c"), (Hosts{"a", "b001", "b003", "c"}));
  EXPECT_EQ(expand_hosts("r[1-2]n[3-4]"), (Hosts{"r1n3", "r1n4", "r2n3", "r2n4"}));
  EXPECT_EQ(expand_hosts("gpu-[098-100]-ib.site"), (Hosts{"gpu-098-ib.site", "gpu-099-ib.site", "gpu-100-ib.site"}));
}

TEST(HostList, RefusesWhatIsNoList) {
  for (const char* list : {"n[1", "n1]", "n[[1]]", "a,,b", ",a", "a,", "n[]", "n[1,]", "n[3-1]", "n[a]", "n[1-]",
                           "n[-1]", "n[1-2-3]", "n[0-1000000]", "n[0-999]m[0-9999]", "n[99999999999999999999]"}) {
    expect_error<UsageError>([&] { expand_hosts(list); }, fmt::format("node list '{}'", list));
  }
}

TEST(Place, NoLauncherNoPlace) {
  EXPECT_FALSE(place({}));
  EXPECT_FALSE(place({{"MASTER_ADDR", "a"}, {"MASTER_PORT", "1"}}));
}

TEST(Place, Torchrun) {
  const auto p = place(kTorchrun).value();
  EXPECT_EQ(p.rank, 3);
  EXPECT_EQ(p.world_size, 4);
  EXPECT_EQ(p.local_rank, 1);
  EXPECT_EQ(p.local_size, 2);
  EXPECT_EQ(p.master_address, "t");
  EXPECT_EQ(p.master_port, 1234);
  EXPECT_EQ(p.source, "torchrun");
  EXPECT_EQ(describe(p), "rank 3 of 4, local rank 1 of 2, store at t:1234 (from torchrun's variables)");
}

TEST(Place, OurLauncherSetsTorchrunsVariablesAndItsOwn) {
  const auto p = place(kTorchrun + Map{{"FEDSHARD_COORDINATOR", "tcp://h:1"}, {"FEDSHARD_RUN_TOKEN", "x"}}).value();
  EXPECT_EQ(p.source, "fedshard");
  EXPECT_EQ(p.coordinator, "tcp://h:1");
  EXPECT_EQ(p.run_token, "x");
  refused(kTorchrun + Map{{"FEDSHARD_COORDINATOR", "tcp://h:1"}}, "only FEDSHARD_COORDINATOR is set");
  refused(kTorchrun + Map{{"FEDSHARD_RUN_TOKEN", "x"}}, "only FEDSHARD_RUN_TOKEN is set");
}

TEST(Place, TorchrunHalfSet) {
  for (const char* name : {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}) {
    Map map = kTorchrun;
    map.erase(name);
    refused(map, name);
    map[name] = "";  // set to nothing is not set
    refused(map, name);
  }
}

TEST(Place, NumbersAreNumbersAndInRange) {
  refused(kTorchrun + Map{{"RANK", "three"}}, "RANK is 'three'");
  refused(kTorchrun + Map{{"RANK", "-1"}}, "RANK is '-1'");
  refused(kTorchrun + Map{{"RANK", "3 "}}, "RANK is '3 '");
  refused(kTorchrun + Map{{"RANK", "4"}}, "rank 4 of a world of 4");
  refused(kTorchrun + Map{{"WORLD_SIZE", "99999999999"}}, "WORLD_SIZE is 99999999999");
  refused(kTorchrun + Map{{"LOCAL_RANK", "2"}}, "local rank 2 of 2");
  refused(kTorchrun + Map{{"LOCAL_WORLD_SIZE", "5"}}, "5 ranks on this node of a world of 4");
  refused(kTorchrun + Map{{"MASTER_PORT", "70000"}}, "MASTER_PORT is 70000");
  refused(kTorchrun + Map{{"MASTER_PORT", "0"}}, "MASTER_PORT is 0");
}

TEST(Place, Slurm) {
  const auto p = place(kSlurm).value();
  EXPECT_EQ(p.rank, 5);
  EXPECT_EQ(p.world_size, 7);
  EXPECT_EQ(p.local_rank, 1);
  EXPECT_EQ(p.local_size, 2);
  EXPECT_EQ(p.master_address, "n09");
  EXPECT_EQ(p.source, "Slurm");
  EXPECT_GE(p.master_port, 10000);
  EXPECT_LT(p.master_port, 30000);
  EXPECT_NE(place(kSlurm + Map{{"SLURM_STEP_ID", "1"}})->master_port, p.master_port);
  EXPECT_NE(place(kSlurm + Map{{"SLURM_JOB_ID", "70002"}})->master_port, p.master_port);
}

TEST(Place, SlurmTasksOfANode) {
  const auto size_at = [](const char* node, const char* tasks) {
    return place(kSlurm + Map{{"SLURM_NODEID", node}, {"SLURM_LOCALID", "0"}, {"SLURM_STEP_TASKS_PER_NODE", tasks}})
        ->local_size;
  };
  EXPECT_EQ(size_at("0", "2(x3),1"), 2);
  EXPECT_EQ(size_at("3", "2(x3),1"), 1);
  EXPECT_EQ(size_at("0", "7"), 7);
  EXPECT_EQ(size_at("1", "3,4"), 4);
  for (const char* bad : {"2(x", "2(x3", "2(x0)", "2,", ",2", "x", "0", "2(y3)", "2;3"}) {
    refused(kSlurm + Map{{"SLURM_STEP_TASKS_PER_NODE", bad}}, "SLURM_STEP_TASKS_PER_NODE");
  }
  refused(kSlurm + Map{{"SLURM_NODEID", "4"}}, "speaks of 4 nodes");

  Map plain = kSlurm;
  plain.erase("SLURM_STEP_TASKS_PER_NODE");
  EXPECT_EQ(place(plain)->local_size, std::nullopt);
  EXPECT_EQ(place(plain + Map{{"SLURM_NTASKS_PER_NODE", "2"}})->local_size, 2);
  EXPECT_EQ(place(plain + Map{{"SLURM_TASKS_PER_NODE", "1,2,3,1"}})->local_size, 3);
}

TEST(Place, AShellOfSlurmIsNoRank) {
  Map batch = kSlurm + Map{{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "1"}};
  batch.erase("SLURM_STEP_ID");
  EXPECT_FALSE(place(batch));
  batch["SLURM_STEP_ID"] = "4294967291";  // the number of the batch script
  EXPECT_FALSE(place(batch));
  batch["SLURM_STEP_ID"] = "4294967290";  // and of an interactive one
  EXPECT_FALSE(place(batch));
}

TEST(Place, SlurmHalfSet) {
  for (const char* name : {"SLURM_JOB_ID", "SLURM_PROCID", "SLURM_LOCALID"}) {
    Map map = kSlurm;
    map.erase(name);
    refused(map, name);
  }
  Map sizes = kSlurm;
  sizes.erase("SLURM_STEP_NUM_TASKS");
  EXPECT_EQ(place(sizes)->world_size, 7);
  sizes.erase("SLURM_NTASKS");
  refused(sizes, "SLURM_NTASKS");
  refused(kSlurm + Map{{"SLURM_JOB_ID", "job"}}, "SLURM_JOB_ID is 'job'");
  refused(kSlurm + Map{{"SLURM_STEP_NODELIST", "n[1"}}, "node list 'n[1'");
  Map nowhere = kSlurm;
  nowhere.erase("SLURM_STEP_NODELIST");
  refused(nowhere, "set MASTER_ADDR");
}

TEST(Place, OpenMpi) {
  const auto p = place(kOpenMpi).value();
  EXPECT_EQ(p.rank, 2);
  EXPECT_EQ(p.world_size, 7);
  EXPECT_EQ(p.local_size, 7);
  EXPECT_EQ(p.master_address, "127.0.0.1");  // all on one node
  EXPECT_EQ(p.master_port, 29500);
  EXPECT_EQ(p.source, "Open MPI");
  EXPECT_NE(place(kOpenMpi + Map{{"PMIX_NAMESPACE", "12"}})->master_port,
            place(kOpenMpi + Map{{"PMIX_NAMESPACE", "13"}})->master_port);
  refused(kOpenMpi + Map{{"OMPI_COMM_WORLD_LOCAL_SIZE", "4"}}, "set MASTER_ADDR");
  for (const auto& [name, value] : kOpenMpi) {
    Map map = kOpenMpi;
    map.erase(name);
    refused(map, name);
  }
}

TEST(Place, Pmi) {
  const Map user{{"MASTER_ADDR", "a"}};
  const auto p = place(user + Map{{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}}).value();
  EXPECT_EQ(p.rank, 1);
  EXPECT_EQ(p.world_size, 2);
  EXPECT_EQ(p.local_rank, std::nullopt);
  EXPECT_EQ(p.source, "PMI");
  EXPECT_EQ(describe(p), "rank 1 of 2, store at a:29500 (from PMI's variables)");
  const Map hydra{{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}, {"MPI_LOCALRANKID", "1"}, {"MPI_LOCALNRANKS", "2"}};
  EXPECT_EQ(place(hydra)->local_rank, 1);
  EXPECT_EQ(place(hydra)->master_address, "127.0.0.1");
  EXPECT_EQ(place(user + Map{{"PMIX_RANK", "1"}, {"WORLD_SIZE", "2"}})->world_size, 2);
  refused({{"PMIX_RANK", "1"}}, "WORLD_SIZE");
  refused({{"PMI_RANK", "1"}}, "PMI_SIZE");
  refused({{"PMI_SIZE", "1"}}, "PMI_RANK");
  refused({{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}}, "set MASTER_ADDR");
}

TEST(Place, AWorldOfOneNeedsNoAddress) {
  EXPECT_EQ(place({{"PMI_RANK", "0"}, {"PMI_SIZE", "1"}})->master_address, "127.0.0.1");
}

TEST(Place, Precedence) {
  const Map pmi{{"PMI_RANK", "0"}, {"PMI_SIZE", "7"}};
  const Map all = pmi + kOpenMpi + kSlurm + kTorchrun;
  EXPECT_EQ(place(all)->source, "torchrun");
  EXPECT_EQ(place(pmi + kOpenMpi + kSlurm)->source, "Slurm");
  EXPECT_EQ(place(pmi + kOpenMpi)->source, "Open MPI");
}

TEST(Place, DaemonsOfMpirunAreNotRanks) {
  const Map inside = kSlurm + kOpenMpi + Map{{"OMPI_COMM_WORLD_SIZE", "14"}, {"MASTER_ADDR", "n09"}};
  const auto p = place(inside).value();
  EXPECT_EQ(p.source, "Open MPI");
  EXPECT_EQ(p.rank, 2);
  EXPECT_EQ(p.world_size, 14);
}

TEST(Place, TheUsersAddressAndPortWin) {
  for (const Map& launcher : {kSlurm, kOpenMpi}) {
    const auto p = place(launcher + Map{{"MASTER_ADDR", "mine"}, {"MASTER_PORT", "4711"}}).value();
    EXPECT_EQ(p.master_address, "mine");
    EXPECT_EQ(p.master_port, 4711);
  }
}

TEST(Place, LeftoversMustAgree) {
  EXPECT_EQ(place(kSlurm + Map{{"WORLD_SIZE", "7"}, {"LOCAL_RANK", "1"}})->source, "Slurm");
  refused(kSlurm + Map{{"WORLD_SIZE", "8"}}, "WORLD_SIZE is 8, but Slurm's variables say 7");
  refused(kSlurm + Map{{"LOCAL_RANK", "0"}}, "LOCAL_RANK is 0, but Slurm's variables say 1");
  refused({{"WORLD_SIZE", "8"}}, "WORLD_SIZE is set but RANK is not");
  refused({{"LOCAL_WORLD_SIZE", "8"}}, "LOCAL_WORLD_SIZE is set but RANK is not");
}

}  // namespace
}  // namespace fedshard::control
