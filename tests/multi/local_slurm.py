"""A Slurm of one node on this machine, for one test: as root, without systemd, munge or a database.

The node carries the machine's own name, so that the job's list of nodes resolves as it does on a cluster. The daemons
are children of the test and stay in the foreground; they end with it.
"""

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import time

from multi_harness import free_port

CONFIG = """
ClusterName=fedshardtest
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
SlurmctldPort={controller_port}
SlurmdPort={node_port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
SwitchType=switch/none
MailProg=/bin/true
SlurmdParameters=config_overrides
NodeName={host} NodeAddr=127.0.0.1 CPUs=4 RealMemory=1000
FirstJobId={first_job}
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""
PATIENCE_S = 60


def why_not():
    """What keeps Slurm from running here, or nothing."""
    for program in ("slurmctld", "slurmd", "srun", "sinfo"):
        if find(program) is None:
            return f"no {program} on this machine (Debian: slurmctld slurmd slurm-client)"
    if os.geteuid() != 0:
        return "a Slurm of one's own needs root"
    try:
        socket.getaddrinfo(socket.gethostname(), None)
    except OSError:
        return f"this machine's own name, {socket.gethostname()}, does not resolve"
    return None


def find(program):
    """Daemons lie in folders that an ordinary PATH leaves out."""
    return shutil.which(program) or shutil.which(program, path="/usr/sbin:/usr/local/sbin")


@contextlib.contextmanager
def running(folder):
    """Path of the configuration of a Slurm whose node is idle; stopped at the end."""
    for name in ("state", "spool"):
        (folder / name).mkdir(parents=True)
    config = folder / "slurm.conf"
    host = socket.gethostname().split(".")[0]
    # Ranks derive their port from the job's number, which therefore differs between runs of the tests.
    config.write_text(CONFIG.format(host=host, folder=folder, controller_port=free_port(), node_port=free_port(),
                                    first_job=random.randint(1, 19_000)))
    environment = {**os.environ, "SLURM_CONF": str(config)}
    daemons = []
    try:
        for command in (["slurmctld", "-D", "-c"], ["slurmd", "-D", "-N", host]):
            with open(folder / f"{command[0]}.out", "w") as out:
                daemons.append(subprocess.Popen([find(command[0]), *command[1:]], env=environment, stdout=out,
                                                stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL))
        wait_until_idle(folder, environment, daemons)
        yield config
    finally:
        for daemon in reversed(daemons):
            stop(daemon)


def wait_until_idle(folder, environment, daemons):
    end = time.monotonic() + PATIENCE_S
    state = ""
    while time.monotonic() < end and all(daemon.poll() is None for daemon in daemons):
        state = subprocess.run([find("sinfo"), "-h", "-o", "%T"], env=environment, capture_output=True,
                               text=True).stdout.strip()
        if state == "idle":
            return
        time.sleep(0.2)
    logs = "\n".join(path.read_text()[-1500:] for path in sorted(folder.glob("*.log")) + sorted(folder.glob("*.out")))
    raise AssertionError(f"Slurm's node is '{state}', not idle:\n{logs}")


def stop(daemon):
    daemon.send_signal(signal.SIGTERM)
    try:
        daemon.wait(10)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()
