"""Every method on scikit-learn's bundled digits: 20 clients, 5 a round, 40 rounds. Ours, not a paper's.

    python -m launch.run --config=configs/digits.py:fl2
    python -m launch.run --config=configs/digits.py:fixmatch,labels=10,split=dir0.3

Expected: fl2 with 40 labels, IID, seeds 0-2: .972, .958, .964. Run time: 70 to 90 s on two CPU cores, half of it compilation.
"""

from ml_collections import ConfigDict

from configs import common

METHODS = ("fl2", "fixmatch", "supervised")


def get_config(argument: str | None = None) -> ConfigDict:
    method, given = common.parse(argument, METHODS, labels="40", split="iid")
    config = common.base(method, "cnn", width=32)
    config.rounds, config.cohort_size, config.eval_every = 40, 5, 2
    data = config.data
    data.name, data.num_clients, data.num_labels = "digits", 20, common.number("labels", given["labels"])
    common.set_split(config, given["split"])
    for holder in (config.client, config.server):
        holder.optimizer.schedule, holder.optimizer.clip_norm = "constant", 1.0
    config.server.pretrain = 0
    if method == "supervised":
        config.server.sbn_data = "labeled"
    else:
        config.method.batches = "accepted"
    return config
