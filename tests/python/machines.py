"""Machines for tests of ``bpslaunch --hosts``: network namespaces, each with an sshd of its own.

They share the processor, the file system and the numbers of processes with the machine that tests.
All that ssh needs (keys, configuration, known hosts) lies in the test's folder. The launcher runs
in a namespace too, which passes packets between the others; nothing is sent beyond.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SETUP = Path(__file__).parents[1] / "ssh" / "setup"
PATIENCE_SECONDS = 90

#: What a login shell of a machine has by itself: no key of the job, no variable of ours.
SSHD = """
Port 22
ListenAddress 0.0.0.0
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
PermitRootLogin prohibit-password
PasswordAuthentication no
StrictModes no
UsePAM no
PidFile none
"""
CLIENT = """
Host node*
    User root
    IdentityFile {folder}/user_key
    IdentitiesOnly yes
    IdentityAgent none
    UserKnownHostsFile {folder}/known_hosts
    GlobalKnownHostsFile /dev/null
    StrictHostKeyChecking yes
"""


def run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, timeout=30)


class Namespace:
    """A network namespace with mounts of its own, for as long as a process holds it."""

    def __init__(self) -> None:
        words = ["unshare", "--net", "--mount", "--propagation", "private", "sleep", "3600"]
        self.holder = subprocess.Popen(words, stderr=subprocess.PIPE)
        own = os.readlink("/proc/self/ns/net")
        deadline = time.monotonic() + PATIENCE_SECONDS
        while self.network() in ("", own):
            if (status := self.holder.poll()) is not None:
                assert self.holder.stderr is not None
                said = self.holder.stderr.read()
                raise subprocess.CalledProcessError(status, words, stderr=said)
            assert time.monotonic() < deadline, "there is no namespace"
            time.sleep(0.01)

    def network(self) -> str:
        try:
            return os.readlink(f"/proc/{self.holder.pid}/ns/net")
        except OSError:
            return ""

    def words(self, *words: str) -> list[str]:
        return ["nsenter", "-t", str(self.holder.pid), "--net", "--mount", "--", *words]

    def run(self, *words: str) -> None:
        run(*self.words(*words))

    def processes(self) -> dict[int, str]:
        """The command lines of the processes here, by number."""
        network, found = self.network(), {}
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdecimal() and os.readlink(entry / "ns/net") == network:
                    words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").strip()
                    if words:  # A process that nobody has reaped has none.
                        found[int(entry.name)] = words.decode(errors="replace")
            except OSError:
                continue  # It has ended.
        return found


class Machines:
    """``node1`` to ``nodeN``, and the namespace ``here`` in which the launcher runs."""

    def __init__(self, count: int, folder: Path, sshd: str) -> None:
        self.folder, self.sshd = folder, sshd
        self.everything: list[subprocess.Popen[bytes]] = []
        self.nodes: list[Namespace] = []
        self.here = self._namespace()
        try:
            for key in ("host_key", "user_key"):
                run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key))
            self.config = folder / "ssh_config"
            text = CLIENT.format(folder=folder)
            self.here.run("ip", "link", "set", "lo", "up")
            forward = "mount -t proc proc /proc && echo 1 >/proc/sys/net/ipv4/ip_forward"
            self.here.run("sh", "-c", forward)
            known = (folder / "host_key.pub").read_text()
            for number in range(1, count + 1):
                self._node(number)
                text += f"Host node{number}\n    HostName {self.address(number)}\n"
                with (folder / "known_hosts").open("a") as file:
                    file.write(f"{self.address(number)} {known}")
            self.config.write_text(text)
            self.calm = [set(node.processes()) for node in self.nodes]
        except BaseException:
            self.close()
            raise

    @staticmethod
    def address(number: int) -> str:
        return f"10.99.{number}.2"

    def _namespace(self) -> Namespace:
        namespace = Namespace()
        self.everything.append(namespace.holder)
        return namespace

    def _node(self, number: int) -> None:
        node = self._namespace()
        self.nodes.append(node)
        pair = f"veth{number}"
        peer = ["peer", "name", "eth0", "netns", str(node.holder.pid)]
        self.here.run("ip", "link", "add", pair, "type", "veth", *peer)
        self.here.run("ip", "address", "add", f"10.99.{number}.1/24", "dev", pair)
        self.here.run("ip", "link", "set", pair, "up")
        for words in (
            "link set lo up",
            f"address add {self.address(number)}/24 dev eth0",
            "link set eth0 up",
            f"route add default via 10.99.{number}.1",
        ):
            node.run("ip", *words.split())
        self._sshd(node, number)

    def _sshd(self, node: Namespace, number: int) -> None:
        """sshd wants a user and a folder of its own, and an account that is not locked."""
        users = Path("/etc/passwd").read_text()
        if "\nsshd:" not in users:
            users += "sshd:x:65533:65534::/run/sshd:/usr/sbin/nologin\n"
        (self.folder / "passwd").write_text(users)
        (self.folder / "shadow").write_text("root:*:19000:0:99999:7:::\n")
        for name in ("passwd", "shadow"):
            node.run("mount", "--bind", str(self.folder / name), f"/etc/{name}")
        node.run("sh", "-c", "mount -t tmpfs none /run && mkdir -m 755 /run/sshd")
        text = SSHD.format(folder=self.folder)
        root = Path(self.sshd).parents[2]
        for option, name in (("SshdSessionPath", "session"), ("SshdAuthPath", "auth")):
            program = root / f"usr/lib/openssh/sshd-{name}"
            if program.exists():
                text += f"{option} {program}\n"
        config = self.folder / "sshd_config"
        config.write_text(text)
        libraries = (
            {str(path.parent) for path in root.rglob("lib*.so*")} if root != Path("/") else []
        )
        environment = os.environ | {"LD_LIBRARY_PATH": ":".join(sorted(libraries))}
        log = (self.folder / f"sshd{number}.log").open("wb")
        words = node.words(self.sshd, "-D", "-e", "-f", str(config))
        daemon = subprocess.Popen(words, stdout=log, stderr=log, env=environment)
        self.everything.append(daemon)
        deadline = time.monotonic() + PATIENCE_SECONDS
        probe = self.here.words("ssh-keyscan", "-T", "2", "-t", "ed25519", self.address(number))
        while not subprocess.run(probe, check=False, capture_output=True, timeout=30).stdout:
            said = (self.folder / f"sshd{number}.log").read_text()
            assert daemon.poll() is None and time.monotonic() < deadline, f"no sshd: {said}"
            time.sleep(0.05)

    def launch(self, *words: str, **environment: str) -> Launched:
        """Starts ``bpslaunch`` with these arguments."""
        program = [sys.executable, "-m", "byteps._programs", "launch"]
        flags = ["--ssh-command", f"ssh -F {shlex.quote(str(self.config))}"]
        path = os.environ.get("PYTHONPATH")
        if (
            path and "--remote-program" not in words
        ):  # A package that is not installed is where nobody looks for it.
            remote = shlex.join(["env", f"PYTHONPATH={path}", *program])
            flags += ["--remote-program", remote, "--env", "PYTHONPATH"]
        own = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
        own |= {"HOME": str(self.folder)} | environment
        # Whoever enters a namespace with mounts of its own finds itself in its root.
        inside = ["env", "-C", str(self.folder), *program, *flags, *words]
        return Launched(self.here.words(*inside), own, self.folder)

    def left(self) -> list[str]:
        """What runs on the machines that did not before."""
        new = [
            f"node{number}: {command}"
            for number, (node, calm) in enumerate(zip(self.nodes, self.calm, strict=True), 1)
            for process, command in node.processes().items()
            if process not in calm
        ]
        holder = self.here.holder.pid
        here = self.here.processes().items()
        return new + [command for process, command in here if process != holder]

    def cut(self, number: int) -> None:
        """Ends the sessions of sshd on a machine, and with them the connections to it."""
        sessions = [
            process
            for process, command in self.nodes[number - 1].processes().items()
            if process not in self.calm[number - 1] and command.startswith("sshd")
        ]
        assert sessions, f"nobody has logged in to node{number}"
        for process in sessions:
            os.kill(process, signal.SIGKILL)

    def settle(self) -> None:
        """Waits until nothing is left on any machine."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while left := self.left():
            assert time.monotonic() < deadline, left
            time.sleep(0.05)

    def close(self) -> None:
        for namespace in [self.here, *self.nodes]:
            for process in namespace.processes():
                if process != namespace.holder.pid:
                    try:
                        os.kill(process, signal.SIGKILL)
                    except ProcessLookupError:
                        continue
        for process in self.everything:
            process.kill()
            process.wait()


class Launched:
    """A running launcher, whose outputs go to files."""

    def __init__(self, words: list[str], environment: dict[str, str], folder: Path) -> None:
        self.outputs = [folder / "output", folder / "errors"]
        with self.outputs[0].open("wb") as output, self.outputs[1].open("wb") as errors:
            self.process = subprocess.Popen(
                words,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
            )

    def said(self) -> str:
        return "".join(path.read_text(errors="replace") for path in self.outputs)

    def wait_for(self, text: str, count: int = 1) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while self.said().count(text) < count:
            assert self.process.poll() is None and time.monotonic() < deadline, self.said()
            time.sleep(0.02)

    def finish(self, code: int) -> tuple[str, str]:
        """Standard output and standard error, once it has ended with this code."""
        try:
            status: int | str = self.process.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            status = "no end"
        output, errors = (path.read_text(errors="replace") for path in self.outputs)
        assert status == code, (status, output, errors)
        return output, errors


def machines(count: int, folder: Path) -> Machines:
    """So many machines; skips the test, and says why, where there can be none."""
    if os.geteuid() != 0:
        pytest.skip("only root can make network namespaces")
    for program in ("unshare", "nsenter", "ip", "ssh", "ssh-keygen", "ssh-keyscan"):
        if shutil.which(program) is None:
            pytest.skip(f"there is no {program}")
    found = subprocess.run([str(SETUP)], check=False, capture_output=True, text=True, timeout=400)
    if found.returncode != 0:
        pytest.skip(f"there is no sshd: {found.stderr.strip().splitlines()[-1:]}")
    try:
        return Machines(count, folder, found.stdout.strip())
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network of namespaces: {error.cmd}: {error.stderr.decode().strip()}")
