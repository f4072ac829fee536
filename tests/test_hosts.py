"""Two hosts: network namespaces of this machine, joined by a link that can be cut, throttled and reset. Needs root.

They share a kernel, a clock, a memory and a disk: NCCL, GPUs, other libraries on one host and a file system over a
network are not shown.
"""

import os
import shutil
import signal
import subprocess
import time
from datetime import timedelta

import pytest
from conftest import TINY, wait_until, weights_of
from server import Command, at_update, environments_of, fails, finish

from mpp.runtime.processes import set_timeout
from mpp.training.checkpoint import newest_step

LACKING = [*(["root"] if os.geteuid() else []), *(name for name in ("ip", "tc", "ss") if shutil.which(name) is None)]
pytestmark = [
    pytest.mark.rehearsal,
    pytest.mark.skipif(bool(LACKING), reason=f"no hosts here: {', '.join(LACKING)} missing (tests/rehearsals)"),
]
ADDRESSES = ("10.77.0.1", "10.77.0.2")
LONG = (*TINY, "--run.steps=60", "--run.eval_every=1000", "--run.checkpoint_every=5")


class Hosts:
    """Two of them, 10.77.0.1 and 10.77.0.2, whose ends of the link are devices with the names of the hosts."""

    def __init__(self):
        self.names = [f"mpp{os.getpid()}{letter}" for letter in "ab"]

    def __enter__(self) -> "Hosts":
        for name in self.names:
            self.ip("netns", "add", name)
            self.ip("-n", name, "link", "set", "lo", "up")
        self.ip("link", "add", self.names[0], "type", "veth", "peer", "name", self.names[1])
        for name, address in zip(self.names, ADDRESSES, strict=True):
            self.ip("link", "set", name, "netns", name)
            self.ip("-n", name, "addr", "add", f"{address}/24", "dev", name)
            self.ip("-n", name, "link", "set", name, "up")
        return self

    def __exit__(self, *_) -> None:
        for name in self.names:
            self.ip("netns", "delete", name)

    def ip(self, *words: str) -> None:
        subprocess.run(("ip", *words), check=True)

    def link(self, state: str) -> None:
        """Cut the link, or mend it: "down", "up"."""
        self.ip("-n", self.names[1], "link", "set", self.names[1], state)

    def inside(self, host: int, *words: str) -> str:
        """What a command writes on a host."""
        return subprocess.check_output(("ip", "netns", "exec", self.names[host], *words), text=True)

    def start(self, folder, *words: str, prepare=None, sharded=False, named=True) -> Command:
        """A run of one process on each host; `named`: it was told by which device they reach each other."""
        shared = {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": ADDRESSES[0]}
        environments = environments_of(2, sharded)
        for name, each in zip(self.names, environments, strict=True):
            each |= shared | {"NETWORK_NAMESPACE": name} | ({"GLOO_SOCKET_IFNAME": name} if named else {})
        arguments = (*LONG, f"--run.dir={folder}", *words)
        return Command("pretrain", *arguments, environments=environments, prepare=prepare)


@pytest.fixture(scope="module")
def hosts():
    try:
        hosts = Hosts().__enter__()
    except subprocess.CalledProcessError as error:  # root of a container may be refused them
        pytest.skip(f"no network namespaces here: {error}")
    yield hosts
    hosts.__exit__()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The encoder of two processes on one host, data-parallel and sharded."""
    encoders = {}
    for sharded in (False, True):
        folder = tmp_path_factory.mktemp("undisturbed") / "run"
        finish(Command("pretrain", *LONG, f"--run.dir={folder}", processes=2, sharded=sharded))
        encoders[sharded] = weights_of(folder)
    return encoders


def goes_on(hosts, folder) -> bytes:
    """The same command, without `prepare`: on where it was, or from the start. The weights."""
    finish(hosts.start(folder))
    return weights_of(folder)


def unhurried() -> None:
    """An update takes 20 ms at least, and no process waits for another for more than 5 s."""

    def act(_) -> None:
        set_timeout(timedelta(seconds=5))
        time.sleep(0.02)

    at_update(None, act)


def patient() -> None:
    at_update(None, lambda _: time.sleep(0.02))


def begun(hosts, folder, prepare) -> Command:
    """A run that has passed a checkpoint."""
    run = hosts.start(folder, prepare=prepare)
    wait_until(lambda: newest_step(folder) >= 5, of=run)
    return run


@pytest.mark.parametrize("sharded", [False, True])
def test_two_hosts_train_as_one(hosts, undisturbed, tmp_path, sharded, tally):
    finish(hosts.start(tmp_path / "run", sharded=sharded))
    assert weights_of(tmp_path / "run") == undisturbed[sharded]
    tally("two hosts, data-parallel and sharded: the bits of one host *")


def test_a_link_that_is_cut_for_10_seconds(hosts, undisturbed, tmp_path, tally):
    run = begun(hosts, tmp_path / "run", patient)
    hosts.link("down")
    time.sleep(10)
    assert newest_step(tmp_path / "run") < 60
    hosts.link("up")
    finish(run)
    assert weights_of(tmp_path / "run") == undisturbed[False]
    tally("two hosts: the link is cut for 10 s *")


def test_a_link_that_is_cut_for_good(hosts, undisturbed, tmp_path, tally):
    """Both give up with a line (after 5 s in place of 20 minutes); what was trained until then is not lost."""
    run = begun(hosts, tmp_path / "run", unhurried)
    hosts.link("down")
    fails(run)
    hosts.link("up")
    assert run.said.count("another process does not answer") == 2, run.said
    assert 5 <= newest_step(tmp_path / "run") < 60
    assert goes_on(hosts, tmp_path / "run") == undisturbed[False]
    tally("two hosts: the link is cut for good: a line from each; the same command continues *")


@pytest.mark.parametrize("fault", ["dies", "reset"])
def test_a_host_or_its_connections_are_gone(hosts, undisturbed, tmp_path, fault, tally):
    run = begun(hosts, tmp_path / "run", patient)
    if fault == "dies":
        os.kill(run.processes[1].pid, signal.SIGKILL)
    else:
        hosts.inside(0, "ss", "--kill", "dst", ADDRESSES[1])
    assert run.wait() == ([2, -signal.SIGKILL] if fault == "dies" else [2, 2]), run.said
    assert run.said.count("another process does not answer") == (1 if fault == "dies" else 2), run.said
    assert goes_on(hosts, tmp_path / "run") == undisturbed[False]
    tally("two hosts: one dies, or all connections are reset: a line from who is left *")


def test_a_slow_link(hosts, undisturbed, tmp_path, tally):
    for host, name in enumerate(hosts.names):
        limit = ("tbf", "rate", "2mbit", "burst", "32kb", "latency", "50ms")
        hosts.inside(host, "tc", "qdisc", "replace", "dev", name, "root", *limit)
    finish(hosts.start(tmp_path / "run"))
    for host, name in enumerate(hosts.names):
        hosts.inside(host, "tc", "qdisc", "delete", "dev", name, "root")
    assert weights_of(tmp_path / "run") == undisturbed[False]
    tally("two hosts: a link of 2 Mbit/s *")


def test_a_name_that_leads_to_loopback_is_refused(hosts, tmp_path, tally):
    """Debian's default: gloo would tell the other host 127.0.0.1."""
    if not all("127." in hosts.inside(host, "getent", "hosts", os.uname().nodename) for host in (0, 1)):
        pytest.skip("this machine's name does not lead to loopback")
    run = hosts.start(tmp_path / "run", named=False)
    fails(run)
    assert run.said.count("GLOO_SOCKET_IFNAME is not set; it must be the network interface") == 2, run.said
    tally("two hosts whose names lead to loopback: refused, with what serves")
