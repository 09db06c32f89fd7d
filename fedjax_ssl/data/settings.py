"""The settings of data, `data.*`: every key with its default, its meaning and what it accepts.

A wrong key or value raises a ValueError that names the key.
"""

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

    Labels are at the server, at the clients, or at some clients, whose examples are all labeled. At the clients there are two
    ways: one partition divides all examples and a share of each client's examples is labeled (`is_joint`), or labeled and
    unlabeled examples are partitioned separately.
    """

    name: str = Field(
        default="cifar10",
        description="The dataset: one that `launch.explain datasets` lists, or another name of TensorFlow Datasets (TFDS), "
        "or hf/OWNER/NAME, a dataset of images on the Hugging Face Hub.",
    )
    data_dir: Annotated[str, ReadWhere({"run.reads_files": SET})] = Field(
        default="",
        description="Folder with the datasets, as TFDS has prepared them or as their authors' original files. If it is empty, "
        "the environment variable FEDJAX_SSL_DATA names the folder, or else it is ~/.cache/fedjax_ssl/data; TFDS's own folder "
        "is searched, too.",
    )
    download: bool = Field(
        default=True,
        description="Whether a dataset that is in no folder is downloaded from its authors, once. If false, such a dataset is "
        "an error.",
    )
    path: str = Field(
        default="",
        description="Path of the file or folder of your own data, for the names `npz`, `image_folder`, `parquet` and "
        "`text_features`.",
    )
    image_column: Annotated[str, ReadWhere({"run.has_columns": SET})] = Field(
        default="", description="Name of the column of images. Empty takes the only column of images."
    )
    label_column: Annotated[str, ReadWhere({"run.has_columns": SET})] = Field(
        default="",
        description="Name of the column of labels. Empty takes the only one with a type of labels or a name such as `label`.",
    )
    client_column: Annotated[str, ReadWhere({"run.has_columns": SET})] = Field(
        default="",
        description="Name of the column that says whose an example is, such as `writer_id`, for `partition=natural`. Empty "
        "takes none: the examples are nobody's.",
    )
    resize: Annotated[Count, ReadWhere({"run.has_columns": SET})] = Field(
        default=0, description="Height and width in pixels to which images are resized; 0 leaves them as they are."
    )
    resplit: Numbers = Field(
        default=(),
        description="Shares of training, validation and test examples in a new random split of all examples, such as 0.8, 0.05 "
        "and 0.15. If it is empty, the dataset's own split is used.",
    )
    validation: Literal["none", "labels", "pool", "own"] = Field(
        default="none",
        description="Which examples the global model is also evaluated on, so that rounds and settings can be chosen without "
        "the test data: none, a share of the server's labeled examples (`labels`), a share of all training examples (`pool`), "
        "or the data's `own` validation part. Nobody trains on them. The seed draws the same share of each class.",
    )
    validation_fraction: Annotated[float, Field(gt=0, lt=1), ReadWhere(validation=("labels", "pool"))] = Field(
        default=0.1, description="Share of the labeled, or of all training, examples that are taken out for validation."
    )
    client_test: Literal["share", "own"] = Field(
        default="share",
        description="Which examples each client is tested on: a `share` of its own ones, `client_test_fraction`, or, for "
        "`partition=natural`, those examples of the data's test part that have the client's id (`own`).",
    )
    client_test_fraction: Annotated[
        float,
        Field(ge=0, lt=1),
        ReadWhere({"run.has_unlabeled_data": SET}),  # the pool lacks these examples, too
        ReadWhere({"diagnostics.client_eval_every": SET}),
    ] = Field(
        default=0.0,
        description="Share of each client's examples that nobody trains on, and on which `diagnostics.client_eval_every` and "
        "`launch.evaluate --clients` measure the client's own accuracy. The seed draws it among the client's examples whose "
        "true class is known: among all of them where labels are drawn later, client by client, else among the unlabeled ones. "
        "0 holds none out; 0.1 to 0.3 is usual.",
    )
    renumber_labels: bool = Field(
        default=False,
        description="Whether the labels of your own images, which may be any integers or texts, are numbered anew from 0 to "
        "C-1.",
    )
    num_clients: Annotated[Clients, ReadWhere({"run.has_client_data": SET})] = Field(
        default=100, description="Number K of clients among which the training examples are divided."
    )
    labels_at: Literal["server", "clients", "some_clients"] = Field(
        default="server",
        description="Who has the labeled examples: the server, so that clients have unlabeled ones alone; the clients, each of "
        "which has some; or, with `some_clients`, a few clients (`labeled_clients`), all of whose examples are labeled, while "
        "the others have unlabeled ones alone.",
    )
    labeled_clients: Annotated[Numbers, ReadWhere(labels_at=("some_clients",))] = Field(
        default=(0.4,),
        description="Which clients have the labels where some have them. A single number is a share of all clients if it is "
        "below 1, else a count; those with the lowest ids are meant. Several numbers are ids of clients, which begin at 0.",
    )
    num_labels: Annotated[Positive, ReadWhere(labels_at=("server", "clients"), labeled_fraction=UNSET)] = Field(
        default=40,
        description="Number of labeled examples in all, over all classes. It is not used where `labeled_fraction` is set.",
    )
    labeled_fraction: Annotated[Numbers, ReadWhere(labels_at=("server", "clients"))] = Field(
        default=(),
        description="Share of labeled examples, from 0 to 1. With `labels_at=clients` and one partition for all examples it is "
        "the share of each client's own examples: one number, or one for each client. Otherwise it is one number, the share of "
        "all examples. If it is empty, `num_labels` says how many there are.",
    )
    label_selection: Annotated[Literal["balanced", "random", "stratified"], ReadWhere(labels_at=("server", "clients"))] = Field(
        default="balanced",
        description="How the labeled examples are chosen: equally many of each class (`balanced`), uniformly at random "
        "(`random`), or the same share of each class, also within a client (`stratified`). Where each client has a "
        "`labeled_fraction` of its own examples, `balanced` chooses them at random, too.",
    )
    exclude_labeled: Annotated[bool, ReadWhere({"run.has_unlabeled_data": SET}, labels_at=("server", "clients"))] = Field(
        default=True,
        description="Whether labeled examples are left out of the clients' unlabeled data. If false, they are in both.",
    )
    labels_first: Annotated[bool, ReadWhere({"run.draws_labels_apart": SET}, exclude_labeled=SET)] = Field(
        default=True,
        description="Whether labeled examples are taken away before the others are divided among clients. If false, all "
        "examples are divided and the labeled ones are taken away from the clients afterwards, as FedCon does.",
    )
    reveal_labels: Annotated[bool, ReadWhere({"run.has_clients": SET})] = Field(
        default=False,
        description="Whether clients get the true labels of their unlabeled examples after the split, for the fully supervised "
        "references that papers compare with, such as FedAvg-SL.",
    )
    partition: Annotated[Scheme, ReadWhere({"run.has_one_partition": SET})] = Field(
        default="iid",
        description="How training examples are divided among clients; `launch.explain splits` lists all ways.",
    )
    labeled_partition: OtherScheme = Field(
        default="",
        description="How the labeled examples are divided among clients, where that differs from `partition`; empty where not.",
    )
    unlabeled_partition: OtherScheme = Field(
        default="",
        description="How the unlabeled examples are divided among clients, where that differs from `partition`; empty where "
        "not.",
    )
    alpha: Annotated[Rate, ReadWhere({"run.partition_reads_alpha": SET})] = Field(
        default=0.3,
        description="Concentration of the Dirichlet distribution in the partitions `dirichlet`, `dirichlet_classes` and "
        "`dirichlet_pairs`. A small one, such as 0.1, gives clients few classes each; 100 makes them nearly alike.",
    )
    min_size: Annotated[Count, ReadWhere({"run.partition_reads_min_size": SET})] = Field(
        default=10,
        description="Smallest number of examples that the partition `dirichlet` gives a client. If labeled and unlabeled "
        "examples are partitioned separately, it applies to each of the two.",
    )
    shards_per_client: Annotated[Positive, ReadWhere({"run.partition_reads_shards_per_client": SET})] = Field(
        default=2,
        description="Number of shards of a client in the partition `shards`, which sorts examples by class and cuts them into "
        "shards of one size.",
    )
    classes_per_client: Annotated[Positive, ReadWhere({"run.partition_reads_classes_per_client": SET})] = Field(
        default=2, description="Number of classes of a client in the partitions `class_shards` and `random_classes`."
    )
    mean: Numbers = Field(
        default=(),
        description="Mean that is subtracted from images scaled to [0, 1]: one number, or one for each channel. If it is "
        "empty, the dataset's own mean is used.",
    )
    std: Numbers = Field(
        default=(),
        description="Standard deviation by which images are divided once `mean` is subtracted: as many numbers as `mean` has.",
    )
    weak: Annotated[str, Known(WEAK_VIEWS, ("default",)), ReadWhere({"run.has_weak_views": SET})] = Field(
        default="default",
        description="Weak augmentation of images, such as flips and small shifts. `default` is that of the dataset.",
    )
    strong: Annotated[str, Known(STRONG_VIEWS, ("default",)), ReadWhere({"run.has_strong_views": SET})] = Field(
        default="default",
        description="Strong augmentation of images, such as RandAugment. `default` is that of the dataset.",
    )
    labeled: Annotated[str, Known(LABELED_VIEWS, ("default",)), ReadWhere({"run.has_labeled_views": SET})] = Field(
        default="default", description="Augmentation of labeled images in training. `default` is the weak augmentation."
    )
    image_size: Annotated[int, Field(ge=0, le=512)] = Field(
        default=0,
        description="Height and width in pixels to which smaller images are padded with zeros. 0 keeps their size, unless the "
        "network is made for larger images.",
    )

    def resolved(self) -> "DataSettings":
        """The settings with views' names in place of `default`, except for text features, whose views are stored."""
        about = known(self.name)
        if self.name == "text_features" or (about and about.kind == "text_features"):
            return self
        weak, strong, labeled = names(self.name, self.weak, self.strong, self.labeled)
        return self.model_copy(update={"weak": weak, "strong": strong, "labeled": labeled})

    @property
    def tests_clients(self) -> bool:
        """Whether clients have test examples of their own."""
        return self.client_test == "own" or self.client_test_fraction > 0

    @property
    def is_joint(self) -> bool:
        """Whether one partition covers all examples, and a share of each client's examples is labeled."""
        apart = self.labeled_partition or self.unlabeled_partition
        return self.labels_at == "some_clients" or (self.labels_at == "clients" and bool(self.labeled_fraction) and not apart)

    @property
    def fractions(self) -> tuple[float, ...]:
        """The share of labeled examples of each client, where one partition covers all examples; one number holds for all."""
        if self.labels_at != "some_clients":
            return self.labeled_fraction
        given, number = self.labeled_clients, self.num_clients
        first = round(given[0] * number) if given[0] < 1 else int(given[0])
        chosen = set(range(first)) if len(given) == 1 else {int(one) for one in given}
        return tuple(float(client in chosen) for client in range(number))

    @pydantic.model_validator(mode="after")
    def _check(self) -> "DataSettings":  # not Self, which beartype, in tests, takes in decorated classes alone
        apart = {key: got for key in ("labeled_partition", "unlabeled_partition") if (got := getattr(self, key))}
        for key, got in apart.items():
            if self.labels_at != "clients":
                given = f"got {got!r} with data.labels_at={self.labels_at}"
                raise ValueError(f"data.{key}: {given}, accepted: '', or labels_at=clients")
        if self.labels_at == "some_clients":
            self._check_labeled_clients()
        if self.validation == "labels" and self.labels_at != "server":
            raise ValueError(f"data.validation: got labels with data.labels_at={self.labels_at}, accepted: none, pool, own")
        if self.client_test == "own" and self.client_test_fraction:
            accepted = "0, or data.client_test=share"
            raise ValueError(
                f"data.client_test_fraction: got {self.client_test_fraction:g} with data.client_test=own, accepted: {accepted}"
            )
        if self.client_test == "own" and (self.unlabeled_partition or self.partition) != "natural":
            raise ValueError("data.client_test: got own, accepted: share, or own with data.partition=natural")
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

    def _check_labeled_clients(self) -> None:
        """Raises ValueError unless some clients are labeled, and some are not."""
        given, number = self.labeled_clients, self.num_clients
        what = f"a share of clients, such as 0.4, a number from 1 to {number - 1}, or clients' numbers from 0 to {number - 1}"
        are_whole = all(one == int(one) for one in given if one >= 1 or len(given) > 1)
        in_range = bool(given) and all(0 <= one < number for one in given) and len(set(given)) == len(given)
        if not (are_whole and in_range and 0 < sum(self.fractions) < number):
            shown = ", ".join(f"{one:g}" for one in given[:5])
            raise ValueError(f"data.labeled_clients: got {shown or 'nothing'} of {number} clients, accepted: {what}")
