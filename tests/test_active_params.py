"""The count of active parameters: published checkpoints at their real dimensions, mutants, our own models, the command.

Oracles are numbers of others: N worked out by hand from dimensions, and the tensors, parameters and bytes that the
published checkpoints are known to have. test_active_transformers.py has a third one.
"""

import json
import math
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from fake_checkpoints import write
from published_checkpoints import (
    GLM5,
    TINY_V3,
    V3,
    V32,
    deepseek_v4,
    glm4_moe,
    gpt_oss,
    latent,
    llama,
    qwen3_5_moe,
    qwen3_moe,
)

from bench import active_params as command
from bench.active_params import active_of_model, active_params, count
from bench.active_rules import COUNTED
from llama_jax import config as configs
from llama_jax import flops, hf, hf_config
from llama_jax.errors import CheckpointError

ROOT = Path(__file__).resolve().parent.parent
NVFP4 = {"quantization": {"quant_algo": "NVFP4"}}


def total(config, header, quantization=None):
    return count(header, config, quantization)["active_parameters"]


# N: by hand from the dimensions. Tensors, parameters and bytes: of the checkpoints on the hub (index or model page).
PUBLISHED = {
    "Llama-3.1-8B": (llama, 7_504_658_432, 291, 8_030_261_248, 16_060_522_496),
    "Qwen3-30B-A3B": (qwen3_moe, 3_041_656_832, None, 30_532_122_624, 61_064_245_248),
    "Qwen3.5-35B-A3B": (qwen3_5_moe, 2_945_269_760, None, 35_951_822_704, None),
    "the same, pruned to 180 experts that are stored one by one, text only": (
        lambda: qwen3_5_moe(experts=180, layout="each", text_only=True),
        2_945_269_760 - 40 * 76 * 2048,
        22_213,
        25_091_371_648,
        50_182_743_296,
    ),
    "DeepSeek-V3": (lambda: latent(V3), 36_624_596_992, 91_991, None, 688_574_839_360),
    "DeepSeek-V3.2": (lambda: latent(V32), 37_476_106_240, None, 685_396_921_376, None),
    "DeepSeek-V4-Flash": (deepseek_v4, 13_268_221_952, 69_187, None, 159_609_485_896),
    "GLM-4.5-Air": (glm4_moe, 12_802_326_528, None, 110_468_824_832, None),
    "GLM-5.2": (lambda: latent(GLM5), 40_297_758_720, 118_629, None, 755_617_140_416),
    "gpt-oss-20b": (gpt_oss, 3_607_142_400, None, None, 13_761_264_768),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_checkpoints(name):
    make, active, tensors, parameters, size = PUBLISHED[name]
    config, header = make()
    counted = count(header, config)
    assert counted["active_parameters"] == active
    assert tensors in (None, counted["tensors"]) and parameters in (None, counted["parameters"])
    assert size in (None, header.bytes)
    assert counted["tensors"] == len(header) == sum(row["tensors"] for row in counted["groups"])
    # Nothing is lost: the classes hold every stored weight, two in each byte of FP4.
    packed = sum(math.prod(shape) for name, (dtype, shape) in header.items() if fp4(name, dtype))
    everything = packed + sum(math.prod(shape) for _, shape in header.values())
    assert counted["parameters"] == everything
    for key, whole in (("parameters", everything), ("active", active)):
        assert sum(row[key] for row in counted["groups"]) == whole
        assert sum(row[key] for row in counted["classes"].values()) == whole


def fp4(name, dtype):
    return dtype == "I8" or (dtype == "U8" and not name.endswith("_scales"))


def classes(make):
    config, header = make()
    return count(header, config)["classes"]


def test_golden_parts():
    """What the golden numbers consist of."""
    qwen = classes(qwen3_moe)
    assert qwen["attention"]["active"] == 48 * 18_874_368 and qwen["router"]["active"] == 48 * 262_144
    assert qwen["routed"]["active"] == 48 * 8 * 4_718_592 and qwen["head"]["active"] == 151_936 * 2048
    assert sum(row["parameters"] for kind, row in qwen.items() if kind != "norm") == 30_531_911_680
    gpt = classes(gpt_oss)
    assert sum(gpt[kind]["parameters"] for kind in (*COUNTED, "embedding") if kind in gpt) == 20_907_786_240
    assert gpt["routed"]["parameters"] == 24 * (530_841_600 + 265_420_800)
    assert classes(gpt_oss)["routed"] == classes(lambda: gpt_oss(packed=False))["routed"]
    assert classes(qwen3_5_moe)["convolution"]["parameters"] == 983_040
    assert classes(lambda: latent(V32))["indexer"]["active"] == 61 * 13_959_168 == 851_509_248
    v4 = classes(lambda: deepseek_v4(layers=5, experts=8))
    assert v4["attention"]["active"] == 5 * 106_954_752 + 2 * 8_388_608 + 4_194_304
    assert v4["indexer"]["active"] == 2 * 10_747_904
    assert v4["hyper"]["active"] == 5 * 786_432 + 65_536
    assert v4["table"]["parameters"] == 3 * 129_280 * 6 and v4["table"]["active"] == 0
    assert v4["routed"]["active"] == 5 * 6 * 3 * 2048 * 4096


def test_layouts_order_shards_and_prefixes_do_not_matter(tmp_path):
    fused = qwen3_5_moe(layers=4, experts=16)
    each = qwen3_5_moe(layers=4, experts=16, layout="each")
    expected = total(*fused)
    assert total(*each) == expected
    packed = gpt_oss(layers=1)
    assert total(*packed) == total(*gpt_oss(layers=1, packed=False))
    config, header = each
    draw = random.Random(0)
    for shards in (1, 3, 8):
        names = list(header)
        draw.shuffle(names)
        folder = write(tmp_path / f"{shards}", config, {name: header[name] for name in names}, shards)
        assert active_params(folder, headers_only=True)["active_parameters"] == expected
    for prefix in ("", "model.", "language_model.model.", "language_model."):
        renamed = {name.replace("model.language_model.", prefix): tensor for name, tensor in header.items()}
        assert total(config, renamed) == expected


# Our own models.

OURS = {
    "tied": {"heads": 4},
    "grouped": {"heads": 8, "kv_heads": 2},
    "untied": {"heads": 4, "tied": False},
    "untied, grouped": {"heads": 8, "kv_heads": 1, "tied": False},
}


def matrices(model):
    """N of one of our models, from its shapes: all matrices but an embedding that is only looked up."""
    sizes = {name: math.prod(shape) for name, shape in flops.parameter_shapes(model).items() if len(shape) == 2}
    return sum(sizes.values()) - (0 if model.tied else sizes["model.embed_tokens.weight"])


@pytest.mark.parametrize("kind", OURS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_exports(tmp_path, kind, dtype):
    section = hf_config.model_section(
        {"vocab_size": 96, "context": 32, "layers": 3, "width": 32, "ffn": 48, **OURS[kind]}
    )
    params = {name: np.zeros(shape, np.float32) for name, shape in flops.parameter_shapes(section).items()}
    folder = hf.export_model(tmp_path / "run" / "exports" / "final", params, section, dtype=dtype)
    counted = active_params(folder)
    assert counted["active_parameters"] == active_of_model(section) == matrices(section)
    assert counted["parameters"] == flops.unique_params(section)
    assert counted["tied_head"] == section.tied
    assert active_params(tmp_path / "run")["active_parameters"] == matrices(section)
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-1])
    with pytest.raises(CheckpointError, match="its header asks for"):
        active_params(folder)


def test_presets():
    toy = hf_config.model_section({"vocab_size": 32000, "layers": 8, "width": 256, "heads": 4, "ffn": 688})
    assert active_of_model(toy) == 14_516_224
    for path in sorted((ROOT / "configs").glob("*.py")):
        model = configs.load(path, {}).model
        assert active_of_model(model) == matrices(model), path.name


# The command.


def run(capsys, *arguments):
    command.main([str(argument) for argument in arguments])
    return capsys.readouterr().out


def test_table_and_json(tmp_path, capsys):
    config, header = gpt_oss()
    folder = write(tmp_path / "gpt", config, header, 3)
    text = run(capsys, folder, "--headers-only")
    assert text.rstrip().endswith("24 layers, 4 of 32 experts: N = 3,607,142,400 active parameters per token")
    row = next(line.split() for line in text.splitlines() if "gate_up_proj_blocks" in line)
    assert row == [
        "routed",
        "24",
        "layers.*.mlp.experts.gate_up_proj_blocks",
        "U8",
        "32x5760x90x16",
        "12,740,198,400",
        "1,592,524,800",
    ]
    assert "two FP4 weights in one byte" in text
    found = json.loads(run(capsys, folder / "model.safetensors.index.json", "--headers-only", "--json"))
    assert found["active_parameters"] == 3_607_142_400 and found["files"] == 3
    assert found["groups"] == count(header, config)["groups"]
    with pytest.raises(CheckpointError, match="its header asks for"):
        command.main([str(folder)])


def test_modelopt_says_it_in_a_file_of_its_own(tmp_path, capsys):
    config, header = latent(TINY_V3, "nvfp4")
    folder = write(tmp_path / "fp4", config, header)
    with pytest.raises(CheckpointError, match="nothing proves"):
        command.main([str(folder), "--headers-only"])
    (folder / "hf_quant_config.json").write_text(json.dumps(NVFP4))
    found = json.loads(run(capsys, folder, "--headers-only", "--json"))
    assert found["active_parameters"] == total(*latent(TINY_V3))


@pytest.mark.parametrize(
    "change, code, message",
    [
        ({}, 0, ""),
        ({"model_type": "mamba"}, 2, "model_type 'mamba' is not one of"),
        ({"num_hidden_layers": 3}, 4, "layer 2 lacks"),
    ],
)
def test_exit_codes(tmp_path, change, code, message):
    config, header = llama(layers=2)
    folder = write(tmp_path / "model", config | change, header)
    script = (
        "import runpy, sys; sys.argv.pop(0); sys.modules['jax'] = None; runpy.run_path(sys.argv[0], None, '__main__')"
    )
    result = subprocess.run(
        [sys.executable, "-c", script, "bench/active_params.py", folder, "--headers-only"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == code, result.stderr
    if code:
        assert result.stderr.startswith(f"error: {folder}") and message in result.stderr
        assert result.stderr.count("\n") == 1 and result.stdout == ""
    else:
        assert "N = 961,544,192 active parameters" in result.stdout
