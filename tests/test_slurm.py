"""The SLURM scripts on a fake cluster that really runs them: restarts, slices, quoting, settings, the environment."""

import hashlib
import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import harness
import pytest
from fakes.slurm.cluster import Cluster
from harness import tiny

ROOT = harness.ROOT
SUBMIT = ROOT / "scripts" / "slurm" / "submit.sh"
SECRETS = {"HF_TOKEN": "planted-hf-token", "WANDB_API_KEY": "planted-wandb-key"}


@pytest.fixture
def cluster(tmp_path):
    return Cluster(tmp_path / "cluster")


@pytest.fixture
def submit(cluster):
    """Runs submit.sh with the fakes in PATH; returns the completed process, which must have the given exit code."""

    def run(*words, code=0, script=SUBMIT, **variables):
        outer = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "LLAMA_JAX_"))}
        environment = outer | SECRETS | {"FAKE_SLURM": str(cluster.folder), "LLAMA_JAX_PYTHON": sys.executable}
        environment |= {"PATH": f"{ROOT / 'tests' / 'fakes' / 'slurm'}:{os.environ['PATH']}"}
        environment |= {name: str(value) for name, value in variables.items()}
        words = ["bash", script, *words]
        ended = subprocess.run(list(map(str, words)), env=environment, cwd="/", capture_output=True, text=True)
        assert ended.returncode == code, ended
        return ended

    return run


@pytest.fixture
def stub(tmp_path):
    """Makes a Python that notes its words as a JSON line in calls(), then runs a shell script instead."""
    calls = tmp_path / "calls.jsonl"

    def make(script="exit 0"):
        path = tmp_path / f"python stub {len(list(tmp_path.glob('python stub*')))}"
        note = [sys.executable, "-SE", "-c", "import json, sys; print(json.dumps(sys.argv[1:]))"]
        path.write_text(f'#!/usr/bin/env bash\n{shlex.join(note)} "$@" >>{shlex.quote(str(calls))}\n{script}\n')
        path.chmod(0o755)
        return path

    make.calls = lambda: [json.loads(line) for line in calls.read_text().splitlines()] if calls.exists() else []
    return make


def ended(cluster):
    """{name: (state, exit code, requeues)} of all jobs."""
    return {job["name"]: (job["state"], job["code"], job["restarts"]) for job in cluster.jobs()}


def written(folder, cluster):
    """The text of everything below a folder but the cluster's own memory."""
    files = [path for path in folder.rglob("*") if path.is_file() and cluster.folder not in path.parents]
    return b"\n".join(path.read_bytes() for path in files)


# Training: restarts end bitwise equal.


def test_usr1_and_a_failed_node_end_bitwise_equal(cluster, submit, tmp_path):
    """Start 1 gets USR1 in update 3, start 2 loses its node behind a recovery checkpoint, start 3 ends."""
    commands = harness.Commands(tmp_path, quick=True)
    harness.run(tiny(), tmp_path / "unbroken")
    folder, faults = tmp_path / "a run; touch x", ["stop@step:3", "stop@after_manifest:2", None]
    variables, _ = commands.environment()
    started, struck = [], []

    def more(job):
        started.append(job["restarts"])
        fault = faults[job["restarts"]]
        fired = {"LLAMA_JAX_TEST_FAULT_FIRED": str(tmp_path / f"struck-{job['restarts']}")}
        return fired | ({"LLAMA_JAX_TEST_FAULT": fault} if fault else {})

    def watch(node):
        number = node.job["restarts"]
        if number in struck or not (tmp_path / f"struck-{number}").exists():
            return
        struck.append(number)
        if number == 1:
            return node.fail()
        node.warn()
        wait_for(lambda: "asks the command to save" in node.text())
        continue_stopped(cluster, node.raw)

    kept = {name: variables[name] for name in variables if name.startswith(("JAX_", "XLA_FLAGS"))}
    words = (f"--config={commands.save(tiny())}", f"--workdir={folder}", "--config.training.recovery_minutes=0")
    submitted = submit("--time=10", "train", *words, **kept)
    (job,) = cluster.jobs()
    log = folder / f"slurm-{job['raw']}.log"
    assert submitted.stdout == f"slurm: job {job['raw']}: train; console in {log}\n"
    cluster.drain(watch, more)
    assert (started, struck) == ([0, 1, 2], [0, 1]), log.read_text()
    assert ended(cluster) == {job["name"]: ("COMPLETED", 0, 2)}, log.read_text()
    assert harness.outcome(folder) == harness.outcome(tmp_path / "unbroken")
    assert [line["update"] for line in harness.lines(folder, "train")] == list(range(1, 11))
    text = log.read_text()  # one log of all starts
    assert [text.count(f"start {number} on ") for number in (1, 2, 3)] == [1, 1, 1]
    saved = re.search(r"error: SIGUSR1 received: saved at update (\d+), ", text)[1]
    assert f"saved, requeued with progress {saved}\n" in text and "start 2 on " in text
    assert text.count("continues after update ") == 2 and text.endswith(f"slurm: job {job['raw']}: done\n")
    starts = harness.strict((folder / "environment.json").read_text())["starts"]
    assert [start["variables"].get("SLURM_RESTART_COUNT") for start in starts] == [None, "1", "2"]
    assert {start["variables"]["XLA_PYTHON_CLIENT_MEM_FRACTION"] for start in starts} == {"0.9"}
    assert not any(secret.encode() in written(folder, cluster) for secret in SECRETS.values())


def wait_for(condition, tries=600):
    while not condition():
        tries -= 1
        assert tries, "it never came"
        time.sleep(0.05)


def continue_stopped(cluster, raw):
    """SIGCONT to the process of a job that a fault has stopped."""
    marks = {f"FAKE_SLURM={cluster.folder}".encode(), f"SLURM_JOB_ID={raw}".encode()}
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if marks <= set(path.read_bytes().split(b"\0")):
                os.kill(int(path.parent.name), signal.SIGCONT)
        except OSError:
            continue


# What the job scripts do with the ways in which a command may end.

WAITS = "trap 'exit 75' TERM USR1; echo ready; while :; do sleep 0.02; done"


def once_ready(act):
    """A watch that acts once in each start, when the command has said `ready`."""
    acted = {}

    def watch(node):
        count = acted.get(node.raw, 0)
        if count == node.job["restarts"] and node.text().count("ready\n") > count:
            acted[node.raw] = count + 1
            act(node)

    return watch


@pytest.mark.parametrize("code", [1, 2, 3, 4, 5, 6, 130, 137])
def test_failures_are_not_requeued(code, cluster, submit, stub, tmp_path):
    submit("train", f"--workdir={tmp_path / 'run'}", LLAMA_JAX_PYTHON=stub(f"exit {code}"))
    cluster.drain()
    assert list(ended(cluster).values()) == [("FAILED", code, 0)]
    assert re.search(rf"exit code {code} \(.+\), not requeued\n$", log_of(cluster, tmp_path / "run"))
    assert len(stub.calls()) == 1


def log_of(cluster, folder):
    (path,) = (path for path in folder.glob("slurm-*.log") if not path.name.endswith(".starts.log"))
    return path.read_text()


def test_a_cancelled_job_is_not_requeued(cluster, submit, stub, tmp_path):
    """scancel signals the step, which saves and exits with 75 as for USR1; but the user wants no other start.

    The shell gets TERM too, and its process group, which must neither end the task nor signal it a second time.
    """
    saves = "trap 'trap \"exit 1\" TERM USR1; sleep 0.5; echo whole; exit 75' TERM USR1"
    script = f"{saves}; echo ready; while :; do sleep 0.02; done"
    submit("train", f"--workdir={tmp_path / 'run'}", LLAMA_JAX_PYTHON=stub(script))
    cluster.drain(once_ready(lambda node: node.cancel()))
    assert list(ended(cluster).values()) == [("CANCELLED", 75, 0)]
    text = log_of(cluster, tmp_path / "run")
    assert "whole\n" in text and "it is COMPLETING, so it is not requeued" in text


@pytest.mark.parametrize("name", ["USR1", "TERM"])
def test_a_signal_to_the_shell_reaches_the_command_once(name, cluster, submit, stub, tmp_path):
    """As USR1, since srun kills the task when it gets TERM.

    Also where a second one follows, which would end a command that saves; and one that came too early for it.
    """
    number = signal.Signals[f"SIG{name}"]
    saves = "trap 'echo got; trap \"echo twice; exit 1\" USR1; sleep 0.3; echo whole; exit 75' USR1"
    script = f"{saves}; echo ready; until [[ ${{SLURM_RESTART_COUNT:-0}} == 2 ]]; do sleep 0.02; done"
    script = f"[[ ${{SLURM_RESTART_COUNT:-0}} != 1 ]] || {{ echo ready; sleep 60; }}; {script}"

    def act(node):
        if node.job["restarts"] < 2:
            node.process.send_signal(number)
            time.sleep(0.1)
            node.process.send_signal(number)

    submit("train", f"--workdir={tmp_path / 'run'}", LLAMA_JAX_PYTHON=stub(script))
    cluster.drain(once_ready(act))
    text = log_of(cluster, tmp_path / "run")
    assert list(ended(cluster).values()) == [("COMPLETED", 0, 2)], text
    assert text.count("got\n") == text.count("whole\n") == 1 and "twice" not in text
    assert text.count("saved, requeued") == 2


def test_a_signal_to_an_srun_that_waits_for_its_step_loses_nothing(cluster, submit, stub, tmp_path):
    submit("train", f"--workdir={tmp_path / 'run'}", LLAMA_JAX_PYTHON=stub())

    def watch(node):
        if node.text().endswith("nodes are busy)\n"):
            node.warn()

    cluster.drain(watch, lambda job: {} if job["restarts"] else {"FAKE_SRUN_WAITS": "1"})
    text = log_of(cluster, tmp_path / "run")
    assert list(ended(cluster).values()) == [("COMPLETED", 0, 1)] and len(stub.calls()) == 1, text
    assert "Cancelled pending job step with signal 10" in text and "requeued with progress 0\n" in text


def test_requeues_end_where_nothing_moves(cluster, submit, stub, tmp_path):
    submit("train", f"--workdir={tmp_path / 'still'}", LLAMA_JAX_PYTHON=stub("exit 75"))
    folder = tmp_path / "moves"
    checkpoint = f"{shlex.quote(str(folder))}/checkpoints/$((10 * SLURM_RESTART_COUNT))"
    moves = (
        f"SLURM_RESTART_COUNT=${{SLURM_RESTART_COUNT:-0}}; mkdir -p {checkpoint}; echo > {checkpoint}/integrity.json"
    )
    submit(
        "train", f"--workdir={folder}", LLAMA_JAX_PYTHON=stub(f"{moves}; exit $((SLURM_RESTART_COUNT == 6 ? 0 : 75))")
    )
    breaks = submit("train", f"--workdir={tmp_path / 'breaks'}", LLAMA_JAX_PYTHON=stub(WAITS))
    assert breaks.stderr == ""
    cluster.drain(once_ready(lambda node: node.fail()))
    assert list(ended(cluster).values()) == [("FAILED", 75, 3), ("COMPLETED", 0, 6), ("FAILED", 1, 4)]
    for name, said in (("still", 1), ("moves", 0), ("breaks", 1)):
        text = log_of(cluster, tmp_path / name)
        assert text.count("requeued 3 times in a row without progress") == said, text
    (starts,) = (tmp_path / "moves").glob("*.starts.log")
    assert [line.split()[-1] for line in starts.read_text().splitlines()] == ["0", "0", "10", "20", "30", "40", "50"]


@pytest.mark.parametrize(("refusals", "state"), [(2, ("COMPLETED", 0, 1)), (9, ("FAILED", 75, 0))])
def test_a_controller_that_does_not_answer_is_asked_again(refusals, state, cluster, submit, stub, tmp_path):
    (cluster.folder / "refusals").write_text(str(refusals))
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "sleep").write_text("#!/bin/sh\n")
    (tools / "sleep").chmod(0o755)
    path = f"{tools}:{ROOT / 'tests' / 'fakes' / 'slurm'}:{os.environ['PATH']}"
    python = stub("exit $((75 * (${SLURM_RESTART_COUNT:-0} == 0)))")
    submit("train", f"--workdir={tmp_path / 'run'}", LLAMA_JAX_PYTHON=python, PATH=path)
    cluster.drain()
    assert list(ended(cluster).values()) == [state]
    text = log_of(cluster, tmp_path / "run")
    assert text.count("Unable to contact") == min(refusals, 3)
    assert ("can't be requeued; submit the same command again" in text) == (refusals > 3)


# Arguments, settings, folders.

HOSTILE = ["a b", "$(touch x)", "`touch x`", "a;touch x", "quote'\"", "*", "--config.name=ünï %j %%", "new\nline", ""]


def test_arguments_arrive_as_they_were(cluster, submit, stub, tmp_path):
    folder = tmp_path / "run $(touch x); 'touch x' \"x\" %j ünï"
    before = set(ROOT.iterdir())
    submit("train", "--workdir", folder, *HOSTILE, LLAMA_JAX_PYTHON=stub())
    cluster.drain()
    assert stub.calls() == [["-m", "llama_jax.main", "--workdir", str(folder), *HOSTILE]]
    (job,) = cluster.jobs()
    assert re.fullmatch(r"llama_jax-train-[A-Za-z0-9._-]+", job["options"]["job-name"])
    assert sorted(path.name for path in folder.iterdir()) == ["slurm-100.log", "slurm-100.starts.log"]
    assert set(ROOT.iterdir()) == before and not list(tmp_path.rglob("x"))


COMMANDS = [
    (["train", "--workdir=W"], "train", ["-m", "llama_jax.main", "--workdir=W"], "W"),
    (["prepare", "--out=W/"], "prepare", ["-m", "data_pipeline.prepare", "--out=W/"], "W.logs"),
    (["bench", "throughput", "--quick"], "bench", ["-m", "bench.throughput", "--quick"], "runs/slurm"),
    (["evaluate", "--run=W"], "command", ["-m", "llama_jax.evaluate", "--run=W"], "W"),
    (["export", "--run=W", "--out=E"], "command", ["-m", "llama_jax.export", "--run=W", "--out=E"], "W"),
    (["generate", "--model=W"], "command", ["-m", "llama_jax.generate", "--model=W"], "runs/slurm"),
    (["verify", "W"], "command", ["-m", "data_pipeline.verify", "W"], "runs/slurm"),
    (["report", "W"], "command", ["scripts/report.py", "W"], "runs/slurm"),
]  # fmt: skip


def test_every_command_can_be_submitted(cluster, checkout, stub, submit):
    for words, _, _, _ in COMMANDS:
        submit(*words, script=checkout / "scripts/slurm/submit.sh", LLAMA_JAX_PYTHON=stub())
    cluster.drain()
    assert stub.calls() == [expected for _, _, expected, _ in COMMANDS]
    for job, (_, script, _, folder) in zip(cluster.jobs(), COMMANDS, strict=True):
        assert job["state"] == "COMPLETED"
        assert Path(job["script"]).read_text() == (ROOT / f"scripts/slurm/{script}.sbatch").read_text()
        assert (checkout / folder / f"slurm-{job['raw']}.log").read_text().endswith("done\n")


@pytest.fixture
def checkout(tmp_path):
    """What the SLURM scripts need of a checkout, in a folder with a space; scripts/setup.sh is the test's affair."""
    root = tmp_path / "my checkout"
    shutil.copytree(ROOT / "scripts" / "slurm", root / "scripts" / "slurm")
    (root / "scripts/slurm/site.conf").unlink(missing_ok=True)
    (root / "bench").mkdir()
    shutil.copy(ROOT / "bench/throughput.py", root / "bench")
    return root


def test_settings_come_from_the_site_and_from_flags(cluster, submit, tmp_path):
    site = tmp_path / "site.conf"
    site.write_text(
        "account=proj1\npartition=gh\ntrain_partition=grace\ngpu_type=gh200\ngpus=2\nmemory=100G\n"
        "time=1-00:00:00\nsignal_minutes=7\nsbatch_options=(--qos=normal '--comment=a b')\n"
    )
    folder = f"--workdir={tmp_path / 'run'}"
    submit("train", folder, LLAMA_JAX_SITE=site)
    flags = "--account=other --gpus=1 --gpu-type=h100 --cpus=3 --time=30 --memory= --sbatch=--exclusive --after=100"
    submit(*flags.split(), "--partition=", "--signal-minutes=2", "train", folder, LLAMA_JAX_SITE=site)
    submit("prepare", f"--out={tmp_path / 'cache'}", LLAMA_JAX_SITE=site)
    first, second, third = (job["options"] for job in cluster.jobs())
    wanted = {"account": "proj1", "partition": "grace", "gres": "gpu:gh200:2", "cpus-per-task": "144", "mem": "100G"}
    wanted |= {"time": "1-00:00:00", "signal": "B:USR1@420", "qos": "normal", "comment": "a b"}
    wanted |= {"requeue": True, "open-mode": "append", "nodes": "1", "ntasks": "1", "chdir": str(ROOT)}
    assert {name: first.get(name) for name in wanted} == wanted
    assert set(first) == {*wanted, "parsable", "output", "job-name"}
    wanted = {"account": "other", "gres": "gpu:h100:1", "cpus-per-task": "3", "time": "30", "signal": "B:USR1@120"}
    wanted |= {"exclusive": "", "dependency": "afterok:100", "kill-on-invalid-dep": "yes"}
    assert {name: second.get(name) for name in wanted} == wanted and not {"mem", "partition"} & set(second)
    assert third["partition"] == "gh" and "gres" not in third and third["cpus-per-task"] == "72"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("time=5", "time = 5 is no longer than signal_minutes = 5"),
        ("signal_minutes=90\ntime=01:30:00", "time = 01:30:00 is no longer than signal_minutes = 90"),
        ("signal_minutes=2880\ntime=2-00:00", "time = 2-00:00 is no longer than signal_minutes = 2880"),
        ("train_time=4:59", "time = 4:59 is no longer than signal_minutes = 5"),
        ("stalls=three", "stalls = three is no number"),
        ("gpus=08", "gpus = 08 is no number"),
        ("memory_fraction=90%", "memory_fraction = 90% is no number above 0, up to 1"),
        ("memory_fraction=", "memory_fraction =  is no number"),
        ("memory_fraction=0.0", "memory_fraction = 0.0 is no number"),
        ("sbatch_options=", "sbatch_options: '' is no option"),
        ("sbatch_options='qos=normal'", "sbatch_options: 'qos=normal' is no option"),
        ("train_sbatch_options=(qos=normal)", "sbatch_options: 'qos=normal' is no option"),
        ("signal_minutes=9999999999999999999", "signal_minutes = 9999999999999999999 is no number from 1 to 1092"),
        ("signal_minutes=1093\ntime=", "signal_minutes = 1093: 1092 is the most"),
        ("stalls=18446744073709551615", "stalls = 18446744073709551615 is no number of up to 9 digits"),
        ("setup=--cuda14", "setup = --cuda14: --cuda13, --cuda12 or --cpu"),
        ("declare gpus=2", "SITE: declare would not last; a setting is NAME=VALUE"),
        ("export folder=/scratch", "SITE: export folder: small letters are for settings"),
        ("[[ -d / ]] && gpsu=2", "SITE: gpsu is no setting"),
        ("if true; then declare gpus=2; fi", "SITE: declare would not last"),
        ("case x in x) gpus=2; tiem=5 ;; esac", "SITE: tiem is no setting"),
        ("false", "SITE: a command in it failed, or ends the shell"),
        ("exit 0", "SITE: a command in it failed, or ends the shell"),
    ],
)
def test_mistakes_in_the_site_file_are_refused(line, message, cluster, submit, tmp_path):
    site = tmp_path / "site.conf"
    site.write_text(f"{line}\n")
    result = submit("train", f"--workdir={tmp_path / 'run'}", LLAMA_JAX_SITE=site, code=2)
    assert result.stderr.startswith(f"error: {message.replace('SITE', str(site))}") and result.stderr.count("\n") == 1
    assert cluster.jobs() == []


@pytest.mark.parametrize("name", ["acount", "trian_partition", "train_", "GPUS", "setup_time", "gpus_type"])
def test_a_misspelt_setting_is_refused(name, cluster, submit, tmp_path):
    site = tmp_path / "site.conf"
    site.write_text(f"export OWN=1 # a comment = no setting\n  train_gpus=2\nsbatch_options=(\n  --qos=a\n)\n{name}=x")
    result = submit("train", f"--workdir={tmp_path / 'run'}", LLAMA_JAX_SITE=site, code=2)
    assert result.stderr.startswith(f"error: {site}: {name} is no setting") and result.stderr.count("\n") == 1
    assert cluster.jobs() == []
    site.write_text(site.read_text().replace(f"{name}=x", ""))
    submit("train", f"--workdir={tmp_path / 'run'}", LLAMA_JAX_SITE=site)
    assert len(cluster.jobs()) == 1


def test_what_a_site_file_may_hold(cluster, submit, tmp_path):
    """Options for one command, a proxy, a false test at its end; nothing from the environment passes for a setting."""
    site = tmp_path / "site.conf"
    site.write_text(
        "sbatch_options=(--qos=a)\ntrain_sbatch_options=(--qos=b '--comment=c d')\nprepare_sbatch_options=()\n"
        "export https_proxy=http://proxy # behind it; no=setting\n"
        "case a in a) bench_gpus=3 ;; esac; [[ -d /nowhere ]] && gpus=2"
    )
    outer = {"given_time": 1, "train_gpus": 8, "after": 5, "LLAMA_JAX_SITE": site}
    submit("train", f"--workdir={tmp_path / 'run'}", **outer)
    submit("bench", "throughput", **outer)
    submit("prepare", f"--out={tmp_path / 'cache'}", **outer)
    first, second, third = (job["options"] for job in cluster.jobs())
    assert (first["qos"], first["comment"], first["gres"], first["time"]) == ("b", "c d", "gpu:1", "04:00:00")
    assert (second["qos"], third.get("qos")) == ("a", None) and "dependency" not in first
    assert second["gres"] == "gpu:3"


def test_line_ends_of_windows_are_refused(cluster, submit, tmp_path):
    (tmp_path / "site.conf").write_bytes(b"partition=gh\r\n")
    result = submit("train", f"--workdir={tmp_path / 'run'}", LLAMA_JAX_SITE=tmp_path / "site.conf", code=2)
    assert "site.conf has the line ends of Windows; take them out: sed -i 's/\\r$//' FILE" in result.stderr
    assert cluster.jobs() == []


@pytest.mark.parametrize("time", ["6", "5:59:00", "0", "0-1", "1-0:0", "00:06:00", "", "UNLIMITED", "08:09:00"])
def test_limits_of_time_that_leave_room_for_a_save(time, cluster, submit, tmp_path):
    submit(f"--time={time}", "train", f"--workdir={tmp_path / 'run'}")
    assert cluster.jobs()[0]["options"].get("time", "") == time


def test_slashes_at_the_end_of_a_folder(cluster, submit, tmp_path):
    submit("train", f"--workdir={tmp_path / 'run'}//")
    submit("prepare", f"--out={tmp_path / 'cache'}//")
    train, prepare = (job["options"] for job in cluster.jobs())
    assert (train["job-name"], train["output"]) == ("llama_jax-train-run", f"{tmp_path / 'run'}/slurm-%j.log")
    assert (prepare["job-name"], prepare["output"]) == (
        "llama_jax-prepare-cache",
        f"{tmp_path / 'cache'}.logs/slurm-%j.log",
    )


def test_nothing_of_an_outer_job_reaches_the_new_one(cluster, submit, stub, tmp_path):
    """Submitted from a task of an array: the new job is none, takes its own CPUs and begins its own count."""
    outer = {"SLURM_ARRAY_JOB_ID": 7, "SLURM_ARRAY_TASK_ID": 1, "SLURM_MEM_PER_NODE": 10, "SLURM_CPUS_PER_TASK": 3}
    outer |= {"SLURM_RESTART_COUNT": 2, "SLURM_CONF": "/etc/slurm.conf", "FAKE_SINFO": ""}
    python = stub("env | grep ^SLURM_ | cut -d= -f1 | sort | tr '\\n' ' '")
    submit("train", f"--workdir={tmp_path / 'run'}", LLAMA_JAX_PYTHON=python, **outer)
    cluster.drain()
    assert list(ended(cluster)) == ["100"]
    text = log_of(cluster, tmp_path / "run")
    assert "job 100, start 1 on" in text and "SLURM_CONF " in text
    assert "SLURM_ARRAY" not in text and "SLURM_MEM" not in text


@pytest.mark.parametrize(
    ("sinfo", "cpus"),
    [
        ("72 gpu:gh200:1\n64+ gpu:4(S:0-1)", "16"),
        ("128 (null)", "128"),
        ("32 gpu:a100:8", "4"),
        ("", None),
        ("x y", None),
    ],
)
def test_cpus_are_the_share_of_a_gpu(sinfo, cpus, cluster, submit, tmp_path):
    submit("train", f"--workdir={tmp_path / 'run'}", FAKE_SINFO=sinfo)
    (job,) = cluster.jobs()
    assert job["options"].get("cpus-per-task") == cpus


def test_jobs_get_their_variables(cluster, submit, stub, tmp_path):
    site = tmp_path / "site.conf"
    site.write_text("compile_cache='/scratch/my cache'\nmemory_fraction=0.8\n")
    script = (
        'echo "got: $XLA_PYTHON_CLIENT_MEM_FRACTION|$LLAMA_JAX_COMPILE_CACHE|$SLURM_CPUS_PER_TASK|$PYTHONUNBUFFERED"'
    )
    submit("train", f"--workdir={tmp_path / 'run'}", LLAMA_JAX_SITE=site, LLAMA_JAX_PYTHON=stub(script))
    cluster.drain(variables=lambda job: {"SLURM_EXPORT_ENV": "NONE"})  # as after sbatch --export=NONE
    assert "got: 0.8|/scratch/my cache|72|1\n" in log_of(cluster, tmp_path / "run")


REFUSED = [
    ([], "a command is missing"),
    (["--quick", "train"], "unknown option: --quick"),
    (["frobnicate"], "unknown command: frobnicate"),
    (["train", "--config=configs/smoke.py"], "train needs --workdir=FOLDER"),
    (["train", "--workdir=a\\b"], "backslash"),
    (["sweep"], "sweep needs --out=FOLDER"),
    (["prepare"], "prepare needs --out=FOLDER"),
    (["bench", "../x"], "bench needs a module of bench/, not ../x"),
    (["bench"], "not nothing"),
    (["--slices=2", "train", "--workdir=w"], "--slices is for prepare"),
    (["--slices=0", "prepare", "--out=w"], "--slices=0: a number from 1"),
    (["--at-once=x", "prepare", "--out=w"], "--at-once=x: a number from 1"),
    (["--slices=2", "prepare", "--out=w", "--download"], "fetch it without --slices first"),
    (["--slices=2", "prepare", "--out=w", "--slice=0/2"], "leave out --slice=0/2"),
    (["--at-once=2", "prepare", "--out=w"], "--at-once is for arrays"),
    (["--at-once=2", "train", "--workdir=w"], "--at-once is for arrays"),
    (["--sbatch=", "train", "--workdir=w"], "unknown option: --sbatch="),
    (["--sbatch=qos=long", "train", "--workdir=w"], "unknown option: --sbatch=qos=long"),
    (["--gpus=x", "train", "--workdir=w"], "gpus = x is no number"),
    (["--signal-minutes=0", "train", "--workdir=w"], "signal_minutes = 0"),
    (["--account", "proj1", "train", "--workdir=w"], "unknown option: --account; values stand behind ="),
    (["--after=", "train", "--workdir=w"], "unknown option: --after="),
    (["--after=x", "train", "--workdir=w"], "--after=x: the number of a job is needed"),
    (["setup", "--cpu"], "setup takes no arguments, not --cpu"),
    (["--dry-run", "setup"], "--dry-run is for jobs, and setup is none"),
    (["train", "--workdir=w", "--dry-run=1"], "--dry-run is an option of the job: it stands before train"),
    (["train", "--workdir=w", "--dry-run"], "--dry-run is an option of the job: it stands before train"),
    (["train", "--workdir=w", "--time=10"], "--time is an option of the job: it stands before train"),
    (["train", "--workdir=~/w"], "~/w: the shell leaves ~ as it is behind =; write $HOME"),
    (["train", "--help"], "--help needs no job: python -m llama_jax.main --help"),
    (["evaluate", "--run=nowhere"], "--run=nowhere is no folder"),
    (["sweep", "--out=w", "--task=1"], "--task=1: the jobs of a sweep have their own"),
    (["sweep", "--out=w", "--table"], "--table: the jobs of a sweep have their own"),
]


@pytest.mark.parametrize(
    ("words", "message"), REFUSED, ids=lambda value: " ".join(value) if type(value) is list else ""
)
def test_refusals(words, message, cluster, submit):
    result = submit(*words, code=2)
    assert message in result.stderr and result.stderr.splitlines()[-1].startswith("error: ")
    assert cluster.jobs() == []


def test_usage_and_dry_run(cluster, submit, tmp_path):
    assert submit("--help").stdout.startswith("usage: bash scripts/slurm/submit.sh [OPTION ...] COMMAND")
    shown = submit("--dry-run", "train", f"--workdir={tmp_path / 'a b'}").stdout
    assert shlex.split(shown)[-2:] == ["scripts/slurm/train.sbatch", f"--workdir={tmp_path / 'a b'}"]
    assert cluster.jobs() == [] and not (tmp_path / "a b").exists()


# The environment: made once, by one process at a time, in a folder of the architecture.


def test_the_environment_is_made_by_one_at_a_time(checkout, submit, stub):
    """Two processes at once: the second waits for the first. Each asks setup.sh, which finds out what is to do."""
    setup = checkout / "scripts" / "setup.sh"
    setup.write_text(
        f"""#!/usr/bin/env bash
printf 'begin %s %s %s\\n' "$VENV" "$PYTHON" "$*" >> asked.txt
sleep 0.5
mkdir -p "$VENV/bin"; cp {shlex.quote(str(stub()))} "$VENV/bin/python"
echo end >> asked.txt
"""
    )
    (checkout / "scripts/slurm/site.conf").write_text("setup=--cuda12\npython='/opt/my python'\n")
    script = checkout / "scripts/slurm/submit.sh"
    outer = {name: value for name, value in os.environ.items() if not name.startswith("LLAMA_JAX_")}
    several = [subprocess.Popen(["bash", script, "setup"], env=outer, stdout=subprocess.PIPE, text=True) for _ in "ab"]
    venv = f".venv-{os.uname().machine}"
    for process in several:
        out, _ = process.communicate(timeout=60)
        assert (process.returncode, out) == (0, f"slurm: the environment is ready: {venv}/bin/python\n")
    begin = f"begin {venv} /opt/my python --cuda12"
    assert (checkout / "asked.txt").read_text().splitlines() == [begin, "end"] * 2
    submit("train", "--workdir=w", script=script, LLAMA_JAX_PYTHON="")
    cluster = Cluster(checkout.parent / "cluster")
    cluster.drain()
    assert stub.calls() == [["-m", "llama_jax.main", "--workdir=w"]]
    assert ended(cluster) == {"100": ("COMPLETED", 0, 0)}


def test_a_failed_environment_ends_the_job(checkout, submit, cluster):
    (checkout / "scripts/setup.sh").write_text("echo no Python >&2; exit 2\n")
    submit("train", "--workdir=w", script=checkout / "scripts/slurm/submit.sh", LLAMA_JAX_PYTHON="")
    cluster.drain()
    assert ended(cluster) == {"100": ("FAILED", 2, 0)}


# Preparation in slices.


def test_slices_give_the_bytes_of_one_process(cluster, submit, tmp_path):
    """Three tasks and the merge that waits for them; the last task is stopped in the middle and requeued, alone."""
    draw = random.Random(3)
    for number in range(5):
        texts = [" ".join(draw.choices(["alpha", "beta", "gamma", "delta"], k=30)) for _ in range(60)]
        path = tmp_path / "my texts" / f"part{number}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    words = [
        "--source=jsonl",
        "--input",
        tmp_path / "my texts",
        "--tokenizer=bpe:300",
        "--shard_tokens=512",
        "--workers=1",
    ]
    words += ["--shuffle_buffer=64"]
    seen = []

    def watch(node):
        steps = list((cluster.folder / "steps").glob(f"{node.raw}-*"))
        if node.job["name"] == "100_2" and steps and not seen:
            seen.append(node.job["raw"])
            node.warn()

    submit("--slices=3", "--at-once=2", "prepare", *words, f"--out={tmp_path / 'sliced'}")
    assert cluster.jobs()[0]["options"]["array"] == "0-2%2"
    cluster.drain(watch)
    tasks = {"100_0": ("COMPLETED", 0, 0), "100_1": ("COMPLETED", 0, 0), "100_2": ("COMPLETED", 0, 1)}
    assert seen == [100] and ended(cluster) == tasks | {"103": ("COMPLETED", 0, 0)}
    from data_pipeline import prepare

    assert prepare.main([*map(str, words), f"--out={tmp_path / 'whole'}"]) == 0
    found = {
        name: {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (tmp_path / name).iterdir()}
        for name in ("sliced", "whole")
    }
    assert found["sliced"] == found["whole"] and len(found["whole"]) > 3
    logs = sorted(path.name for path in (tmp_path / "sliced.logs").glob("*[0-9].log"))
    assert logs == ["slurm-100_0.log", "slurm-100_1.log", "slurm-100_2.log", "slurm-103.log"]


def test_no_merge_after_a_failed_slice(cluster, submit, stub, tmp_path):
    python = stub('case "$*" in *--slice=1/2) exit 3 ;; esac')
    submit("--slices=2", "prepare", "--source=mini", f"--out={tmp_path / 'cache'}", LLAMA_JAX_PYTHON=python)
    cluster.drain()
    assert ended(cluster) == {"100_0": ("COMPLETED", 0, 0), "100_1": ("FAILED", 3, 0), "102": ("CANCELLED", None, 0)}


# Sweeps as arrays.


def test_a_sweep_is_an_array_a_stage(cluster, submit, tmp_path):
    """Two stages and the table, each after the one before; a task near its limit saves, and is requeued alone."""
    base = {"config": "configs/smoke.py"}
    stages = [
        {"name": "small", **base, "grid": {"optimizer.lr": [0.003, 0.01]}},
        {"name": "wide", **base, "best": 1, "settings": {"model.width": 96}},
    ]
    content = {"name": "two", "stages": stages}
    (tmp_path / "my sweep.py").write_text(f"def get_sweep():\n    return {content!r}\n")
    (tmp_path / "losses.json").write_text(json.dumps({"small/lr_0.01-seed_42": 3.25, "wide/lr_0.01-seed_42": 3.0}))
    python = tmp_path / "python"
    fake = shlex.join([sys.executable, str(ROOT / "tests/fakes/sweep.py")])
    python.write_text(f'#!/usr/bin/env bash\n[[ "$1" == scripts/sweep.py ]] || exit 9\nshift\nexec {fake} "$@"\n')
    python.chmod(0o755)
    variables = {
        "LLAMA_JAX_PYTHON": python,
        "FAKE_LOSSES": tmp_path / "losses.json",
        "FAKE_STARTS": tmp_path / "starts",
    }
    words = (f"--sweep={tmp_path / 'my sweep.py'}", f"--out={tmp_path / 'out'}")
    said = submit("--gpus=2", "--at-once=4", "sweep", *words, FAKE_STEP_S="0.2", **variables).stdout
    assert [line.split(";")[0] for line in said.splitlines()] == [
        "slurm: job 100: stage small, 2 runs",
        "slurm: job 102: stage wide, 1 runs",
        "slurm: job 103: the table",
    ]
    options = [job["options"] for job in cluster.jobs()]
    assert [part.get("dependency") for part in options] == [None, None, "afterok:100", "afterok:102"]
    assert [part.get("array") for part in options] == ["0-1%4", "0-1%4", "0-0%4", None]
    assert [part.get("gres") for part in options] == ["gpu:2"] * 3 + [None]
    warned = []

    def watch(node):
        if node.job["name"] == "100_1" and not warned and "lr_0.01-" in (tmp_path / "starts").read_text():
            warned.append(node.raw)
            node.warn()

    cluster.drain(watch)
    done = ("COMPLETED", 0, 0)
    assert ended(cluster) == {"100_0": done, "100_1": ("COMPLETED", 0, 1), "102_0": done, "103": done}
    starts = [line.split(" on ")[0] for line in (tmp_path / "starts").read_text().splitlines()]
    assert starts == ["small/lr_0.003-seed_42", *["small/lr_0.01-seed_42"] * 2, "wide/lr_0.01-seed_42"]
    text = (tmp_path / "out" / "slurm-100_1.log").read_text()
    assert "SIGTERM received" not in text and "SIGUSR1 received: the runs have saved" in text
    assert "| 1 | 0.01 | 3.2500 | promoted |" in (tmp_path / "out" / "slurm-103.log").read_text()


def test_a_bad_sweep_is_not_submitted(cluster, submit, tmp_path):
    ended = submit("sweep", "--config=configs/smoke.py", "--grid=optimizer.lr=-1", f"--out={tmp_path / 'out'}", code=2)
    assert ended.stderr.startswith("error: optimizer.lr = -1.0 is not a number") and cluster.jobs() == []
    ended = submit("sweep", "--config=configs/smoke.py", "--grid=optimizer.lr=0.01", f"--out={tmp_path}", code=4)
    assert "holds cluster and no sweep.json" in ended.stderr and ended.stderr.count("\n") == 1 and cluster.jobs() == []


def test_what_was_queued_before_a_refusal_is_named(cluster, submit, tmp_path):
    """The two tasks of the slices are all that the user may have; their merge is refused."""
    (cluster.folder / "most").write_text("2")
    out = f"--out={tmp_path / 'cache'}"
    ended = submit("--slices=2", "prepare", out, code=2)
    assert ended.stderr.splitlines()[-1] == (
        "error: sbatch refused it; jobs before it are queued, take them back with: scancel 100"
    )
