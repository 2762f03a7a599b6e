"""Known defects of training, and a tiny Llama trained 20 steps with each of them by the real step.

The model reads EOS-joined rows of a synthetic language in bfloat16, 20 updates with the SFT schedule (10 % warm-up,
cosine to a tenth), once from the initial weights and once from weights that have learnt the language (fine-tuning).
A defect is a change of the config, of the code, of the rows or of the learning rates; controls change the execution and
nothing else. bench/sensitivity.py judges the curves.
"""

import contextlib
import dataclasses
import hashlib
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from bench.convergence import AA_ARMS, Arm
from bench.measure import STEPS
from llama_jax import arena, model, ops, optimizer, runtime, synthetic
from llama_jax import config as configs
from llama_jax import step as steps

EOS, ROWS, CONTEXT = 0, 32, 32  # rows of an update, targets of a row
STARTS = {"from scratch": 1e-2, "fine-tuning": 5e-4}  # peak learning rates
LEARNT, LEARNING_RATE = 200, 2e-2  # updates before fine-tuning, their peak
FIELDS: dict[str, Any] = {
    "model.vocab_size": 32,
    "model.context": CONTEXT,
    "model.layers": 1,
    "model.width": 32,
    "model.heads": 2,
    "model.kv_heads": 1,
    "model.ffn": 64,
    "model.compute_dtype": "bfloat16",
    "training.targets_per_parameter": None,
    "training.total_updates": STEPS,
    "training.batch_targets": ROWS * CONTEXT,
    "training.microbatch": ROWS,
    "optimizer.beta1": 0.9,
    "optimizer.beta2": 0.95,
    "optimizer.weight_decay": 0.1,
    "optimizer.clip_norm": 0.25,  # a clip that acts
    "lr_schedule.warmup_steps": None,
    "lr_schedule.warmup_fraction": 0.1,
    "data.source": "synthetic",
}


class Change(NamedTuple):
    """A defect, or a control, which changes no more than rounding. Only what it changes is given.

    fields: of the config; numerics: of model.Numerics; patch: (module, name, function of what stands there);
    rows: of [20, n, context + 1]; kept: rows of an update that count; rates: of the 20 learning rates; seed: of init.
    """

    name: str
    control: bool = False
    fields: Mapping[str, Any] | None = None
    numerics: Mapping[str, Any] | None = None
    patch: tuple[Any, str, Callable[[Any], Any]] | None = None
    rows: Callable[[np.ndarray], np.ndarray] | None = None
    kept: int = ROWS
    rates: Callable[[np.ndarray], np.ndarray] | None = None
    seed: int = 1


def _attention(change: Callable[..., tuple]) -> tuple[Any, str, Callable[[Any], Any]]:
    """A patch of q, k, v [B, T, heads, d] before every attention."""
    return ops, "attention", lambda real: lambda name: lambda *qkv: real(name)(*change(*qkv))


def _head(change: Callable[..., tuple]) -> tuple[Any, str, Callable[[Any], Any]]:
    """A patch of the targets and their weights [tokens] before the loss."""

    def patched(real):
        return lambda h, w, targets, weights, *rest: real(h, w, *change(targets, weights), *rest)

    return ops, "head_loss", patched


def _without_eos(targets, weights):
    kept = weights * (targets != EOS)
    return targets, kept * (weights.sum() / kept.sum())


def _rounded(real):
    def adamw(*arguments):
        params, moments = real(*arguments)
        return params.astype(jnp.bfloat16).astype(params.dtype), moments

    return adamw


REFERENCE = Change("reference")
CHANGES = [
    Change("rows of each update in another order", control=True, rows=lambda rows: rows[:, ::-1]),
    Change("two microbatches", control=True, fields={"training.microbatch": ROWS // 2}),
    Change("plain head, reference attention", control=True, numerics={"head": "plain", "attention": "reference"}),
    Change("recomputed layers", control=True, numerics={"remat": True}),
    Change("learning rate x 1.05", rates=lambda rates: rates * 1.05),
    Change("learning rate one update late", rates=lambda rates: np.append(0, rates[:-1])),
    Change("no warm-up", rates=lambda rates: np.maximum.accumulate(rates[::-1])[::-1]),
    Change("beta2 0.95 -> 0.99", fields={"optimizer.beta2": 0.99}),
    Change("no weight decay", fields={"optimizer.weight_decay": 0.0}),
    Change(
        "weight decay on norm scales",
        patch=(arena, "make_layout", lambda real: lambda model: (x := real(model))._replace(decayed=x.used)),
    ),
    Change("no clip", fields={"optimizer.clip_norm": 0.0}),
    Change("parameters rounded to bfloat16", patch=(optimizer, "adamw", _rounded)),
    Change("labels one token late", patch=_head(lambda targets, weights: (jnp.roll(targets, -1), weights))),
    Change("EOS left out of the loss", patch=_head(_without_eos)),
    Change("keys one position early", patch=_attention(lambda q, k, v: (q, jnp.roll(k, -1, 1), jnp.roll(v, -1, 1)))),
    Change("no 1/sqrt(d) in attention", patch=_attention(lambda q, k, v: (q * q.shape[-1] ** 0.5, k, v))),
    Change("no gradient to keys", patch=_attention(lambda q, k, v: (q, jax.lax.stop_gradient(k), v))),
    Change("norm epsilon 1e-5 -> 1e-2", fields={"model.norm_eps": 1e-2}),
    Change("two updates swapped", rows=lambda rows: rows[[*range(9), 10, 9, *range(11, STEPS)]]),
    Change("updates in another order", rows=lambda rows: rows[np.random.RandomState(1).permutation(STEPS)]),
    Change("the same rows each update", rows=lambda rows: rows[np.zeros(STEPS, int)]),
    Change("half of the rows lost", kept=ROWS // 2),
    Change("another seed", seed=2),
]


# What strict() must refuse. The other defects hardly move 20 losses: the configuration check must find them.
CODE = (
    "labels one token late",
    "EOS left out of the loss",
    "keys one position early",
    "no 1/sqrt(d) in attention",
    "no gradient to keys",
    "norm epsilon 1e-5 -> 1e-2",
)
DATA = ("two updates swapped", "updates in another order", "the same rows each update", "half of the rows lost")
RATES = ("learning rate x 1.05", "learning rate one update late", "no warm-up")
CAUGHT = {
    "from scratch": (*CODE, *DATA, *RATES, "another seed", "no clip"),
    "fine-tuning": (*CODE, *DATA, *RATES, "another seed", "parameters rounded to bfloat16"),
}
STATED = {("fine-tuning", name) for name in RATES}  # refused for the learning rates that the arm states


def text(updates: int) -> np.ndarray:
    """EOS-joined rows [updates, ROWS, CONTEXT + 1] of documents in which a token depends on the one before the last."""
    need = updates * ROWS * (CONTEXT + 1)
    source = synthetic.SyntheticSource(FIELDS["model.vocab_size"] - 1, CONTEXT, 7, 4, need // CONTEXT + 2)
    stream, random = source.load_group(0).astype(np.int64) + 1, np.random.RandomState(0)
    parts: list[np.ndarray] = []
    used = 0
    while used < need:
        half = random.randint(6, 30)
        pair = stream[used : used + 2 * half].reshape(2, half)
        parts += [pair.T.reshape(-1), np.array([EOS])]
        used += 2 * half
    return np.concatenate(parts)[:need].reshape(updates, ROWS, CONTEXT + 1).astype(np.uint16)


def settings(change: Change) -> Any:
    """The finalized config of a change."""
    config = configs.default()
    for field, value in {**FIELDS, **(change.fields or {})}.items():
        configs.set_field(config, field, value)
    return configs.finalize(config)


class Program:
    """The compiled step of one change; run() trains it."""

    def __init__(self, change: Change) -> None:
        self.config, self.change = settings(change), change
        numerics, _ = runtime.resolve(self.config)
        self.mesh = steps.make_mesh(1, 1)
        with self._patched():
            numerics = dataclasses.replace(numerics, **(change.numerics or {}))
            self.step = steps.make_step(self.config, numerics, self.mesh)

    def _patched(self) -> Any:
        if self.change.patch is None:
            return contextlib.nullcontext()
        module, name, replacement = self.change.patch
        return mock.patch.object(module, name, replacement(getattr(module, name)))

    def run(self, row_P: np.ndarray, rows_KnS: np.ndarray, rates_K: np.ndarray, kept: int = ROWS) -> Any:
        """Trains from a row on so many updates -> (losses [K], gradient norms [K], the row after them)."""
        state, found = steps.init_state(row_P, 1, self.mesh), []
        shape = (self.config.derived.accumulation, self.config.training.microbatch)
        with self._patched():  # the first call traces
            for rows_nS, rate in zip(rows_KnS, rates_K, strict=True):
                batch = steps.make_batch(rows_nS[:kept], 1, *shape)
                state, metrics = self.step(state, batch, np.asarray([rate], np.float32))
                found.append((float(metrics.loss_sum[0]) / int(metrics.targets[0]), float(metrics.grad_norm[0])))
        return *np.asarray(found).T, np.asarray(state.params_NP[0])


def schedule(peak: float) -> np.ndarray:
    """The learning rates of 20 updates."""
    config = settings(REFERENCE)
    ends = config.training.batch_targets * np.arange(1, STEPS + 1)
    return np.array([optimizer.learning_rate(config, int(end), peak) for end in ends])


def train(names: Collection[str] | None = None) -> dict[str, Any]:
    """Trains the reference, AA_ARMS - 1 more of it and the changes called so (all), each from both starts -> JSON.

    {start: {"reference": arm, "again": [arms], "changed": {name: arm}}}; `again` reads the rows of an update in other
    orders, which is what a kernel with atomic additions does to a sum.
    """
    chosen = [change for change in CHANGES if names is None or change.name in names]
    words, reference = text(LEARNT + STEPS), Program(REFERENCE)
    rows_KnS, layout = words[:STEPS], arena.make_layout(reference.config.model)
    initial = {seed: arena.to_row(model.init(reference.config.model, seed), layout) for seed in (1, 2)}
    warm, cool = np.minimum(1, np.arange(1, LEARNT + 1) / 20), np.linspace(1, 0.1, LEARNT)
    learnt = reference.run(initial[1], words[STEPS:], LEARNING_RATE * warm * cool)[2]
    image = f"jax {jax.__version__}, {jax.devices()[0].device_kind}"

    def arm(program: Program, change: Change, start: str) -> dict[str, Any]:
        row_P = learnt if start == "fine-tuning" and change.seed == 1 else initial[change.seed]
        rows = change.rows(rows_KnS) if change.rows else rows_KnS
        rates = change.rates(schedule(STARTS[start])) if change.rates else schedule(STARTS[start])
        losses, norms, _ = program.run(row_P, rows, rates, change.kept)
        short = ([float(f"{x:.8g}") for x in curve] for curve in (losses, norms, rates))
        names = (hashlib.sha256(part.tobytes()).hexdigest() for part in (rows_KnS, row_P))
        return dict(zip(Arm._fields, (*short, *names, image), strict=True))

    def shuffled(seed: int) -> Change:
        order = np.random.RandomState(seed).permutation(ROWS)
        return Change("again", rows=lambda rows: rows[:, order])

    again = [shuffled(seed) for seed in range(1, AA_ARMS)]
    found: dict[str, Any] = {
        start: {
            "reference": arm(reference, REFERENCE, start),
            "again": [arm(reference, change, start) for change in again],
            "changed": {},
        }
        for start in STARTS
    }
    for change in chosen:
        own = change.fields or change.numerics or change.patch
        program = Program(change) if own else reference
        for start in STARTS:
            found[start]["changed"][change.name] = arm(program, change, start)
    return found
