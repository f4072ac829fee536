"""A Slurm cluster of two virtual nodes on this machine. It needs root, slurm-wlm and munge (`tests/rehearsals`).

Its nodes are n1 and n2, each with 64 pretended CPUs and 8 pretended GPUs. Its daemons, and so its jobs, live in a mount
namespace where these names lead to this machine; nothing of the machine is changed. It cannot show a network between
nodes, a shared file system that lags, or GPUs.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
from conftest import ROOT, wait_until

PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin"
NEEDED = ("slurmctld", "slurmd", "sbatch", "munged", "unshare")
CONFIG = """
ClusterName=rehearsal
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=1,sched_interval=2
KillWait=30
MinJobAge=3600
SlurmdTimeout=20
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
NodeName=n[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{ports[2]}-{ports[3]}] CPUs=64 RealMemory=20000 Gres=gpu:8
PartitionName=low Nodes=n[1-2] Default=YES MaxTime=INFINITE PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
PartitionName=high Nodes=n[1-2] MaxTime=INFINITE PriorityTier=2 PreemptMode=OFF
"""


def missing() -> str:
    """What a cluster needs and this machine lacks; nothing where one can be started."""
    lacking = [program for program in NEEDED if shutil.which(program, path=PATH) is None]
    return ", ".join([*(["root"] if os.geteuid() else []), *lacking])


class Cluster:
    """Start with `with`; what runs at the end is killed."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir()
        folder.chmod(0o755)
        (folder / "state").mkdir()
        first = 20_000 + 4 * (os.getpid() % 5_000)  # another worker of pytest's may have one, too
        text = CONFIG.format(folder=folder, host=socket.gethostname(), ports=range(first, first + 4))
        (folder / "slurm.conf").write_text(text)
        for gpu in range(8):
            os.mknod(folder / f"gpu{gpu}", 0o020666, os.makedev(1, 3))
        (folder / "gres.conf").write_text(f"AutoDetect=off\nNodeName=n[1-2] Name=gpu File={folder}/gpu[0-7]\n")
        (folder / "cgroup.conf").write_text("CgroupAutomount=no\n")
        (folder / "munge.key").write_bytes(os.urandom(1024))
        (folder / "munge.key").chmod(0o400)
        (folder / "hosts").write_text(Path("/etc/hosts").read_text() + "\n127.0.0.1 n1\n127.0.0.1 n2\n")
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": PATH}

    def __enter__(self) -> "Cluster":
        where = self.folder
        names = ("key-file", "socket", "pid-file", "log-file", "seed-file")
        munge = [f"--{name}={where}/munge.{name.split('-')[0]}" for name in names]
        self.call("munged", "--force", *munge)
        self.daemon("slurmctld", "-c")
        for node in ("n1", "n2"):
            self.daemon("slurmd", "-N", node)
        wait_until(lambda: set(self.call("sinfo", "-hNo", "%t").split()) == {"idle"})
        return self

    def __exit__(self, *_) -> None:
        self.call("scancel", "--signal=KILL", "--full", "--user=root")
        self.call("scancel", "--user=root")
        for file in sorted(self.folder.glob("*.pid")):
            os.kill(int(file.read_text()), signal.SIGTERM)
        time.sleep(1)  # their last words

    def daemon(self, *words: str) -> None:
        mount = f"mount --bind {self.folder}/hosts /etc/hosts && exec "
        self.call("unshare", "--mount", "sh", "-c", mount + " ".join(words))

    def kill(self, node: str) -> None:
        """A node dies, with all that runs on it."""
        own = psutil.Process(int((self.folder / f"{node}.pid").read_text()))
        steps = [each for each in psutil.process_iter(["cmdline"]) if "slurmstepd" in " ".join(each.info["cmdline"])]
        for process in [own, *steps, *(child for step in steps for child in step.children(recursive=True))]:
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def call(self, *words: str) -> str:
        """What a command of Slurm's writes."""
        ended = subprocess.run(words, cwd=ROOT, env=os.environ | self.environment, capture_output=True, text=True)
        assert ended.returncode == 0, (words, ended.stderr)
        return ended.stdout

    def submit(self, script: Path, *options: str) -> str:
        """The number of a new job, whose output is the file SCRIPT.log."""
        return self.call("sbatch", "--parsable", f"--output={script}.log", *options, str(script)).strip()

    def job(self, number: str) -> dict[str, str]:
        """What Slurm says of a job: JobState, ExitCode, Restarts, and so on."""
        said = self.call("scontrol", "show", "job", "--oneliner", number).splitlines()[0]
        return dict(word.split("=", 1) for word in said.split() if "=" in word)

    def signal(self, number: str) -> None:
        """What `#SBATCH --signal=TERM@120` does two minutes before the end: SIGTERM to the steps of a job."""
        self.call("scancel", "--signal=TERM", number)

    def ended(self, number: str) -> dict[str, str]:
        """Wait for a job's end; what Slurm says of it then."""
        states = ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "REQUEUED", "SUSPENDED", "PREEMPTED")
        wait_until(lambda: self.job(number)["JobState"] not in states, poll=0.2)
        return self.job(number)
