"""What the tests of config files share: expected values as a table, and their comparison with a file's."""

import ast
import importlib
import itertools

from fedjax_ssl.experiment.settings import Settings


def values(table: str) -> dict:
    """Keys and their values, written as lines such as `client, server: epochs=5 steps=0`."""
    found = {}
    for line in table.strip().splitlines():
        *groups, pairs = line.strip().split(": ")
        for group, pair in itertools.product(groups[0].split(", ") if groups else [""], pairs.split()):
            key, _, text = pair.partition("=")
            try:
                value = ast.literal_eval(text)
            except (ValueError, SyntaxError):
                value = text
            found[f"{group}.{key}".lstrip(".")] = value
    return found


FIXMATCH = values("method: name=fixmatch pseudo_labels=local divisor=batch strict=False confidence=0.95")  # as published


def settings(file: str, argument: str | None = None) -> Settings:
    """The settings of a config file, whose argument may also stand behind a colon."""
    file, _, behind = file.partition(":")
    config = importlib.import_module(f"configs.{file}").get_config(argument or behind or None)
    return Settings.from_dict(config.to_dict())


def flat(tree: dict, prefix: str = "") -> dict:
    items = [(f"{prefix}{key}", value) for key, value in tree.items()]
    return dict(itertools.chain(*(flat(v, f"{k}.").items() if isinstance(v, dict) else [(k, v)] for k, v in items)))


def without(tree: dict, prefixes: str | tuple[str, ...]) -> dict:
    return {key: value for key, value in tree.items() if not key.startswith(prefixes)}


def check(got: Settings, expected: dict) -> None:
    found = flat(got.to_dict())
    assert {key: found.get(key, "absent") for key in expected} == expected
    got.method_options()  # raises for an unknown or a wrong one
