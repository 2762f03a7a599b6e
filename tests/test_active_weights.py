"""Checkpoints that the count of active parameters refuses: mutants of small ones of every family and number format."""

import pytest
from published_checkpoints import (
    TINY_GLM5,
    TINY_V3,
    V32,
    deepseek_v4,
    glm4_moe,
    gpt_oss,
    latent,
    llama,
    qwen3_5_moe,
    qwen3_moe,
)

from bench import active_rules
from bench.active_params import count
from bench.active_rules import COUNTED
from bench.active_weights import check_head, classify, read_model
from llama_jax.errors import CheckpointError, ConfigError
from llama_jax.hf_files import Tensor

NVFP4 = {"quantization": {"quant_algo": "NVFP4"}}


def total(config, header, quantization=None):
    return count(header, config, quantization)["active_parameters"]


# With every kind of layer at least twice where the family has several.
SMALL = {
    "llama": lambda: llama(layers=2),
    "tied": lambda: llama(layers=2, tied=True),
    "qwen3_moe": lambda: qwen3_moe(layers=2, experts=16),
    "qwen3_5_moe": lambda: qwen3_5_moe(layers=8, experts=16),
    "qwen3_5_moe, text": lambda: qwen3_5_moe(layers=8, experts=16, layout="each", text_only=True),
    "deepseek_v3": lambda: latent(TINY_V3),
    "deepseek_v32": lambda: latent(V32 | TINY_V3 | {"model_type": "deepseek_v32"}),
    "glm_moe_dsa": lambda: latent(TINY_GLM5),
    "deepseek_v4": lambda: deepseek_v4(layers=6, experts=8),
    "deepseek_v4, base": lambda: deepseek_v4("fp8_e8m0", layers=6, experts=8),
    "glm4_moe": lambda: glm4_moe(layers=3, experts=8),
    "gpt_oss": lambda: gpt_oss(layers=2),
    "gpt_oss, bf16": lambda: gpt_oss(packed=False, layers=2),
}


@pytest.mark.parametrize("name", SMALL)
def test_every_counted_tensor_matters(name):
    """Dropped, renamed, of another shape or in another number format: an error, for one tensor of every kind."""
    config, header = SMALL[name]()
    active = total(config, header)
    model = read_model(config, {})
    done = set()
    for member, weight in zip(header, check_head(model, classify(header, model)), strict=True):
        dtype, shape = header[member]
        if (weight.kind, weight.pattern, dtype, shape) in done:
            continue
        done.add((weight.kind, weight.pattern, dtype, shape))
        rest = {key: tensor for key, tensor in header.items() if key != member}
        if weight.kind == "scale":
            owner = (
                member.replace("_scales", "_blocks")
                .replace(".scale", ".weight")
                .replace(".weight_scale_inv", ".weight")
            )
            if header[owner].dtype in ("I8", "U8"):
                refused(config, rest)
            else:
                assert total(config, rest) == active
            continue
        if weight.kind not in (*COUNTED, "embedding"):
            assert total(config, rest) == active
            continue
        refused(config, rest)
        names = {member.replace("weight", "wait"), member.replace("_", "-"), member[:-1], "x." + member} - {member}
        for other in names:
            refused(config, rest | {other: header[member]})
        reshaped = header | {member: Tensor(dtype, (*shape[:-1], shape[-1] + 1))}
        if member == "hc_head_fn":
            assert total(config, reshaped) == active + shape[0]  # the only one of its kind
        else:
            refused(config, reshaped)
        small = dtype in ("I8", "U8", "F8_E4M3")
        for wrong in {"I8", "U8", "I32", *({"BF16", "F8_E4M3"} if small else ())} - {dtype}:
            changed = header | {member: Tensor(wrong, shape)}
            if (dtype, wrong) == ("I8", "U8"):
                assert total(config, changed) == active  # either holds two FP4 weights
            else:
                refused(config, changed)


def refused(config, header, error=CheckpointError, message=None):
    with pytest.raises(error, match=message) as caught:
        total(config, header)
    assert "\n" not in str(caught.value)


def without(config, *keys):
    return {key: value for key, value in config.items() if key not in keys}


MUTANTS = {  # name of a small checkpoint: [(change of its config.json, words of the error, or what changes in N)]
    "llama": [
        ({"num_hidden_layers": 1}, "layer that config.json does not have"),
        ({"num_hidden_layers": 3}, "layer 2 lacks"),
        ({"hidden_size": 4097}, "no axis of hidden_size"),
        ({"vocab_size": 128255}, "not \\[vocab_size"),
        ({"model_type": "gpt_oss"}, "layer 0 (lacks|has)"),
        ({"tie_word_embeddings": True}, 0),  # stored all the same, and counted once
    ],
    "tied": [
        ({"tie_word_embeddings": False}, "does not say that it is tied"),
        ({"tie_word_embeddings": None}, "does not say that it is tied"),
    ],
    "qwen3_moe": [
        ({"num_experts": 17}, "says 17 experts"),
        ({"num_experts": 15}, "says 15 experts"),
        ({"num_experts_per_tok": 9}, 2 * 4_718_592),
        ({"num_experts_per_tok": 7}, -2 * 4_718_592),
        ({"num_local_experts": 16}, 0),
    ],
    "qwen3_5_moe, text": [
        ({"layer_types": ["full_attention"] * 8}, "layer 0 lacks self_attn"),
        ({"layer_types": ["linear_attention"] * 8}, "layer 3 lacks linear_attn"),
        ({"mtp_num_hidden_layers": 0}, 0),
    ],
    "deepseek_v3": [
        ({"n_group": 1, "topk_group": 1, "n_shared_experts": 2}, 0),  # none of them is top-k
        ({"num_hidden_layers": 4}, "layer that config.json does not have"),
        ({"num_hidden_layers": 6}, "layers.5.eh_proj.weight .* no rule knows"),
        ({"num_nextn_predict_layers": 0}, "layer that config.json does not have"),
        ({"num_mtp_layers": 2}, "num_nextn_predict_layers and num_mtp_layers differ"),
        ({"first_k_dense_replace": 3}, "layer 2 lacks mlp.down_proj"),
        ({"first_k_dense_replace": 1}, "layer 1 lacks mlp"),
        ({"model_type": "deepseek_v32"}, "layer 0 lacks self_attn.indexer"),
        ({"quantization_config": {"quant_method": "fp8"}}, "does not fit"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}}, "does not fit"),
        ({"n_routed_experts": 16}, "says 16 experts"),
    ],
    "deepseek_v32": [
        ({"model_type": "deepseek_v3"}, "has self_attn.indexer.* does not belong there"),
        ({"index_topk": 1}, 0),
    ],
    "glm_moe_dsa": [
        ({"indexer_types": ["full"] * 7}, "layer 3 lacks self_attn.indexer"),
        ({"indexer_types": ["shared"] * 7}, "layer 0 has self_attn.indexer"),
        ({"indexer_types": ["full"] * 3}, "indexer_types says nothing that is known of layer 3"),
        ({"indexer_types": None}, 0),
    ],
    "deepseek_v4": [
        ({"expert_dtype": "fp8"}, "nothing proves"),
        ({"expert_dtype": None, "quantization_config": {"weight_block_size": [128, 128], "expert_dtype": "fp4"}}, 0),
        ({"compress_ratios": [0] * 6}, "layer 2 has attn"),
        ({"compress_ratios": [0, 0, 4, 4, 4, 4]}, "layer 3 lacks attn.indexer"),
        ({"compress_ratios": [0, 0, 4, 2, 4, 2]}, "compress_ratios says nothing that is known of layer 3"),
        ({"num_experts_per_tok": 5}, -6 * 3 * 2048 * 4096),
    ],
    "deepseek_v4, base": [({"expert_dtype": "fp4"}, "config.json says that experts are FP4")],
    "gpt_oss": [
        ({"quantization_config": None}, "nothing proves"),
        ({"num_experts_per_tok": 2}, "num_experts_per_tok and experts_per_token differ"),
        ({"num_experts_per_tok": None, "experts_per_token": 33}, "33 of 32 experts"),
        ({"num_experts_per_tok": None, "experts_per_token": None}, "0 of 32 experts"),
        ({"num_local_experts": 31}, "says 31 experts"),
    ],
    "gpt_oss, bf16": [({"quantization_config": {"quant_method": "mxfp4"}}, "says that experts are FP4")],
}


@pytest.mark.parametrize("name, number", [(name, i) for name, mutants in MUTANTS.items() for i in range(len(mutants))])
def test_config_mutants(name, number):
    config, header = SMALL[name]()
    change, outcome = MUTANTS[name][number]
    if isinstance(outcome, str):
        refused(config | change, header, (CheckpointError, ConfigError), outcome)
    else:
        assert total(config | change, header) == total(config, header) + outcome


@pytest.mark.parametrize("number", range(len(active_rules.RULES)))
def test_every_rule_is_needed(monkeypatch, number):
    """Without a rule some checkpoint is refused or counted in other classes."""
    monkeypatch.setattr(active_rules, "RULES", active_rules.RULES[:number] + active_rules.RULES[number + 1 :])
    for make in SMALL.values():
        config, header = make()
        header["model.layers.0.self_attn.rotary_emb.inv_freq"] = Tensor("F32", (8,))  # as old checkpoints have
        try:
            counted = count(header, config)
        except CheckpointError:
            return
        if any(row["class"] == "vector" and not row["name"].endswith(("_base", "_scale")) for row in counted["groups"]):
            return
    raise AssertionError(active_rules.RULES[number])


def test_unknown_matrices_and_vectors():
    config, header = llama(layers=2)
    for name in ("model.layers.0.self_attn.k_proj.lora_A.weight", "model.extra", "vision.x", "mtp"):
        added = header | {name: Tensor("BF16", (4, 4))}
        if name == "vision.x":
            assert total(config, added) == total(config, header)
        else:
            refused(config, added, message="is a tensor that no rule knows")
    assert count(header | {"model.extra": Tensor("F32", (9,))}, config)["classes"]["vector"]["parameters"] == 9
    refused(config, header | {"model.layers.*.mlp.up_proj.weight": Tensor("BF16", (4, 4))}, message="no name")
    for name in ("model.layers.01.mlp.up_proj.weight", "layers.1.mlp.up_proj.weight"):
        same = header["model.layers.1.mlp.up_proj.weight"]
        refused(config, header | {name: same}, message="twice|no rule")
    refused(config, header | {"head.weight": header["lm_head.weight"]}, message="more than one head")
    refused(config, header | {"model.layers.2.mlp.up_proj.weight": same}, message="does not have")
    refused(config, header | {f"model.layers.{'9' * 5000}.x": same}, message="no rule knows")
    config, header = deepseek_v4(layers=3, experts=8)
    table = {"layers.0.ffn.gate.tid2eid": Tensor("F32", (129280, 6))}
    refused(config, header | table, message="not a table of integers")
    lone = {"layers.0.ffn.gate.scale": Tensor("F8_E8M0", (2, 32))}
    refused(config, header | lone, message="scale .*, which only smaller formats need")
    refused(config, header | {"layers.0.other.scale": Tensor("F8_E8M0", (2, 32))}, message="no rule knows")


def test_absurd_numbers_take_no_memory():
    config, header = qwen3_moe(layers=2, experts=16)
    refused(config | {"num_hidden_layers": 10**12}, header, message="says 1000000000000 layers, there are")
    refused(config | {"num_experts": 10**12}, header, message="says 1000000000000 experts")
    config, header = gpt_oss(packed=False, layers=2)
    wide = {name: Tensor(dtype, (10**15, *shape[1:])) for name, (dtype, shape) in header.items() if len(shape) == 3}
    refused(config, header | wide, message="1000000000000000 x")


def test_expert_numbers():
    config, header = qwen3_moe(layers=2, experts=16)
    for old, new in (("15", "16"), ("3", "03"), ("3", "4")):
        changed = {name.replace(f"1.mlp.experts.{old}.", f"1.mlp.experts.{new}."): header[name] for name in header}
        refused(config, changed, message="are not numbered|says 16 experts|no rule knows")


def test_fp4_needs_its_proof():
    """Scales of the wrong shape or dtype, none at all, and true 8-bit integers are refused in every layout."""
    config, header = gpt_oss(layers=2)
    scales = "model.layers.1.mlp.experts.down_proj_scales"
    for wrong in (Tensor("U8", (32, 2880, 89)), Tensor("U8", (32, 2880)), Tensor("F32", (32, 2880, 90))):
        refused(config, header | {scales: wrong}, message="nothing proves")
    config, header = deepseek_v4(layers=3, experts=8)
    for wrong in (Tensor("F8_E8M0", (2048, 64)), Tensor("F8_E8M0", (2048, 256)), Tensor("F32", (2048, 128))):
        refused(config, header | {"layers.1.ffn.experts.3.w1.scale": wrong}, message="nothing proves")
    int8 = {
        "layers.0.attn.wq_a.weight": Tensor("I8", (1024, 4096)),
        "layers.0.attn.wq_a.scale": Tensor("F32", (1024, 1)),
    }
    refused(config, header | int8, message="nothing proves")
    attention = {"layers.0.attn.wq_a.weight": Tensor("I8", (1024, 2048))}
    attention |= {"layers.0.attn.wq_a.scale": Tensor("F8_E8M0", (1024, 128))}
    refused(config, header | attention, message="nothing proves")  # config.json says it of experts only
    logical = {
        name: Tensor("F4", (*shape[:-1], 2 * shape[-1])) for name, (dtype, shape) in header.items() if dtype == "I8"
    }
    assert total(config, header | logical) == total(config, header)  # F4 is stored with its own shape


def test_nvfp4():
    config, header = latent(TINY_V3)
    expected = total(config, header)
    plain = without(config, "quantization_config")
    config, header = latent(TINY_V3, "nvfp4")
    said = config | {"quantization_config": config["quantization_config"] | {"quant_algo": "NVFP4"}}
    assert total(said, header) == total(config, header, NVFP4) == expected
    refused(config, header, message="nothing proves")
    refused(plain, header, message="does not fit")  # FP8 blocks of the attention
    scale = {"model.layers.3.mlp.experts.2.up_proj.weight_scale": Tensor("F8_E4M3", (2048, 224))}
    refused(said, header | scale, message="nothing proves")


def test_fp8_scales_of_other_shapes():
    config, header = latent(TINY_V3)
    expected = total(config, header)
    name = "model.layers.0.self_attn.q_a_proj.weight"
    for scale, shape, good in (
        ("_scale", (), True),
        ("_scale", (1,), True),
        ("_scale", (1536,), True),
        ("_scale", (1536, 1), True),
        ("_scale", (7168,), False),
        ("_scale_inv", (12, 57), False),
        ("_scale_2", (1536,), False),
    ):
        changed = without(header, name + "_scale_inv") | {name + scale: Tensor("F32", shape)}
        if good:
            assert total(config, changed) == expected
        else:
            refused(config, changed, message="does not fit")


def test_config_json_that_says_nothing_useful():
    config, header = qwen3_moe(layers=2, experts=16)
    for change, message in (
        ({"model_type": "mamba"}, "model_type 'mamba' is not one of llama"),
        ({"model_type": ["llama"]}, "model_type"),
        ({"model_type": None}, "model_type None"),
        ({"text_config": [1]}, "text_config is not an object"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": 2048.0}, "hidden_size is 2048.0"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_experts": -16}, "num_experts is -16"),
        ({"num_local_experts": 8}, "num_experts and num_local_experts differ"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is neither"),
        ({"quantization_config": "fp8"}, "quantization_config is not an object"),
        ({"quantization_config": {"weight_block_size": [128]}}, "weight_block_size is not two numbers"),
    ):
        refused(config | change, header, ConfigError, message)
    nested = {"model_type": "qwen3_5_moe", "text_config": config | {"tie_word_embeddings": False}}
    rest = without(header, "lm_head.weight")
    refused(nested | {"tie_word_embeddings": True}, rest, (ConfigError, CheckpointError), "contradicts itself")
