"""Resized crops and changes of color against Pillow and colorsys."""

import colorsys

import jax
import numpy as np
import pytest
from PIL import Image, ImageEnhance

from fedjax_ssl.data import augment, contrastive
from fedjax_ssl.data.presets import WEAK_VIEWS
from tests.data.common import many, picture


def resized(image, size, box=None):
    """Pillow's bilinear resizing of an image [H, W, 3] to `size`, (W, H), of a part of it first."""
    part = Image.fromarray(image).crop(box) if box else Image.fromarray(image)
    return np.asarray(part.resize(size, Image.Resampling.BILINEAR)).astype(int)


def near(one, other):
    """Whether two images are the same but for Pillow's rounding between rows and columns."""
    return np.abs(one - other).max() <= 1


def test_an_enlarged_crop_is_a_window_of_pillows_enlarged_image_at_a_uniform_place():
    image = picture(16, 12, 3)
    large = resized(image, (15, 20))
    places = {(i, j): large[i : i + 16, j : j + 12] for i in range(5) for j in range(4)}
    found = [
        [place for place, window in places.items() if near(one, window)]
        for one in many(contrastive.enlarged_crop(1.25), image, 600)
    ]
    assert all(len(place) == 1 for place in found)
    counts = {place: sum(one == [place] for one in found) for place in places}
    assert min(counts.values()) > 10
    assert max(counts.values()) < 55


def boxes(image):
    """Every part of an image that a crop may be, as Pillow enlarges it."""
    height, width, _ = image.shape
    for h in range(1, height + 1):
        for w in range(1, width + 1):
            for top in range(height - h + 1):
                for left in range(width - w + 1):
                    yield (h, w), resized(image, (width, height), (left, top, left + w, top + h))


def test_a_resized_crop_is_a_part_of_the_image_as_pillow_enlarges_it():
    image = picture(6, 6, 3)
    parts = list(boxes(image))
    sizes = []
    for one in many(contrastive.resized_crop(0.25), image, 200):
        sizes.append(next(size for size, part in parts if near(one, part)))
    area, ratio = (np.array([of(h, w) for h, w in sizes]) for of in (lambda h, w: h * w / 36, lambda h, w: w / h))
    assert 0.15 < area.min() < 0.35  # sides are rounded
    assert area.max() == 1
    assert len({*sizes}) > 8
    assert 0.6 <= ratio.min() < 0.9 < 1.1 < ratio.max() <= 1.67


@pytest.mark.parametrize(
    ("made", "enhance"),
    [
        (lambda low, high: augment.blend(lambda _: 0.0, low, high), ImageEnhance.Brightness),
        (lambda low, high: augment.blend(augment.gray_of, low, high), ImageEnhance.Color),
    ],
)
def test_brightness_and_saturation_are_pillows(made, enhance):
    image = picture(9, 7, 3)
    for seed in range(6):
        key = jax.random.key(seed)
        factor = np.float32(0.2) + np.float32(1.6) * np.asarray(jax.random.uniform(key))
        expected = np.asarray(enhance(Image.fromarray(image)).enhance(float(factor)))
        np.testing.assert_array_equal(np.asarray(made(0.2, 1.8)(key, image)), expected)


def test_hue_is_turned_as_colorsys_has_it_and_gray_stays():
    image = picture(5, 4, 3)
    image[0] = 77  # gray
    for seed in range(4):
        key = jax.random.key(seed)
        turn = 0.2 * (2 * float(jax.random.uniform(key)) - 1)
        expected = np.empty(image.shape)
        for place in np.ndindex(image.shape[:2]):
            h, s, v = colorsys.rgb_to_hsv(*(image[place] / 255))
            expected[place] = 255 * np.array(colorsys.hsv_to_rgb((h + turn) % 1, s, v))
        np.testing.assert_allclose(np.asarray(contrastive.hue(0.2)(key, image)), expected, atol=0.51)
    gray = image[..., :1]
    np.testing.assert_array_equal(contrastive.hue(0.2)(key, gray), gray)


def test_sometimes_is_as_often_as_it_says():
    image = picture(4, 4, 3)
    changed = many(contrastive.sometimes(0.3, lambda key, image: 0.0 * image), image, 2000).max((1, 2, 3)) == 0
    assert abs(changed.mean() - 0.3) < 5 * np.sqrt(0.3 * 0.7 / 2000)


@pytest.mark.parametrize("channels", [1, 3])
def test_simclrs_view_has_whole_values_and_hardly_ever_the_same(channels):
    views = many(WEAK_VIEWS["simclr"], picture(12, 10, channels), 300)
    assert np.array_equal(views, np.rint(views))
    assert 0 <= views.min() < views.max() <= 255
    assert len({view.tobytes() for view in views}) > 295
    if channels == 3:
        gray = np.array([(view == view[..., :1]).all() for view in views])
        assert 0.1 < gray.mean() < 0.35
