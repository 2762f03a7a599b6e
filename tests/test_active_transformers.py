"""The count of active parameters of checkpoints that transformers saves, against its modules: an oracle without names.

What multiplies is told by the class of a module: linear layers, routers, stacks of experts, hyper-connections.
"""

import pytest

from bench.active_params import active_params

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

BASE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": None,
}
ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
LATENT = ROUTED | {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
INDEXED = LATENT | {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 4}
LINEAR = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 16,
}
V4 = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "q_lora_rank": 24,
    "o_groups": 2,
    "o_lora_rank": 8,
    "head_dim": 64,
    "index_n_heads": 2,
    "index_head_dim": 64,
    "num_key_value_heads": 1,
    "layer_types": ["sliding_attention", "heavily_compressed_attention", *["compressed_sparse_attention"] * 2],
}
MODELS = {
    "Llama": {},
    "Llama, tied": {"tie_word_embeddings": True},
    "Llama, biases": {"attention_bias": True, "mlp_bias": True},
    "Qwen3": {},
    "Qwen3Moe": {"num_experts": 8, "num_experts_per_tok": 2, "mlp_only_layers": [1]},
    "Qwen3_5Text": LINEAR,
    "Qwen3_5Text, tied": LINEAR | {"tie_word_embeddings": True},
    "Qwen3_5MoeText": LINEAR,
    "DeepseekV3": LATENT,
    "DeepseekV3, full queries": LATENT | {"q_lora_rank": None},
    "DeepseekV32": INDEXED,
    "DeepseekV4": V4,
    "Glm4": {},
    "Glm4Moe": ROUTED | {"attention_bias": True, "use_qk_norm": True},
    "Glm4MoeLite": LATENT,
    "GlmMoeDsa": INDEXED,
    "GlmMoeDsa, shared indexers": INDEXED | {"index_topk_freq": 2},
    "GptOss": {"num_local_experts": 8, "num_experts_per_tok": 2},
}


def of_modules(model, config):
    """N of a transformers model: weights by the class of their module, without a vision tower."""
    found = 0
    for name, module in model.named_modules():
        kind = type(module).__name__
        if "visual" in name:
            continue
        if isinstance(module, torch.nn.Linear) or kind.endswith(("Router", "HyperConnection", "HyperHead")):
            found += sum(tensor.numel() for tensor in module.parameters(recurse=False) if tensor.dim() == 2)
        elif kind.endswith("Experts"):
            stacks = [tensor for tensor in module.parameters(recurse=False) if tensor.dim() == 3]
            assert len(stacks) == 2
            experts = len(stacks[0])
            found += sum(tensor.numel() for tensor in stacks) * config.num_experts_per_tok // experts
    return found


@pytest.mark.parametrize("name", MODELS)
def test_saved_models(tmp_path, name):
    config = getattr(transformers, name.split(",")[0] + "Config")(**BASE | MODELS[name])
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    counted = active_params(tmp_path)
    assert counted["active_parameters"] == of_modules(model, config)
    assert counted["tied_head"] == ("tied" in name)
    assert counted["files"] > 1


def test_saved_vision_language_model(tmp_path):
    vision = {"depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32}
    text = BASE | LINEAR | {"vocab_size": 96}
    config = transformers.Qwen3_5MoeConfig(text_config=text, vision_config=vision | {"num_position_embeddings": 16})
    model = transformers.Qwen3_5MoeForConditionalGeneration(config)
    model.save_pretrained(tmp_path)
    counted = active_params(tmp_path)
    assert counted["active_parameters"] == of_modules(model, config.text_config)
    assert counted["classes"]["vision"]["parameters"] == sum(p.numel() for p in model.model.visual.parameters())
