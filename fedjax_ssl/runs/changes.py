"""Whether a run's method and network, where they are the user's own, are still those that it began with.

`run.json` has digests of the files that registered them, in the order in which the run had them, and of the programs that
predict and run a round, which tell of what those files import. A run's folder has copies of the files.
"""

import hashlib
import json
import logging
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl import methods, models
from fedjax_ssl.experiment.experiment import Experiment
from fedjax_ssl.experiment.settings import Settings
from fedjax_ssl.files import make_folder, plain, replacing
from fedjax_ssl.origins import Origin, origin

REGISTERED = "registered"
"""The name of the digests in `run.json`, and of the folder with copies."""
ENDED = "these results are not, or not all, of the files as they are now; --overwrite runs it anew"
GOES_ON = "its further rounds are of the files as they are now; --overwrite starts anew"
LOADED = "its checkpoint is not, or not all, of the files as they are now"
_log = logging.getLogger(__name__)


def origins(settings: Settings) -> dict[str, Origin]:
    """The files of a run's own method and network, by `method` and `model`; without those of the package."""
    things = {
        "method": methods.METHODS[settings.method.name],
        "model": models.MODELS[settings.model.name].module,
    }
    found = {group: origin(group, getattr(settings, group).name, thing) for group, thing in things.items()}
    return {group: one for group, one in found.items() if one is not None}


def digests(settings: Settings) -> dict[str, str]:
    """Their digests."""
    return {group: one.digest for group, one in origins(settings).items()}


def kept(folder: pathlib.Path, noted: Mapping[str, Any], settings: Settings) -> dict[str, list[str]]:
    """All digests that a run has had, whose `run.json` was `noted`, with those of now last; their files are copied."""
    history = {group: list(before) for group, before in noted.get(REGISTERED, {}).items()}
    for group, one in origins(settings).items():
        own = history.setdefault(group, [])
        if own[-1:] != [one.digest]:
            own.append(one.digest)
            for number, (name, text) in enumerate(one.files, start=1):
                target = folder / REGISTERED / f"{group}-{len(own)}" / name
                target = target if not target.exists() else target.with_stem(f"{target.stem}-{number}")
                make_folder(target.parent)
                with replacing(target) as file:
                    file.write(text)
    return history


def changed(noted: Mapping[str, Any], settings: Settings) -> str:
    """How the files are others than those of the run whose `run.json` was `noted`, in words; empty: they are the same.

    A run of a version that noted none counts as the same.
    """
    here, found = origins(settings), []
    for group in ("method", "model") if REGISTERED in noted else ():
        before, now, name = (
            noted[REGISTERED].get(group, []),
            here.get(group),
            f"{group}.name={getattr(settings, group).name}",
        )
        if before == ([now.digest] if now else []):
            continue
        where = f"{REGISTERED}/{group}-{len(before)} of the run's folder"
        if not before:
            found.append(f"{name} is registered by files that were not there when it began ({now})")
        elif now and before[-1] == now.digest:
            found.append(
                f"{len(before)} versions of the files that register {name} ({now}) have run it, the last one is in {where}"
            )
        else:
            found.append(
                f"{name} is registered by other files than before ({now or 'the package'}); what they were is in {where}"
            )
    return " and ".join(found)


def of_package(noted: Mapping[str, Any], sources: str) -> str:
    """Words for a run that the package's own files, whose digest is `sources`, are not those of; empty: they are."""
    return (
        "the files of the package have changed since" if noted.get("machine", {}).get("fedjax_ssl", sources) != sources else ""
    )


def warn(said: Mapping[pathlib.Path, str], consequence: str) -> None:
    """Logs the `lines`; a handler may drop those whose `once` it had before."""
    for text, line in lines(said, consequence).items():
        _log.warning(line, extra={"once": text})


def lines(said: Mapping[pathlib.Path, str], consequence: str) -> dict[str, str]:
    """A line for each text of what has changed for runs' folders, however many it holds for; none for empty texts."""
    found = {}
    for text in dict.fromkeys(filter(None, said.values())):
        folders = [folder for folder, own in said.items() if own == text]
        more = f" and {len(folders) - 1} more" if len(folders) > 1 else ""
        found[text] = f"{folders[0]}{more}: {text}; {consequence}"
    return found


def predicting(experiment: Experiment) -> str:
    """A digest of the program that evaluates, where method or network are one's own; else empty. Traced, not compiled."""
    if not origins(experiment.settings):
        return ""
    spec = experiment.problem.spec
    server, _ = jax.eval_shape(lambda key: experiment.method.init(key, spec), jax.random.key(0))
    images = experiment.problem.test.images[:2]
    predict = next(iter(experiment.method.predict.values()))
    program = jax.make_jaxpr(predict)(server, jnp.asarray(images), jnp.ones(len(images), bool))
    found = hashlib.blake2b(re.sub(r" at 0x[0-9a-f]+", "", str(program.jaxpr)).encode(), digest_size=16)
    for array in program.consts:
        found.update(np.asarray(array).tobytes())
    return found.hexdigest()


def key(*parts: Any) -> str:
    """A digest of what two programs have to have in common to be compared."""
    return hashlib.blake2b(json.dumps(plain(parts), sort_keys=True, default=str).encode(), digest_size=8).hexdigest()


def first_of(noted: Mapping[str, Any], programs: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
    """The programs for a `run.json`: the first ones, so that each later call says that they have changed, if comparable."""
    before = noted.get("programs", {})
    return {**before, **{name: one for name, one in programs.items() if before.get(name, {}).get("of") != one["of"]}}


def other_program(noted: Mapping[str, Any], settings: Settings, programs: Mapping[str, Mapping[str, str]]) -> str:
    """Words for a run of which one of the programs, by their names, is another than in its `run.json`; empty: none is.

    Those of another machine, version or layout are not compared.
    """
    before = noted.get("programs", {})
    pairs = [(before[name], now) for name, now in programs.items() if name in before]
    if all(old["of"] != now["of"] or old["digest"] == now["digest"] for old, now in pairs):
        return ""
    names = " and ".join(f"{group}.name={getattr(settings, group).name} ({one})" for group, one in origins(settings).items())
    return (
        f"the code of {names} computes something else than before, though its files are the same: see what they import or read"
    )
