"""The README of all measurements against the results that it is written from."""

from benchmarks import harness, report


def test_the_committed_readme_is_what_the_command_writes_and_has_as_many_cells_in_each_row_of_a_table():
    text = report.written()
    assert report.README.read_text() == text, "run python -m benchmarks.report"
    assert "Not measured yet." not in text
    for table in (part.splitlines() for part in text.split("\n\n") if part.startswith("|")):
        assert len({row.count("|") for row in table}) == 1, table


def test_a_section_has_a_table_of_each_machine_with_its_source(tmp_path):
    about = {"machine": "a machine", "device": "2 x cpu", "commit": "0123456789abcdef", "warm_up": "1 round"}
    about |= {"command": "python -m benchmarks.compare", "versions": {"python": "3.13", "jax": "0.12"}}
    one = {"case": {"kind": "cnn", "cohort": 10, "name": "pfl"}, "seconds": 0.51234, "quartiles": [0.5, 0.6], "ratio": 2.0}
    one |= {"least_and_greatest": [1.5, 2.25], "images_per_s": 1234.5, "difference": 2e-5}
    failed = {"case": {"kind": "cnn", "cohort": 10, "name": "Flower"}, "error": "no | wheel"}
    harness.save(tmp_path / "compare_here.json", about, [one, failed])
    lines = report.section("compare", tmp_path).splitlines()
    assert lines[0] == "a machine (`compare_here.json`):"
    assert lines[4] == "| cnn | 10 | pfl | 0.512 (0.5 to 0.6) | 2 (1.5 to 2.25) | 1,234 | 2e-05 |"
    assert lines[5] == "| cnn | 10 | Flower | no / wheel |  |  |  |"
    assert lines[7] == "- `python -m benchmarks.compare`, commit 012345678, 2 x cpu, python 3.13, jax 0.12, warm-up 1 round"
    assert report.section("costs", tmp_path) == "Not measured yet."


def test_a_sweeps_source_has_every_commit_and_the_number_of_seeds():
    run = {"command": "c", "commit": "0123456789abcdef, fedcba9876543210", "device": "1 x cpu", "warm_up": "none"}
    run |= {"versions": {"python": "3.13", "jax": "0.12"}, "results": [{"runs": [{}, {}]}, {"runs": [{}, {}, {}]}]}
    expected = "- `c`, commit 012345678, fedcba987, 2 or 3 seeds, 1 x cpu, python 3.13, jax 0.12, warm-up none"
    assert report.source(run) == expected
