"""Packed runs as the real command, killed with SIGKILL and started again: bit for bit the unbroken run.

Every run is a process of its own. That with everything at once compiles as those of users do.
"""

import random
import signal
import time

import harness
import pytest
from harness import tiny

SAVING = {"training.recovery_minutes": 0.0}
THREE = {
    "decentralized.workers": 3,
    "training.sequence_multiple": 3,
    "training.batch_targets": 240,
    "training.microbatch": 5,
    "log.consensus_every": 2,
}
FIVE = THREE | {"decentralized.workers": 5, "training.sequence_multiple": 5, "training.microbatch": 3}
ADAPTIVE = {
    "decentralized.adaptive.mode": "lr_power",
    "decentralized.adaptive.start_frac": 0.3,
    "decentralized.adaptive.p": 2.0,
}
RUNS = {
    "exponential": THREE | ADAPTIVE,  # offsets 1 and 2 in turn
    "ring": FIVE | ADAPTIVE | {"decentralized.topology": "one_peer_ring", "decentralized.scheme": "atc"},
}
EVERYTHING = THREE | ADAPTIVE | {"decentralized.sync_every": 7, "decentralized.worker_lr": "0.002, 0.004, 0.006"}
PLACES = ["kill@step:{}", "kill@after_orbax_commit:{}", "kill@after_manifest:{}"]


@pytest.fixture(scope="module")
def commands(tmp_path_factory):
    return harness.Commands(tmp_path_factory.mktemp("commands"), quick=True)


@pytest.mark.parametrize("name", RUNS)
def test_killed_at_an_update_and_restarted(name, commands, tmp_path):
    """Two kills at seeded updates, each behind a recovery checkpoint of its process; ten updates in all."""
    chosen, draw = RUNS[name], random.Random(name)
    assert commands.train(tiny(chosen), tmp_path / "unbroken").code == 0
    folder, reached = tmp_path / "run", 0
    for nth in (draw.randint(4, 5), 4):  # the save of the first update is whole when the third begins
        fault = draw.choice(PLACES).format(nth)
        ended = commands.train(tiny(chosen | SAVING), folder, fault=fault)
        assert (ended.code, ended.fired) == (-signal.SIGKILL, [fault]), ended
        assert (f"continues after update {reached}" in ended.out) == (reached > 0)
        update, kind = harness.kept(folder)[-1]
        assert kind == "recovery" and reached < update < 10
        reached = update
    ended = commands.train(tiny(chosen | SAVING), folder)
    assert (ended.code, ended.err) == (0, "")
    assert f"continues after update {reached}" in ended.out
    assert harness.outcome(folder) == harness.outcome(tmp_path / "unbroken")
    assert [line["update"] for line in harness.lines(folder, "train")] == list(range(1, 11))


def test_killed_at_random_times(tmp_path):
    """A longer run with everything at once, saved after each update, killed at seeded moments while it trains."""
    commands, more = harness.Commands(tmp_path), EVERYTHING | {"training.total_targets": 15 * 16 * 60}
    assert commands.train(tiny(more), tmp_path / "unbroken").code == 0
    moments, folder, reached = random.Random(5), tmp_path / "run", []
    for _ in range(2):
        process = commands.start_train(tiny(more | SAVING), folder)
        left = moments.randint(3, 5)
        while left:  # each is three updates further, or an evaluation
            left -= process.stdout.readline().startswith("update ")
        time.sleep(moments.uniform(0, 0.2))
        process.kill()
        assert commands.end(process).code == -signal.SIGKILL
        reached.append(harness.kept(folder)[-1][0])
    assert reached == sorted(reached) and 0 < reached[0] < reached[-1] < 60
    ended = commands.train(tiny(more), folder)
    assert (ended.code, ended.err) == (0, "")
    found = harness.outcome(folder)
    assert found == harness.outcome(tmp_path / "unbroken") and "outer_momentum" in found["arrays"]
