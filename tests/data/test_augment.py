"""Flips, crops, cutouts and views, against NumPy and Pillow, and their distributions over many keys."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image, ImageDraw

from fedjax_ssl.data import augment
from fedjax_ssl.data.randaugment import randaugment, strong_view
from fedjax_ssl.data.variants import VARIANTS
from tests.data.common import many, windows

SIZE = 32


def coordinates(height: int = SIZE, width: int = SIZE) -> np.ndarray:
    """An image [H, W, 2] whose pixels hold 1 + row and 1 + column, so that 0 is left for black."""
    return np.stack(np.mgrid[1 : height + 1, 1 : width + 1], -1).astype(np.uint8)


def assert_uniform(values: np.ndarray, expected: list) -> None:
    """Every value of `expected` occurs equally often within 5 standard deviations, and no other does."""
    found, counts = np.unique(values, return_counts=True)
    np.testing.assert_array_equal(found, expected)
    share = 1 / len(expected)
    np.testing.assert_allclose(counts / values.size, share, atol=5 * np.sqrt(share * (1 - share) / values.size))


def painted(image: np.ndarray) -> tuple[int, int, int, int]:
    """First and last row, first and last column of the rectangle painted on a black image [H, W, ch]."""
    mask = image[..., 0] != 0
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    assert mask[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1].all()
    return rows[0], rows[-1], columns[0], columns[-1]


def test_flip_mirrors_half_of_the_images():
    image = coordinates(6, 5)
    flipped = many(augment.flip(), image, 4000)
    mirrored = np.array([np.array_equal(one, image[:, ::-1]) for one in flipped])
    unchanged = np.array([np.array_equal(one, image) for one in flipped])
    assert (mirrored ^ unchanged).all()
    assert_uniform(mirrored, [False, True])
    assert flipped.dtype == np.uint8


@pytest.mark.parametrize(("mode", "numpy_mode"), [("reflect", "reflect"), ("zero", "constant"), ("edge", "edge")])
@pytest.mark.parametrize(("pad", "height", "width"), [(4, 32, 32), (2, 8, 11)])
def test_crop_is_a_uniformly_placed_window_of_the_padded_image(mode, numpy_mode, pad, height, width):
    image = coordinates(height, width)
    expected = windows(image, pad, numpy_mode)
    crops = many(augment.crop(pad, mode), image, 8000)
    places = np.array([expected[one.tobytes()] for one in crops])  # a KeyError here is a crop that is no window
    for axis in (0, 1):
        assert_uniform(places[:, axis], list(range(2 * pad + 1)))
    assert abs(np.corrcoef(places.T)[0, 1]) < 5 / np.sqrt(len(places))


@pytest.mark.parametrize("side", [0.0, 0.7, 3.2, 9.6, 15.9, 16.0, 40.0])
def test_pillow_box_is_the_rectangle_that_pillow_draws(side):
    height, width = 24, 32
    centers = np.random.default_rng(0).uniform(size=(60, 2)).astype(np.float32)
    centers[:4] = [[0, 0], [0.999, 0.999], [0.5, 0.5], [0.25, 0.999]]
    got = jax.vmap(lambda c: augment.pillow_box(c[0], c[1], side, height, width))(centers)
    for (row, column), box in zip(centers, np.asarray(got), strict=True):
        x0, y0 = int(max(0, column * width - side / 2)), int(max(0, row * height - side / 2))
        x1, y1 = int(min(width, x0 + side)), int(min(height, y0 + side))
        canvas = Image.new("L", (width, height))
        ImageDraw.Draw(canvas).rectangle((x0, y0, x1, y1), 255)
        np.testing.assert_array_equal(box, np.asarray(canvas) == 255)


def test_cutout_of_16_pixels_covers_17_from_a_clamped_corner():
    boxes = np.array([painted(one) for one in many(augment.cutout(0.5, 0.5, 127), np.zeros((SIZE, SIZE, 3), np.uint8), 6000)])
    for first, last in (boxes[:, :2].T, boxes[:, 2:].T):
        np.testing.assert_array_equal(last, np.minimum(first + 16, SIZE - 1))
        # The corner is int(max(0, c - 8)) for c ~ U(0, 32): 0 for c < 9, then 1/32 each.
        assert abs(np.mean(first == 0) - 9 / 32) < 5 * np.sqrt(9 / 32 * 23 / 32 / len(first))
        assert_uniform(first[first > 0], list(range(1, 24)))


def test_cutout_with_one_bound_has_its_center_in_1_to_32():
    """NumPy's uniform(32) draws from (1, 32]: the corner is 0 for c < 9, then 1/31 each."""
    images = many(augment.cutout(0.5, 0.5, 127, first=1), np.zeros((SIZE, SIZE, 3), np.uint8), 6000)
    for first in np.array([painted(one) for one in images])[:, ::2].T:
        assert abs(np.mean(first == 0) - 8 / 31) < 3 * np.sqrt(8 / 31 * 23 / 31 / len(first))
        assert_uniform(first[first > 0], list(range(1, 24)))


def test_the_released_strong_view_has_the_center_of_its_code():
    black, released = np.zeros((SIZE, SIZE, 3), np.uint8), augment.cutout(0, 0.5, (125, 123, 114), first=1)
    found, usb = (many(VARIANTS[name].cutout, black, 50) for name in ("fl2_released", "usb"))
    np.testing.assert_array_equal(found, many(released, black, 50))
    assert np.any(found != usb)


def test_cutout_sides_are_uniform_between_their_ends():
    images = many(augment.cutout(0.1, 0.2, (125, 123, 114)), np.zeros((64, 64, 3), np.float32), 4000)
    for channel, value in enumerate((125, 123, 114)):
        assert set(np.unique(images[..., channel])) == {0, value}
    boxes = np.array([painted(one) for one in images])
    rows = boxes[boxes[:, 0] <= 50]  # not cut off at the far edge
    # side ~ U(6.4, 12.8), and the corner int(max(0, c - side / 2)) is <= 50 for c < 51 + side / 2
    sides = np.linspace(6.4, 12.8, 64001)
    expected = np.bincount(sides.astype(int), weights=51 + sides / 2)
    expected /= expected.sum()
    shares = np.bincount(rows[:, 1] - rows[:, 0], minlength=len(expected)) / len(rows)
    np.testing.assert_allclose(shares, expected, atol=5 * np.sqrt(0.25 / len(rows)))
    assert not shares[:6].any()


def test_clipped_cutout_surrounds_a_uniform_pixel():
    images = many(augment.cutout_clipped(0.5, 127.5), np.zeros((SIZE, SIZE, 3), np.uint8), 6000)
    assert set(np.unique(images)) == {0.0, 127.5}
    boxes = np.array([painted(one) for one in images])
    for first, last in (boxes[:, :2].T, boxes[:, 2:].T):
        center = np.where(first > 0, first + 8, last - 7)  # of rows center - 8 .. center + 7
        np.testing.assert_array_equal(first, np.maximum(center - 8, 0))
        np.testing.assert_array_equal(last, np.minimum(center + 7, SIZE - 1))
        assert_uniform(center, list(range(SIZE)))


LUMA = Image.new("RGB", (1, 1), (125, 123, 114)).convert("L").getpixel((0, 0))


@pytest.mark.parametrize(
    ("fill", "channels", "values"), [((125, 123, 114), 1, {0, LUMA}), (127, 1, {0, 127}), ((9, 8), 2, {0, 8, 9})]
)
def test_fill_fits_the_channels(fill, channels, values):
    assert set(np.unique(many(augment.cutout(0.5, 0.5, fill), np.zeros((8, 8, channels)), 8))) == values


def test_compose_gives_each_part_its_own_key():
    def add_number(key, image):
        return image + jax.random.uniform(key)

    composed = augment.compose(add_number, lambda key, image: 2 * image, add_number)
    got = composed(jax.random.key(3), np.zeros((2, 2, 1), np.float32))
    parts = [float(jax.random.uniform(key)) for key in jax.random.split(jax.random.key(3), 3)]
    np.testing.assert_allclose(got, 2 * parts[0] + parts[2], rtol=1e-6)
    np.testing.assert_array_equal(augment.compose()(jax.random.key(3), coordinates()), coordinates())


@pytest.fixture(scope="module")
def views() -> augment.Views:
    weak = augment.compose(augment.flip(), augment.crop(2))
    strong = augment.compose(weak, augment.cutout(0.1, 0.5, 127))
    made = augment.make_views(weak=weak, strong=strong, labeled=augment.flip(), mean=[0.1, 0.2], std=[0.5, 0.25])
    return augment.Views(*(jax.jit(view) for view in made))


BATCH = np.random.default_rng(0).integers(0, 256, (12, 8, 8, 2), np.uint8)


def test_plain_view_normalizes_and_others_are_functions_of_key_and_image(views):
    expected = (BATCH / 255 - np.array([0.1, 0.2])) / np.array([0.5, 0.25])
    np.testing.assert_allclose(views.plain(BATCH), expected, rtol=1e-5, atol=1e-6)
    for view in (views.weak, views.strong):
        first, again, other = (np.asarray(view(jax.random.key(number), BATCH)) for number in (1, 1, 2))
        assert (first.shape, first.dtype) == (BATCH.shape, np.float32)
        np.testing.assert_array_equal(first, again)
        assert np.any(first != other, axis=(1, 2, 3)).mean() > 0.5


def test_weak_view_is_the_augmentation_of_each_example_with_its_key(views):
    weak = augment.compose(augment.flip(), augment.crop(2))
    own_keys = jax.random.split(jax.random.key(5), len(BATCH))
    expected = [views.plain(weak(key, image)[None])[0] for key, image in zip(own_keys, BATCH, strict=True)]
    np.testing.assert_allclose(views.weak(jax.random.key(5), BATCH), np.stack(expected), rtol=1e-6, atol=1e-6)


def test_view_of_an_example_does_not_depend_on_the_batch(views):
    whole = np.asarray(views.strong(jax.random.key(1), BATCH))
    np.testing.assert_array_equal(views.strong(jax.random.key(1), BATCH[:5]), whole[:5])
    others = BATCH.copy()
    others[:3] = 255 - others[:3]
    np.testing.assert_array_equal(np.asarray(views.strong(jax.random.key(1), others))[3:], whole[3:])
    clients = jax.vmap(views.strong)(jnp.stack([jax.random.key(7), jax.random.key(1)]), np.stack([others, BATCH]))
    np.testing.assert_array_equal(clients[1], whole)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: augment.crop(4, "mirror"), "got crop mode 'mirror', accepted: reflect, zero, edge"),
        (lambda: augment.crop(-1), "got crop pad -1, accepted: 0 or more"),
        (lambda: augment.cutout(0.5, 0.2, 0), "got cutout sides from 0.5 to 0.2"),
        (lambda: augment.cutout_clipped(0.0, 0), "got cutout size 0.0, accepted: a positive share"),
        (lambda: many(augment.cutout(0.1, 0.2, (1, 2)), np.zeros((8, 8, 3)), 1), "got a fill of 2 values for an image of 3"),
        (lambda: augment.contrast(1.2, 0.8), "got factors of an image from 1.2 to 0.8"),
        (lambda: augment.grayscale(1.2), "got a grayscale probability of 1.2"),
        (lambda: augment.grayscale(1.0)(jax.random.key(0), jnp.zeros((2, 2, 4))), "got an image of 4 channels"),
        (lambda: randaugment("fixmatch2"), "got RandAugment variant 'fixmatch2', accepted: fixmatch, randaugment_mc, usb"),
        (lambda: strong_view("", augment.flip()), "got RandAugment variant ''"),
        (lambda: randaugment("usb")(jax.random.key(0), np.zeros((8, 8, 2))), r"an image of 2 channels, accepted .* 1 .* or 3"),
        (lambda: make(mean=[0.5], std=[0.5, 0.5]), "one value per channel in both"),
        (lambda: make(mean=[125.0], std=[60.0]), "images scaled to"),
        (lambda: make(mean=[0.5], std=[0.0]), "std > 0"),
        (lambda: make(mean=[0.5], std=[0.5]).plain(np.zeros((2, 8, 8, 3))), r"accepted: \[B, H, W, 1\]"),
    ],
)
def test_bad_input_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def make(**statistics) -> augment.Views:
    return augment.make_views(weak=augment.flip(), strong=augment.flip(), labeled=augment.flip(), **statistics)
