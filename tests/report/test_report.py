"""`python -m launch.report` on real runs: page, figures, tables and commands; in Chromium wide and as on a phone."""

import csv
import html
import json
import pathlib
import re
import shlex
import shutil

import numpy as np
import pytest

from fedjax_ssl.experiment.settings import Settings
from fedjax_ssl.files import plain, write_json
from fedjax_ssl.report import groups, sections
from fedjax_ssl.runs import reading
from launch import config_file, report
from tests.commands import CONFIG, FIXMATCH, succeeded

RUNS = ("average/0", "average/1", "average/2", "fixmatch/0")
SLOWEST = 300_000  # milliseconds that a browser may take on a busy machine


@pytest.fixture(scope="module")
def folder(tmp_path_factory, own_methods) -> pathlib.Path:
    """Real runs: three seeds of one method, of which one seems to be killed, one run of another, and what others may add."""
    top = tmp_path_factory.mktemp("report") / "runs & more"
    top.mkdir()
    for name, text, several in (("average", CONFIG, ["--config.seeds=3"]), ("fixmatch", FIXMATCH, [])):
        (top / f"{name}.py").write_text(text.replace("synthetic", "digits"))  # whose images all seeds share
        succeeded(f"--config={top / name}.py", *several, f"--workdir={top / name}{'' if several else '/0'}")
    killed = top / "average" / "2"
    (killed / "summary.json").unlink()
    log = (killed / "metrics.jsonl").read_text().splitlines(keepends=True)
    (killed / "metrics.jsonl").write_text("".join([*log[:2], log[2][:40]]))
    generator = np.random.default_rng(0)
    confusion = generator.multinomial(20, np.full(10, 0.1), 10)
    evaluation = {"round": 6, "accuracy": 0.5, "class_accuracy": np.linspace(0, 1, 10), "confusion": confusion}
    evaluation["clients"] = {"accuracy": [0.5, None, 0.75]}
    write_json(top / "fixmatch" / "0" / "evaluation.json", plain(evaluation))  # as `launch.evaluate --clients --save` does
    clients = top / "fixmatch" / "0" / "clients"
    clients.mkdir()
    record = {"client/id": [0, 2, 5], "client/threshold": [0.1, 0.2, 0.3]}
    np.savez(clients / "round_000001.npz", **record, **{"client/class_thresholds": generator.uniform(size=(3, 10))})
    return top


@pytest.fixture(scope="module")
def page(folder) -> pathlib.Path:
    out = folder.parent / "report.html"
    done = succeeded(str(folder), f"--out={out}", "--x=bytes", program=report)
    said = [line.removeprefix(f"note: {folder.name}/average/2: ") for line in done.stderr.splitlines()]
    assert said == ["unfinished: round 2 of 6"]
    return out


def test_the_page_has_every_run_and_needs_nothing_from_elsewhere(folder, page):
    text = page.read_text()
    for name in RUNS:
        assert f">{html.escape(folder.name)}/{name}</th>" in text
    assert not [target for target in re.findall(r'(?:src|href)="([^"]*)"', text) if not target.startswith(("#", "data:"))]
    assert "<script" not in text
    assert "url(" not in text
    anchors = re.findall(r'id="([^"]*)"', text)
    assert len(set(anchors)) == len(anchors)
    assert set(re.findall(r'href="#([^"]*)"', text)) <= set(anchors)
    assert all(len(alt) > 20 for alt in re.findall(r'<img [^>]*alt="([^"]*)"', text))


def test_the_tables_hold_what_the_logs_say(folder, page):
    with (page.parent / "report_files" / "results.csv").open() as file:
        rows = {row["method"]: row for row in csv.DictReader(file)}
    for method, seeds in (("average", (0, 1)), ("FixMatch", (0,))):
        logs = [(folder / method.lower() / str(seed) / "metrics.jsonl").read_text().splitlines() for seed in seeds]
        accuracies = [[100 * row["eval/accuracy"] for row in map(json.loads, log) if "eval/accuracy" in row] for log in logs]
        ends = [values[-1] for values in accuracies]
        assert float(rows[method]["last, %"]) == pytest.approx(np.mean(ends), rel=1e-4)
        assert float(rows[method]["last 5, %"]) == pytest.approx(np.mean([np.mean(v[-5:]) for v in accuracies]), rel=1e-4)
        spread = f"{np.std(ends, ddof=1):.6g}" if len(seeds) > 1 else ""
        assert rows[method]["last, %: sd"] == spread
    assert (rows["average"]["runs"], rows["FixMatch"]["runs"]) == ("2 of 3", "1")


def test_figures_and_tables_lie_beside_the_page(page):
    names = {path.name for path in (page.parent / "report_files").iterdir()}
    figures = (
        "eval_accuracy_bytes", "panel", "diagnostics_label_ratio_bytes", "confusion_fixmatch", "clients_histogram",
        "trace_threshold_fixmatch", "trace_class_thresholds_fixmatch", "split_1_labeled", "split_1_unlabeled",
    )  # fmt: skip
    tables = ("results", "costs", "runs", "per_class", "clients")
    assert {f"{name}.{suffix}" for name in figures for suffix in ("svg", "png", "pdf")} <= names
    assert {f"{name}.{suffix}" for name in tables for suffix in ("txt", "csv", "tex")} <= names


@pytest.mark.slow
def test_the_same_runs_give_the_same_bytes_and_what_an_earlier_report_left_goes(folder, page):
    def files() -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in (page, *(page.parent / "report_files").iterdir())}

    before = files()
    stale = page.parent / "report_files" / "files.txt"
    stale.write_text(stale.read_text() + "old.svg\n../kept.svg\n")
    for path in (stale.with_name("old.svg"), stale.with_name("own.txt"), page.parent / "kept.svg"):
        path.write_text("x")
    succeeded(str(folder), f"--out={page}", "--x=bytes", program=report)
    assert files() == before | {"own.txt": b"x"}
    assert (page.parent / "kept.svg").exists()
    stale.with_name("own.txt").unlink()


@pytest.mark.ci
def test_a_note_says_that_no_run_has_the_chosen_axis(folder, tmp_path):
    out = tmp_path / "report.html"
    done = succeeded(str(folder / "fixmatch"), f"--out={out}", "--x=simulated", "--interval", program=report)
    assert "confidence intervals" in out.read_text()
    assert done.stderr == "note: --x=simulated: no run has simulated seconds, which come with config.system.*\n"


def test_each_command_of_the_page_makes_its_runs(folder, page):
    text = html.unescape(re.sub(r"</?span>", "", page.read_text()))
    lines = [shlex.split(line)[3:] for line in re.findall(r"python -m launch.run [^\n<]*", text)]
    typed = [[f"--config={folder / name}.py"] for name in ("average", "fixmatch")]
    assert lines == [[*typed[0], "--config.seeds=3"], typed[1]]


def test_the_command_of_a_run_that_was_made_in_python_has_a_config_file(tmp_path):
    held = Settings.from_dict(config_file.read("digits:fl2", {"rounds": "7"}).tree).to_dict()
    for seed in (3, 5):
        (tmp_path / f"{seed}").mkdir()
        write_json(tmp_path / f"{seed}" / "config.json", held | {"seed": seed})
        write_json(tmp_path / f"{seed}" / "run.json", {})
    files: dict[str, bytes] = {}
    (group,) = groups.group(reading.find([tmp_path]).runs).groups
    lines = sections.commands(group, str(tmp_path), files)
    for seed, line in zip((3, 5), lines, strict=True):
        (tmp_path / "config_fl2_1.py").write_bytes(files["config_fl2_1.py"])
        *_, config, override = shlex.split(line)
        assert override == f"--config.seed={seed}"
        again = config_file.read(config.removeprefix("--config="), {"seed": f"{seed}"}).tree
        assert plain(Settings.from_dict(again).to_dict()) == plain(held | {"seed": seed})


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("no Chromium is installed")
    with playwright.sync_playwright() as driver:
        # Root, as in CI, has no sandbox, and a container little shared memory.
        options = ["--no-sandbox", "--disable-dev-shm-usage"]
        program = driver.chromium.launch(executable_path=found, args=options, timeout=SLOWEST)
        yield program
        program.close()


@pytest.mark.parametrize("width", [1280, 390])
def test_chromium_shows_every_run_without_an_error_or_a_page_that_scrolls_sideways(folder, page, browser, width):
    view = browser.new_page(viewport={"width": width, "height": 844})
    errors: list[str] = []
    requests: list[str] = []
    view.on("console", lambda message: errors.append(message.text))
    view.on("pageerror", lambda error: errors.append(str(error)))
    view.on("request", lambda request: requests.append(request.url))
    view.goto(page.as_uri(), timeout=SLOWEST)
    assert view.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    shown = view.locator("#Runs tbody th").all_inner_texts()
    assert tuple(name.removeprefix(f"{folder.name}/") for name in shown[: len(RUNS)]) == RUNS
    assert view.evaluate("[...document.images].every(image => image.naturalWidth > 100 && image.clientWidth > 250)")
    assert view.locator("nav a").count() == view.locator("section").count()
    assert [url for url in requests if not url.startswith(("file:", "data:"))] == []
    assert errors == []
    view.close()
