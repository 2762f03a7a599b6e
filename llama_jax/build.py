"""What a config needs on this device: the plan, the arena layout, the mesh, the compiled step and evaluation."""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from llama_jax import arena, budget, hf, model, network, optimizer, outer, runtime, topology
from llama_jax import config as configs
from llama_jax import step as steps
from llama_jax import validation as validations
from llama_jax.control import Advance, Control, make_control
from llama_jax.faults import fault_point


class Built(NamedTuple):
    """What a config needs on this device: the plan in sequences, the compiled step and evaluation."""

    config: Any
    plan: budget.Plan
    layout: arena.Layout
    numerics: model.Numerics
    resolved: dict[str, Any]
    mesh: Mesh
    step: steps.Step
    evaluate: validations.Evaluator
    measure: Callable[..., steps.Distances]
    schedule: topology.Schedule
    sync: Callable[..., tuple[steps.State, outer.Outer]] | None
    control: Advance | None

    def mixing(self) -> Callable[[int, Control | None], steps.Mixing]:
        """A function from the zero-based update to its phase, gamma, whether it is measured, who is there.

        Where there is a control, gamma is its own, on the device.
        """
        config, adaptive = self.config, self.config.decentralized.adaptive
        period, every = self.schedule.period, config.log.consensus_every
        gamma_T, links = None, network.make_links(config, self.schedule)
        if adaptive.mode == "lr_power":
            ends = itertools.accumulate(self.plan.sizes())
            rates = [optimizer.learning_rate(config, end * self.plan.context) for end in ends]
            gamma_T = topology.gamma_table(rates, adaptive.start_frac, adaptive.p, adaptive.min_gamma)

        def of(update: int, held: Control | None) -> steps.Mixing:
            gamma = held.gamma if held else np.float32(1 if gamma_T is None else gamma_T[update])
            measure = np.bool_((update + 1) % every == 0)
            return steps.Mixing(np.int32(update % period), gamma, measure, links(update))

        return of

    def initial_state(self) -> steps.State:
        """The state before the first update: drawn by the seed, or the weights in model.init_from."""
        config = self.config.model
        params = hf.load_params(config.init_from, config) if config.init_from else model.init(config, self.config.seed)
        row_P = arena.to_row(params, self.layout)
        return steps.init_state(row_P, self.config.decentralized.workers, self.mesh)

    def place(self, rows: np.ndarray) -> steps.Batch:
        """The next sequences of the stream [n, S] as one update's batch on the device."""
        config = self.config
        batch = steps.make_batch(
            rows, config.decentralized.workers, config.derived.accumulation, config.training.microbatch
        )
        if fault_point("step"):
            batch.rows[:] = np.nan
        return jax.tree.map(jax.device_put, batch, steps.shardings(self.mesh, steps.BATCH_SPEC))


def build(config: Any) -> Built:
    """Everything of a finalized config but its data and its folder. Call runtime.prepare(config) first."""
    network.check(config)
    numerics, resolved = runtime.resolve(config)
    mesh = steps.make_mesh(config.runtime.mesh_worker, config.runtime.mesh_data)
    layout = arena.make_layout(config.model)
    return Built(
        config,
        configs.make_plan(config),
        layout,
        numerics,
        resolved,
        mesh,
        steps.make_step(config, numerics, mesh),
        validations.make_evaluator(config, numerics, mesh),
        steps.make_measure(config, mesh),
        steps.make_schedule(config),
        outer.make_sync(config, mesh) if config.decentralized.sync_every else None,
        make_control(config, mesh) if config.decentralized.adaptive.mode == "target" else None,
    )
