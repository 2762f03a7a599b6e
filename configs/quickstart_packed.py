"""Four workers packed on one CPU, mixed over the one-peer exponential graph; scripts/quickstart.sh --packed runs it.

    python -m data_pipeline.prepare --source=mini --mini_clients=pip --tokenizer=bpe:4096 --out=data/quickstart
    python -m llama_jax.main --config=configs/quickstart_packed.py --workdir=runs/quickstart_packed

A minute or two of training on the quickstart's data. A smaller model than configs/quickstart.py, since four of them
train: expect about 5.9 nats, against 6.7 for the unigram entropy. The line of an update shows the loss over all
workers; metrics.jsonl has each worker's, the consensus distance, and at evaluations the mean and the local models.
"""

from llama_jax.config import default


def get_config():
    config = default()
    config.name = "quickstart_packed"
    config.model.vocab_size = 4096
    config.model.context = 128
    config.model.layers = 2
    config.model.width = 64
    config.model.heads = 2
    config.model.ffn = 176
    config.training.targets_per_parameter = None
    config.training.total_updates = 300
    config.training.epoch_targets_per_parameter = 0.25
    config.training.sequence_multiple = 4
    config.training.batch_targets = 4 * 4 * 128  # workers x sequences x context
    config.training.microbatch = 4
    config.optimizer.lr = 0.005
    config.lr_schedule.warmup_steps = None
    config.lr_schedule.warmup_fraction = 0.05
    config.decentralized.workers = 4
    config.evaluation.subset_sequences = 128
    config.evaluation.batch_sequences = 64
    config.log.consensus_every = 10
    config.data.path = "data/quickstart"
    return config
