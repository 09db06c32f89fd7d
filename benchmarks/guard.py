"""What got slower since another commit: rounds of five networks, in turns with a checkout of that commit beside this one.

    python -m benchmarks.guard [--against HEAD] [--workloads fl2_cnn ...]

For use before a release; about five minutes on two CPU cores. A network counts as slower if it takes longer in three of four
turns or more, and more than 1.03 times as long in the median turn. Exit status: 0 nothing is slower; 1 something is, or failed.
"""

import argparse
import pathlib
import subprocess
import sys
import tempfile

from benchmarks import harness, round_time
from benchmarks.harness import Result, Worker

SLOWER = 1.03


def verdict(this: Result, other: Result) -> str:
    """What two results of one network say, in words; `ratio` of `other` is its seconds by those of this checkout."""
    if error := this.get("error") or other.get("error"):
        return f"failed: {error}"
    low, high = other["ratio_quartiles"]  # of seconds there by seconds here
    ratio = 1 / other["ratio"]
    is_slower = ratio > SLOWER and high < 1
    return f"{ratio:.3f} times as long as before ({1 / high:.3f} to {1 / low:.3f}){': SLOWER' * is_slower}"


def compared(name: str, other: pathlib.Path, on_cpu: bool) -> str:
    """The verdict on a network, of this checkout and another one."""
    cohort = 2 * harness.cores() if on_cpu else 10
    arguments = argparse.Namespace(on_cpu=on_cpu, compare_with=other, cohort=cohort, layouts=["usual"], evaluations=None)
    with Worker() as worker:
        ceilings = worker.ask("ceilings", precisions=["float32 default"])
    return verdict(*round_time.measure(name, arguments, ceilings))


def main() -> None:
    """Prints a line for each network."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", default="HEAD", help="the commit to compare with (%(default)s: what is not committed)")
    parser.add_argument("--workloads", nargs="+", choices=list(round_time.WORKLOADS), default=list(round_time.WORKLOADS))
    options = parser.parse_args()
    with Worker() as worker:
        on_cpu = "cpu" in worker.ask("device").lower()
    found = []
    with tempfile.TemporaryDirectory() as folder:
        other = pathlib.Path(folder, "other")
        git = ["git", "-C", str(harness.ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(other), options.against], check=True)
        try:
            for name in options.workloads:
                found.append(compared(name, other, on_cpu))
                print(f"{name}: {found[-1]}", flush=True)
        finally:
            subprocess.run([*git, "remove", "--force", str(other)], check=True)
    sys.exit(any("SLOWER" in one or one.startswith("failed") for one in found))


if __name__ == "__main__":
    main()
