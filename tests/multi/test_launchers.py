"""The same two ranks, whoever starts them: fedshard itself, torchrun, a plain environment, srun, mpirun."""

import os
import shutil
import subprocess
import sys

import pytest

import local_slurm
from multi_harness import BINARY, DEADLINE_S, finish, free_port, run_process

TABLES = {"training": {"local_batch_size": 2, "steps": 8}, "parallelism": {"groups": 2}, "federation": {"every": 3},
          "validation": {"interval": 4}}


@pytest.fixture(scope="module")
def own_launcher(module_program):
    return module_program.train(2, **TABLES)


def assert_same(run, own_launcher, source):
    assert run.numbers_as_text() == own_launcher.numbers_as_text()
    assert [r["kind"] for r in run.records].count("round") == 2
    # Each rank's log says whose variables it read, so this was not some other way of starting.
    for log in (run.folder / "log.txt", run.folder / "ranks" / "1.log.txt"):
        assert f"from {source}'s variables" in log.read_text()


def test_own_launcher(own_launcher):
    assert_same(own_launcher, own_launcher, "fedshard")


def test_torchrun(program, own_launcher):
    path, run_folder = program.config(**TABLES)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", 2, "--master-addr", "127.0.0.1",
               "--master-port", free_port(), "--no-python", BINARY, "train", path]
    run = program.result(run_process(command, program.environment()), run_folder)
    assert_same(run, own_launcher, "torchrun")


def test_plain_environment(program, own_launcher):
    """Two processes that a script starts by hand, with the variables of torchrun and no agent behind them."""
    path, run_folder = program.config(**TABLES)
    place = {"WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    ranks = [subprocess.Popen([BINARY, "train", path], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, text=True, start_new_session=True,
                              env=program.environment(RANK=rank, LOCAL_RANK=rank, **place)) for rank in range(2)]
    done = [finish(rank) for rank in ranks]
    assert [d.returncode for d in done] == [0, 0], [d.stderr for d in done]
    assert_same(program.result(done[0], run_folder), own_launcher, "torchrun")


def test_srun(program, own_launcher, tmp_path):
    if reason := local_slurm.why_not():
        pytest.skip(reason)
    path, run_folder = program.config(**TABLES)
    with local_slurm.running(tmp_path / "slurm") as slurm_conf:
        command = ["srun", "--ntasks", 2, "--time", max(1, DEADLINE_S // 60), BINARY, "train", path]
        done = run_process(command, program.environment(SLURM_CONF=slurm_conf), folder=tmp_path)
    assert_same(program.result(done, run_folder), own_launcher, "Slurm")


def test_mpirun(program, own_launcher):
    if shutil.which("mpirun") is None:
        pytest.skip("no mpirun on this machine (Debian: openmpi-bin)")
    version = subprocess.run(["mpirun", "--version"], capture_output=True, text=True).stdout
    if "Open MPI" not in version:
        pytest.skip(f"mpirun here is not Open MPI's: {version.splitlines()[:1]}")
    path, run_folder = program.config(**TABLES)
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": 1, "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": 1} if os.geteuid() == 0 else {}
    command = ["mpirun", "--oversubscribe", "-n", 2, BINARY, "train", path]
    run = program.result(run_process(command, program.environment(**as_root)), run_folder)
    assert_same(run, own_launcher, "Open MPI")
