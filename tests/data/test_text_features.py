"""Texts as features: the file that a run reads, the script that writes it with an encoder made here, and training on it."""

import json
import sys

import jax
import numpy as np
import pytest

from fedjax_ssl.data import sources, text_encoder
from fedjax_ssl.data.augment import feature_views
from fedjax_ssl.experiment.build import build
from launch import text_features
from tests import tiny
from tests.data.common import load_npz, message_of, same


def features(size, classes, dim, seed):
    labels = np.arange(size) % classes
    rng = np.random.default_rng(seed)
    return (2 * np.eye(classes, dim)[labels] + 0.3 * rng.standard_normal((size, dim))).astype(np.float32), labels


def arrays(strong=True, sizes=(12, 6), classes=3, dim=5, **changes):
    (train, train_labels), (test, test_labels) = (features(size, classes, dim, seed) for seed, size in enumerate(sizes))
    given = {"train_features": train, "train_labels": train_labels, "test_features": test, "test_labels": test_labels}
    if strong:
        given["train_strong_features"] = features(sizes[0], classes, dim, seed=2)[0]
    return given | changes


@pytest.mark.parametrize("strong", [True, False])
def test_a_file_of_features_is_a_dataset_of_stored_views(tmp_path, strong):
    given = arrays(strong)
    more = {"metadata": np.array("{}"), "classes": np.array(["a", "b", "c"])}
    dataset = load_npz(tmp_path, given | more, "text_features")
    assert (dataset.name, dataset.num_classes, dataset.holds_features) == ("text_features", 3, True)
    assert dataset.classes == ("a", "b", "c")
    assert (dataset.train_images.dtype, dataset.train_images.shape) == (np.float32, (12, 1 + strong, 5))
    assert np.array_equal(dataset.train_images[:, 0], given["train_features"])
    assert np.array_equal(dataset.train_images[:, -1], given["train_strong_features" if strong else "train_features"])
    assert np.array_equal(dataset.test_images, given["test_features"][:, None])
    assert np.array_equal(dataset.test_labels, given["test_labels"])
    views, key = feature_views(), jax.random.key(0)
    seen = views.plain(dataset.train_images), views.weak(key, dataset.train_images), views.strong(key, dataset.train_images)
    assert same(seen, (given["train_features"], given["train_features"], dataset.train_images[:, -1]))


def test_features_may_say_whose_they_are(tmp_path):
    owners = np.arange(12) // 3
    file = load_npz(tmp_path, arrays() | {"client": owners * 2}, "text_features")
    memory = sources.from_features(**arrays(), clients=[np.flatnonzero(owners == k) for k in range(4)])
    assert np.array_equal(file.clients, owners)
    assert np.array_equal(memory.clients, owners)


def test_a_file_without_features_says_what_is_needed(tmp_path):
    message = message_of(ValueError, load_npz, tmp_path, {"x_train": np.zeros(3)}, "ag_news")
    assert "holds x_train: needed are train_features, train_labels, test_features, test_labels" in message
    message = message_of(ValueError, load_npz, tmp_path, arrays(), "ag_news")
    assert message == "ag_news: got 3 classes, and it has 4: check that these are all its data"


def blobs(strong=True):
    return sources.from_features(**arrays(strong, (400, 80), 4, 6), name="blobs")


def config(model="linear", **overrides):
    tree = tiny.config("fl2", **({"data__weak": "default", "data__strong": "default"} | overrides))
    tree["model"] = {"name": model, "norm": "static"}
    return tree


@pytest.mark.slow
def test_fl2_learns_from_features_with_their_strong_view():
    experiment = build(config(), dataset=blobs())
    assert experiment.problem.spec.image_shape == (6,)
    assert experiment.settings.data.name == "blobs"
    assert experiment.num_params == 6 * 4 + 4
    states, rows = zip(*experiment.rounds(), strict=True)
    assert rows[-1]["eval/accuracy"] > 0.9
    assert rows[-1]["diagnostics/pseudo_label_accuracy"] > 0.9
    test = experiment.problem.data.test
    correct = experiment.predict(states[-1], test.images).argmax(1) == test.labels
    assert correct.mean() == pytest.approx(rows[-1]["eval/accuracy"])
    _, without = next(build(config(), dataset=blobs(strong=False)).rounds())
    assert without["client/loss"] != rows[0]["client/loss"]


@pytest.mark.slow
def test_features_may_stay_on_the_host_and_take_a_hidden_layer():
    _, row = next(build(config("mlp", execution__data="host", eval_every=1), dataset=blobs()).rounds())
    assert row["eval/accuracy"] > 0.5


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({"data__weak": "crop4"}, "data.weak: got 'crop4' for text features, accepted: default"),
        ({"data__strong": "none"}, "data.strong: got 'none' for text features"),
        ({"data__mean": (0.5,), "data__std": (0.5,)}, "data.mean: got (0.5,) for text features, accepted: ()"),
        ({"data__image_size": 32}, "data.image_size: got 32 for text features, accepted: 0"),
        ({"model": "cnn"}, "model.name: got cnn for text features, accepted: mlp, linear"),
    ],
)
def test_options_of_images_are_refused(overrides, expected):
    assert expected in message_of(ValueError, build, config(**overrides), dataset=blobs())


def test_arrays_of_images_are_trained_on_by_their_own_name():
    digits = sources.load("digits")
    tree = tiny.config("fixmatch", data__image_size=10, data__path="ignored.npz")
    experiment = build(tree, dataset=digits._replace(name="mine"))
    assert experiment.problem.spec.image_shape == (10, 10, 1)
    assert (experiment.settings.data.name, experiment.settings.data.path) == ("mine", "")
    data = experiment.problem.data
    assert np.array_equal(data.train.images[:, 1:9, 1:9], digits.train_images)
    assert np.array_equal(data.test.labels, digits.test_labels)


AG_NEWS = r""""3","Wall St. Bears Claw Back Into the Black (Reuters)","Short-sellers, a dwindling\band of ultra-cynics"
"1","Venezuelans Vote","CARACAS - a ""historic"" day gave\no indication"
"2","Phelps, Thorpe Advance","ATHENS - in the 200 freestyle"
"4","Rocket test","A new engine was fired"
"3","Oil prices","Crude rose"
"""
TEST = '"2","Games","They won"\n"4","Chips","Smaller ones"\n'


def encode(texts):
    """Letters, words and the first letter's code of each text."""
    return np.array([[len(text), len(text.split()), ord(text[0])] for text in texts], np.float64)


def write_csv(folder, name, content):
    (folder / name).write_text(content, encoding="utf-8")
    return str(folder / name)


def test_ag_news_rows_are_read_as_they_are_meant(tmp_path):
    rows = text_encoder.read_csv(write_csv(tmp_path, "train.csv", AG_NEWS))
    assert rows.labels == ["3", "1", "2", "4", "3"]
    assert rows.texts[0].endswith("Into the Black (Reuters) Short-sellers, a dwindling band of ultra-cynics")
    assert rows.texts[1] == 'Venezuelans Vote CARACAS - a "historic" day gave no indication'
    rows = text_encoder.Texts(["b", "a", "b", "b", "a"], ["0", "1", "2", "3", "4"])
    assert text_encoder.first_of_each_class(rows, 2) == ((["b", "a", "b", "a"], ["0", "1", "2", "4"]), (["b"], ["3"]))
    assert text_encoder.first_of_each_class(rows, 0) == (rows, ([], []))


@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_a_byte_order_mark_is_no_part_of_a_class_and_a_missing_label_is_none(tmp_path, mark):
    content = f"{mark}sports,a\nworld,b\n{mark}sports,c\n-1,d\nNaN,e\n"  # as two files that were joined
    rows = text_encoder.read_csv(write_csv(tmp_path, "train.csv", content))
    assert rows == (["sports", "world", "sports", "-1", "-1"], ["a", "b", "c", "d", "e"])
    assert text_encoder.first_of_each_class(rows, 1)[0].texts == ["a", "b", "d", "e"]
    got = text_encoder.compute(rows, text_encoder.Texts(["world"], ["f"]), None, encode)
    assert (got["train_labels"].tolist(), got["classes"].tolist()) == ([0, 1, 0, -1, -1], ["sports", "world"])
    rows = text_encoder.read_csv(write_csv(tmp_path, "floats.csv", f"{mark}1.0,a\n0.0,b\n"))
    assert rows.labels == ["1", "0"]


def test_other_words_are_fewer_and_mostly_in_their_order():
    words = [f"{i}" for i in range(20_000)]
    rows = text_encoder.Texts(["0", "1"], [" ".join(words), "alone"])
    labels, (many, one) = text_encoder.in_other_words(rows)
    left = [int(word) for word in many.split()]
    assert (labels, one) == (["0", "1"], "alone")
    assert len(set(left)) == len(left) == pytest.approx(0.9 * 20_000, rel=0.01)
    # A swap makes one descent, as a word that moves on by several places does.
    assert np.mean(np.diff(left) < 0) == pytest.approx(0.1, rel=0.15)
    assert text_encoder.in_other_words(rows) == (labels, [many, one])
    assert text_encoder.in_other_words(rows, seed=1).texts[0] != many
    shorts = text_encoder.Texts(["0"] * 200, ["alone"] * 200)
    assert set(text_encoder.in_other_words(shorts).texts) == {"alone"}


def test_features_are_computed_in_order_in_batches(tmp_path):
    train, test = (text_encoder.read_csv(write_csv(tmp_path, "a.csv", content)) for content in (AG_NEWS, TEST))
    strong = train._replace(texts=[f"said anew: {text}" for text in train.texts])
    batches = []
    got = text_encoder.compute(train, test, strong, lambda texts: batches.append(len(texts)) or encode(texts), batch_size=2)
    assert batches == [2, 2, 1, 2, 2, 2, 1]
    for key, texts in [("train_features", train.texts), ("test_features", test.texts), ("train_strong_features", strong.texts)]:
        assert got[key].dtype == np.float32
        assert np.array_equal(got[key], encode(texts))
    assert got["train_labels"].tolist() == [2, 0, 1, 3, 2]
    assert got["test_labels"].tolist() == [1, 3]
    assert got["classes"].tolist() == ["1", "2", "3", "4"]
    rows = text_encoder.Texts(["10", "2", "x", "b"], ["text"] * 4)  # classes in the order of their labels
    assert text_encoder.compute(rows, rows, None, encode)["train_labels"].tolist() == [1, 0, 3, 2]


def run(monkeypatch, tmp_path, *more, **files):
    asked = []
    monkeypatch.setattr(text_encoder, "hugging_face_encoder", lambda *arguments: asked.append(arguments) or encode)
    train, test = write_csv(tmp_path, "train.csv", AG_NEWS), write_csv(tmp_path, "test.csv", TEST)
    out = tmp_path / "ag_news.npz"
    given = [f"--{name}={path}" for name, path in ({"train": train, "test": test, "out": out} | files).items()]
    return text_features.main(["text_features", *given, *more]), out, asked


def test_the_script_writes_what_ag_news_is_read_from(tmp_path, monkeypatch):
    strong = write_csv(tmp_path, "anew.csv", AG_NEWS.replace("Oil", "Petroleum"))
    status, out, asked = run(monkeypatch, tmp_path, f"--train_strong={strong}", "--pooling=mean", "--per_class=1")
    assert status == 0
    assert asked == [("bert-base-uncased", "mean", 128)]
    dataset = sources.load("ag_news", path=str(out))
    assert (dataset.train_images.shape, dataset.test_images.shape, dataset.num_classes) == ((4, 2, 3), (2, 1, 3), 4)
    with np.load(out) as archive:
        metadata = json.loads(str(archive["metadata"]))
    assert metadata["files"] == ["train.csv", "test.csv", "anew.csv"]
    assert (metadata["encoder"], metadata["pooling"], metadata["per_class"]) == ("bert-base-uncased", "mean", 1)


def test_one_file_may_be_both_parts_and_make_its_strong_view(tmp_path, monkeypatch):
    monkeypatch.setattr(text_encoder, "hugging_face_encoder", lambda *_: encode)
    both = write_csv(tmp_path, "both.csv", AG_NEWS + AG_NEWS.replace("Oil", "Petroleum"))
    words = ["text_features", f"--train={both}", f"--out={tmp_path / 'out.npz'}"]
    assert text_features.main([*words, "--per_class=1", "--strong=words"]) == 0
    rows = text_encoder.read_csv(both)
    train, test = text_encoder.first_of_each_class(rows, 1)
    with np.load(tmp_path / "out.npz") as got:
        assert np.array_equal(got["train_features"], encode(train.texts))
        assert np.array_equal(got["train_strong_features"], encode(text_encoder.in_other_words(train).texts))
        assert np.array_equal(got["test_features"], encode(test.texts))
        assert json.loads(str(got["metadata"]))["strong"] == "words"


def test_the_script_writes_the_whole_file_or_none(tmp_path, monkeypatch):
    status, out, _ = run(monkeypatch, tmp_path)
    assert status == 0
    before = out.read_bytes()

    def failing(file, **content):
        file.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(np, "savez", failing)
    assert run(monkeypatch, tmp_path)[0] == 2
    assert out.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ag_news.npz", "test.csv", "train.csv"]


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("train", "", "train.csv: no rows: give a CSV file"),
        ("train", "1,a\n2\n", "train.csv: row 2 has no text: give a label"),
        ("train", "1,a\n,b\n", "train.csv: row 2 has no label: give a label, or -1"),
        ("test", "-1,a\n", "the test file has label '-1', which no training row has"),
        ("train", "label,text\n1,a\n2,b\n", "train.csv: row 1 has label 'label', which is a header: remove it"),
        ("train", "Class,text\nsports,a\nworld,b\n", "train.csv: row 1 has label 'Class', which is a header: remove it"),
        ("train", "topic,text\n1,a\nnan,b\n", "train.csv: row 1 has label 'topic', which is a header: remove it"),
        ("test", '"5","text"\n', "the test file has label '5', which no training row has: accepted are 1, 2, 3, 4"),
        ("strong", AG_NEWS.replace('"4"', '"1"'), "the strong view: row 4 has another label: give the 5 training rows"),
        ("strong", "\n".join(AG_NEWS.splitlines()[:4]), "the strong view: 4 rows: give the 5 training rows"),
    ],
)
def test_the_script_says_what_is_wrong_with_a_file(tmp_path, monkeypatch, capsys, name, content, expected):
    path = write_csv(tmp_path, f"wrong_{name}.csv", content)
    status, out, _ = run(monkeypatch, tmp_path, **{"train_strong" if name == "strong" else name: path})
    assert status == 2
    assert not out.exists()
    message = capsys.readouterr().err
    assert len(message.splitlines()) == 1
    assert expected in message


def test_a_missing_encoder_library_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setitem(sys.modules, "torch", None)
    message = message_of(ModuleNotFoundError, text_encoder.hugging_face_encoder, "any", "cls", 8)
    assert message == 'torch is not installed: python -m pip install -e ".[text]"'


def test_pooling_leaves_padding_out():
    hidden = np.arange(2 * 3 * 2, dtype=np.float32).reshape(2, 3, 2)
    mask = np.array([[1, 1, 0], [1, 1, 1]])
    assert np.array_equal(text_encoder.pool(hidden, mask, "cls"), hidden[:, 0])
    expected = np.stack([hidden[0, :2].mean(0), hidden[1].mean(0)])
    np.testing.assert_allclose(text_encoder.pool(hidden, mask, "mean"), expected)
