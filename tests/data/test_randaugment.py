"""Every operation against Pillow on real images, and every variant's distribution against its paper's or code's formulas."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image, ImageEnhance, ImageOps
from sklearn.datasets import load_digits, load_sample_images

from fedjax_ssl.data.randaugment import VARIANTS, Draw, Op, apply_op, draw, randaugment, strong_view
from fedjax_ssl.data.randaugment import _remap as remap

ENHANCE = (Op.BRIGHTNESS, Op.COLOR, Op.CONTRAST, Op.SHARPNESS)
TRANSLATE, SHEAR = (Op.TRANSLATE_X, Op.TRANSLATE_Y), (Op.SHEAR_X, Op.SHEAR_Y)
MAGNITUDES = {
    Op.POSTERIZE: tuple(range(1, 9)),
    Op.SOLARIZE: (0.0, 0.5, 85.33, 128.0, 200.7, 255.0, 256.0),
    **dict.fromkeys(ENHANCE, (0.05, 0.1, 0.28, 0.5, 0.77, 0.95, 1.0, 1.36, 1.9)),
    Op.ROTATE: (-30.0, -17.3, -3.0, 0.0, 3.0, 10.0, 25.7, 30.0, 40.0, 160.0),
    **dict.fromkeys(SHEAR, (-0.3, -0.123, -0.03, 0.0, 0.1, 0.27, 0.3)),
    **dict.fromkeys(TRANSLATE, (-100.0, -9.6, -4.5, -3.2, -1.0, 0.0, 0.49, 0.51, 2.0, 6.7, 9.6)),
}
# Share of values that may be off, by 1: Pillow's blend rounds its product and its sum, AutoContrast's table comes from a
# product and an offset in float64, whose sum can fall just short of a whole number. All others are exact, geometry included.
OFF_BY_ONE = {Op.AUTO_CONTRAST: 0.01, **dict.fromkeys(ENHANCE, 0.005)}
SHEARS_OFF_BY_ONE = 0.06  # interpolated: Pillow's weights are float64, ours have 16 bits


def pillow(op: Op, magnitude: float, image: np.ndarray, resample=Image.Resampling.NEAREST, fill: int = 0) -> np.ndarray:
    """What Pillow makes of one image [H, W, ch]."""
    picture = Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image)
    color = fill if image.shape[-1] == 1 else (fill,) * 3

    def affine(*matrix):
        return picture.transform(picture.size, Image.Transform.AFFINE, matrix, resample, fillcolor=color)

    results = {
        Op.IDENTITY: lambda: picture,
        Op.AUTO_CONTRAST: lambda: ImageOps.autocontrast(picture),
        Op.EQUALIZE: lambda: ImageOps.equalize(picture),
        Op.INVERT: lambda: ImageOps.invert(picture),
        Op.POSTERIZE: lambda: ImageOps.posterize(picture, int(magnitude)),
        Op.SOLARIZE: lambda: ImageOps.solarize(picture, magnitude),
        Op.BRIGHTNESS: lambda: ImageEnhance.Brightness(picture).enhance(magnitude),
        Op.COLOR: lambda: ImageEnhance.Color(picture).enhance(magnitude),
        Op.CONTRAST: lambda: ImageEnhance.Contrast(picture).enhance(magnitude),
        Op.SHARPNESS: lambda: ImageEnhance.Sharpness(picture).enhance(magnitude),
        Op.ROTATE: lambda: picture.rotate(magnitude, fillcolor=color),
        Op.SHEAR_X: lambda: affine(1, magnitude, 0, 0, 1, 0),
        Op.SHEAR_Y: lambda: affine(1, 0, 0, magnitude, 1, 0),
        Op.TRANSLATE_X: lambda: affine(1, 0, magnitude, 0, 1, 0),
        Op.TRANSLATE_Y: lambda: affine(1, 0, 0, 0, 1, magnitude),
    }
    return np.asarray(results[op]()).reshape(image.shape)


@functools.cache
def photographs() -> np.ndarray:
    """Crops of scikit-learn's two photographs, and images without contrast, uint8 [B, 32, 32, 3]."""
    boxes = [(0, 0, 427, 427), (100, 50, 300, 250), (300, 100, 600, 400)]
    crops = [
        Image.fromarray(photograph).crop(box).resize((32, 32), Image.Resampling.BILINEAR)
        for photograph in load_sample_images().images
        for box in boxes
    ]
    flat = [np.full((32, 32, 3), value) for value in (0, 93, 255)]
    two_values = np.where(np.arange(32 * 32 * 3).reshape(32, 32, 3) % 7, 200, 50)
    return np.stack([*map(np.asarray, crops), *flat, two_values]).astype(np.uint8)


@pytest.fixture(params=["photographs", "gray", "digits", "cifar10"])
def images(request) -> np.ndarray:
    """Real images, uint8 [B, H, W, ch]: 32 x 32 in color, 28 x 28 in gray, 8 x 8 digits, CIFAR-10 where it is there."""
    if request.param == "photographs":
        return photographs()
    if request.param == "gray":
        small = [np.asarray(Image.fromarray(image).convert("L").resize((28, 28))) for image in photographs()]
        return np.stack(small)[..., None]
    if request.param == "digits":
        return np.round(load_digits().images[:20] * 255 / 16).astype(np.uint8)[..., None]
    import tensorflow_datasets as tfds

    source = tfds.data_source("cifar10", split="test", data_dir=request.getfixturevalue("tfds_dir"))
    return np.stack([source[i]["image"] for i in range(24)])


@functools.cache
def batched_op(name: str):
    """apply_op of a variant on images [B, H, W, ch], jitted: (op, magnitude, images) -> images. Cutout is low and left."""

    def one(op, magnitude, image):
        planes = jnp.moveaxis(image.astype(jnp.float32), -1, 0)
        return jnp.moveaxis(apply_op(Draw(op, magnitude, jnp.array([0.9, 0.3])), planes, VARIANTS[name]), 0, -1)

    return jax.jit(jax.vmap(one, (None, None, 0)))


def assert_close(got: np.ndarray, expected: np.ndarray, off_by_one: float) -> None:
    """Whole values 0..255, none off by more than 1, and at most the share `off_by_one` of them off at all."""
    np.testing.assert_array_equal(got, np.floor(np.clip(got, 0, 255)))
    difference = np.abs(got - expected.astype(np.float32))
    assert difference.max() <= (1 if off_by_one else 0)
    assert np.mean(difference > 0) <= off_by_one


COMPARED = [
    *(("usb", op) for op in Op if op != Op.CUTOUT),
    *(("semifl", op) for op in (Op.ROTATE, *SHEAR, Op.INVERT, Op.EQUALIZE)),  # interpolates its shears
    ("fedmatch", Op.ROTATE),  # fills with gray
]
OPTIONS = {"usb": {}, "semifl": {"resample": Image.Resampling.BILINEAR}, "fedmatch": {"fill": 128}}


@pytest.mark.parametrize(("name", "op"), COMPARED)
def test_operation_equals_pillow(name, op, images):
    off_by_one = SHEARS_OFF_BY_ONE if name == "semifl" and op in SHEAR else OFF_BY_ONE.get(op, 0.0)
    for magnitude in MAGNITUDES.get(op, (0.0,)):
        got = np.asarray(batched_op(name)(jnp.int32(op), jnp.float32(magnitude), images))
        assert_close(got, np.stack([pillow(op, magnitude, image, **OPTIONS[name]) for image in images]), off_by_one)


def test_cutout_of_semifl_blanks_from_a_corner():
    got = np.asarray(batched_op("semifl")(jnp.int32(Op.CUTOUT), jnp.float32(40 / 32), photographs()))
    expected = photographs().copy()
    expected[:, 8:] = 127  # row int(.9 * 32 - 20), column 0, both to the end
    np.testing.assert_array_equal(got, expected)


LEVELS = range(1, 10)
SHARED = [op for op in Op if op not in (Op.INVERT, Op.CUTOUT)]


def signed(values) -> list[float]:
    return [sign * value for value in values for sign in (-1, 1)]


GROUPS = (ENHANCE, (Op.POSTERIZE,), (Op.ROTATE,), SHEAR, TRANSLATE, (Op.SOLARIZE,), (Op.CUTOUT,))


def fixed(level: float) -> tuple:
    turns = (signed([scale * level]) for scale in (30, 0.3, 9.6))
    return [0.1 + 1.8 * level], [8 - round(4 * level)], *turns, [256 * level]


TURNS = signed(3 * v for v in LEVELS), signed(0.03 * v for v in LEVELS)
INVERTED = [256 - int(25.6 * v) for v in LEVELS]
# (slots, share of applied operations, operations, magnitudes of GROUPS: the values of a list equally often, or U(low, high))
EXPECTED = {
    "fixmatch": (2, 0.5, SHARED, (
        [0.1 + 0.18 * v for v in LEVELS], [4 - int(0.4 * v) for v in LEVELS], *TURNS, signed(LEVELS), INVERTED,
    )),
    "randaugment_mc": (2, 0.5, SHARED, (
        [0.05 + 0.09 * v for v in LEVELS], [4 + int(0.4 * v) for v in LEVELS], *TURNS,
        signed(int(0.96 * v) for v in LEVELS), INVERTED,
    )),
    "usb": (3, 1.0, SHARED, ((0.05, 0.95), [4, 5, 6, 7], (-30, 30), (-0.3, 0.3), (-9.6, 9.6), (0, 256))),
    "semifl": (2, 0.5, [op for op in Op if op != Op.IDENTITY], ([1.9], [4], [-30, 30], [-0.3, 0.3], [-100, 100], [0], [1.25])),
    "fedlabel_released": (1, 1.0, SHARED, fixed(10 / 30)),
    "fedlabel_paper": (10, 1.0, SHARED, fixed(1 / 30)),
    "fedsiam": (10, 1.0, SHARED, fixed(10 / 30)),
}  # fmt: skip
DRAWS = 60_000


def draws(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Operations and magnitudes of many slots on 32 x 32 images."""
    keys = jax.random.split(jax.random.key(0), DRAWS)
    drawn = jax.jit(jax.vmap(lambda key: draw(key, VARIANTS[name], 32, 32)))(keys)
    return np.asarray(drawn.op), np.asarray(drawn.magnitude)


def assert_share(count, total: int, share) -> None:
    assert np.all(abs(count / total - share) <= 5 * np.sqrt(share * (1 - share) / total))


@pytest.mark.parametrize("name", EXPECTED)
def test_draws_follow_the_table(name):
    slots, probability, operations, magnitudes = EXPECTED[name]
    assert VARIANTS[name].slots == slots
    op, magnitude = draws(name)
    for one in operations:
        idle = 1 - probability if one == Op.IDENTITY else 0.0
        assert_share(np.sum(op == one), DRAWS, probability / len(operations) + idle)
    assert set(op) == {*operations, *([Op.IDENTITY] if probability < 1 else [])}
    for group, expected in zip(GROUPS, magnitudes, strict=False):  # Cutout is SemiFL's alone
        for one in group:
            got = magnitude[op == one]
            if isinstance(expected, list):
                values, weights = np.unique(np.float32(expected), return_counts=True)
                found, counts = np.unique(got, return_counts=True)
                np.testing.assert_allclose(found, values, rtol=1e-5, atol=1e-5)
                assert_share(counts, len(got), weights / len(expected))
            else:
                low, high = expected
                unit = (got - low) / (high - low)
                assert 0 <= unit.min() < 0.005 < 0.995 < unit.max() <= 1
                assert_share(np.histogram(unit, 10, (0, 1))[0], len(unit), 0.1)


def test_fedmatch_is_mild():
    op, magnitude = draws("fedmatch")
    for one in Op:
        listed = one not in (Op.EQUALIZE, Op.INVERT, Op.CUTOUT)
        assert_share(np.sum(op == one), DRAWS, 1 / 13 if listed else 0.0)
    shares = [sum(1 / m for m in (2, 3, 4, 5) if k < m) / 4 for k in range(5)]  # k uniform in 0..M-1, M uniform in 2..5
    for k, share in enumerate(shares):
        rotated = magnitude[op == Op.ROTATE]
        assert_share(np.sum(np.isclose(rotated, 40 * k)), len(rotated), share)
    assert set(magnitude[op == Op.POSTERIZE]) == set(np.round(np.linspace(8, 4, 10), 0)[:5])
    for one, largest in ((Op.COLOR, 0.9), (Op.CONTRAST, 0.5), (Op.BRIGHTNESS, 0.3), (Op.SHARPNESS, 0.9)):
        ends = 1 - largest * 4 / 9, 1 + largest * 4 / 9
        np.testing.assert_allclose((magnitude[op == one].min(), magnitude[op == one].max()), ends, rtol=1e-5)
    np.testing.assert_allclose(magnitude[op == Op.SOLARIZE].min(), np.linspace(256, 231, 10)[4], rtol=1e-5)


@functools.cache
def augmented(name: str):
    """randaugment(name) on a batch: (keys [B], images [B, H, W, ch]) -> images, jitted."""
    return jax.jit(jax.vmap(randaugment(name)))


IMAGES = np.concatenate([photographs()] * 6)


def keys(seed: int) -> jax.Array:
    return jax.random.split(jax.random.key(seed), len(IMAGES))


def test_operations_follow_one_another_as_in_pillow():
    """The slots of an image, replayed in Pillow. Differences of 1 may grow in later slots, but few values differ at all."""
    got = np.asarray(augmented("usb")(keys(1), IMAGES))

    def slots(key):
        return jax.vmap(lambda key: draw(key, VARIANTS["usb"], 32, 32))(jax.random.split(key, VARIANTS["usb"].slots))

    drawn = jax.tree.map(np.asarray, jax.jit(jax.vmap(slots))(keys(1)))
    expected = IMAGES.copy()
    for i, slot in np.ndindex(drawn.op.shape):
        expected[i] = pillow(Op(drawn.op[i, slot]), float(drawn.magnitude[i, slot]), expected[i])
    assert np.mean(got != expected) < 0.005
    assert np.mean(np.any(got != IMAGES, axis=(1, 2, 3))) > 0.3


@pytest.mark.parametrize("name", ["usb", "semifl", "fedmatch"])
def test_result_depends_on_key_and_image_alone(name):
    first = np.asarray(augmented(name)(keys(2), IMAGES))
    assert first.dtype == np.float32
    np.testing.assert_array_equal(first, augmented(name)(keys(2), IMAGES))
    np.testing.assert_array_equal(first[::-1], augmented(name)(keys(2)[::-1], IMAGES[::-1]))
    other = np.asarray(augmented(name)(keys(3), IMAGES))
    assert np.mean(np.any(first != other, axis=(1, 2, 3))) > 0.3
    if name == "usb":  # neither on the batch's size nor on an outer map
        by_client = jax.jit(jax.vmap(jax.vmap(randaugment("usb"))))
        got = by_client(keys(2).reshape(4, 15), IMAGES.reshape(4, 15, 32, 32, 3))
        np.testing.assert_array_equal(got.reshape(IMAGES.shape), first)


def test_autocontrast_as_released_is_pillows_to_the_bit():
    """Also where 255 (x - low) / (high - low) is whole, and Pillow's sum in float64 falls short of it."""
    rng = np.random.default_rng(0)
    ends = np.sort(rng.choice(256, (1500, 2)), axis=1)
    values = np.clip(np.arange(256), ends[:, :1], ends[:, 1:]).astype(np.uint8)[:, None]  # [B, 1, 256]
    expected = np.stack([np.asarray(ImageOps.autocontrast(Image.fromarray(one))) for one in values])

    def stretched(name):
        one = jax.vmap(lambda x: remap(jnp.int32(Op.AUTO_CONTRAST), jnp.float32(0), x[None], VARIANTS[name])[0])
        return np.asarray(jax.jit(one)(np.float32(values)))

    np.testing.assert_array_equal(stretched("fl2_released"), expected)
    assert 0.001 < np.mean(stretched("usb") != expected) < 0.3  # what others leave out


@pytest.mark.parametrize(
    ("name", "color", "largest"),
    [("usb", (125, 123, 114), 16), ("randaugment_mc", (127,) * 3, 17), ("fixmatch", (127.5,) * 3, 16), ("semifl", None, 0)],
)
def test_variant_ends_with_its_cutout(name, color, largest):
    white = np.full((32, 32, 3), 255, np.uint8)
    got = np.asarray(jax.jit(jax.vmap(VARIANTS[name].cutout, (0, None)))(keys(0), white))
    painted = np.any(got != 255, -1)
    np.testing.assert_array_equal(got[painted], np.broadcast_to(np.float32(color or 255), got[painted].shape))
    assert painted.any(2).sum(1).max() == largest


@pytest.mark.parametrize("shape", [(32, 32, 3), (8, 8, 1)], ids=["color", "gray"])
def test_strong_view_is_base_then_operations_then_cutout(shape):
    """A base that blackens leaves the operations nothing to change, and the cutout's color stays exact."""
    color = (125, 123, 114)
    if shape[-1] == 1:
        color = (Image.new("RGB", (1, 1), color).convert("L").getpixel((0, 0)),)
    view = strong_view("usb", lambda key, image: jnp.zeros_like(image))
    got = np.asarray(jax.jit(jax.vmap(view))(keys(0), np.full((len(IMAGES), *shape), 99, np.uint8)))
    painted = np.any(got != 0, -1)
    assert painted.any((1, 2)).all()
    np.testing.assert_array_equal(got[painted], np.broadcast_to(color, got[painted].shape))
