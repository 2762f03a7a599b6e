"""Fine-tuning by the recipe protocol: 20 updates of 128 rows of 8,192 tokens of conversations, on a 1B-class Llama.

    python -m data_pipeline.sft_rows --source=tulu3 --model=$HF_CKPT --rows=2560 --out=data/sft_rows
    python -m llama_jax.main --config=configs/sft_8k.py --config.model.init_from=$HF_CKPT --workdir=runs/sft_8k

$HF_CKPT is the folder of any Hugging Face Llama (config.json, safetensors, tokenizer, chat template); the shape comes
from it. Without model.init_from the model is one of the shape of Llama 3.2 1B with random weights, for measurements.
The rows are read in their order, once; every row has 8,192 inputs and 8,191 targets, and attention and positions run
across the conversations in it. Optimizer and schedule are those of the reference recipe. There is no evaluation unless
data.validation_rows holds rows out.

An update of 1,048,576 tokens is 128 microbatches of a row. Blocks are recomputed in the backward pass, which saves
memory; a larger device may hold a larger microbatch, or all of model.remat=False: both change rounding only.
"""

from llama_jax.config import default

ROWS, CONTEXT = 128, 8192


def get_config():
    config = default()
    config.name = "sft_8k"
    config.model.vocab_size = 128256
    config.model.context = CONTEXT
    config.model.layers = 16
    config.model.width = 2048
    config.model.heads = 32
    config.model.kv_heads = 8
    config.model.ffn = 8192
    config.model.rope_theta = 500000.0
    config.model.rope_scaling = "llama3"
    config.model.rope_factor = 32.0
    config.model.head_chunk_rows = 8192
    config.model.remat = True
    config.training.targets_per_parameter = None
    config.training.total_updates = 20
    config.training.epoch_targets_per_parameter = 100_000.0  # one virtual epoch, so that no update is short
    config.training.batch_targets = ROWS * (CONTEXT - 1)
    config.training.microbatch = 1
    config.optimizer.lr = 1e-5
    config.optimizer.beta1 = 0.9
    config.optimizer.beta2 = 0.95
    config.optimizer.weight_decay = 0.1
    config.optimizer.clip_norm = 1.0
    config.lr_schedule.warmup_steps = None
    config.lr_schedule.warmup_fraction = 0.1
    config.lr_schedule.min_lr_ratio = 0.1  # 1e-6
    config.data.source = "rows"
    config.data.path = "data/sft_rows"
    config.log.every_updates = 1
    return config
