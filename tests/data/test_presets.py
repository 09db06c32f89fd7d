"""Views by name: each recipe against NumPy or Pillow, and which of them a dataset gets."""

import jax
import numpy as np
import pytest
from PIL import Image, ImageEnhance

from fedjax_ssl.data import augment, presets
from fedjax_ssl.data.catalog import DATASETS
from fedjax_ssl.data.presets import STRONG_VIEWS, WEAK_VIEWS
from fedjax_ssl.experiment.build import build
from fedjax_ssl.experiment.expansion import flattened, identity
from fedjax_ssl.experiment.settings import Settings
from launch import explain
from tests.data.common import in_memory, many, message_of, picture, windows


def dataset(name="mine", shape=(12, 12, 3)):
    examples = picture(20, *shape), np.arange(20) % 2
    return in_memory(examples, examples, name=name)


PADS = {"none": 0, "crop1": 1, "crop4": 4, "zero_crop4": 4, "flip_crop4": 4, "flip_zero_crop4": 4, "crop": 1}


@pytest.mark.parametrize(("name", "pad"), PADS.items())
def test_geometric_weak_views_are_all_crops_and_no_others(name, pad):
    mode = "constant" if "zero" in name else "reflect"
    image = picture(12, 10, 3)
    got = {view.tobytes() for view in many(WEAK_VIEWS[name], image, 3000)}
    mirrored = windows(image[:, ::-1], pad, mode) if "flip" in name else {}
    assert got == {*windows(image, pad, mode), *mirrored}  # 162 equally likely ones are all drawn, but for 1 case in 1e6


@pytest.mark.parametrize("channels", [3, 1])
def test_contrast_is_pillows(channels):
    image = picture(9, 7, channels)
    for seed in range(8):
        key = jax.random.key(seed)
        factor = np.float32(0.6) + np.float32(0.8) * np.asarray(jax.random.uniform(key))
        pillow = Image.fromarray(image if channels == 3 else image[..., 0])
        expected = np.asarray(ImageEnhance.Contrast(pillow).enhance(float(factor))).reshape(image.shape)
        np.testing.assert_array_equal(np.asarray(augment.contrast(0.6, 1.4)(key, image)), expected)


def test_grayscale_is_pillows_and_as_frequent_as_it_says():
    image = picture(9, 7, 3)
    expected = np.asarray(Image.fromarray(image).convert("L"))[..., None].repeat(3, -1)
    got = many(augment.grayscale(0.2), image, 2000)
    gray = np.array([np.array_equal(view, expected) for view in got])
    assert all(np.array_equal(view, image) for view in got[~gray])
    assert abs(gray.mean() - 0.2) < 5 * np.sqrt(0.2 * 0.8 / 2000)
    assert np.array_equal(np.asarray(augment.grayscale(1.0)(jax.random.key(0), image[..., :1])), image[..., :1])


def test_fedsiams_view_varies_place_contrast_and_color():
    image = picture(12, 10, 3)
    got = many(WEAK_VIEWS["fedsiam"], image, 300)
    assert np.array_equal(got, np.rint(got))
    assert 0 <= got.min() < got.max() <= 255
    assert len({view.tobytes() for view in got}) > 280
    gray = np.array([(view == view[..., :1]).all() for view in got])
    assert 0.08 < gray.mean() < 0.32
    spread = got.std((1, 2, 3))
    assert spread.min() < 0.8 * image.std() < 1.1 * image.std() < spread.max()
    assert many(WEAK_VIEWS["fedsiam"], image[..., :1], 4).shape == (4, 12, 10, 1)


def test_every_known_dataset_has_views_and_says_what_it_is():
    assert {"cifar10", "cifar100", "svhn_cropped", "mnist", "fashion_mnist", "emnist/byclass"} <= set(DATASETS)
    assert {"cinic10", "bloodmnist", "organamnist", "ag_news", "digits"} <= set(DATASETS)
    for name, about in DATASETS.items():
        assert about.weak in WEAK_VIEWS, name
        assert about.strong in STRONG_VIEWS, name
        assert all((about.citation, about.terms, about.url.startswith("http"))), name
        assert len(about.mean) == len(about.std), name
    assert DATASETS["digits"].weak == "crop1"
    for name in ("mnist", "emnist/byclass", "svhn_cropped", "digits", "organamnist", "organcmnist"):  # have a left and a right
        assert "flip" not in DATASETS[name].weak


def test_a_known_datasets_views_are_its_own():
    data = dataset("cifar10")
    views = presets.make(data)
    images = data.train_images
    expected = (images / 255 - DATASETS["cifar10"].mean) / DATASETS["cifar10"].std
    np.testing.assert_allclose(np.asarray(views.plain(images)), expected, atol=1e-5)
    explicit = presets.make(data, weak="flip_crop4", strong="usb")
    for view in ("weak", "strong"):
        got, wanted, other = (
            str(jax.make_jaxpr(getattr(made, view))(jax.random.key(1), images))  # the program, which need not be compiled
            for made in (views, explicit, presets.make(data, weak="crop4", strong="semifl"))
        )
        assert got == wanted, view
        assert got != other, view
    versioned = presets.make(data._replace(name="cifar10:3.0.2"))
    assert np.array_equal(versioned.plain(images), views.plain(images))


def test_an_unknown_datasets_views_are_measured_and_not_mirrored():
    data = dataset()
    images = data.train_images
    plain = np.asarray(presets.make(data).plain(images))
    np.testing.assert_allclose(plain.mean((0, 1, 2)), 0, atol=1e-5)
    np.testing.assert_allclose(plain.std((0, 1, 2)), 1, atol=1e-5)
    got = presets.make(data).weak(jax.random.key(1), images)
    assert np.array_equal(got, presets.make(data, weak="crop1").weak(jax.random.key(1), images))  # of 12 pixels
    assert presets.measured(np.full_like(images, 51))[1] == (1e-3,) * 3


def test_one_value_normalizes_every_channel_and_other_numbers_are_refused():
    images = dataset().train_images
    views = presets.make(dataset(), mean=(0.5,), std=(0.25,))
    np.testing.assert_allclose(np.asarray(views.plain(images)), (images / 255 - 0.5) / 0.25, atol=1e-5)
    half = presets.make(dataset(), mean=(0.5,), std=(0.5,))
    assert np.array_equal(presets.make(dataset("bloodmnist")).plain(images), half.plain(images))
    message = message_of(ValueError, presets.make, dataset(), mean=(0.5, 0.5), std=(0.5, 0.5))
    assert message == "data.mean, data.std: got 2 and 2 values for images of 3 channels, accepted: 3 in both, or 1"
    assert message_of(ValueError, presets.make, dataset("cifar10", (12, 12, 1))).endswith("1 channel, accepted: 1 in both")


def test_labeled_images_are_seen_as_the_weak_view_unless_a_config_says_otherwise_and_so_are_strong_views_of_none():
    images, key = dataset().train_images, jax.random.key(1)
    weak, none = (presets.make(dataset(), weak="flip_crop4", strong="none", labeled=labeled) for labeled in ("default", "none"))
    assert np.array_equal(weak.labeled(key, images), weak.weak(key, images))
    assert np.array_equal(weak.strong(key, images), weak.weak(key, images))
    assert np.array_equal(none.labeled(key, images), none.plain(images))


def test_feddures_labeled_view_is_a_crop_with_a_square_of_zeros_once_normalized():
    data = dataset("cifar10", (32, 32, 3))
    view = jax.jit(presets.make(data, labeled="feddure").labeled)
    sides = set()
    for seed in range(40):
        image = data.train_images[seed % 20]
        got = np.asarray(view(jax.random.key(seed), image[None]))[0]
        cut = (np.abs(got) < 1e-6).all(-1)
        rows, columns = (np.flatnonzero(cut.any(axis)) for axis in (1, 0))
        assert cut[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1].all()
        assert {len(rows), len(columns)} <= set(range(8, 17))  # clipped where it leaves the image: 8 pixels at least
        sides |= {len(rows), len(columns)}
        raw = np.round(255 * (got * DATASETS["cifar10"].std + DATASETS["cifar10"].mean))
        crops = {*windows(image, 4, "constant"), *windows(image[:, ::-1], 4, "constant")}
        candidates = (np.frombuffer(one, np.uint8).reshape(32, 32, 3) for one in crops)
        assert any(np.array_equal(raw[~cut], one[~cut]) for one in candidates)
    assert 16 in sides


@pytest.mark.parametrize(("weak", "strong", "key"), [("default", "default", "strong"), ("fedsiam", "none", "weak")])
def test_views_of_colors_refuse_images_of_four_channels(weak, strong, key):
    data = dataset(shape=(8, 8, 4))
    assert f"data.{key}: got " in message_of(ValueError, presets.make, data, weak=weak, strong=strong)
    views = presets.make(data, weak="crop1", strong="none")
    assert views.strong(jax.random.key(0), data.train_images).shape == (20, 8, 8, 4)


@pytest.mark.parametrize(("network", "given", "size"), [("resnet9", 0, 32), ("resnet9", 28, 28), ("mlp", 0, 28)])
def test_networks_that_are_made_for_a_size_get_it(network, given, size):
    data = {"num_clients": 2, "num_labels": 2, "image_size": given}
    experiment = build({"model": {"name": network}, "data": data, "cohort_size": 1}, dataset(shape=(28, 28)))
    images = experiment.problem.data.train.images
    assert images.shape[1:3] == (size, size)
    assert images.sum() == picture(20, 28, 28).sum()


@pytest.mark.parametrize(("side", "pad"), [(4, 0), (8, 1), (28, 3), (32, 4), (64, 4)])
def test_the_default_crop_shifts_by_an_eighth_of_the_side_at_most(side, pad):
    image = picture(side, side + 4, 1)
    view, wanted = WEAK_VIEWS["crop"], augment.compose(augment.crop(pad))
    for seed in range(5):
        key = jax.random.key(seed)
        assert np.array_equal(view(key, image), wanted(key, image) if pad else image)
    words = f"crop with {pad} mirrored pixel{'s' * (pad > 1)} of {side}" if pad else "none"
    line = f"weak view: {words}; strong view: the weak view and usb; labeled view: as the weak view"
    assert presets.described(*presets.names("mine"), side=side, used=("weak", "strong", "labeled")) == line


@pytest.mark.parametrize(
    ("name", "given", "side", "expected"),
    [
        ("mine", {"weak": "flip_zero_crop4"}, 8, "data.weak=flip_zero_crop4: images of 8 pixels are shifted by up to 4, more"),
        ("digits", {"labeled": "feddure"}, 8, "data.labeled=feddure: images of 8 pixels are shifted by up to 4, more"),
        ("digits", {}, 8, ""),
        ("mine", {}, 8, ""),
        ("mine", {"weak": "crop4"}, 32, ""),
        ("mnist", {"weak": "fedsiam"}, 28, ""),  # its own view shifts by 4
    ],
)
def test_a_shift_of_more_than_an_eighth_is_named_unless_it_is_the_datasets_own(name, given, side, expected):
    weak, _, labeled = presets.names(name, **given)
    lines = list(presets.far_shifts(name, weak, labeled, side))
    assert [line.startswith(expected) for line in lines] == [True] * bool(expected)


def test_default_views_are_resolved_in_the_config_and_said(caplog):
    config = {"model": {"name": "linear"}, "data": {"num_clients": 2, "num_labels": 2}, "cohort_size": 1}
    with caplog.at_level("INFO"):
        settings = build(config, dataset(shape=(8, 8))).settings
    assert (settings.data.weak, settings.data.strong, settings.data.labeled) == ("crop", "usb", "crop")
    said = "weak view: crop with 1 mirrored pixel of 8; strong view: the weak view and usb; labeled view: as the weak view"
    assert said in caplog.messages
    flat = flattened(Settings().to_dict())
    assert identity(flat)["data.weak"] == "flip_crop4"  # as a run's folder has it, or one that was made before
    assert Settings.from_dict({"data": {"name": "text_features"}}).data.resolved().weak == "default"


@pytest.mark.parametrize(("words", "weak"), [(["--config=fl2_cifar10"], "flip_crop4"), (["--config.data.name=npz"], "crop")])
def test_explain_says_what_default_is(capsys, words, weak):
    assert explain.main(["explain", *(words if "--config=" in words[0] else ["--config=digits:fl2", *words]), "data.weak"]) == 0
    assert capsys.readouterr().out.startswith(f"data.weak = {weak}\n")
