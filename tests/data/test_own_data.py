"""Own data as people have them: tables of labels, unlabeled images, other formats, new numbers; and whose each example is."""

import logging
import unicodedata

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image, ImageOps

from fedjax_ssl import build, metrics
from fedjax_ssl.data import sources, split
from fedjax_ssl.data.partition import PARTITIONS
from fedjax_ssl.data.settings import DataSettings
from fedjax_ssl.ssl import pseudo_labels
from tests import tiny
from tests.data.common import as_rows, in_memory, labels_alone, load_npz, message_of, picture, same
from tests.data.test_odd_inputs import classes, flat, save
from tests.data.test_sources import tagged

CSV = "id,label,client\n0.png,0,ann\n1,1,bob\n2,0,bob\n3,-1,ann\n"


def pixels(numbers):
    return np.stack([picture(4, 6, 3, seed=i) for i in numbers])


def test_a_table_beside_a_flat_folder_has_labels_and_clients(tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        dataset = flat(CSV)(tmp_path)
    assert same(dataset[1:5], (pixels(range(4)), [0, 1, 0, -1], pixels((4, 5)), [1, 0]))
    assert dataset.clients.tolist() == [0, 1, 1, 0]
    clients = "image_folder train: 2 clients are numbered: 0 = ann, 1 = bob"
    assert caplog.messages == [clients, "image_folder: 1 of 4 training examples have no label"]


@pytest.mark.parametrize("folder", ["", "images"])
def test_one_table_for_all_images_is_split_anew(tmp_path, folder):
    names = [f"{i:02d}" for i in range(20)]
    for i, name in enumerate(names):
        save(tmp_path / folder / f"{name}.png", 4, 6, 3, seed=i)
    (tmp_path / "labels.csv").write_text("client,id,label\n" + "".join(f"{i},{n},{i % 3 - 1}\n" for i, n in enumerate(names)))
    dataset = sources.load("image_folder", path=str(tmp_path), resplit=(0.5, 0.0, 0.5))
    rows = dataset.clients  # each client has one image here, so its number is that of the image
    assert np.array_equal(dataset.train_images, pixels(rows))
    assert np.array_equal(dataset.train_labels, rows % 3 - 1)
    assert sorted(rows[dataset.train_labels == -1]) == list(range(0, 20, 3))  # all unlabeled ones
    assert len(rows) == 7 + 6
    assert len(dataset.test_labels) == 6


def test_names_and_any_integers_are_numbered_and_the_mapping_is_logged(tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        text = flat("id,label\n0,dog\n1,cat\n2,dog\n3,-1\n", "id,label\n4,cat\n5,dog\n", renumber_labels=True)(tmp_path)
        numbers = in_memory((picture(4, 3, 3), [30, 7, -1, 30]), (picture(1, 3, 3, seed=1), [7]), renumber_labels=True)
    assert (text.train_labels.tolist(), text.test_labels.tolist()) == ([1, 0, 1, -1], [0, 1])
    assert (numbers.train_labels.tolist(), numbers.test_labels.tolist()) == ([1, 0, -1, 1], [0])
    assert (text.classes, numbers.classes) == (("cat", "dog"), ("7", "30"))
    assert "image_folder: labels are numbered: 0 = cat, 1 = dog" in caplog.messages
    assert "arrays: labels are numbered: 0 = 7, 1 = 30" in caplog.messages
    message = message_of(ValueError, sources.load, "digits", renumber_labels=True)
    assert message == "renumber_labels=True is for npz, image_folder, parquet and hf/..., got name='digits': drop it"


class NA:
    """What pandas.NA is like: it is written `<NA>`, and equals nothing."""

    def __str__(self):
        return "<NA>"

    def __eq__(self, other):
        return self

    def __bool__(self):
        raise TypeError

    __hash__ = None


NAN, MASKED = float("nan"), np.ma.masked_array([0, 7, 1, 0], [False, True, False, False])
PANDAS = {
    "floats": [0.0, -1.0, 1.0, 0.0], "NaN": [0.0, NAN, 1.0, 0.0], "None": [0, None, 1, 0],
    "NA": np.array([0, NA(), 1.0, 0], object),
    "column": np.array([[0], [-1.0], [1], [0]]), "masked": MASKED, "masked in a list": [0, np.ma.masked, 1, 0],
    "masked floats": MASKED.astype(float), "names": ["cat", None, "dog", "cat"], "text": np.array(["cat", NAN, "dog", "cat"]),
    "floats as text": ["0.0", "-1.0", "1.0", "0.0"],
}  # fmt: skip


@pytest.mark.parametrize("numbers_anew", [False, True])
@pytest.mark.parametrize("name", PANDAS)
def test_labels_as_pandas_has_them_and_masked_ones_make_no_class(name, numbers_anew):
    test = [2.0 / 2, 0.0] if name not in ("names", "text", "floats as text") else [PANDAS[name][2], PANDAS[name][0]]
    parts = (picture(4, 3, 3), PANDAS[name]), (picture(2, 3, 3, seed=1), test)
    if isinstance(test[0], str) and not numbers_anew:
        assert "labels are text such as" in message_of(ValueError, in_memory, *parts)
        return
    dataset = in_memory(*parts, renumber_labels=numbers_anew)
    assert (dataset.train_labels.tolist(), dataset.test_labels.tolist()) == ([0, -1, 1, 0], [1, 0])
    assert len(dataset.classes) in (0, 2)


def test_labels_that_are_empty_texts_and_masked_positions_are_refused():
    parts = (picture(4, 3, 3), ["cat", "", "dog", " "]), (picture(1, 3, 3, seed=1), ["cat"])
    assert "labels: 2 are empty texts: give -1 for what is not known" in message_of(
        ValueError, in_memory, *parts, renumber_labels=True
    )
    lists = [np.ma.masked_array([0, 1], [False, True]), np.array([2, 3])]
    parts = (picture(4, 3, 3), [0, 1] * 2), (picture(1, 3, 3, seed=1), [0])
    assert "clients[0] has masked positions: leave these out" in message_of(ValueError, in_memory, *parts, clients=lists)


@pytest.mark.parametrize("unknown", ["-1.0", "nan", "NaN", "None", "<NA>", "-1"])
@pytest.mark.parametrize(("zero", "one"), [("0.0", "1.0"), ("5", "7.0"), ("cat", "dog"), ("01", "1"), ("+1", "1")])
def test_labels_in_a_table_as_pandas_writes_them(tmp_path, unknown, zero, one):
    train, test = f"id,label\n0,{zero}\n1,{one}\n2,{zero}\n3,{unknown}\n", f"id,label\n4,{one}\n5,{zero}\n"
    dataset = flat(train, test, renumber_labels=True)(tmp_path)
    assert (dataset.train_labels.tolist(), dataset.test_labels.tolist()) == ([0, 1, 0, -1], [1, 0])
    if zero == "0.0":
        assert same(flat(train, test)(tmp_path)[1:5], dataset[1:5])


def test_ids_of_clients_that_are_missing_are_nobodys(tmp_path):
    given = [2.0, NAN, 0.0, 2.0]
    assert in_memory((picture(4, 3, 3), [0, 1] * 2), (picture(1, 3, 3, seed=1), [0]), clients=given).clients.tolist() == [
        1,
        -1,
        0,
        1,
    ]
    table = "id,label,client\n0,0,2.0\n1,1,nan\n2,0,0.0\n3,1,2.0\n"
    assert flat(table)(tmp_path).clients.tolist() == [1, -1, 0, 1]


def test_names_in_two_of_unicodes_forms_are_one_class_and_one_file(tmp_path):
    composed, apart = (unicodedata.normalize(form, "Übung") for form in ("NFC", "NFD"))
    for i, name in enumerate((composed, apart, "cat", "cat")):
        for part in ("train", "test"):
            save(
                tmp_path / part / (name if part == "train" else apart if i < 2 else name) / f"{name}{i}.png",
                4,
                6,
                seed=[i, len(part)],
            )
    table = f"id,client\n{apart}0,a\n{apart}1,b\ncat2,a\ncat3,b\n"
    (tmp_path / "train.csv").write_text(table)
    dataset = sources.load("image_folder", path=str(tmp_path))
    assert (dataset.classes, dataset.train_labels.tolist()) == (("cat", composed), [0, 0, 1, 1])
    assert sorted(dataset.clients.tolist()) == [0, 0, 1, 1]
    text = in_memory((picture(4, 3, 3), [composed, "b", apart, "b"]), (picture(1, 3, 3, seed=1), [apart]), renumber_labels=True)
    assert (text.classes, text.train_labels.tolist()) == (("b", composed), [1, 0, 1, 0])


@pytest.mark.parametrize("name", ["nan", "-1", "None"])
def test_a_folder_is_a_class_whatever_its_name(tmp_path, name):
    dataset = classes(
        lambda root: [(root / split / "dog").rename(root / split / name) for split in ("train", "test")], renumber_labels=True
    )(tmp_path)
    assert sorted(dataset.train_labels.tolist()) == [0] * 3 + [1] * 3
    assert set(dataset.classes) == {"cat", name}


def test_folders_of_classes_with_an_unlabeled_folder(tmp_path, caplog):
    def add(root):
        save(root / "unlabeled" / "deep" / "a.png", 4, 6, 3, seed=50)
        save(root / "unlabeled" / "b.png", 4, 6, 3, seed=51)

    with caplog.at_level(logging.INFO):
        dataset = classes(add, renumber_labels=True)(tmp_path)
    assert dataset.train_labels.tolist() == [0] * 3 + [1] * 3 + [-1] * 2
    assert dataset.classes == ("cat", "dog")
    assert same(as_rows(dataset.train_images[6:], [-1, -1]), as_rows(pixels((50, 51)), [-1, -1]))
    assert caplog.messages[0] == f"{tmp_path}: classes are numbered: 0 = cat, 1 = dog"
    again = sources.load("image_folder", path=str(tmp_path), resplit=(0.5, 0.0, 0.5))
    assert (again.classes, (again.train_labels < 0).sum()) == (("cat", "dog"), 2)
    assert len(again.test_labels) == 6
    (tmp_path / "unlabeled.csv").write_text("id,client\nb,1\na,0\n")
    assert sources.load("image_folder", path=str(tmp_path)).clients.tolist() == [-1] * 6 + [1, 0]


def owned(text, name="train.csv"):
    """Folders of classes, whose images 0, 2, 4 are dogs and 1, 3, 5 cats, with a table of clients."""
    return lambda root: (root / name).write_text(text)


@pytest.mark.parametrize("ids", ["{0}.png", "{0}", "{1}/{0}", "{1}/{0}.png"])
def test_a_table_beside_folders_of_classes_says_whose_the_images_are(tmp_path, ids):
    names = [ids.format(i, "cat" if i % 2 else "dog") for i in range(6)]
    table = "id,client\n" + "".join(f"{name},{'-1' if i == 4 else 'ann' if i < 2 else 'bob'}\n" for i, name in enumerate(names))
    dataset = classes(owned(table))(tmp_path)
    assert dataset.train_labels.tolist() == [0] * 3 + [1] * 3
    assert dataset.clients.tolist() == [0, 1, 1, 0, 1, -1]  # cats 1, 3, 5, then dogs 0, 2, 4


def test_a_stray_image_beside_folders_of_classes_is_counted_and_ids_with_underscores_are_names(tmp_path, caplog):
    def stray(root):
        save(root / "train" / "montage.png", 4, 6, 3)
        owned("id,client\n0,1_1\n1,11\n2,1_1\n3,11\n4,11\n5,1_1\n")(root)

    with caplog.at_level(logging.INFO):
        dataset = classes(stray)(tmp_path)
    assert dataset.clients.tolist() == [0, 0, 1, 1, 1, 0]  # cats 1, 3, 5, then dogs 0, 2, 4; int("1_1") would be 11
    _, passed_over, numbered = caplog.messages
    assert passed_over.startswith(f"{tmp_path}: 1 files or folders are passed over")
    assert numbered == "image_folder train: 2 clients are numbered: 0 = 11, 1 = 1_1"


def test_one_table_in_a_folder_of_classes_that_is_split_anew(tmp_path):
    for i in range(20):  # names occur in both classes
        save(tmp_path / ("cat" if i % 2 else "dog") / f"{i // 2}.png", 4, 6, 3, seed=i)
    rows = [f"{'cat' if i % 2 else 'dog'}/{i // 2}.png,{i}\n" for i in range(20)]
    (tmp_path / "clients.csv").write_text("".join(["id,client\n", *rows]))
    dataset = sources.load("image_folder", path=str(tmp_path), resplit=(0.5, 0.0, 0.5))
    assert len(dataset.clients) == 10
    assert np.array_equal(dataset.train_images, pixels(dataset.clients))  # each client has one image, of its number
    (tmp_path / "clients.csv").write_text("id,client\n" + "".join(f"{i // 2},{i}\n" for i in range(20)))
    message = message_of(ValueError, sources.load, "image_folder", path=str(tmp_path), resplit=(0.5, 0.0, 0.5))
    where = f"{tmp_path / 'clients.csv'}, row 2"
    assert message == f"{where}: id 0 fits several images: give their paths such as FOLDER/NAME.png"


def test_a_table_without_clients_beside_folders_of_classes_is_not_read(tmp_path):
    assert classes(owned("id,width\n0,6\n"))(tmp_path).clients is None


@pytest.mark.parametrize("name", ["val", "valid", "validation"])
def test_the_validation_part_has_several_names(tmp_path, name):
    dataset = classes(
        lambda root: [save(root / name / kind / "v.png", 4, 6, 3, seed=40) for kind in ("cat", "dog")], resplit=(0.5, 0, 0.5)
    )(tmp_path)
    assert len(dataset.train_labels) + len(dataset.test_labels) == 14


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "tif", "tiff", "bmp"])
def test_other_formats_are_read_upright_as_pillow_reads_them(tmp_path, suffix):
    exif = Image.Exif()
    exif[0x112] = 6  # turned by a quarter
    options = {} if suffix == "bmp" else {"exif": exif} | ({"lossless": True} if suffix == "webp" else {})

    def replace(root):
        for path in root.rglob("*.png"):
            image = Image.open(path)
            image.load()
            path.unlink()
            image.save(path.with_suffix(f".{suffix}"), **options)

    dataset = classes(replace)(tmp_path)
    files = sorted((tmp_path / "train" / "cat").iterdir())
    expected = np.stack([np.asarray(ImageOps.exif_transpose(Image.open(path))) for path in files])
    assert expected.shape == (3, *((4, 6) if suffix == "bmp" else (6, 4)), 3)
    assert np.abs(dataset.train_images[:3].astype(int) - expected).max() <= (2 if suffix == "jpg" else 0)


def test_what_systems_leave_in_folders_is_passed_over_silently(tmp_path, caplog):
    def litter(root):
        for folder in (root, root / "train", root / "train/cat", root / "test/dog"):
            for name in ("._0.png", ".DS_Store", "Thumbs.db"):
                (folder / name).write_bytes(b"x")
            for name in ("__MACOSX", "@eaDir", ".ipynb_checkpoints"):
                save(folder / name / "0.png", 2, 2)

    dataset = classes(litter)(tmp_path)
    assert len(dataset.train_labels) == len(dataset.test_labels) == 6
    assert caplog.messages == []


# --- whose the examples are, and what nobody knows ------------------------------------------------------------------------

TRAIN, TEST = tagged(40, 0, 4), tagged(8, 40, 4)
OWNERS = np.random.default_rng(0).integers(0, 5, 40)
OWNERS[:5] = range(5)


def test_clients_come_as_ids_or_lists_from_arrays_and_from_npz(tmp_path):
    text = in_memory(TRAIN, TEST, clients=[f"client {k}" for k in OWNERS])
    lists = in_memory(TRAIN, TEST, clients=[np.flatnonzero(k == OWNERS) for k in range(5)])
    file = load_npz(
        tmp_path, {"x_train": TRAIN[0], "y_train": TRAIN[1], "x_test": TEST[0], "y_test": TEST[1], "client": OWNERS * 3}
    )
    alone = load_npz(tmp_path, {"x_train": TRAIN[0], "y_train": TRAIN[1], "client": OWNERS}, resplit=(0.5, 0.0, 0.5))
    for dataset in (text, lists, file):
        assert np.array_equal(dataset.clients, OWNERS)
    assert np.array_equal(alone.clients, OWNERS[alone.train_images[:, 0, 0, 0]])  # the first pixel counts the images
    some = in_memory(TRAIN, TEST, clients=[[3, 1], [2]])
    assert some.clients[:5].tolist() == [-1, 0, 1, 0, -1]


def test_validation_examples_may_be_in_memory_too():
    given = {"validation_images": TEST[0], "validation_labels": TEST[1]}
    made = in_memory(TRAIN, TEST, **given)
    assert all(map(np.array_equal, (made.validation.images[..., 0], made.validation.labels), TEST))
    config = tiny.config("supervised", data__validation="own", data__num_clients=4, data__num_labels=8, cohort_size=4)
    (_, row), *_ = build(config | {"rounds": 1}, made).rounds()
    assert {"eval/val_accuracy", "eval/val_loss"} <= row.keys()
    message = message_of(ValueError, in_memory, TRAIN, TEST, validation_images=TEST[0])
    assert message.startswith("arrays validation labels: got None, accepted: an array")
    message = message_of(ValueError, in_memory, TRAIN, TEST, validation_images=TEST[0], validation_labels=TEST[1] + 9)
    assert "arrays validation: label" in message
    assert "is out of range" in message


@pytest.mark.parametrize("keys", [{}, {"labels_at": "clients"}, {"labels_at": "clients", "labeled_fraction": (0.5,)}])
def test_a_natural_split_gives_each_client_its_own(keys):
    training = labels_alone(TRAIN[1], 4, np.where(OWNERS == 4, -1, OWNERS))
    drawn = split.draw(training, DataSettings(num_clients=4, num_labels=8, partition="natural", **keys), 0)
    for k, (labeled, unlabeled) in enumerate(zip(drawn.labeled, drawn.unlabeled, strict=True)):
        own = np.flatnonzero(k == OWNERS)
        assert set(labeled) | set(unlabeled) == set(own) - set(drawn.server)
    nobodys = set(np.flatnonzero(OWNERS == 4)) - set(drawn.server)
    assert nobodys <= set(drawn.pooled) | set(range(40))
    assert drawn.unassigned >= len(nobodys) - 8
    if keys.get("labeled_fraction"):
        assert [len(row) for row in drawn.labeled] == [int(0.5 * (k == OWNERS).sum() + 0.5) for k in range(4)]


def test_a_natural_split_needs_the_clients_and_their_number():
    config = tiny.config("fixmatch", data__partition="natural", cohort_size=4)
    config["data"]["num_clients"], config["data"]["num_labels"] = 4, 4
    message = message_of(ValueError, build, config, in_memory(TRAIN, TEST, clients=OWNERS))
    assert message == "data.num_clients=4 with partition=natural of 5 clients: give num_clients=5"
    message = message_of(ValueError, build, config, in_memory(TRAIN, TEST))
    assert message.startswith("data.partition=natural: the data do not say whose the examples are: give an array `client`")
    config["data"]["num_clients"] = 5
    table = build(config, in_memory(TRAIN, TEST, clients=OWNERS)).problem.data.unlabeled
    for k, (row, count) in enumerate(zip(table.index, table.count, strict=True)):
        assert set(OWNERS[row[:count]]) <= {k}


SCENARIOS = {
    "server": {},
    "joint": {"labels_at": "clients", "labeled_fraction": (0.5,)},
    "joint, not excluded": {"labels_at": "clients", "labeled_fraction": (0.5,), "exclude_labeled": False},
    "apart": {"labels_at": "clients"},
    "random": {"label_selection": "random", "labels_first": False},
    "revealed": {"labels_at": "clients", "reveal_labels": True},
}


@pytest.mark.parametrize("partition", PARTITIONS)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_examples_of_unknown_class_go_to_clients_and_never_as_labeled(partition, scenario):
    num_classes = 10 if partition == "batch_imbalanced" else 3
    labels = np.where(np.arange(1000) // 10 % 5 > 1, -1, np.arange(1000) % num_classes)
    how = DataSettings(
        num_clients=8 if partition == "dirichlet_pairs" else 9,
        num_labels=60,
        partition=partition,
        min_size=1,
        classes_per_client=1,
        **SCENARIOS[scenario],
    )
    drawn = split.draw(labels_alone(labels, num_classes, np.arange(1000) % 9), how, 0)
    assert all((labels[row] >= 0).all() for row in (drawn.server, *drawn.labeled))
    unknown = np.sort(np.concatenate([row[labels[row] < 0] for row in drawn.unlabeled]))
    spare = 8 if partition in ("iid", "dirichlet_pairs") else 0
    assert 600 - spare <= len(unknown) <= 600
    assert len(set(unknown)) == len(unknown)
    assert set(unknown) <= set(drawn.pooled)
    if scenario == "revealed":
        assert all((labels[row] < 0).all() for row in drawn.unlabeled)


def test_all_labels_may_be_the_servers():
    labels = np.where(np.arange(50) < 6, np.arange(50) % 3, -1)
    drawn = split.draw(labels_alone(labels, 3), DataSettings(num_clients=4, num_labels=6, partition="dirichlet"), 0)
    assert drawn.server.tolist() == list(range(6))
    assert [len(row) for row in drawn.unlabeled] == [11] * 4


def test_diagnostics_count_examples_of_known_class_alone():
    rng = np.random.default_rng(0)
    label, true_labels = rng.integers(0, 3, 200), rng.integers(-1, 3, 200)
    accepted, mask = rng.random(200) < 0.6, rng.random(200) < 0.8
    got = pseudo_labels.diagnostics(*map(jnp.asarray, (label, true_labels, accepted, mask)))
    got = metrics.reduce(jax.device_get(got))
    total = correct = wrong = 0
    for i in range(200):
        if mask[i] and true_labels[i] >= 0:
            total += 1
            correct += accepted[i] and label[i] == true_labels[i]
            wrong += accepted[i] and label[i] != true_labels[i]
    expected = {
        "label_ratio": (correct + wrong) / total,
        "pseudo_label_accuracy": correct / (correct + wrong),
        "correct_ratio": correct / total,
        "wrong_ratio": wrong / total,
        "correct_wrong_ratio": correct / wrong,
    }
    assert got == pytest.approx({f"diagnostics/{key}": value for key, value in expected.items()})


def test_a_resplit_says_how_many_examples_count_as_unlabeled_and_where_they_were(tmp_path, caplog):
    arrays = {"x_train": picture(30, 3, 3), "y_train": np.arange(30) % 3 - 1, "x_test": picture(12, 3, 3, seed=1)}
    dataset = load_npz(tmp_path, arrays | {"y_test": np.arange(12) % 3 - 1}, resplit=(0.5, 0.0, 0.5))
    assert dataset.num_classes == 2
    assert caplog.messages == [
        "npz: examples with the label -1 have no class and go to the training part of resplit (10 of 30 in train, 4 of 12 in "
        "test): if -1 is a class, number the classes from 0 on"
    ]
    caplog.clear()
    load_npz(tmp_path, arrays | {"y_test": np.arange(12) % 2}, resplit=(0.5, 0.0, 0.5))  # a pool without labels, as it is meant
    assert caplog.messages == []
