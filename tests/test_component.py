"""Component tests: what is the same passes, every seeded defect fails, records can't be bent.

The oracles are held against the FP64 NumPy model's own parts where a closed form says less than they do.
"""

import copy
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from recipe_records import component_record, config, recipe

from bench import component, component_cases, component_draws, component_layers, record
from bench.component_draws import KINDS
from bench.record import RecordError
from llama_jax import arena, kernels, ops

SHAPE = {"model.context": 24, "model.heads": 4, "model.kv_heads": 2, "model.vocab_size": 80}
MODEL = config({**SHAPE, "training.batch_targets": 8 * 23}).model
SEEDS = (1, 2, 3)


@functools.cache  # one case, one compiled oracle
def case_of(name, dtype="float32"):
    return component_cases.make(name, MODEL, dtype, 2)


def judged(case, a, b, kinds=KINDS, seeds=SEEDS):
    return component.judge(component.measure(case, a, b, kinds, seeds))


# What is the same passes.


def test_a_path_against_itself():
    case = case_of("norm", "bfloat16")
    path = case.path({"kernels": "xla"})
    errors = component.measure(case, path, path, KINDS, SEEDS)
    assert component.judge(errors)["passed"]
    for outputs in errors.values():
        assert set(outputs) == {"h", "dx"}
        assert all(entry["a"] == entry["b"] and len(entry["a"]) == 3 for entry in outputs.values())
    assert 1e-4 < component.judge(errors)["worst_error"] < 0.1  # of bfloat16


SWAPS = {
    "attention": ({"attention": "reference"}, {"attention": "xla"}, "bfloat16"),
    "head": ({"head": "plain"}, {"head": "chunked", "chunk_rows": 7, "kernels": "xla"}, "bfloat16"),
    "optimizer": (*component.ALSO["optimizer"], "float32"),
    "workers": (*component.ALSO["workers"], "float32"),
}


@pytest.mark.parametrize("name", SWAPS)
def test_real_swaps_pass(name):
    a, b, dtype = SWAPS[name]
    seeds = SEEDS if name != "workers" else SEEDS[:1]
    found = component.test(name, a, b, MODEL, dtype, 2, seeds)
    assert found["passed"], found["worst"]
    assert found["layer_shape"] == component_draws.shape_of(name, MODEL, 2)
    assert set(found["errors"]) == set(KINDS)
    assert component._problem(found, "") is None
    assert component.line(found).startswith(f"{name}: ")


def test_oracles_are_those_of_numpy():
    """Attention and head of one draw, written out with loops in NumPy's FP64."""
    q, k, v, _ = case_of("attention").inputs("normal", 1)
    with jax.enable_x64(True):
        y = np.asarray(jax.jit(case_of("attention").oracle)(q, k, v, q)["y"])
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    for row, head, at in ((0, 0, 0), (0, 3, 11), (1, 1, 23)):
        scores = np.array([q[row, at, head] @ k[row, s, head // 2] / 2 for s in range(at + 1)])  # head size 4
        weights = np.exp(scores - scores.max())
        expected = weights @ v[row, : at + 1, head // 2] / weights.sum()
        np.testing.assert_allclose(y[row, at, head], expected, rtol=1e-12)
    h, w, targets, weights = case_of("head").inputs("eos_dense", 2)
    with jax.enable_x64(True):
        found = jax.jit(case_of("head").oracle)(h, w, targets, weights)
    logits = np.asarray(h, np.float64) @ np.asarray(w, np.float64).T
    softmax = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    losses = -np.log(softmax[np.arange(48), targets])
    np.testing.assert_allclose(found["loss"], (losses * weights).sum(), rtol=1e-12)
    one_hot = np.eye(80)[targets]
    dlogits = (softmax - one_hot) * weights[:, None]
    np.testing.assert_allclose(found["dw"], dlogits.T @ np.asarray(h, np.float64), rtol=1e-9, atol=1e-12)
    assert weights.reshape(2, 24)[:, -1].tolist() == [0, 0] and weights.sum() == 46
    assert 0.3 < (targets == 0).mean() < 0.7  # EOS


# Seeded defects.


def attention_with(change):
    """reference_attention of changed q, k, v."""
    return component_layers.attention_path(lambda q, k, v: ops.reference_attention(*change(q, k, v)))


def peeking(q, k, v):
    """The mask one position late: a token sees the next one."""
    T, H, K = q.shape[1], q.shape[2], k.shape[2]
    k, v = (jnp.repeat(x, H // K, axis=2) for x in (k, v))
    scores = jnp.einsum("bthd,bshd->bhts", q, k) / np.sqrt(q.shape[-1])
    scores = jnp.where(np.tril(np.ones((T, T), bool), 1)[None, None], scores, -jnp.inf)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores, axis=-1), v)


def shifted(h, w, targets, weights):
    return ops.plain_head_loss(h, w, jnp.roll(jnp.asarray(targets), 1), weights)


def without_last_tile(h, w, targets, weights):
    """The statistics leave out the last 16 of the vocabulary."""
    logits = h @ w.T.astype(h.dtype)
    picked = jnp.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
    return jnp.sum((jax.nn.logsumexp(logits[:, :-16], axis=-1) - picked) * weights)


def all_positions(h, w, targets, weights):
    return ops.plain_head_loss(h, w, targets, jnp.ones_like(weights))


def loose_norm(x):
    return x, kernels.plain_norm(x, 1e-2, x.dtype)[0]


def rounded_norm(x):
    """Statistics in bfloat16."""
    inverse = jax.lax.rsqrt(jnp.mean((x * x).astype(jnp.bfloat16), axis=-1, keepdims=True) + 1e-5)
    return x, x * inverse.astype(x.dtype)


def cut_norm(x):
    """The gradient of what goes on from the norm is lost."""
    return jax.lax.stop_gradient(x), ops.norm(x, 1e-5, x.dtype, "xla")[1]


def swapped_halves(h, w_GD, w_DF):
    return ops.mlp(h, jnp.roll(w_GD, w_GD.shape[0] // 2, 0), w_DF, "xla")


def gelu(h, w_GD, w_DF):
    gate, up = jnp.split(ops.plain_dense(h, w_GD), 2, axis=-1)
    return ops.plain_dense(jax.nn.gelu(gate) * up, w_DF)


def ungated_gradient(h, w_GD, w_DF):
    """No gradient through the sigmoid of the gate."""
    gate, up = jnp.split(ops.plain_dense(h, w_GD), 2, axis=-1)
    return ops.plain_dense(gate * jax.lax.stop_gradient(jax.nn.sigmoid(gate)) * up, w_DF)


def rotated_with(change):
    """The accepted projections of changed queries, keys and values."""
    own = accepted_projections()
    return component_layers.projections_path(lambda h, w: change(*own(h, w)))


def accepted_projections():
    shape = (MODEL.heads, MODEL.kv_heads or MODEL.heads, MODEL.width // MODEL.heads)
    tables = ops.rope_tables(MODEL, np.arange(MODEL.context), jnp.float32)
    return lambda h, w: ops.rotated_projections(h, w, shape, tables, "xla")


def decayed_norms(params, grads):
    return component_cases.tree_adamw(params, grads, lambda name, p: True)


def uncorrected(params, grads):
    """No bias correction in the first updates: the learning rate of another schedule."""
    scaled = tuple({name: g * 0.9 for name, g in part.items()} for part in grads)
    return component_cases.tree_adamw(params, scaled)


def padded(params, grads):
    """The arena's own update with the decay reaching one tensor too far."""
    layout = arena.make_layout(MODEL)
    first = next(slot for slot in layout.slots if not slot.decay)
    return component_cases.arena_adamw(layout._replace(decayed=layout.decayed + first.size), params, grads)


def one_model_for_all(params, tokens, weights):
    """Every worker has the parameters of the first."""
    same = {name: jnp.broadcast_to(x[:1], x.shape) for name, x in params.items()}
    return accepted("workers")(same, tokens, weights)


DEFECTS = {
    "causal mask off by one": ("attention", component_layers.attention_path(peeking)),
    "no 1/sqrt(d)": ("attention", attention_with(lambda q, k, v: (q * q.shape[-1] ** 0.5, k, v))),
    "no gradient to k": ("attention", attention_with(lambda q, k, v: (q, jax.lax.stop_gradient(k), v))),
    "keys one position early": ("attention", attention_with(lambda q, k, v: (q, jnp.roll(k, -1, 1), v))),
    "groups of heads mixed up": ("attention", attention_with(lambda q, k, v: (q, k[:, :, ::-1], v[:, :, ::-1]))),
    "labels shifted": ("head", component_layers.head_path(shifted)),
    "last tile of the vocabulary left out": ("head", component_layers.head_path(without_last_tile)),
    "the last token of a row has a loss": ("head", component_layers.head_path(all_positions)),
    "epsilon 1e-2": ("norm", component_layers.norm_path(loose_norm)),
    "statistics in bfloat16": ("norm", component_layers.norm_path(rounded_norm)),
    "no gradient past the norm": ("norm", component_layers.norm_path(cut_norm)),
    "gate and up swapped": ("mlp", component_layers.mlp_path(swapped_halves)),
    "another activation": ("mlp", component_layers.mlp_path(gelu)),
    "no gradient through the sigmoid": ("mlp", component_layers.mlp_path(ungated_gradient)),
    "positions one late": ("projections", rotated_with(lambda q, k, v: (jnp.roll(q, 1, 1), k, v))),
    "halves of the values swapped": ("projections", rotated_with(lambda q, k, v: (q, k, jnp.flip(v, -1)))),
    "no gradient to keys": ("projections", rotated_with(lambda q, k, v: (q, jax.lax.stop_gradient(k), v))),
    "decay on norm scales": ("optimizer", decayed_norms),
    "gradients scaled": ("optimizer", uncorrected),
    "decay reaches too far": ("optimizer", padded),
    "the parameters of another worker": ("workers", one_model_for_all),
}
ACCEPTED = {
    "attention": {"attention": "reference"},
    "head": {"head": "plain"},
    "norm": {"kernels": "xla"},
    "mlp": {"gate": "xla"},
    "projections": {"rotary": "xla"},
    "optimizer": {"optimizer": "tree"},
    "workers": {"workers": "loop"},
}


@functools.cache
def accepted(which):
    return case_of(which).path(ACCEPTED[which])


@pytest.mark.parametrize("name", DEFECTS)
def test_seeded_defects_fail(name):
    which, defect = DEFECTS[name]
    found = judged(case_of(which), accepted(which), defect, seeds=SEEDS[:1])
    assert not found["passed"], found


def test_what_is_not_finite_fails():
    case = case_of("norm")
    path = case.path({"kernels": "xla"})

    def broken(x, dy, dh):
        found = path(x, dy, dh)
        return {
            **found,
            "dx": jnp.where(jnp.arange(found["dx"].size).reshape(found["dx"].shape) == 5, jnp.nan, found["dx"]),
        }

    errors = component.measure(case, path, broken, ("normal",), (1,))
    assert errors["normal"]["dx"]["b"] == [None]
    found = component.judge(errors)
    assert not found["passed"] and found["worst_error"] is None and found["worst"]["output"] == "dx"
    assert not component.judge({})["passed"]


def test_the_bound_is_that_of_the_accepted_path():
    def passed(a, b):
        return component.judge({"normal": {"y": {"a": a, "b": b}}})["passed"]

    assert passed([1e-3], [2e-3]) and not passed([1e-3], [2.01e-3])
    assert passed([0.0], [1e-6]) and not passed([0.0], [1.1e-6])
    assert passed([1e-3, 5e-3], [9e-3, 1e-3])  # the worst of the seeds
    assert not passed([1e-3, None], [1e-3, 1e-3])
    two = {"normal": {"y": {"a": [1.0], "b": [1.0]}}, "large": {"y": {"a": [1e-3], "b": [3e-3]}}}
    found = component.judge(two)
    assert not found["passed"] and found["worst"]["kind"] == "large" and found["worst_error"] == 1.0


FOUND = component_record(recipe(resolved={"attention": "cudnn"}))


def changed(path, value, rehash=True):
    made = copy.deepcopy(FOUND)
    holder, *keys = made["measured"], *path.split("/")
    for key in keys[:-1]:
        holder = holder[int(key) if isinstance(holder, list) else key]
    holder[int(keys[-1]) if isinstance(holder, list) else keys[-1]] = value
    if rehash:
        made["sha256"] = record.digest(made["measured"])
    return made


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("tests/0/passed", False),
        ("tests/0/worst_error", 1e-9),
        ("tests/0/worst", None),
        ("tests/0/errors", {"normal": {"y": {"a": [1e-3] * 3, "b": [1.0] * 3}}}),
        ("tests/0/errors", {"normal": {"y": {"a": [1e-3], "b": [1e-3]}}}),
        ("tests/0/errors", {}),
        ("tests/0/bound", {"factor": 200.0, "slack": 1e-6}),
        ("tests/0/errors/normal/y/b/0", 10**400),
        ("tests/0/errors/normal/y/b/0", -1.0),
        ("tests/0/errors/normal/y/b/0", True),
        ("tests/0/errors/normal/y/luck", []),
        ("tests/0/errors/normal", []),
        ("tests/0/layer_shape", None),
        ("tests/0/layer_shape/rows", "4"),
        ("tests/0/seeds", [1, 2, [3]]),
        ("tests/0/a", []),
        ("tests/0", None),
        ("tests", {}),
        ("stack", None),
        ("stack", {}),
        ("stack/versions", None),
        ("tests/0/luck", 1),
        ("luck", 1),
    ],
)
def test_a_bent_record_is_refused(path, value):
    assert component.check_record(copy.deepcopy(FOUND)) == FOUND
    with pytest.raises(RecordError):
        component.check_record(changed(path, value))


def test_records_are_read_from_files(tmp_path):
    path = tmp_path / "component.json"
    for content in ("{", "[]", '{"format": "llama_jax.component.v1", "sha256": "", "measured": {"tests": 3}}'):
        path.write_text(content)
        with pytest.raises(RecordError, match=r"component\.json"):
            component.read(path)
    with pytest.raises(RecordError, match="sha256"):
        component.check_record(changed("command", "another", rehash=False))
