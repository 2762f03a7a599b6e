"""Published checkpoints as headers at their real dimensions, for tests of what active_params counts.

Dimensions and names are the published ones; fewer layers or experts make small ones for tests that need many. Where the
size or the number of tensors of the real checkpoint is known, tests compare it, so that a header here that isn't like
the real one shows.
"""

from fake_checkpoints import Header, heads, mlp, norms

from llama_jax.hf_files import Tensor


def llama(vocabulary=128256, width=4096, layers=32, count=32, kv=8, ffn=14336, tied=False):
    """Llama 3.1 8B."""
    config = {"model_type": "llama", "hidden_size": width, "vocab_size": vocabulary, "num_hidden_layers": layers}
    header = Header()
    header.matrix("model.embed_tokens", vocabulary, width)
    for layer in range(layers):
        block = f"model.layers.{layer}."
        heads(header, block, width, count, kv, width // count)
        mlp(header, block + "mlp.", width, ffn)
        norms(header, block, width, "input_layernorm", "post_attention_layernorm")
    norms(header, "model.", width, "norm")
    if not tied:
        header.matrix("lm_head", vocabulary, width)
    return config | {"tie_word_embeddings": tied}, header


def qwen3_moe(layers=48, experts=128):
    """Qwen3-30B-A3B."""
    width, vocabulary = 2048, 151936
    config = {"model_type": "qwen3_moe", "hidden_size": width, "vocab_size": vocabulary, "num_hidden_layers": layers}
    config |= {"num_experts": experts, "num_experts_per_tok": 8, "decoder_sparse_step": 1, "mlp_only_layers": []}
    header = Header()
    header.matrix("model.embed_tokens", vocabulary, width)
    header.matrix("lm_head", vocabulary, width)
    for layer in range(layers):
        block = f"model.layers.{layer}."
        heads(header, block, width, 32, 4, 128)
        norms(header, block + "self_attn.", 128, "q_norm", "k_norm")
        header.matrix(block + "mlp.gate", experts, width)
        for expert in range(experts):
            mlp(header, f"{block}mlp.experts.{expert}.", width, 768)
        norms(header, block, width, "input_layernorm", "post_attention_layernorm")
    norms(header, "model.", width, "norm")
    return config, header


def qwen3_5_moe(layers=40, experts=256, layout="fused", text_only=False):
    """Qwen3.5-35B-A3B: nested text model, linear attention in three layers of four, shared experts, MTP, vision."""
    width, vocabulary = 2048, 248320
    kinds = ["full_attention" if layer % 4 == 3 else "linear_attention" for layer in range(layers)]
    text = {"model_type": "qwen3_5_moe_text", "hidden_size": width, "vocab_size": vocabulary}
    text |= {"num_hidden_layers": layers, "num_experts": experts, "num_experts_per_tok": 8, "layer_types": kinds}
    text |= {"shared_expert_intermediate_size": 512, "mtp_num_hidden_layers": 1, "tie_word_embeddings": False}
    config = text if text_only else {"model_type": "qwen3_5_moe", "text_config": text, "vision_config": {"depth": 2}}
    header = Header()

    def moe(block, fused):
        header.matrix(block + "gate", experts, width)
        if fused:
            header[block + "experts.gate_up_proj"] = Tensor("BF16", (experts, 1024, width))
            header[block + "experts.down_proj"] = Tensor("BF16", (experts, width, 512))
        else:
            for expert in range(experts):
                mlp(header, f"{block}experts.{expert}.", width, 512)
        mlp(header, block + "shared_expert.", width, 512)
        header.matrix(block + "shared_expert_gate", 1, width)

    def full(block):
        heads(header, block, width, 16, 2, 256, gated=True)
        norms(header, block + "self_attn.", 256, "q_norm", "k_norm")

    header.matrix("model.language_model.embed_tokens", vocabulary, width)
    header.matrix("lm_head", vocabulary, width)
    for layer, kind in enumerate(kinds):
        block = f"model.language_model.layers.{layer}."
        if kind == "full_attention":
            full(block)
        else:
            linear = block + "linear_attn."
            for name, out in {"in_proj_qkv": 8192, "in_proj_z": 4096, "in_proj_a": 32, "in_proj_b": 32}.items():
                header.matrix(linear + name, out, width)
            header.matrix(linear + "out_proj", width, 4096)
            header[linear + "conv1d.weight"] = Tensor("BF16", (8192, 1, 4))
            header.vectors("BF16", 32, linear + "A_log", linear + "dt_bias")
            norms(header, linear, 128, "norm")
        moe(block + "mlp.", layout == "fused")
        norms(header, block, width, "input_layernorm", "post_attention_layernorm")
    norms(header, "model.language_model.", width, "norm")
    if not text_only:
        header.matrix("mtp.fc", width, 2 * width)
        norms(header, "mtp.", width, "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
        full("mtp.layers.0.")
        moe("mtp.layers.0.mlp.", layout != "fused")  # laid out otherwise than the main layers
        norms(header, "mtp.layers.0.", width, "input_layernorm", "post_attention_layernorm")
        vision(header, "model.visual.", width)
    return config, header


def vision(header, block, width):
    """The vision tower of Qwen3.5-35B-A3B."""

    def linear(name, out, inner):
        header.matrix(block + name, out, inner)
        header.vectors("BF16", out, f"{block}{name}.bias")

    def norm(name):
        header.vectors("BF16", 1152, f"{block}{name}.weight", f"{block}{name}.bias")

    header[block + "patch_embed.proj.weight"] = Tensor("BF16", (1152, 3, 2, 16, 16))
    header.vectors("BF16", 1152, block + "patch_embed.proj.bias")
    header.matrix(block + "pos_embed", 2304, 1152)
    for layer in range(27):
        linear(f"blocks.{layer}.attn.qkv", 3456, 1152)
        linear(f"blocks.{layer}.attn.proj", 1152, 1152)
        linear(f"blocks.{layer}.mlp.linear_fc1", 4304, 1152)
        linear(f"blocks.{layer}.mlp.linear_fc2", 1152, 4304)
        norm(f"blocks.{layer}.norm1")
        norm(f"blocks.{layer}.norm2")
    norm("merger.norm")
    linear("merger.linear_fc1", 4608, 4608)
    linear("merger.linear_fc2", width, 4608)


# Multi-head latent attention: DeepSeek V3, V3.2, GLM-5.
V3 = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "vocab_size": 129280,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}
V32 = V3 | {"model_type": "deepseek_v32", "index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048}
GLM5 = V3 | {
    "model_type": "glm_moe_dsa",
    "hidden_size": 6144,
    "vocab_size": 154880,
    "num_hidden_layers": 78,
    "num_attention_heads": 64,
    "q_lora_rank": 2048,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "intermediate_size": 12288,
    "n_group": 1,
    "topk_group": 1,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 2048,
    "indexer_types": ["full" if layer < 3 or layer % 4 == 2 else "shared" for layer in range(78)],
}
TINY_V3 = V3 | {"num_hidden_layers": 5, "n_routed_experts": 8, "first_k_dense_replace": 2}
TINY_GLM5 = GLM5 | {"num_hidden_layers": 7, "n_routed_experts": 8, "indexer_types": GLM5["indexer_types"][:7]}


def latent(config, experts_form="fp8"):
    """DeepSeek V3 and V3.2, and GLM-5.2, with their layer of multi-token prediction numbered behind the others."""
    config, header = dict(config), Header()
    width, vocabulary, layers = config["hidden_size"], config["vocab_size"], config["num_hidden_layers"]
    count, key = config["num_attention_heads"], config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    q, kv, moe = config["q_lora_rank"], config["kv_lora_rank"], config["moe_intermediate_size"]
    deepseek = config["model_type"].startswith("deepseek")
    header.matrix("model.embed_tokens", vocabulary, width)
    header.matrix("lm_head", vocabulary, width)
    norms(header, "model.", width, "norm")
    for layer in range(layers + 1):
        block = f"model.layers.{layer}."
        attention = block + "self_attn."
        shapes = {"q_a_proj": (q, width), "q_b_proj": (count * key, q)}
        shapes |= {"kv_a_proj_with_mqa": (kv + config["qk_rope_head_dim"], width)}
        shapes |= {"kv_b_proj": (count * (config["qk_nope_head_dim"] + config["v_head_dim"]), kv)}
        shapes |= {"o_proj": (width, count * config["v_head_dim"])}
        for name, shape in shapes.items():
            header.matrix(attention + name, *shape, "fp8")
        header.vectors("BF16", q, attention + "q_a_layernorm.weight")
        header.vectors("BF16", kv, attention + "kv_a_layernorm.weight")
        if "index_n_heads" in config and (config.get("indexer_types") or ["full"] * layers)[layer:][:1] != ["shared"]:
            size = config["index_head_dim"]
            header.matrix(attention + "indexer.wq_b", config["index_n_heads"] * size, q, "fp8")
            header.matrix(attention + "indexer.wk", size, width, "fp8")
            header.matrix(attention + "indexer.weights_proj", config["index_n_heads"], width)
            header.vectors("BF16", size, attention + "indexer.k_norm.weight", attention + "indexer.k_norm.bias")
        if layer < config["first_k_dense_replace"]:
            mlp(header, block + "mlp.", width, config["intermediate_size"], "fp8")
        else:
            header.matrix(block + "mlp.gate", config["n_routed_experts"], width)
            header.vectors("F32", config["n_routed_experts"], block + "mlp.gate.e_score_correction_bias")
            mlp(header, block + "mlp.shared_experts.", width, moe * config["n_shared_experts"], "fp8")
            for expert in range(config["n_routed_experts"]):
                mlp(header, f"{block}mlp.experts.{expert}.", width, moe, experts_form)
        norms(header, block, width, "input_layernorm", "post_attention_layernorm")
    last = f"model.layers.{layers}."
    header.matrix(last + "eh_proj", width, 2 * width)
    norms(header, last, width, "enorm", "hnorm", "shared_head.norm")
    if deepseek:
        header.matrix(last + "embed_tokens", vocabulary, width)
        header.matrix(last + "shared_head.head", vocabulary, width)
    return config, header


def deepseek_v4(experts_form="fp4", layers=43, experts=256):
    """DeepSeek-V4-Flash: compressed attention, hash-routed first layers, hyper-connections, FP4 experts."""
    width, vocabulary = 4096, 129280
    ratios = [0, 0, *([4, 128] * layers)[: layers - 2], 0]  # the last one is of the MTP layer
    config = {"model_type": "deepseek_v4", "hidden_size": width, "vocab_size": vocabulary, "num_hidden_layers": layers}
    config |= {"n_routed_experts": experts, "n_shared_experts": 1, "num_experts_per_tok": 6, "compress_ratios": ratios}
    config |= {"num_hash_layers": 3, "num_nextn_predict_layers": 1, "tie_word_embeddings": False}
    config |= {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    if experts_form == "fp4":
        config["expert_dtype"] = "fp4"
    header = Header()

    def hyper(prefix, rows, scales):
        header[prefix + "_fn"] = Tensor("F32", (rows, 4 * width))
        header[prefix + "_base"] = Tensor("F32", (rows,))
        header[prefix + "_scale"] = Tensor("F32", (scales,))

    def compress(prefix, ratio, size):
        out = size * (2 if ratio == 4 else 1)
        for name in ("wkv", "wgate"):
            header.matrix(f"{prefix}compressor.{name}", out, width)
        header[prefix + "compressor.ape"] = Tensor("F32", (ratio, out))
        norms(header, prefix + "compressor.", size, "norm")

    def layer(block, ratio, hashed):
        attention = block + "attn."
        for name, shape in {
            "wq_a": (1024, width),
            "wq_b": (64 * 512, 1024),
            "wkv": (512, width),
            "wo_a": (8 * 1024, 8 * 512),
            "wo_b": (width, 8 * 1024),
        }.items():
            header.matrix(attention + name, *shape, "fp8_e8m0")
        norms(header, attention, 1024, "q_norm")
        norms(header, attention, 512, "kv_norm")
        header.vectors("F32", 64, attention + "attn_sink")
        if ratio:
            compress(attention, ratio, 512)
        if ratio == 4:
            header.matrix(attention + "indexer.wq_b", 64 * 128, 1024, "fp8_e8m0")
            header.matrix(attention + "indexer.weights_proj", 64, width)
            compress(attention + "indexer.", ratio, 128)
        header.matrix(block + "ffn.gate", experts, width)
        if hashed:
            header[block + "ffn.gate.tid2eid"] = Tensor("I64", (vocabulary, 6))
        else:
            header.vectors("F32", experts, block + "ffn.gate.bias")
        for expert in range(experts):
            for name, shape in {"w1": (2048, width), "w2": (width, 2048), "w3": (2048, width)}.items():
                header.matrix(f"{block}ffn.experts.{expert}.{name}", *shape, experts_form)
        for name, shape in {"w1": (2048, width), "w2": (width, 2048), "w3": (2048, width)}.items():
            header.matrix(f"{block}ffn.shared_experts.{name}", *shape, "fp8_e8m0")
        norms(header, block, width, "attn_norm", "ffn_norm")
        hyper(block + "hc_attn", 24, 3)
        hyper(block + "hc_ffn", 24, 3)

    header.matrix("embed", vocabulary, width)
    header.matrix("head", vocabulary, width)
    norms(header, "", width, "norm")
    hyper("hc_head", 4, 1)
    for number in range(layers):
        layer(f"layers.{number}.", ratios[number], number < 3)
    layer("mtp.0.", 0, False)
    for name in ("e_proj", "h_proj"):
        header.matrix("mtp.0." + name, width, width, "fp8_e8m0")
    norms(header, "mtp.0.", width, "enorm", "hnorm", "norm")
    hyper("mtp.0.hc_head", 4, 1)
    return config, header


def glm4_moe(layers=46, experts=128):
    """GLM-4.5-Air."""
    width, vocabulary = 4096, 151552
    config = {"model_type": "glm4_moe", "hidden_size": width, "vocab_size": vocabulary, "num_hidden_layers": layers}
    config |= {"n_routed_experts": experts, "num_experts_per_tok": 8, "n_shared_experts": 1, "first_k_dense_replace": 1}
    config |= {"num_nextn_predict_layers": 1, "tie_word_embeddings": False, "n_group": 1, "topk_group": 1}
    header = Header()
    header.matrix("model.embed_tokens", vocabulary, width)
    header.matrix("lm_head", vocabulary, width)
    norms(header, "model.", width, "norm")
    for layer in range(layers + 1):
        block = f"model.layers.{layer}."
        heads(header, block, width, 96, 8, 128, bias=True)
        if layer == 0:
            mlp(header, block + "mlp.", width, 10944)
        else:
            header.matrix(block + "mlp.gate", experts, width)
            header.vectors("F32", experts, block + "mlp.gate.e_score_correction_bias")
            mlp(header, block + "mlp.shared_experts.", width, 1408)
            for expert in range(experts):
                mlp(header, f"{block}mlp.experts.{expert}.", width, 1408)
        norms(header, block, width, "input_layernorm", "post_attention_layernorm")
    last = f"model.layers.{layers}."
    header.matrix(last + "eh_proj", width, 2 * width)
    header.matrix(last + "embed_tokens", vocabulary, width)
    header.matrix(last + "shared_head.head", vocabulary, width)
    norms(header, last, width, "enorm", "hnorm", "shared_head.norm")
    return config, header


def gpt_oss(packed=True, layers=24, experts=32):
    """gpt-oss-20b, as published in MXFP4 or with experts in bf16."""
    width, vocabulary, ffn = 2880, 201088, 2880
    config = {"model_type": "gpt_oss", "hidden_size": width, "vocab_size": vocabulary, "num_hidden_layers": layers}
    config |= {"num_local_experts": experts, "num_experts_per_tok": 4, "experts_per_token": 4}
    config |= {"tie_word_embeddings": False}
    if packed:
        config["quantization_config"] = {"quant_method": "mxfp4"}
    header = Header()
    header.matrix("model.embed_tokens", vocabulary, width)
    header.matrix("lm_head", vocabulary, width)
    norms(header, "model.", width, "norm")
    for layer in range(layers):
        block = f"model.layers.{layer}."
        heads(header, block, width, 64, 8, 64, bias=True)
        header.vectors("BF16", width, block + "self_attn.o_proj.bias")
        header.vectors("BF16", 64, block + "self_attn.sinks")
        header.matrix(block + "mlp.router", experts, width)
        header.vectors("BF16", experts, block + "mlp.router.bias")
        for name, out, inner in (("gate_up_proj", 2 * ffn, width), ("down_proj", width, ffn)):
            name = f"{block}mlp.experts.{name}"
            if packed:
                header[name + "_blocks"] = Tensor("U8", (experts, out, inner // 32, 16))
                header[name + "_scales"] = Tensor("U8", (experts, out, inner // 32))
            else:
                header[name] = Tensor("BF16", (experts, inner, out))
            header[name + "_bias"] = Tensor("BF16", (experts, out))
        norms(header, block, width, "input_layernorm", "post_attention_layernorm")
    return config, header
