"""Learning rates in closed form; AdamW, clip and schedule against numpy FP64, torch and real gradients."""

import math
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import numpy_llama
import pytest

from llama_jax import arena, config, loss, model, optimizer, step

HYPER = SimpleNamespace(beta1=0.9, beta2=0.98, eps=1e-8, weight_decay=0.1)


# Schedule.


def schedule(total=1_000_000, batch=1000, peak=0.0056, **changes):
    values = {
        "name": "cosine",
        "warmup_steps": 100,
        "warmup_fraction": None,
        "min_lr_ratio": 0.1,
        "decay_fraction": 0.2,
        **changes,
    }
    return SimpleNamespace(
        optimizer=SimpleNamespace(lr=peak),
        lr_schedule=SimpleNamespace(**values),
        training=SimpleNamespace(batch_targets=batch),
        derived=SimpleNamespace(total_targets=total),
    )


@pytest.fixture(scope="module")
def c4_20m():
    """The preset and the positions in targets at the end of each of its 3,120 updates."""
    loaded = config.load(Path(__file__).parent.parent / "configs" / "c4_20m.py")
    ends = np.cumsum([size * 1024 for size in config.make_plan(loaded).sizes()])
    return loaded, [int(end) for end in ends]


def test_the_whole_column_of_the_20m_run(c4_20m):
    loaded, ends = c4_20m
    rates = [optimizer.learning_rate(loaded, end) for end in ends]
    warmup, total = 312 * 131_072, 408_070_144
    for end, rate in zip(ends, rates, strict=True):
        if end < warmup:
            expected = float(Fraction(0.0056) * end / warmup)
        else:  # the half-angle form of the same cosine
            expected = 0.0056 * (0.1 + 0.9 * math.cos(math.pi / 2 * float(Fraction(end - warmup, total - warmup))) ** 2)
        assert rate == pytest.approx(expected, rel=1e-13)
    assert rates[0] == 0.0056 / 312
    assert (ends[-1], rates[-1]) == (total, 0.1 * 0.0056)
    peak = rates.index(max(rates))
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    # Four epochs end within the warm-up with a short update each, so that update 312 is a little under the peak.
    assert 0.98 * 0.0056 < rates[311] < 0.0056


def test_cosine_at_its_landmarks():
    one = schedule()
    assert optimizer.learning_rate(one, 1000) == 0.0056 / 100
    assert optimizer.learning_rate(one, 50_000) == 0.0056 / 2
    assert optimizer.learning_rate(one, 100_000) == 0.0056
    assert optimizer.learning_rate(one, 550_000) == pytest.approx(0.0056 * 0.55, rel=1e-14)
    assert optimizer.learning_rate(one, 1_000_000) == pytest.approx(0.0056 * 0.1, rel=1e-14)
    assert optimizer.learning_rate(schedule(min_lr_ratio=0.0), 1_000_000) == 0
    assert optimizer.learning_rate(schedule(min_lr_ratio=1.0), 700_000) == 0.0056


def test_warmup_as_a_fraction_of_the_budget():
    one = schedule(warmup_steps=None, warmup_fraction=0.05)
    assert optimizer.learning_rate(one, 1000) == pytest.approx(0.0056 / 50, rel=1e-14)
    assert optimizer.learning_rate(one, 50_000) == 0.0056
    assert optimizer.learning_rate(one, 525_000) == pytest.approx(0.0056 * 0.55, rel=1e-14)
    for none in (schedule(warmup_steps=0), schedule(warmup_steps=None, warmup_fraction=0.0)):
        assert 0.0055 < optimizer.learning_rate(none, 1000) < 0.0056
        assert optimizer.learning_rate(none, 1_000_000) == pytest.approx(0.00056, rel=1e-14)


def test_wsd_and_constant():
    one = schedule(name="wsd")
    for position, ratio in ((1000, 0.01), (100_000, 1), (799_000, 1), (800_000, 1), (900_000, 0.55), (1_000_000, 0.1)):
        assert optimizer.learning_rate(one, position) == pytest.approx(0.0056 * ratio, rel=1e-12)
    # A decay longer than what the warm-up leaves starts with its end.
    late = schedule(name="wsd", warmup_steps=500, decay_fraction=1.0)
    for position, ratio in ((500_000, 1), (750_000, 0.55), (1_000_000, 0.1)):
        assert optimizer.learning_rate(late, position) == pytest.approx(0.0056 * ratio, rel=1e-12)
    flat = schedule(name="constant")
    assert optimizer.learning_rate(flat, 50_000) == 0.0056 / 2
    assert optimizer.learning_rate(flat, 600_000) == optimizer.learning_rate(flat, 1_000_000) == 0.0056


@pytest.mark.parametrize("name", ["cosine", "wsd", "constant"])
def test_a_warmup_as_long_as_the_budget_ends_at_the_peak(name):
    one = schedule(name=name, warmup_steps=1000)
    assert optimizer.learning_rate(one, 999_000) == pytest.approx(0.0056 * 0.999, rel=1e-14)
    assert optimizer.learning_rate(one, 1_000_000) == 0.0056


# AdamW.


class NumpyAdamW:
    """Decoupled AdamW of named tensors in FP64 (Loshchilov and Hutter 2019, algorithm 2), one global-norm clip."""

    def __init__(self, params, hyper, clip_norm):
        self.params = {name: np.asarray(value, np.float64).copy() for name, value in params.items()}
        self.mu = {name: np.zeros_like(value) for name, value in self.params.items()}
        self.nu = {name: np.zeros_like(value) for name, value in self.params.items()}
        self.hyper, self.clip_norm, self.count = hyper, clip_norm, 0

    def update(self, grads, lr):
        """Returns (norm before the clip, factor)."""
        h, self.count = self.hyper, self.count + 1
        norm = math.sqrt(sum(float(np.sum(grad**2)) for grad in grads.values()))
        factor = min(1.0, self.clip_norm / (norm + 1e-6)) if self.clip_norm else 1.0
        for name, param in self.params.items():
            grad = factor * grads[name]
            self.mu[name] = h.beta1 * self.mu[name] + (1 - h.beta1) * grad
            self.nu[name] = h.beta2 * self.nu[name] + (1 - h.beta2) * grad**2
            first = self.mu[name] / (1 - h.beta1**self.count)
            second = self.nu[name] / (1 - h.beta2**self.count)
            decay = h.weight_decay if param.ndim == 2 else 0.0
            self.params[name] = param - lr * decay * param - lr * first / (np.sqrt(second) + h.eps)
        return norm, factor


SHAPES = {"a": (5, 4), "b": (3, 7), "scale": (6,)}  # 41 decayed elements, 6 others; a row has 64
CLIP = 1.0


def updates_of(worker, count=20):
    """Gradients and learning rates of one worker: norms on both sides of the clip."""
    random = np.random.default_rng(worker)
    for number in range(1, count + 1):
        size = 10.0 ** random.uniform(-3, 0.5)
        grads = {name: random.normal(0, size, shape) for name, shape in SHAPES.items()}
        yield grads, optimizer.learning_rate(schedule(total=20_000, warmup_steps=5), number * 1000) * (1 + worker)


def start_of(worker):
    random = np.random.default_rng(100 + worker)
    return {name: random.normal(0, 0.5, shape) for name, shape in SHAPES.items()}


def row_of(tensors):
    return np.concatenate([*(tensors[name].reshape(-1) for name in SHAPES), np.zeros(64 - 47)])


def run_adamw(dtype, hyper=HYPER, decayed=41):
    """20 updates of three workers -> rows after each, moments at the end."""
    update = jax.jit(lambda p, g, m, lr: optimizer.adamw(hyper, decayed, p, g, m, lr))
    params = jnp.asarray(np.stack([row_of(start_of(n)) for n in range(3)]), dtype)
    moments = optimizer.Moments(jnp.zeros_like(params), jnp.zeros_like(params), jnp.zeros(3, jnp.int32))
    history = []
    for steps in zip(*(updates_of(n) for n in range(3)), strict=True):
        rows = []
        for grads, _ in steps:
            norm = math.sqrt(sum(np.sum(grad**2) for grad in grads.values()))
            rows.append(row_of(grads) * min(1.0, CLIP / (norm + 1e-6)))
        lr = jnp.asarray([lr for _, lr in steps], dtype)
        params, moments = update(params, jnp.asarray(np.stack(rows), dtype), moments, lr)
        history.append(np.asarray(params, np.float64))
    assert params.dtype == moments.mu_NP.dtype == moments.nu_NP.dtype == dtype
    return history, moments


@pytest.mark.parametrize(("wide", "bound"), [(True, 1e-12), (False, 2e-5)], ids=["float64", "float32"])
def test_adamw_of_three_rows_against_numpy(wide, bound):
    """float32: 20 updates of at most 0.017, each with a few roundings and a bias correction that loses 1 / (1 - b2)."""
    with jax.enable_x64(wide):
        history, moments = run_adamw(jnp.float64 if wide else jnp.float32)
    for n in range(3):
        oracle, factors = NumpyAdamW(start_of(n), HYPER, CLIP), []
        for number, (grads, lr) in enumerate(updates_of(n)):
            factors.append(oracle.update(grads, lr)[1])
            np.testing.assert_allclose(history[number][n], row_of(oracle.params), atol=bound)
        assert {factor < 1 for factor in factors} == {True, False}
        np.testing.assert_allclose(moments.mu_NP[n], row_of(oracle.mu), atol=bound)
        np.testing.assert_allclose(moments.nu_NP[n], row_of(oracle.nu), atol=bound)
        assert not history[-1][n, 47:].any()
        assert moments.count_N.tolist() == [20, 20, 20]
        assert moments.count_N.dtype == jnp.int32


@pytest.mark.parametrize(
    ("name", "changed", "decayed"),
    [
        ("decay of the norm scales", {}, 47),
        ("decay in the gradient's place", {"weight_decay": 0.0}, 41),
        ("eps inside the root", {"eps": 1e-4}, 41),
        ("beta2 of another preset", {"beta2": 0.99}, 41),
    ],
)
def test_seeded_defects_of_adamw_are_far_outside_of_the_bound(name, changed, decayed):
    with jax.enable_x64(True):
        history, _ = run_adamw(jnp.float64, SimpleNamespace(**{**vars(HYPER), **changed}), decayed)
    oracle = NumpyAdamW(start_of(0), HYPER, CLIP)
    for grads, lr in updates_of(0):
        oracle.update(grads, lr)
    assert np.abs(history[-1][0] - row_of(oracle.params)).max() > 1e-6, name


def test_adamw_against_torch():
    torch = pytest.importorskip("torch")
    with jax.enable_x64(True):
        history, _ = run_adamw(jnp.float64)
    params = {name: torch.nn.Parameter(torch.tensor(value)) for name, value in start_of(0).items()}
    groups = [
        {"params": [params["a"], params["b"]], "weight_decay": HYPER.weight_decay},
        {"params": [params["scale"]], "weight_decay": 0.0},
    ]
    other = torch.optim.AdamW(groups, lr=1.0, betas=(HYPER.beta1, HYPER.beta2), eps=HYPER.eps)
    for number, (grads, lr) in enumerate(updates_of(0)):
        for name, param in params.items():
            param.grad = torch.tensor(grads[name])
        torch.nn.utils.clip_grad_norm_(list(params.values()), CLIP)
        for group in other.param_groups:
            group["lr"] = lr
        other.step()
        found = row_of({name: param.detach().numpy() for name, param in params.items()})
        np.testing.assert_allclose(history[number][0], found, atol=1e-12)


def test_no_array_of_a_row_is_a_constant_of_the_program():
    row = jax.ShapeDtypeStruct((1, 64), jnp.float32)
    moments = optimizer.Moments(row, row, jax.ShapeDtypeStruct((1,), jnp.int32))
    lr = jax.ShapeDtypeStruct((1,), jnp.float32)
    program = jax.make_jaxpr(lambda p, g, m, lr: optimizer.adamw(HYPER, 41, p, g, m, lr))(row, row, moments, lr)
    assert [np.shape(constant) for constant in program.consts if np.size(constant) >= 41] == []
    text = jax.jit(lambda p, g, m, lr: optimizer.adamw(HYPER, 41, p, g, m, lr)).lower(row, row, moments, lr).as_text()
    constants = [line for line in text.splitlines() if "stablehlo.constant" in line]
    assert constants
    assert not [line for line in constants if "64x" in line and "dense<[" in line]


# The whole update: real gradients, clip, schedule, short updates.


@pytest.mark.parametrize("path", ["fast", "reference"])
def test_twenty_real_updates_in_fp64(path):
    """make_step against gradients of the reference loss per named tensor and NumpyAdamW, to 1e-12."""
    raw = config.default()
    raw.model.update({"vocab_size": 11, "context": 6, "layers": 1, "width": 8, "heads": 2, "kv_heads": 1, "ffn": 12})
    raw.training.update({"targets_per_parameter": None, "total_updates": 20, "batch_targets": 4 * 6, "microbatch": 4})
    raw.training.epoch_targets_per_parameter = 0.1  # short updates
    raw.lr_schedule.warmup_steps = 5
    raw.optimizer.clip_norm = 0.9
    settings = config.finalize(raw)
    sizes = list(config.make_plan(settings).sizes())
    assert len(sizes) == 20
    assert set(sizes) > {4}

    layout = arena.make_layout(settings.model)
    start = numpy_llama.params(settings.model, seed=7)
    random, position, factors = np.random.default_rng(8), 0, []
    numerics = model.reference(jnp.float64)
    if path == "fast":  # own gradients, chunked head; attention has its softmax in float32 except in the reference
        numerics = model.Numerics(jnp.float64, jnp.float64, "reference", "chunked", head_chunk_rows=7)
    with jax.enable_x64(True):
        mesh = step.make_mesh(1, 1)
        update = step.make_step(settings, numerics, mesh)
        state = step.init_state(arena.to_row(start, layout).astype(np.float64), 1, mesh)
        oracle = NumpyAdamW(start, settings.optimizer, settings.optimizer.clip_norm)
        frozen = numpy_llama.model(**{k: v for k, v in settings.model.items() if k in numpy_llama.model()})

        @jax.jit
        def mean(params, tokens, rows):
            total = loss.loss_sum(frozen, model.reference(jnp.float64), params, tokens, rows)
            return total / (jnp.sum(rows) * 6)

        gradient = jax.jit(jax.value_and_grad(mean))
        for size in sizes:
            rows = random.integers(0, 11, (size, 7)).astype(np.uint16)
            position += size * 6
            lr = optimizer.learning_rate(settings, position)
            state, metrics = update(state, step.make_batch(rows, 1, 1, 4), np.array([lr]))
            # The oracle's batch is filled up with copies of weight 0.
            filled, weights = np.resize(rows, (4, 7)).astype(np.int32), (np.arange(4) < size).astype(np.float64)
            value, grads = gradient(oracle.params, filled, weights)
            norm, factor = oracle.update({name: np.asarray(grad) for name, grad in grads.items()}, lr)
            factors.append(factor)
            np.testing.assert_allclose(metrics.loss_sum[0], value * size * 6, rtol=1e-12)
            np.testing.assert_allclose(metrics.grad_norm[0], norm, rtol=1e-11)
            np.testing.assert_allclose(metrics.clip[0], factor, rtol=1e-11)
            assert metrics.targets.tolist() == [size * 6]
            found = arena.from_row(np.asarray(state.params_NP)[0], layout)
            for name, value in oracle.params.items():
                np.testing.assert_allclose(found[name], value, atol=1e-12, err_msg=name)
    assert {factor < 1 for factor in factors} == {True, False}
    assert not np.asarray(state.params_NP)[0, layout.used :].any()
