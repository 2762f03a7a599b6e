"""Fine-tuning a Llama that transformers saved: logits, loss and gradients, and whole runs against torch.

The oracle is transformers with its own labels shift, torch's AdamW and clip, and a schedule written out here; the model
under test reads the folder and the rows through the real command's functions.
"""

import json
import math
import shutil

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from llama_jax import config as configs
from llama_jax import data, evaluate, export, hf, hf_files, loss, model, rows
from llama_jax.errors import ConfigError, DataError

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

T, V, ROWS, UPDATES = 16, 61, 4, 3
LR, WARMUP, DECAY, BETAS = 2e-3, 0.5, 0.1, (0.9, 0.95)
SIZES = {
    "vocab_size": V,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
KINDS = {
    "tied, llama3": {"tie_word_embeddings": True, "rope_parameters": LLAMA3},
    "untied": {"tie_word_embeddings": False, "rms_norm_eps": 1e-4},
}


@pytest.fixture(scope="module")
def ids():
    return np.random.default_rng(0).integers(0, V, (UPDATES * ROWS + 2, T)).astype(np.int32)


@pytest.fixture(scope="module")
def folders(tmp_path_factory, ids):
    """What transformers saved of each kind, one whole and one in shards, with made-up tokenizer files; and the rows."""
    folder = tmp_path_factory.mktemp("sft")
    for kind, changes in KINDS.items():
        torch.manual_seed(0)
        theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **changes))
        for name, tensor in theirs.named_parameters():
            if "norm" in name:  # transformers begins with ones
                torch.nn.init.uniform_(tensor, 0.5, 1.5)
        theirs.save_pretrained(folder / kind, max_shard_size="20KB" if kind == "untied" else "1GB")
        (folder / kind / "tokenizer.json").write_text('{"added_tokens": []}')
        (folder / kind / "tokenizer_config.json").write_text('{"chat_template": "made up"}')
    rows.write(folder / "rows.parquet", [ids], T)
    return folder


def load(folders, kind, **changes):
    """The config that a preset and the command line give: no field of the shape is repeated."""
    preset = folders / "preset.json"
    fields = {
        "model.context": T,
        "training.targets_per_parameter": None,
        "training.total_updates": UPDATES,
        "training.epoch_targets_per_parameter": 100_000.0,
        "training.batch_targets": ROWS * (T - 1),
        "training.microbatch": ROWS,
        "optimizer.lr": LR,
        "optimizer.beta2": BETAS[1],
        "lr_schedule.warmup_steps": None,
        "lr_schedule.warmup_fraction": WARMUP,
        "data.source": "rows",
        "data.path": str(folders),
        "evaluation.batch_sequences": 2,
    }
    base = configs.default()
    for field, value in fields.items():
        configs.set_field(base, field, value)
    preset.write_text(json.dumps(configs.to_dict(base)))
    overrides = {name.replace("__", "."): value for name, value in changes.items()}
    return configs.load(preset, {"model.init_from": str(folders / kind), **overrides})


def theirs_of(folders, kind):
    return transformers.LlamaForCausalLM.from_pretrained(folders / kind, dtype=torch.float32)


@pytest.fixture(scope="module")
def trained(folders, ids):
    """{kind: (losses, gradient norms, parameters by name)} of the same updates in torch, float32."""
    found = {}
    for kind in KINDS:
        theirs, losses, norms = theirs_of(folders, kind), [], []
        parameters = list(theirs.parameters())
        groups = [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": DECAY},
            {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
        ]
        adamw = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=1e-8)
        for update in range(UPDATES):
            batch = torch.tensor(ids[update * ROWS : (update + 1) * ROWS], dtype=torch.long)
            for group in adamw.param_groups:
                group["lr"] = rate(update + 1)
            adamw.zero_grad()
            found_loss = theirs(input_ids=batch, labels=batch).loss
            found_loss.backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, 1.0)))
            losses.append(found_loss.item())
            adamw.step()
        found[kind] = losses, norms, {name: p.detach().numpy() for name, p in theirs.named_parameters()}
    return found


def rate(update):
    """The learning rate of an update, one-based: linear to the end of the warm-up, cosine to a tenth."""
    done = update / UPDATES
    if done < WARMUP:
        return LR * done / WARMUP
    return LR * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (done - WARMUP) / (1 - WARMUP))))


@pytest.mark.parametrize("kind", KINDS)
def test_the_shape_comes_from_the_folder(folders, kind):
    chosen = load(folders, kind).model
    assert (chosen.vocab_size, chosen.width, chosen.ffn, chosen.layers) == (V, 24, 40, 2)
    assert (chosen.heads, chosen.kv_heads, chosen.tied) == (6, 2, kind != "untied")
    assert (chosen.rope_scaling, chosen.rope_factor) == (("llama3", 4.0) if kind != "untied" else ("none", 8.0))
    assert chosen.context == T  # the config's own
    again = load(folders, kind, model__layers=2)  # the same is no contradiction
    assert again.model.layers == 2
    with pytest.raises(ConfigError, match=r"model\.layers = 3, but .* has 2"):
        load(folders, kind, model__layers=3)
    with pytest.raises(ConfigError, match=r"model\.init_from: .*gone is not a directory"):
        load(folders, kind, model__init_from=str(folders / "gone"))
    with pytest.raises(
        ConfigError, match=r"model\.vocab_size = 32000, but .* has 61"
    ):  # a config that was never loaded
        hf.load_params(folders / kind, configs.default().model)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_loss_and_gradients(folders, ids, kind):
    section = hf.model_section(hf.load_folder(folders / kind)[0] | {"context": T})
    params = {name: jnp.asarray(tensor) for name, tensor in hf.load_params(folders / kind, section).items()}
    theirs, batch = theirs_of(folders, kind), torch.tensor(ids[:ROWS], dtype=torch.long)
    told = theirs(input_ids=batch, labels=batch)
    told.loss.backward()
    tokens = jnp.asarray(ids[:ROWS])
    logits = jax.jit(lambda p: model.logits(section, model.reference(), p, tokens))(params)
    np.testing.assert_allclose(logits, told.logits.detach().numpy(), atol=2e-5, rtol=0)
    numerics = model.Numerics(jnp.float32, jnp.float32, "xla", head_chunk_rows=24)  # chunks across rows
    for chosen in (model.reference(), numerics):

        def mean(p, chosen=chosen):
            return loss.loss_sum(section, chosen, p, tokens, jnp.ones(ROWS)) / (ROWS * (T - 1))

        total, grads = jax.jit(jax.value_and_grad(mean))(params)
        assert float(total) == pytest.approx(told.loss.item(), abs=1e-6)
        for name, parameter in theirs.named_parameters():
            np.testing.assert_allclose(grads[name], parameter.grad.numpy(), atol=1e-6, rtol=1e-4, err_msg=name)


@pytest.mark.parametrize("position", [T - 1, T - 2])
def test_the_last_token_is_a_target_only(ids, folders, position):
    """Its value changes the loss of the position before it and nothing else: nobody reads it."""
    section = hf.model_section(hf.load_folder(folders / "untied")[0] | {"context": T})
    params = {name: jnp.asarray(tensor) for name, tensor in hf.load_params(folders / "untied", section).items()}
    reference = model.reference()
    logits_of = jax.jit(lambda tokens: model.logits(section, reference, params, tokens))
    loss_of = jax.jit(lambda tokens: loss.loss_sum(section, reference, params, tokens, jnp.ones(1)))
    changed = ids[:1].copy()
    changed[0, position] = (changed[0, position] + 1) % V

    def losses(tokens):
        logits = logits_of(tokens[:, :-1])
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits[0]), jnp.asarray(tokens[0, 1:, None]), axis=1)
        return -np.asarray(picked, np.float64)[:, 0]

    before, after = losses(ids[:1]), losses(changed)
    assert np.flatnonzero(before != after).tolist() == ([T - 2] if position == T - 1 else [T - 3, T - 2])
    assert float(loss_of(changed)) - float(loss_of(ids[:1])) == pytest.approx(after.sum() - before.sum(), abs=1e-5)
    found = jax.jit(lambda tokens: loss.sequence_losses(section, reference, params, tokens))(changed)
    assert float(found[0]) == pytest.approx(after.sum(), abs=1e-4)


WAYS = {
    "two microbatches, blocks recomputed": {"training__microbatch": 2, "model__remat": True},
    "scanned and recomputed, chunks": {
        "training__microbatch": 1,
        "model__remat": True,
        "model__scan_layers": True,
        "model__head_chunk_rows": 5,
    },
}


@pytest.mark.parametrize(("kind", "way"), [("untied", None), *(("tied, llama3", way) for way in WAYS)])
def test_runs_train_as_torch_does(folders, trained, tmp_path, kind, way, capsys):
    losses, norms, params = trained[kind]
    result = harness.run(load(folders, kind, **WAYS.get(way, {})), tmp_path)
    lines = harness.lines(tmp_path)
    assert [line["kind"] for line in lines] == ["train"] * UPDATES  # no evaluation without rows held out
    assert [line["targets"] for line in lines] == [ROWS * (T - 1) * (i + 1) for i in range(UPDATES)]
    np.testing.assert_allclose([line["loss"] for line in lines], losses, atol=3e-6, rtol=0)
    np.testing.assert_allclose([line["grad_norm"] for line in lines], norms, rtol=2e-5)
    np.testing.assert_allclose([line["lr"] for line in lines], [rate(i + 1) for i in range(UPDATES)], rtol=1e-12)
    assert (result["validation_loss"], result["subset_loss"], result["best"]) == (None, None, None)
    section, exported = hf.load_folder(tmp_path / "exports/final")
    for name, tensor in params.items():
        np.testing.assert_allclose(exported[name], tensor, atol=3e-5, rtol=0, err_msg=name)
    # The tokenizer and the ids of the folder come along.
    said = json.loads((tmp_path / "exports/final/config.json").read_text())
    assert (said["bos_token_id"], said["eos_token_id"], section["context"]) == (1, [2, 3], T)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "exports/final" / name).read_bytes() == (folders / kind / name).read_bytes()
    assert "initial weights of" in capsys.readouterr().out


def test_a_stopped_run_ends_bitwise_equal(folders, tmp_path):
    chosen = load(folders, "untied", data__validation_rows=2)
    harness.run(chosen, tmp_path / "unbroken")
    expected = harness.outcome(tmp_path / "unbroken")
    assert expected["result"]["validation_loss"] == pytest.approx(expected["result"]["subset_loss"])
    for k in (1, 2):
        with pytest.raises(harness.Preempted):
            harness.run(chosen, tmp_path / f"broken-{k}", harness.StopAfter(k))
        harness.run(chosen, tmp_path / f"broken-{k}")
        assert harness.outcome(tmp_path / f"broken-{k}") == expected
    capture = json.loads((tmp_path / "unbroken/config.json").read_text())
    source = data.open_source(chosen)
    assert capture["data"] == {"tokens": source.fingerprint}
    assert capture["resolved"]["init"] == hf_files.weights_sha256(folders / "untied")
    found = evaluate.evaluate(chosen, source, evaluate.load_run(tmp_path / "unbroken", chosen)[0], "validation")
    assert found["loss"] == pytest.approx(expected["result"]["validation_loss"], rel=1e-6) and found["targets"] == 30
    with pytest.raises(DataError, match="no rows are held out"):
        bare = load(folders, "untied")
        evaluate.evaluate(bare, data.open_source(bare), None, "validation")


def test_other_weights_or_rows_are_refused_at_a_restart(folders, tmp_path, ids):
    moved = tmp_path / "moved"
    shutil.copytree(folders, moved)
    chosen = load(moved, "untied")
    with pytest.raises(harness.Preempted):
        harness.run(chosen, tmp_path / "run", harness.StopAfter(1))
    file = min((moved / "untied").glob("*.safetensors"))
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(ConfigError, match=r"another recipe.*\n  resolved\.init: [0-9a-f]{64} -> [0-9a-f]{64}$"):
        harness.run(chosen, tmp_path / "run")
    with pytest.raises(ConfigError, match=r"resolved\.init: [0-9a-f]{64} -> absent"):
        harness.run(configs.load(tmp_path / "run/config.json", {"model.init_from": ""}), tmp_path / "run")
    rows.write(moved / "rows.parquet", [ids[::-1]], T)
    file.write_bytes(whole)
    with pytest.raises(DataError, match="was trained on other data"):
        harness.run(chosen, tmp_path / "run")
    harness.run(load(folders, "untied"), tmp_path / "run")  # the same weights and rows at another place


def test_a_run_needs_all_its_rows(folders, tmp_path):
    with pytest.raises(DataError, match="14 rows to train on, each used once; the budget is 16"):
        harness.run(load(folders, "untied", training__total_updates=4), tmp_path / "run")
    with pytest.raises(DataError, match="11 rows to train on"):
        harness.run(load(folders, "untied", data__validation_rows=3), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_longer_context_than_the_folder_has_is_warned_about(folders, capsys):
    section = hf.model_section(hf.load_folder(folders / "untied")[0])
    hf.load_params(folders / "untied", section)
    assert capsys.readouterr().err == ""
    hf.load_params(folders / "untied", hf.model_section(dict(section) | {"context": 65}))
    assert "was made for 64 positions" in capsys.readouterr().err


def test_identity_of_the_weights(folders, tmp_path):
    whole, sharded = folders / "tied, llama3", folders / "untied"
    assert hf_files.weights_sha256(whole) == harness.hashlib.sha256((whole / hf.WEIGHTS).read_bytes()).hexdigest()
    names = sorted(path.name for path in sharded.glob("*.safetensors"))
    assert len(names) > 1
    lines = [f"{harness.hashlib.sha256((sharded / name).read_bytes()).hexdigest()}  {name}\n" for name in names]
    assert hf_files.weights_sha256(sharded) == harness.hashlib.sha256("".join(lines).encode()).hexdigest()
    assert hf.identity("") == {}


def test_export_of_the_weights_that_a_config_begins_with(folders, tmp_path, capsys):
    file = folders / "shape.json"
    chosen = load(
        folders, "untied", model__init_from="", model__layers=1, model__width=48, model__kv_heads=1, model__heads=2
    )
    file.write_text(json.dumps(configs.to_dict(chosen)))
    out = tmp_path / "weights"
    words = [f"--config={file}", f"--out={out}", "--config.seed=5"]
    assert export.main(words) == 0
    assert str(out) in capsys.readouterr().out
    stored = safetensors.numpy.load_file(out / hf.WEIGHTS)
    expected = model.init(chosen.model, 5)
    assert stored.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(stored[name], tensor)
    assert export.main(words) == 4 and "not an empty folder" in capsys.readouterr().err
    again = configs.load(file, {"model.init_from": str(out)})
    np.testing.assert_array_equal(hf.load_params(out, again.model)["model.norm.weight"], expected["model.norm.weight"])
    assert export.main([f"--config={file}", f"--out={out}-2", f"--config.model.init_from={out}"]) == 2
    assert "a folder already" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        export.main([f"--config={file}", f"--out={out}-2", "--worker=1"])
