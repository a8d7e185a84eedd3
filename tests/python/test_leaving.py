"""Ranks that leave a job in good order, and ranks that come to it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest

import byteps.common
import byteps.torch as bps
from byteps import elastic
from cluster import clean_environment, servers_of

#: Of one job, most of which is the start of Python and torch on a busy machine.
SECONDS = 240
SAMPLES = 240

#: Every sample is a step of one rank, which tells of it. An optimizer would take seconds to import.
TRAIN = f"""
import os, sys, time
import torch, byteps.torch as bps
torch.set_num_threads(1)
every = int(os.environ.get("EVERY", 1))
bps.init()
sampler = bps.elastic.ElasticSampler(range({SAMPLES}), shuffle=False)
state = bps.elastic.TorchState(sampler=sampler, step=0, total=0.0)
hold = int(os.environ.get("HOLD", -1))
say = lambda text: sys.stdout.write(text + "\\n") and sys.stdout.flush()

@state.on_change
def changed(old, new):
    say(f"changed from {{old}} to {{new}}")

@bps.elastic.run
def train(state):
    say(f"process {{os.getpid()}} of {{bps.size()}}")
    for number, sample in enumerate(list(sampler)):
        state.total += bps.push_pull(torch.tensor([float(sample)]), False, "x").item()
        sampler.record_batch(number, 1)
        state.step += 1
        say(f"step {{state.step}} sample {{sample}} of {{bps.size()}}")
        time.sleep(0.03)
        if state.step % every == 0:
            state.commit()
        # Until the file is there, which all see in one step.
        while state.step >= hold >= 0:
            if bps.push_pull(torch.tensor([float(os.path.exists("go"))]), False, "go").item():
                break
            time.sleep(0.03)
            state.commit()

train(state)
say(f"done with {{bps.size()}}: {{state.total}}")
bps.shutdown()
"""


class Launched:
    """A launcher, and what it says."""

    def __init__(self, folder, *flags, elastic="redo", **variables):
        script = folder / "train.py"
        script.write_text(TRAIN)
        command = [sys.executable, "-m", "byteps.launch", *flags]
        if elastic is not None:
            command += ["--elastic", elastic]
        self.process = subprocess.Popen(
            [*command, sys.executable, str(script)],
            env=clean_environment() | variables,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines = []
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self):
        self.lines += []
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))

    def find(self, pattern):
        """The matches in all lines so far."""
        found = (re.search(pattern, line) for line in list(self.lines))
        return [match for match in found if match]

    def wait_for(self, pattern, count=1):
        deadline = time.monotonic() + SECONDS
        while len(found := self.find(pattern)) < count:
            text = "\n".join(self.lines)
            assert time.monotonic() < deadline, f"no {pattern!r} in {SECONDS} s:\n{text}"
            assert self.process.poll() is None or not self.reader.is_alive(), text
            assert self.reader.is_alive(), text
            time.sleep(0.01)
        return found

    def finish(self):
        code = self.process.wait(SECONDS)
        self.reader.join(SECONDS)
        return code, "\n".join(self.lines)


@pytest.fixture
def launch(tmp_path):
    started = []

    def start(*flags, elastic="redo", **variables):
        started.append(Launched(tmp_path, *flags, elastic=elastic, **variables))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.process.kill()
            one.process.wait()


def pid_of(job, rank):
    return int(job.wait_for(rf"\[rank {rank}\] process (\d+)")[0][1])


def check_samples(job, text, repeats):
    """Every sample once, but for some that all ranks may have needed for equally many steps."""
    samples = [int(match[1]) for match in job.find(r"sample (\d+) of")]
    assert set(samples) == set(range(SAMPLES)), text
    assert len(samples) <= SAMPLES + repeats, text
    totals = {match[1] for match in job.find(r"done with \d+: (\S+)$")}
    assert len(totals) == 1, text
    # A sample that was needed twice is one of the last or, after a death, any.
    assert float(totals.pop()) >= sum(range(SAMPLES)), text


def test_a_rank_that_is_told_to_leaves_and_no_step_is_lost(launch):
    job = launch("--local", "3", "--servers", "1", "--min-workers", "2", BPS_LOCAL_REDUCE="0")
    pid = pid_of(job, 1)
    job.wait_for(r"\[rank 1\] step 5 ")
    os.kill(pid, signal.SIGTERM)
    code, text = job.finish()
    assert code == 0, text
    assert "SIGTERM: this rank leaves at the next commit, within 30s" in text, text
    for line in job.find(r"epoch 2: 2 ranks and 1 server go on after"):
        assert re.search(rf": rank 1 \(host .*, pid {pid}\) left$", line.string), text
    assert len(job.find(r"\[rank [02]\] changed from 3 to 2")) == 2, text
    assert len(job.find("done with 2")) == 2 and "rank 1] done" not in text, text
    assert "died" not in text and "rank 1 was killed" not in text, text
    assert "Traceback" not in text, text
    # No rank has made a step twice, or left one out; what the leaver has read is not read again.
    for rank in (0, 2):
        steps = [int(match[1]) for match in job.find(rf"\[rank {rank}\] step (\d+) ")]
        assert steps == list(range(1, len(steps) + 1)), text
    check_samples(job, text, repeats=1)


def test_a_rank_that_does_not_leave_in_time_counts_as_dead(launch):
    job = launch(
        *("--local", "3", "--servers", "1", "--leave-notice", "0.4"),
        BPS_LOCAL_REDUCE="0",
        EVERY="1000",
    )
    pid = pid_of(job, 2)
    job.wait_for(r"\[rank 2\] step 5 ")
    os.kill(pid, signal.SIGTERM)
    code, text = job.finish()
    assert code == 0, text
    assert "it was stopped by SIGTERM" in text, text
    assert "rank 2 was killed by SIGTERM (15); the job goes on with 2 workers here" in text, text
    check_samples(job, text, repeats=SAMPLES)


def test_a_server_that_is_told_to_leaves_and_no_step_is_lost(launch):
    job = launch("--local", "2", "--servers", "2", BPS_LOCAL_REDUCE="0")
    job.wait_for(r"\[rank 1\] step 5 ")
    pid = servers_of(job.process.pid)[0]
    os.kill(pid, signal.SIGTERM)
    code, text = job.finish()
    assert code == 0, text
    asked = "SIGTERM: this server leaves when the job can go on without it, within 30s"
    assert asked in text and "this server has left; the job goes on without it" in text, text
    told = job.find(r"epoch 2: 2 ranks and 1 server go on after")
    assert told and all(
        re.search(rf": server \d \(host .*, pid {pid}\) left$", line.string) for line in told
    ), text
    assert all(word not in text for word in ("died", "was killed", "failed", "Traceback")), text
    for rank in (0, 1):
        steps = [int(match[1]) for match in job.find(rf"\[rank {rank}\] step (\d+) ")]
        assert steps == list(range(1, len(steps) + 1)), text
    check_samples(job, text, repeats=1)


def test_the_last_server_is_not_let_go_and_fails_when_its_time_is_up(launch):
    job = launch(
        *("--local", "2", "--servers", "1", "--leave-notice", "0.5"), BPS_LOCAL_REDUCE="0", HOLD="5"
    )
    job.wait_for(r"\[rank 1\] step 5 ")
    os.kill(servers_of(job.process.pid)[0], signal.SIGTERM)
    code, text = job.finish()
    assert code == 1, text
    assert "the job could not let it go within 500ms (BPS_LEAVE_NOTICE)" in text, text
    assert "the job cannot go on: no server left for 2 workers" in text, text


def test_in_a_job_that_is_not_elastic_nobody_leaves_and_sigterm_ends_it_at_once(launch):
    job = launch("--local", "2", elastic=None, EVERY="1000", HOLD="10")
    pid = pid_of(job, 1)
    job.wait_for(r"\[rank 1\] step 5 ")
    begun = time.monotonic()
    os.kill(pid, signal.SIGTERM)
    code, text = job.finish()
    assert code == 143, text
    assert time.monotonic() - begun < 15 and "killed by SIGKILL" not in text, text
    assert "it was stopped by SIGTERM" in text and "leaves" not in text, text


def test_sigterm_to_the_launcher_ends_the_job_in_time(launch):
    job = launch("--local", "2", "--servers", "1", EVERY="1000", BPS_LOCAL_REDUCE="0")
    job.wait_for(r"step 5 ", 2)
    begun = time.monotonic()
    job.process.send_signal(signal.SIGTERM)
    code, text = job.finish()
    assert code == 143, text
    assert time.monotonic() - begun < 15 and "killed" not in text, text


def test_ranks_come_and_go_as_a_command_says(launch, tmp_path):
    def answer(text):
        (tmp_path / "new").write_text(text)
        (tmp_path / "new").rename(tmp_path / "answer")

    answer("localhost:1\n")
    job = launch(
        *("--host-discovery", "cat answer", "--discovery-interval", "0.1"),
        *("--max-workers", "3", "--min-workers", "1"),
        HOLD="10",
    )
    job.wait_for(r"\[rank 0 on localhost\] step 3 ")
    answer("localhost:2\n")
    job.wait_for(r"\[rank 0 on localhost\] changed from 1 to 2")
    job.wait_for(r"\[slot 1 on localhost\] step \d+ sample \d+ of 2")
    answer("localhost:1\n")
    job.wait_for(r"\[rank 0 on localhost\] changed from 2 to 1")
    (tmp_path / "go").touch()
    code, text = job.finish()
    assert code == 0, text
    assert "slot 1 on localhost has left (exited with code 0)" in text, text
    assert "died" not in text, text
    steps = [int(match[1]) for match in job.find(r"\[rank 0 .*\] step (\d+) ")]
    assert steps == list(range(1, len(steps) + 1)), text
    check_samples(job, text, repeats=1)


def test_a_rank_that_dies_is_started_again(launch, tmp_path):
    job = launch(
        *("--local", "2", "--servers", "1", "--max-workers", "2", "--restart-delay", "0.1"),
        BPS_LOCAL_REDUCE="0",
        HOLD="10",
    )
    pid = pid_of(job, 1)
    job.wait_for(r"\[rank 1\] step 3 ")
    os.kill(pid, signal.SIGKILL)
    job.wait_for(r"\[rank 0\] changed from 2 to 1")
    job.wait_for(r"\[rank 0\] changed from 1 to 2")
    (tmp_path / "go").touch()
    code, text = job.finish()
    assert code == 0, text
    assert "rank 1 has started" in text and len(job.find("done with 2")) == 2, text


# The state


def test_changes_are_told_with_the_size_that_the_state_is_of(monkeypatch):
    size = [1]
    monkeypatch.setattr(byteps.common, "size", lambda: size[0])
    monkeypatch.setattr(byteps.common, "rank", lambda: 0)
    monkeypatch.setattr(elastic, "_sum", lambda name, values: values)
    state = bps.elastic.TorchState(step=0)
    state.send = lambda root: None
    told = []
    state.register_reset_callbacks([lambda: told.append("reset")])
    assert state.on_change(lambda old, new: told.append((old, new))) is not None
    state.on_reset()
    assert told == ["reset"], "nothing is known of a size before"
    state.sync()
    size[0] = 4
    state.on_reset()
    # It was not synchronized: what is restored is of the size before.
    size[0] = 3
    state.on_reset()
    state.sync()
    state.on_reset()
    assert told[1:] == ["reset", (1, 4), "reset", (1, 3), "reset"]


def test_who_has_asked_to_leave_is_counted_and_hands_over(monkeypatch):
    sums = []
    monkeypatch.setattr(elastic._native, "newcomers", lambda: 0)
    monkeypatch.setattr(elastic, "_asked", False)
    monkeypatch.setattr(elastic, "_sum", lambda name, values: sums.append(values) or values)
    state = bps.elastic.TorchState(step=0)
    handed = []
    state.hand_over = lambda: handed.append(state._saved["step"])
    state.step = 5
    state.commit()
    bps.elastic.leave()
    with pytest.raises(bps.HostsUpdatedInterrupt):
        state.commit()
    assert sums == [[0, 0], [0, 1]] and handed == [5] and state._leaves
