"""The settings of data, `data.*`: every key with its default, its meaning and what it accepts; ValueError names a wrong one."""

from typing import Annotated, Literal

import pydantic
from pydantic import Field

from fedjax_ssl.data.catalog import known
from fedjax_ssl.data.partition import PARTITIONS
from fedjax_ssl.data.presets import LABELED_VIEWS, STRONG_VIEWS, WEAK_VIEWS, names
from fedjax_ssl.options import SET, UNSET, Count, Known, Model, Numbers, Positive, Rate, ReadWhere

Clients = Annotated[int, Field(ge=1, le=10_000_000)]
Scheme = Annotated[str, Known(PARTITIONS)]
OtherScheme = Annotated[str, Known(PARTITIONS, ("",))]


class DataSettings(Model):
    """The dataset, its split and its views.

    Labels are at the server, or at the clients: jointly (`is_joint`), as a share of what each client gets by one partition of
    all examples, or apart, as a labeled set with a partition of its own.
    """

    name: str = Field(
        default="cifar10", description="Name of the dataset: one that `launch.explain datasets` lists, or any other of TFDS."
    )
    data_dir: str = Field(
        default="",
        description="Folder of the datasets, prepared by TFDS or as original files; empty: FEDJAX_SSL_DATA, else "
        "~/.cache/fedjax_ssl/data and TFDS's own folder.",
    )
    download: bool = Field(
        default=True, description="Whether a dataset that is missing is downloaded once from where its authors publish it."
    )
    path: str = Field(
        default="", description="File or folder with your own data, for the datasets `npz`, `image_folder` and `text_features`."
    )
    resplit: Numbers = Field(
        default=(),
        description="Shares of training, validation and test examples when all are split anew; empty: the stored split.",
    )
    renumber_labels: bool = Field(
        default=False, description="Whether the labels of your own images, integers or text, are numbered 0..C-1."
    )
    num_clients: Clients = Field(default=100, description="Number K of clients.")
    labels_at: Literal["server", "clients"] = Field(
        default="server", description="Who has the labels: the server or the clients."
    )
    num_labels: Annotated[Positive, ReadWhere(labeled_fraction=UNSET)] = Field(
        default=40, description="Number of labeled examples in all; not used with `labeled_fraction`."
    )
    labeled_fraction: Numbers = Field(
        default=(),
        description="Share of examples that are labeled, of all or of each client's: one number, or K, one per client.",
    )
    label_selection: Literal["balanced", "random", "stratified"] = Field(
        default="balanced",
        description="How labeled examples are chosen: equally many of each class, at random, or the same share of each "
        "class (within a client, too).",
    )
    exclude_labeled: Annotated[bool, ReadWhere({"run.has_unlabeled_data": SET})] = Field(
        default=True, description="Whether labeled examples are left out of the clients' unlabeled data."
    )
    labels_first: Annotated[bool, ReadWhere({"run.draws_labels_apart": SET}, exclude_labeled=SET)] = Field(
        default=True,
        description="Whether labeled examples are removed before the others are partitioned, or after it (FedCon).",
    )
    reveal_labels: Annotated[bool, ReadWhere({"run.has_clients": SET})] = Field(
        default=False,
        description="Whether clients get the true labels of all their examples after the split: the fully supervised "
        "references (-SL).",
    )
    partition: Scheme = Field(default="iid", description="Rule by which examples are distributed over the clients.")
    labeled_partition: OtherScheme = Field(
        default="", description="Rule by which labeled examples are distributed; empty: as `partition`."
    )
    unlabeled_partition: OtherScheme = Field(
        default="", description="Rule by which unlabeled examples are distributed; empty: as `partition`."
    )
    alpha: Annotated[Rate, ReadWhere({"run.partition_reads_alpha": SET})] = Field(
        default=0.3,
        description="Concentration of the Dirichlet distribution in `dirichlet` and `dirichlet_classes`; the smaller, the"
        " more skewed.",
    )
    min_size: Annotated[Count, ReadWhere({"run.partition_reads_min_size": SET})] = Field(
        default=10,
        description="Smallest number of examples of a client in `dirichlet`, counted apart for labeled and unlabeled ones.",
    )
    shards_per_client: Annotated[Positive, ReadWhere({"run.partition_reads_shards_per_client": SET})] = Field(
        default=2, description="Number of shards that each client gets in the partition `shards`."
    )
    classes_per_client: Annotated[Positive, ReadWhere({"run.partition_reads_classes_per_client": SET})] = Field(
        default=2, description="Number of classes of each client in the partitions `class_shards` and `random_classes`."
    )
    mean: Numbers = Field(
        default=(),
        description="Mean of pixels scaled to [0, 1] that images are normalized by, one number or one per channel; empty:"
        " the dataset's own.",
    )
    std: Numbers = Field(
        default=(),
        description="Standard deviation of pixels that images are normalized by, one number or one per channel; empty: "
        "the dataset's own.",
    )
    weak: Annotated[str, Known(WEAK_VIEWS, ("default",)), ReadWhere({"run.has_weak_views": SET})] = Field(
        default="default", description="Weak augmentation; `default`: the dataset's own."
    )
    strong: Annotated[str, Known(STRONG_VIEWS, ("default",)), ReadWhere({"run.has_strong_views": SET})] = Field(
        default="default", description="Strong augmentation; `default`: the dataset's own."
    )
    labeled: Annotated[str, Known(LABELED_VIEWS, ("default",)), ReadWhere({"run.has_labeled_views": SET})] = Field(
        default="default", description="Augmentation of labeled examples; `default`: the weak one."
    )
    image_size: Annotated[int, Field(ge=0, le=512)] = Field(
        default=0,
        description="Side in pixels to which smaller images are padded with zeros; 0: the stored size, or the one that "
        "the network needs.",
    )

    def resolved(self) -> "DataSettings":
        """The settings with the names of views in the place of `default`, but for text features, whose views are stored."""
        about = known(self.name)
        if self.name == "text_features" or (about and about.kind == "text_features"):
            return self
        weak, strong, labeled = names(self.name, self.weak, self.strong, self.labeled)
        return self.model_copy(update={"weak": weak, "strong": strong, "labeled": labeled})

    @property
    def is_joint(self) -> bool:
        """Whether one partition covers all examples, and each client has a share of labels within its own."""
        apart = self.labeled_partition or self.unlabeled_partition
        return self.labels_at == "clients" and bool(self.labeled_fraction) and not apart

    @pydantic.model_validator(mode="after")
    def _check(self) -> "DataSettings":  # not Self, which beartype, in tests, takes in decorated classes alone
        apart = {key: got for key in ("labeled_partition", "unlabeled_partition") if (got := getattr(self, key))}
        for key, got in apart.items():
            if self.labels_at != "clients":
                given = f"got {got!r} with data.labels_at={self.labels_at}"
                raise ValueError(f"data.{key}: {given}, accepted: '', or labels_at=clients")
        fractions, per_client = self.labeled_fraction, self.labels_at == "clients" and not apart
        if fractions and len(fractions) not in (1, self.num_clients if per_client else 1):
            accepted = f"one number, or {self.num_clients}, one per client" if per_client else "one number"
            raise ValueError(f"data.labeled_fraction: got {len(fractions)} numbers, accepted: {accepted}")
        if fractions and not (all(0 <= f <= 1 for f in fractions) and sum(fractions) > 0):
            shown = f"({', '.join(map(str, fractions[:5]))}{', ...' if len(fractions) > 5 else ''})"
            raise ValueError(f"data.labeled_fraction: got {shown}, accepted: numbers in [0, 1], not all 0")
        for key, values, accepted in (("mean", self.mean, "numbers in [0, 1]"), ("std", self.std, "numbers > 0")):
            if not all(0 <= value <= 1 if key == "mean" else value > 0 for value in values):
                raise ValueError(f"data.{key}: got {values}, accepted: {accepted}, for images scaled to [0, 1]")
        if len(self.mean) != len(self.std):
            raise ValueError(f"data.mean, data.std: got {len(self.mean)} and {len(self.std)} values, accepted: as many of both")
        return self
