"""Whether a run's method and network, where they are the user's own, are still those that it began with.

`run.json` has digests of the files that registered them, in the order in which the run had them, and of the program that they
compute, which also shows changes in the files that they import. A run's folder has copies of the files.
"""

import hashlib
import json
import logging
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_ssl import methods, models
from fedjax_ssl.experiment.experiment import Experiment
from fedjax_ssl.experiment.settings import Settings
from fedjax_ssl.files import make_folder, read_json, replacing
from fedjax_ssl.origins import Origin, origin
from fedjax_ssl.runs.provenance import git_state, software, sources
from fedjax_ssl.simulation.execution import Execution
from fedjax_ssl.simulation.round import run_round
from fedjax_ssl.simulation.source import DeviceSource, RunInputs

REGISTERED = "registered"
"""The name of the digests in `run.json`, and of the folder with copies."""
REPOSITORY = "repository.diff"
"""The file beside copies with the state of their git repository, see `provenance.git_state`."""
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
    """The digests in `noted`, the content of a run's `run.json`, and after them the current ones, unless they are the newest.

    The files of digests that are new are copied to the run's folder, with the state of the git repository that they are in.
    """
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
            if one.place and (state := git_state(pathlib.Path(one.place).absolute().parent)):
                target = folder / REGISTERED / f"{group}-{len(own)}" / REPOSITORY
                make_folder(target.parent)
                with replacing(target) as file:
                    file.write(state)
    return history


def versions(folder: pathlib.Path) -> list[str]:
    """What a run's folder has of each version of the user's own files, in words; they are only read."""
    found = []
    for version in sorted(path for path in (folder / REGISTERED).glob("*-*") if path.is_dir()):
        names = ", ".join(sorted(path.name for path in version.iterdir() if path.name != REPOSITORY))
        state = version / REPOSITORY
        head, _, changes = state.read_text("utf-8", "replace").partition("\n") if state.is_file() else ("", "", "")
        at = f", at {head[:17]}{' with changes' if changes else ''}" if head else ""
        found.append(f"{REGISTERED}/{version.name}: {names}{at}")
    return found


def changed(path: pathlib.Path, settings: Settings, program: Mapping[str, str] | None = None) -> str:
    """How the code differs from what the `run.json` at `path` notes, in words; empty if it does not, or there is no such file.

    `program` has today's digests, as the function `program` returns them; None leaves the program out of the comparison. What
    an older version did not note counts as unchanged.
    """
    noted, here, found = read_json(path) if path.exists() else {}, origins(settings), list[str]()
    names = {group: f"{group}.name={getattr(settings, group).name}" for group in ("method", "model")}
    for group, name in names.items() if REGISTERED in noted else ():
        before, now = noted[REGISTERED].get(group, []), here.get(group)
        if before == ([now.digest] if now else []):
            continue
        those = f"those are in {REGISTERED}/{group}-{len(before)} of the run's folder" if before else "there were none"
        if now and before[-1:] == [now.digest]:
            found.append(f"{len(before)} versions of the files that register {name} ({now}) have run it, the last one: {those}")
        else:
            found.append(f"{name} is registered by other files than before ({now or 'the package'}); {those}")
    if noted.get("machine", {}).get("fedjax_ssl", sources()) != sources():
        found.append("the files of the package have changed since")
    before = noted.get("program", {})
    if not found and program and before.get("of") == program["of"] and before["digest"] != program["digest"]:
        code = " and ".join(f"{names[group]} ({one})" for group, one in here.items())
        same = "though its files are the same: see what they import or read"
        found.append(f"the code of {code} computes something else than before, {same}")
    return " and ".join(found)


def warn(said: Mapping[pathlib.Path, str], consequence: str) -> None:
    """Logs the `lines`. Each record has its text as `once`, so that a handler can drop a text that it has shown."""
    for text, line in lines(said, consequence).items():
        _log.warning(line, extra={"once": text})


def lines(said: Mapping[pathlib.Path, str], consequence: str) -> dict[str, str]:
    """One line for each different text, which names the first folder that it holds for and counts the others.

    Empty texts have none.
    """
    found = {}
    for text in dict.fromkeys(filter(None, said.values())):
        folders = [folder for folder, own in said.items() if own == text]
        more = f" and {len(folders) - 1} more" if len(folders) > 1 else ""
        found[text] = f"{folders[0]}{more}: {text}; {consequence}"
    return found


def program(experiment: Experiment) -> dict[str, str]:
    """A digest of what the user's own code computes, traced and not compiled, and one of what it depends on beside the code.

    Programs that differ in the latter are not compared. Empty where method and network are the package's.
    """
    if not origins(experiment.settings):
        return {}
    problem, source = experiment.problem, DeviceSource(experiment.problem)

    def whole(inputs: RunInputs, key: jax.Array, pools: tuple) -> tuple:
        state, prepared = source.initialize(inputs, key, pools)
        ready = source.open(state, inputs, pools)
        predict = next(iter(ready.method.predict.values()))
        return prepared, run_round(ready, Execution()), predict(state.server, pools[1].images[:2], jnp.ones(2, bool))

    lowered = jax.jit(whole).lower(RunInputs(problem.tables[0], problem.first_number), jax.random.key(0), source.pools)
    beside = software(), jax.default_backend(), experiment.layout.conv, experiment.settings.execution.dtype
    texts = {"digest": lowered.as_text(), "of": json.dumps(beside, sort_keys=True, default=str)}
    return {name: hashlib.blake2b(text.encode(), digest_size=16).hexdigest() for name, text in texts.items()}
