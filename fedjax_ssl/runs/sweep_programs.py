"""The programs that the cells of a sweep need: cells that differ in one number alone share one."""

import functools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

from fedjax_ssl.experiment.expansion import flattened, runs_of
from fedjax_ssl.runs.sweep import Cell


class Program(NamedTuple):
    """The cells of one `launch.run`: one, or several that differ in the number `vary` alone."""

    cells: tuple[Cell, ...]
    vary: str = ""

    @property
    def is_shared(self) -> bool:
        """Whether it has several cells."""
        return len(self.cells) > 1

    @property
    def name(self) -> str:
        """The name of its folder, while it runs, and of its log."""
        return "shared@" * self.is_shared + self.cells[0].name

    def settings(self, seeds: int) -> Any:
        """The settings of all its runs."""
        several = {"vary": self.vary, "values": tuple(map(self._value, self.cells))} if self.is_shared else {}
        return self.cells[0].settings.model_copy(update={"seeds": seeds, **several})

    def _value(self, cell: Cell) -> Any:
        return functools.reduce(operator.getitem, self.vary.split("."), cell.settings.to_dict())


def programs(cells: Sequence[Cell], least: int) -> list[Program]:
    """The programs of cells, in their order: those that differ in a number that `vary` takes share one.

    There are at least `least`, if there are so many cells. A cell whose number is 0 has one of its own: 0 often switches a part
    of a program off.
    """
    flat = {cell.name: flattened(cell.settings.to_dict()) for cell in cells}
    kinds: dict[tuple[str, str], list[Cell]] = {}
    for key in sorted({key for own in flat.values() for key, value in own.items() if type(value) is float}):
        if len({own.get(key) for own in flat.values()}) > 1:
            for cell in (cell for cell in cells if flat[cell.name].get(key)):
                others = repr({other: value for other, value in flat[cell.name].items() if other != key})
                kinds.setdefault((key, others), []).append(cell)
    left, found = {cell.name: cell for cell in cells}, []
    for (key, _), own in sorted(kinds.items(), key=lambda kind: -len(kind[1])):
        program = Program(tuple(cell for cell in own if cell.name in left), key)
        if program.is_shared and _are_its_runs(program):
            found.append(program)
            left = {name: cell for name, cell in left.items() if cell not in program.cells}
    found += [Program((cell,)) for cell in left.values()]
    while len(found) < min(least, len(cells)):
        largest = max(found, key=lambda one: len(one.cells))
        half = len(largest.cells) // 2
        found.remove(largest)
        found += [largest._replace(cells=part) for part in (largest.cells[:half], largest.cells[half:])]
    return sorted(found, key=lambda one: cells.index(one.cells[0]))


def _are_its_runs(program: Program) -> bool:
    """Whether the runs of a program with several values are those that its cells ask for."""
    try:
        return [run.settings for run in runs_of(program.settings(seeds=1))] == [cell.settings for cell in program.cells]
    except ValueError:  # a number that does not vary
        return False
