"""(FL)^2's settings, shared by its config files: `paper` (the default) and `released` (where its code differs)."""

from ml_collections import ConfigDict

from configs import common


def config(dataset: str, variant: str, labels: int, split: str, *, linear: bool = False) -> ConfigDict:
    """(FL)^2 on `dataset`, 100 clients, 10 a round, 800 rounds, 5 local and 5 server epochs; WRN-28-2 or a linear model."""
    config = common.base("fl2", "linear") if linear else common.base("fl2", "wide_resnet", depth=28, width=2)
    config.data.name, config.data.num_labels = dataset, labels
    common.set_split(config, split)
    if variant == "released":
        config.method.update(strict=False, batches="accepted", consistency_on="confident_accepted")
        for holder in (config.client, config.server):
            holder.optimizer.schedule, holder.optimizer.clip_norm = "constant", 1.0
        server = config.server
        server.sbn_data, server.sbn_weighting = "all", "batches"
        server.sbn_labeled_batch_size, server.sbn_unlabeled_batch_size = 10, 2048
        server.pretrain = 10
    return config
