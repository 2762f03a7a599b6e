"""The training run: the only loop, from a config and a run folder to result.json.

Letters: N workers, P arena row length.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

from llama_jax import config as configs
from llama_jax import (
    data,
    describe,
    flops,
    hf,
    integrity,
    metrics,
    network,
    optimizer,
    records,
    resume,
    run_folder,
)
from llama_jax import step as steps
from llama_jax import validation as validations
from llama_jax.build import Built, build
from llama_jax.errors import CheckpointError, DataError, DeviceError, Error, NonFiniteError
from llama_jax.faults import fault_point
from llama_jax.files import write_json_atomic
from llama_jax.trackers import check_trackers, open_trackers

Stop = Callable[[], Error | None]


class _Stopped(Exception):
    """A signal arrived in the middle of an evaluation."""


def run(config: Any, workdir: str | Path, stop: Stop = lambda: None) -> dict[str, Any]:
    """Trains a finalized config in a run folder, from the start or from where the folder stands; returns result.json.

    `stop` is asked at every update boundary and evaluation batch; the error it returns is raised once the state is
    saved. Raises the errors of llama_jax.errors.
    """
    check_trackers(config.log.tensorboard, config.log.wandb)
    source = data.open_source(config)
    built = build(config)
    if not source.permuted and built.plan.total_sequences > source.sequences:
        raise DataError(
            f"{config.data.path}: {source.sequences:,} rows to train on, each used once; the budget is "
            f"{built.plan.total_sequences:,}: lower it (or data.validation_rows), or build more rows"
        )
    recipe = built.resolved | hf.identity(config.model.init_from)
    folder = run_folder.open_run(workdir, configs.to_dict(config), recipe, {"tokens": source.fingerprint})
    try:
        if folder.finished:
            return resume.finished(folder)
        with jax.disable_jit(not config.runtime.jit):
            return _Loop(built, source, folder, stop).run()
    except jax.errors.JaxRuntimeError as error:
        text = " ".join(str(error).split())
        if "RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower():
            text += f"; lower training.microbatch (now {config.training.microbatch}) or set model.remat"
        raise DeviceError(text[:600]) from error
    except OSError as error:
        reason = f"{error.filename or folder.path}: {error.strerror or error}"
        raise CheckpointError(f"{reason}; free space or fix its rights, then run the same command again") from error
    finally:
        folder.close()


class _Loop:
    """One process's part of a run."""

    def __init__(self, built: Built, source: data.Source, folder: run_folder.RunFolder, stop: Stop):
        self.built, self.config, self.source, self.folder, self.stop = built, built.config, source, folder, stop
        self.plan = built.plan
        self.saved = resume.open_checkpoints(folder.checkpoints, built.layout)
        self.at, self.state, self.met, self.held, self.loader = resume.restore(self.saved, built, source)
        config = built.config
        peak = flops.peak_flops(jax.devices()[0].device_kind)
        self.meter = metrics.Meter(
            built.plan.total_targets,
            self._targets(self.at.position),
            self.at.wall_s,
            flops.flops_per_target(config.model),
            peak * built.mesh.size if peak else None,
            config.log.every_updates,
        )
        self.log = metrics.MetricsLog(folder.metrics)
        self.log.truncate(self.at.update, keep_eval=self.at.evaluated)
        self.progress = metrics.Progress(built.plan.total_updates, config.log.every_updates)
        self.trackers = open_trackers(
            folder.path, config.log.tensorboard, config.log.wandb, config.name, configs.to_dict(config), self.at.update
        )
        self.last_save = time.monotonic()
        self.unread: records.Sent | None = None
        self.watcher = ThreadPoolExecutor(1, "watcher")  # of what the device computes
        self.lost: set[int] = set()  # workers that have skipped an update that was not finite
        self.mixing, self.peaks = built.mixing(), configs.per_worker(built.config, "lr")
        self.ledger = network.make_ledger(config, built.schedule)

    def run(self) -> dict[str, Any]:
        fault_point("start")
        for text in describe.before(self.built, self.source, self.at.update, self.folder.changes):
            self.progress.note(text)
        try:
            if not self.at.evaluated:  # the last process was stopped in the middle of an evaluation
                self._evaluate_epoch()
            self._train()
            return self._end()
        except _Stopped:
            return self._save_and_stop()
        except BaseException:
            with contextlib.suppress(CheckpointError):
                self.saved.finish()  # a save under way is completed before the folder is unlocked
            raise
        finally:
            self.loader.close()
            self.watcher.shutdown()
            self.progress.close()
            for tracker in self.trackers:
                tracker.close()

    def _train(self) -> None:
        update = self._next_update()
        while update is not None:
            end = update.position + update.size
            lr_N = np.array([optimizer.learning_rate(self.config, self._targets(end), peak) for peak in self.peaks])
            mixing = self.mixing(self.at.update, self.held)
            self.state, measured = self.built.step(self.state, update.batch, lr_N.astype(np.float32), mixing)
            if self.built.sync and self.met and (self.at.update + 1) % self.config.decentralized.sync_every == 0:
                self.state, self.met = self.built.sync(self.state, self.met, mixing.links)
            if self.built.control and self.held and (self.at.update + 1) % self.built.schedule.period == 0:
                self.held = self.built.control(self.state, self.held, np.int32(self.at.update + 1), mixing.links)
            distances = self.built.measure(self.state, mixing.links) if mixing.measure and lr_N.size > 1 else None
            self.at.update, self.at.position = self.at.update + 1, end
            self.at.evaluated = not self.plan.is_boundary(end)
            self._read()  # the update before this one, so that the device never waits for the host
            finished = self.watcher.submit(self._finished, measured)
            self.unread = records.Sent(self.at.update, update, lr_N, mixing, measured, distances, self.held, finished)
            update = self._next_update()
            if not self.at.evaluated:
                self._evaluate_epoch()
            elif self.stop():
                self._save_and_stop()
            elif self._recovery_due():
                self._save("recovery")

    def _next_update(self) -> records.Update | None:
        position = self.at.position
        if position >= self.plan.total_sequences:
            return None
        size, passes = self.plan.update_size(position), self.loader.passes
        rows = self.loader.next(size)
        if self.loader.passes > passes:
            self.progress.note(f"pass {self.loader.passes} over the data begins, with new permutations")
        return records.Update(position, size, self.built.place(rows))

    def _finished(self, measured: steps.Metrics) -> float:
        """When an update is computed. In a thread: the dispatch of the next one can block until it nearly is, too."""
        jax.block_until_ready(measured)
        return self.meter.clock()

    def _read(self) -> None:
        """Logs the dispatched update that has not been read yet, if any; waits until it is computed."""
        if self.unread is None:
            return
        sent, self.unread = self.unread, None
        number, found = sent.number, jax.tree.map(np.asarray, sent.metrics)
        self.meter.step(self._targets(sent.update.size), sent.finished.result())
        line = records.update_line(self.built, sent, found, self.meter.rates(), self.ledger)
        blame = records.blame(sent, found, self.loader)
        self._write(line)
        lost = set(np.flatnonzero(~records.finite(found)).tolist()) - self.lost if found.ok else set()
        for worker in sorted(lost):
            self.progress.note(f"update {number}: worker {worker} is not finite and skips it; the others go on")
        self.lost |= lost
        self.progress.show(line)
        if number % self.config.log.every_updates == 0:
            self.log.flush()
        if blame:
            self.log.flush(sync=True)
            self.saved.finish()
            raise NonFiniteError(blame)

    def _write(self, line: dict[str, Any]) -> None:
        written = self.log.append(line)
        for tracker in self.trackers:
            tracker.write(written)

    def _evaluate_epoch(self) -> None:
        """What is due at the end of a virtual epoch: subset, at the very end the whole split, interval checkpoint.

        Without validation sequences there is nothing to evaluate.
        """
        evaluation, last = self.config.evaluation, self.at.position == self.plan.total_sequences
        self._read()  # before the pause, or the time of this update would not count
        with self.meter.pause():
            sequences, final = self.source.validation_sequences, {}
            if sequences:
                subset = validations.subset_indices(sequences, evaluation.subset_sequences, evaluation.subset_seed)
                final["subset"] = self._evaluate("subset", subset)
                if self.config.decentralized.workers > 1:
                    final["subset"]["local_loss"] = self._evaluate_workers(subset)
                if last and evaluation.full_at_end:
                    final["validation"] = self._evaluate("validation", np.arange(sequences))
            for line in final.values():  # only when all are there, so that a stop in between repeats them all
                self._write(line)
                self.progress.note(records.eval_text(line))
            self.log.flush()
            self.at.evaluated = True
            if last:
                self.at.final = {**final, **self.meter.rates()}
            kept = self._interval_due() or (last and self.config.training.checkpoint_policy != "none")
            reached = final["subset"]["loss"] if final else None
            if reached is not None and (self.at.best is None or reached < self.at.best["loss"]):
                self.at.best = {
                    **{key: final["subset"][key] for key in ("update", "targets", "loss", "bits_per_byte")},
                    "checkpoint": f"checkpoints/{self.at.update}" if kept else None,
                }
            # Every time: a killed process may have left a better one, of an update that this one has not come to yet.
            if self.at.best:
                write_json_atomic(self.folder.best, self.at.best)
            if self._interval_due() and not last:
                self._export(f"update-{self.at.update}")  # before the save: a restart behind it would not export
                self._save("interval")
            elif not last and self._recovery_due():
                self._save("recovery")
        if self.stop() and not last:
            self._save_and_stop()

    def _loss(self, row_P: jax.Array, split: str, indices: np.ndarray) -> validations.Loss:
        """Loss of a parameter row on validation sequences, finite but in a sweep; _Stopped when a signal arrives."""

        def rows() -> Iterator[np.ndarray]:
            size = self.config.evaluation.batch_sequences
            for part in validations.batches(self.source.validation_rows, indices, size):
                fault_point("eval")
                if self.stop():
                    raise _Stopped
                yield part

        found = self.built.evaluate(row_P, rows())
        if not math.isfinite(found.total) and not network.independent(self.config, self.built.schedule):
            raise NonFiniteError(
                f"update {self.at.update}: the loss on the {split} split is not finite; lower optimizer.lr"
            )
        return found

    def _evaluate(self, split: str, indices: np.ndarray) -> dict[str, Any]:
        """The evaluation line of the mean model."""
        start = time.monotonic()
        present_N = network.present(self.config, self.at.update)
        found = self._loss(validations.mean_row(self.state.params_NP, present_N), split, indices)
        position, seconds = self.at.position, time.monotonic() - start
        epoch, targets = self.plan.epoch(position - 1) + 1, self._targets(position)
        return records.eval_line(self.at.update, epoch, targets, split, found, self.source, seconds)

    def _evaluate_workers(self, indices: np.ndarray) -> dict[str, Any]:
        """Losses of the local models on the same sequences, in nats: mean, min, max, and of each worker.

        None for a worker that is away, and in a sweep for one whose loss is not finite.
        """
        params_NP, present_N = self.state.params_NP, network.present(self.config, self.at.update)
        losses: list[float | None] = [None] * params_NP.shape[0]
        for i in range(len(losses)) if present_N is None else np.flatnonzero(present_N):
            loss = self._loss(params_NP[i], "subset", indices).mean
            losses[i] = loss if math.isfinite(loss) else None
        found = [loss for loss in losses if loss is not None] or [math.nan]
        return {"mean": sum(found) / len(found), "min": min(found), "max": max(found), "workers": losses}

    def _end(self) -> dict[str, Any]:
        """Final save, export and result, in this order; each can be repeated after a crash."""
        config, policy = self.config, self.config.training.checkpoint_policy
        final = self.at.final
        assert final is not None  # the last update ends a virtual epoch
        if policy != "none":
            with self.meter.pause():
                self._save("final", wait=True)
                self._export("final")
        self.saved.finish()
        self.log.close()
        targets, wall_s = self._targets(self.at.position), self.meter.wall_s
        result = records.result(
            config, self.source, self.at.update, targets, final, self.at.best, self.loader.passes, wall_s
        )
        write_json_atomic(self.folder.result, result)
        if policy == "none":  # a stop saves under every policy; only now is its checkpoint useless
            for entry in self.saved.entries():
                if entry.kind == "recovery":
                    integrity.retire(self.folder.checkpoints / str(entry.update))
        for text in describe.after(self.folder.path, result):
            self.progress.note(text)
        return result

    def _recovery_due(self) -> bool:
        training = self.config.training
        return training.checkpoint_policy != "none" and (
            time.monotonic() - self.last_save >= 60 * training.recovery_minutes
        )

    def _interval_due(self) -> bool:
        training = self.config.training
        epoch = self.plan.epoch(self.at.position - 1) + 1
        return training.checkpoint_policy == "interval" and epoch % training.interval_epochs == 0

    def _save(self, kind: str, wait: bool = False) -> None:
        self._read()
        with self.meter.pause():
            if not self.log.flush(sync=True):
                if wait:
                    raise CheckpointError(f"{self.folder.metrics}: can't be written, so no checkpoint was saved")
                return
            self.at.wall_s = self.meter.wall_s
            arrays, meta = resume.content(self.state, self.met, self.held, self.at, self.loader)
            self.saved.save(self.at.update, arrays, meta, kind, wait)
            self.last_save = time.monotonic()

    def _save_and_stop(self) -> Any:
        error = self.stop()
        assert error is not None
        self._save("recovery", wait=True)
        self.saved.finish()
        self.log.close()
        raise type(error)(f"{error} received: saved at update {self.at.update}, the same command continues")

    def _export(self, name: str) -> None:
        fault_point("export")
        resume.export(self.folder.exports / name, self.built, self.source, self.state.params_NP, self.at)

    def _targets(self, position: int) -> int:
        return position * self.plan.context
