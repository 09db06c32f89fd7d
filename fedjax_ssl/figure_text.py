"""Texts of figures: matplotlib would draw a character that its font lacks as a box, and warn of each."""

import functools
import re
import unicodedata

FONT = "DejaVu Sans"
"""The font that comes with matplotlib, so that figures are the same everywhere."""
MATH = re.compile(r"(\$[^\s$](?:[^$]*[^\s$])?\$)")
r"""Mathematics in a label, as LaTeX and matplotlib both typeset it: `$\beta = 0.5$`."""


@functools.cache
def error_of_math(text: str) -> str:
    """What matplotlib does not understand of the mathematics in a text, in one line; empty: nothing."""
    from matplotlib.mathtext import MathTextParser

    try:
        for formula in MATH.findall(text):
            MathTextParser("path").parse(formula)
    except ValueError as error:
        return " ".join(str(error).split())
    return ""


def has_math(text: str) -> bool:
    """Whether a text has mathematics that can be typeset."""
    return bool(MATH.search(text)) and not error_of_math(text)


@functools.cache
def _glyphs() -> frozenset[int]:
    """The characters that the font has, bold or not."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    fonts = (get_font(findfont(FontProperties(family=FONT, weight=weight))) for weight in ("normal", "bold"))
    return frozenset.intersection(*(frozenset(font.get_charmap()) for font in fonts))


def _is_drawn(character: str) -> bool:
    """Whether a character is drawn as it should be: letters that are written from right to left are not."""
    is_left_to_right = unicodedata.bidirectional(character) not in ("R", "AL")
    return character == "\n" or (ord(character) in _glyphs() and is_left_to_right)


def is_drawable(text: str) -> bool:
    """Whether a figure can show a text."""
    return all(map(_is_drawn, text))


def drawable(text: str) -> str:
    r"""The text with Python's escapes in place of what a figure cannot show: `\u732b` for the Chinese word for cat."""
    return "".join(one if _is_drawn(one) else one.encode("unicode_escape").decode() for one in text)
