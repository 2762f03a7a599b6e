"""A SLURM of one node that really runs what is submitted: the commands beside this file, and the Cluster of jobs.

The folder in FAKE_SLURM is the controller's memory: one JSON file a job, the spooled scripts, the running steps.
Nothing runs until somebody calls Cluster.drain(), which plays the node: it runs one job after the other, and a `watch`
function may meanwhile do to a running job what time limits, users and broken nodes do. What matters to scripts is as in
the real one: the script is a copy in a spool folder; --signal=B: reaches the batch shell alone; srun hands USR1 on, but
kills the task when it gets TERM, exits with 128 + n for a task that a signal ended, and gives up with 1 when a signal
comes while it waits for its step; scancel signals the tasks, and the process group of the shell; requeueing kills the
job; the last task of an array has the id of the whole array, so that a requeue by that id means all of them.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

FLAGS = {"requeue", "parsable", "no-requeue"}
ENDED = ("COMPLETED", "FAILED", "CANCELLED")


class Refused(SystemExit):
    """What the real command would refuse: one line, exit code 1."""

    def __init__(self, text):
        print(f"sbatch: error: {text}", file=sys.stderr)
        super().__init__(1)


class Cluster:
    """The jobs below a folder; every call reads and writes files, so that processes may share them."""

    def __init__(self, folder):
        self.folder = Path(folder)
        for name in ("jobs", "spool", "steps"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)

    def jobs(self):
        """All jobs and tasks, in the order in which they run."""
        found = [json.loads(path.read_text()) for path in (self.folder / "jobs").glob("*.json")]
        return sorted(found, key=lambda job: (job["array"] or job["raw"], job["task"] or 0))

    def job(self, raw):
        return json.loads((self.folder / "jobs" / f"{raw:06d}.json").read_text())

    def put(self, job, **changes):
        """Stores a job with changes and returns it."""
        job = {**job, **changes}
        path = self.folder / "jobs" / f"{job['raw']:06d}.json"
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(job))
        temporary.rename(path)
        return job

    def find(self, name):
        """The jobs that an id names: a number (of an array: all its tasks) or ARRAY_TASK."""
        found = [job for job in self.jobs() if name in (job["name"], str(job["array"] or job["raw"]), str(job["raw"]))]
        whole = [job for job in found if str(job["array"]) == name]
        return whole or found

    def submit(self, options, script, arguments, environment, directory):
        """Stores a job, or the tasks of an array; the id that sbatch prints."""
        first = 100 + len(self.jobs())
        spooled = self.folder / "spool" / f"{first}-slurm_script"
        spooled.write_text(Path(script).read_text())
        tasks = [None]
        if "array" in options:
            span = re.fullmatch(r"(\d+)-(\d+)(%\d+)?", options["array"])
            if not span or int(span[2]) < int(span[1]):
                raise Refused(f"Invalid job array specification: {options['array']}")
            tasks = list(range(int(span[1]), int(span[2]) + 1))
        array = None if tasks == [None] else first
        numbers = [first] if array is None else [*range(first + 1, first + len(tasks)), first]
        for raw, task in zip(numbers, tasks, strict=True):
            job = {"raw": raw, "array": array, "task": task, "name": str(raw) if array is None else f"{array}_{task}"}
            job |= {"count": len(tasks), "options": options, "script": str(spooled), "arguments": arguments}
            job |= {"environment": environment, "directory": options.get("chdir", directory)}
            self.put(job, state="PENDING", restarts=0, code=None)
        return first

    def ready(self):
        """The next job that may start, after cancelling those whose dependency can never be met."""
        for job in self.jobs():
            if job["state"] != "PENDING":
                continue
            kind, _, name = job["options"].get("dependency", "").partition(":")
            states = {other["state"] for other in self.find(name)} if name else {"COMPLETED"}
            assert kind in ("", "afterok") and states, job["options"]
            if states == {"COMPLETED"}:
                return job
            if states & {"FAILED", "CANCELLED"} and job["options"].get("kill-on-invalid-dep") == "yes":
                self.put(job, state="CANCELLED")
        return None

    def drain(self, watch=None, variables=None, limit_s=200):
        """Runs jobs until none may start.

        watch(node): called again and again while a job runs. variables(job): more variables of a start.
        """
        end = time.monotonic() + limit_s
        while (job := self.ready()) is not None:
            Node(self, job, variables(job) if variables else {}).run(watch, end)


class Node:
    """One start of a job."""

    def __init__(self, cluster, job, more):
        self.cluster, self.raw, self.more, self.failed = cluster, job["raw"], more, False
        self.job = cluster.put(job, state="RUNNING")
        self.log = Path(self._pattern(job["options"].get("output", "slurm-%j.out")))
        if not self.log.is_absolute():
            self.log = Path(job["directory"]) / self.log

    def _pattern(self, text):
        job = self.job
        values = {"j": job["raw"], "A": job["array"] or job["raw"], "a": job["task"], "%": "%"}
        return re.sub(r"%([jAa%])", lambda found: str(values[found[1]]), text)

    def environment(self):
        job, options = self.job, self.job["options"]
        found = {**job["environment"], **self.more, "SLURM_JOB_ID": job["raw"], "SLURM_SUBMIT_DIR": job["directory"]}
        found |= {"SLURM_CPUS_ON_NODE": options.get("cpus-per-task", 1), "SLURM_JOB_NAME": options.get("job-name", "")}
        if "cpus-per-task" in options:
            found["SLURM_CPUS_PER_TASK"] = options["cpus-per-task"]
        if job["restarts"]:
            found["SLURM_RESTART_COUNT"] = job["restarts"]
        if job["array"] is not None:
            found |= {"SLURM_ARRAY_JOB_ID": job["array"], "SLURM_ARRAY_TASK_ID": job["task"]}
            found["SLURM_ARRAY_TASK_COUNT"] = job["count"]
        return {name: str(value) for name, value in found.items()}

    def run(self, watch, end):
        appends = self.job["options"].get("open-mode") == "append"
        with open(self.log, "ab" if appends else "wb") as log:  # fails as the real one does: the folder must exist
            self.process = subprocess.Popen(
                ["bash", self.job["script"], *self.job["arguments"]],
                cwd=self.job["directory"], env=self.environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
            try:
                while self.process.poll() is None:
                    if time.monotonic() > end:
                        raise TimeoutError(f"job {self.job['name']} runs too long: {self.log.read_text()}")
                    if self.cluster.job(self.raw)["state"] == "REQUEUED":
                        self._kill()
                    elif watch:
                        watch(self)
                    time.sleep(0.02)
            finally:
                self._kill()  # whatever a job leaves running ends with it
        job, code = self.cluster.job(self.raw), self.process.returncode
        requeue = job["state"] == "REQUEUED" or (self.failed and "requeue" in job["options"])
        if requeue:
            self.cluster.put(job, state="PENDING", restarts=job["restarts"] + 1)
        elif job["state"] == "COMPLETING":
            self.cluster.put(job, state="CANCELLED", code=code)
        else:
            self.cluster.put(job, state="COMPLETED" if code == 0 else "FAILED", code=code)

    def text(self):
        return self.log.read_text()

    def warn(self):
        """What --signal=B:USR1@... does near the time limit: a signal to the batch shell alone."""
        assert self.job["options"]["signal"].startswith("B:USR1@")
        self.process.send_signal(signal.SIGUSR1)

    def cancel(self):
        """scancel: the state changes at once, then the steps get SIGTERM, the batch step too."""
        self.cluster.put(self.job, state="COMPLETING")
        for path in (self.cluster.folder / "steps").glob(f"{self.raw}-*"):
            os.kill(int(path.read_text()), signal.SIGTERM)
        os.killpg(self.process.pid, signal.SIGTERM)

    def fail(self):
        """The node dies: everything of the job at once."""
        self.failed = True
        self._kill()

    def _kill(self):
        """SIGKILL to every process that has this job's variables; nobody else is touched."""
        marks = {f"FAKE_SLURM={self.cluster.folder}".encode(), f"SLURM_JOB_ID={self.raw}".encode()}
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                if marks <= set(path.read_bytes().split(b"\0")):
                    os.kill(int(path.parent.name), signal.SIGKILL)
            except OSError:  # it has ended, or belongs to somebody else
                continue
        self.process.wait()


def here():
    return Cluster(os.environ["FAKE_SLURM"])


def split(words, flags=FLAGS):
    """(options, the rest) of long options in the form --NAME=VALUE."""
    options, rest = {}, list(words)
    while rest and rest[0].startswith("-"):
        name, _, value = rest.pop(0).removeprefix("--").partition("=")
        options[name] = True if name in flags and not value else value
    return options, rest


def sbatch():
    given, rest = split(sys.argv[1:])
    if not rest:
        raise Refused("no script")
    script = Path(rest[0])
    if not script.is_file():
        raise Refused(f"Unable to open file {script}")
    most = here().folder / "most"  # jobs that a user may have
    if most.exists() and len(here().jobs()) >= int(most.read_text()):
        raise Refused("Batch job submission failed: Job violates accounting/QOS policy")
    lines = re.findall(r"^#SBATCH +(\S+)", script.read_text(), re.MULTILINE)
    written, more = split(lines)
    assert not more, f"what is this in {script}: {more}"
    directory = given.get("chdir", os.getcwd())
    number = here().submit({**written, **given}, script, rest[1:], dict(os.environ), directory)
    print(number if "parsable" in given else f"Submitted batch job {number}")


def srun():
    options, words = split(sys.argv[1:])
    cluster, raw = here(), os.environ["SLURM_JOB_ID"]
    process, waiting = None, []

    def hand_on(number, frame):
        if process is None:
            waiting.append(number)
        else:
            process.send_signal(signal.SIGKILL if number == signal.SIGTERM else number)

    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, hand_on)
    if "FAKE_SRUN_WAITS" in os.environ:
        print("srun: Step creation temporarily disabled, retrying (Requested nodes are busy)", flush=True)
        while not waiting:
            time.sleep(0.02)
        sys.exit(f"srun: Cancelled pending job step with signal {waiting[0]}")
    given = dict(os.environ)
    if options.get("export", given.get("SLURM_EXPORT_ENV")) == "NONE":
        given = {name: given[name] for name in given if name.startswith(("SLURM_", "FAKE_")) or name == "PATH"}
    variables = {**given, "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}
    variables.pop("SLURM_CPUS_PER_TASK", None)
    if "cpus-per-task" in options:
        variables["SLURM_CPUS_PER_TASK"] = options["cpus-per-task"]
    step = cluster.folder / "steps" / f"{raw}-{os.getpid()}"
    process = subprocess.Popen(words, env=variables, start_new_session=True)
    step.write_text(str(process.pid))
    for number in waiting:
        hand_on(number, None)
    code = process.wait()
    step.unlink()
    sys.exit(128 - code if code < 0 else code)


def scontrol():
    action, name = sys.argv[1:]
    assert action == "requeue", sys.argv
    refusals = here().folder / "refusals"  # of a controller that doesn't answer: so many to come
    if refusals.exists() and (left := int(refusals.read_text())):
        refusals.write_text(str(left - 1))
        sys.exit("slurm_requeue: Unable to contact slurm controller (connect failure)")
    jobs = here().find(name)
    if not jobs:
        sys.exit(f"Invalid job id specified for job {name}")
    for job in jobs:
        if job["state"] == "RUNNING":
            here().put(job, state="REQUEUED")
        else:
            here().put(job, state="PENDING", restarts=job["restarts"] + 1)


def squeue():
    options, _ = split(sys.argv[1:], {"noheader", "me"})
    form = options.get("format", "%i %T")
    for job in here().find(options["jobs"]) if "jobs" in options else here().jobs():
        if job["state"] not in ENDED:
            print(form.replace("%i", job["name"]).replace("%T", job["state"]))


def sacct():
    options, _ = split(sys.argv[1:], {"noheader", "parsable2"})
    for job in here().find(options["jobs"]):
        values = {"jobid": job["name"], "state": job["state"], "exitcode": f"{job['code'] or 0}:0"}
        print("|".join(values[name.lower()] for name in options["format"].split(",")))


def sinfo():
    print(os.environ.get("FAKE_SINFO", "288 gpu:gh200:4(S:0-3)"))
