"""The variants of RandAugment: which operations, how often and how strongly."""

import enum
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from fedjax_ssl.data.augment import Augmentation, compose, cutout, cutout_clipped


class Op(enum.IntEnum):
    """The operations, with the unit of their magnitude."""

    IDENTITY = 0
    AUTO_CONTRAST = 1
    EQUALIZE = 2
    INVERT = 3
    POSTERIZE = 4  # bits that remain
    SOLARIZE = 5  # threshold from which on values are inverted
    BRIGHTNESS = 6  # factor; 1 changes nothing, here and in the next three
    COLOR = 7
    CONTRAST = 8
    SHARPNESS = 9
    ROTATE = 10  # degrees, counterclockwise
    SHEAR_X = 11  # pixels per pixel
    SHEAR_Y = 12
    TRANSLATE_X = 13  # pixels
    TRANSLATE_Y = 14
    CUTOUT = 15  # side, as a share of the width


class Magnitude(NamedTuple):
    """The distribution of a magnitude: one of `values`, all equally likely, plus U(0, span)."""

    values: tuple[float, ...] = (0.0,)
    span: float = 0.0


def _uniform(low: float, high: float) -> Magnitude:
    return Magnitude((low,), high - low)


def _one_of(*values: float | Float[np.ndarray, " levels"]) -> Magnitude:
    return Magnitude(tuple(np.hstack(values).tolist()))


def _either_sign(values: float | Float[np.ndarray, " levels"]) -> Magnitude:
    return _one_of(values, -values)


class Variant(NamedTuple):
    """One version of RandAugment."""

    slots: int  # operations drawn per image, independently and with replacement
    probability: float  # with which each drawn operation is applied
    ops: Mapping[Op, Magnitude]  # to draw from, all equally likely
    translate: Callable[[int], Magnitude]  # side of the image in pixels -> magnitude of TranslateX or -Y, which are drawn, too
    cutout: Augmentation = compose()  # the end of the strong view
    fill: float = 0.0  # value of pixels from outside of the image
    bilinear: bool = False  # whether shears interpolate; rotations take the nearest pixel
    ops_first: bool = False  # whether the operations come before flip and crop
    rounds_as_pillow: bool = False  # whether AutoContrast has Pillow's rounding errors, which take 1 from some values


def _ops(
    *plain: Op, enhance: Magnitude, posterize: Magnitude, solarize: Magnitude, rotate: Magnitude, shear: Magnitude
) -> dict[Op, Magnitude]:
    """The operations of a variant: `plain` ones, which have no magnitude, and those that all variants have."""
    return {
        **dict.fromkeys(plain, Magnitude()),
        Op.POSTERIZE: posterize,
        Op.SOLARIZE: solarize,
        **dict.fromkeys([Op.BRIGHTNESS, Op.COLOR, Op.CONTRAST, Op.SHARPNESS], enhance),
        Op.ROTATE: rotate,
        **dict.fromkeys([Op.SHEAR_X, Op.SHEAR_Y], shear),
    }


def _fixed(slots: int, level: float, *, ops_first: bool = False) -> Variant:
    """A variant whose operations all have one level, given as a share of each operation's range.

    Low levels make images dark, low in contrast and inverted.
    """
    ops = _ops(
        *_PLAIN, enhance=_one_of(0.1 + 1.8 * level), posterize=_one_of(8 - np.round(4 * level)), solarize=_one_of(256 * level),
        rotate=_either_sign(30 * level), shear=_either_sign(0.3 * level),
    )  # fmt: skip
    return Variant(slots, 1.0, ops, translate=lambda side: _either_sign(0.3 * level * side), ops_first=ops_first)


_PLAIN = (Op.IDENTITY, Op.AUTO_CONTRAST, Op.EQUALIZE)
_LEVELS = np.arange(1, 10) / 10  # l / 10 for the levels l = 1..9
_MILD = np.repeat(np.arange(5), [77, 77, 47, 27, 12]) / 9  # k / 9 for k uniform in 0..M-1, M uniform in 2..5

VARIANTS: dict[str, Variant] = {
    # FixMatch (its RandAugment, "rac")
    "fixmatch": Variant(
        slots=2, probability=0.5,
        ops=_ops(
            *_PLAIN, enhance=_one_of(0.1 + 1.8 * _LEVELS), rotate=_either_sign(30 * _LEVELS), shear=_either_sign(0.3 * _LEVELS),
            posterize=_one_of(4 - np.floor(4 * _LEVELS)), solarize=_one_of(256 - np.floor(256 * _LEVELS)),
        ),
        translate=lambda side: _either_sign(10 * _LEVELS),
        cutout=cutout_clipped(0.5, 127.5),
    ),
    # RandAugmentMC(2, 10): FixMatch's PyTorch port, FedDure
    "randaugment_mc": Variant(
        slots=2, probability=0.5,
        ops=_ops(
            *_PLAIN, enhance=_one_of(0.05 + 0.9 * _LEVELS), posterize=_one_of(4 + np.floor(4 * _LEVELS)),
            rotate=_either_sign(30 * _LEVELS), shear=_either_sign(0.3 * _LEVELS),
            solarize=_one_of(256 - np.floor(256 * _LEVELS)),
        ),
        translate=lambda side: _either_sign(np.floor(0.3 * _LEVELS * side)),
        cutout=cutout(0.5, 0.5, 127),
    ),
    # RandAugment(3, 5): USB and TorchSSL, where the 5 is unused, and (FL)^2
    "usb": Variant(
        slots=3, probability=1.0,
        ops=_ops(
            *_PLAIN, enhance=_uniform(0.05, 0.95), rotate=_uniform(-30, 30),
            posterize=_one_of(4, 5, 6, 7), solarize=_uniform(0, 256), shear=_uniform(-0.3, 0.3),
        ),
        translate=lambda side: _uniform(-0.3 * side, 0.3 * side),
        cutout=cutout(0, 0.5, (125, 123, 114)),
    ),
    # SemiFL: full strength; for every operation the probability is itself drawn from U(.2, .8), which makes it .5
    "semifl": Variant(
        slots=2, probability=0.5,
        ops={
            Op.CUTOUT: _one_of(40 / 32),
            **_ops(
                *(Op.AUTO_CONTRAST, Op.EQUALIZE, Op.INVERT), enhance=_one_of(1.9), rotate=_either_sign(30),
                posterize=_one_of(4), solarize=_one_of(0), shear=_either_sign(0.3),
            ),
        },
        translate=lambda side: _either_sign(100),
        bilinear=True,
    ),
    "fedlabel_released": _fixed(slots=1, level=10 / 30, ops_first=True),
    "fedlabel_paper": _fixed(slots=10, level=1 / 30),
    # FedSiam's FedMatch and FedFixMatch: n = 10, m = 10, read as 10 of the usual 30
    "fedsiam": _fixed(slots=10, level=10 / 30),
    # FedMatch: mild; its Equalize does nothing. It draws M once per image and shears bicubically; here per slot, nearest pixel
    "fedmatch": Variant(
        slots=6, probability=1.0,
        ops={
            **_ops(
                *(Op.IDENTITY, Op.AUTO_CONTRAST), enhance=_one_of(1 + 0.9 * _MILD, 1 - 0.9 * _MILD),
                posterize=_one_of(np.round(8 - 4 * _MILD)), solarize=_one_of(256 - 25 * _MILD),
                rotate=_one_of(360 * _MILD), shear=_either_sign(0.3 * _MILD),
            ),
            Op.CONTRAST: _one_of(1 + 0.5 * _MILD, 1 - 0.5 * _MILD),
            Op.BRIGHTNESS: _one_of(1 + 0.3 * _MILD, 1 - 0.3 * _MILD),
        },
        translate=lambda side: _either_sign(0.2 * _MILD * side),
        fill=128.0,
    ),
}  # fmt: skip

# (FL)^2's code: its Cutout gives the generator one bound, 32, which draws the center from (1, 32]
VARIANTS["fl2_released"] = VARIANTS["usb"]._replace(cutout=cutout(0, 0.5, (125, 123, 114), first=1), rounds_as_pillow=True)
