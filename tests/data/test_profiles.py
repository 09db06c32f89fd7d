"""Clients' devices: drawn by each client's id, or read from files that are as documented, or refused in one line."""

import os

import numpy as np
import pytest

from fedjax_ssl.data import profiles

TRACE = "client,start,end\n2,0,100\n0,3600,7200\n2,80000,90000.5\n"
RATES = "client,examples_per_s,up_bytes_per_s,down_bytes_per_s\n1,20,2e3,4000\n0,10,1e3,2000\n"


def written(folder, text):
    path = folder / "clients.csv"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_a_clients_numbers_are_lognormal_and_depend_on_seed_and_id_alone():
    speed, up, down = profiles.lognormal(3, 20_000, (100.0, 0.0, 50.0), 0.5, 1.0)
    assert np.isinf(up).all()
    for values, median, sigma in ((speed, 100, 0.5), (down, 50, 1.0)):
        logs = np.log(values)
        np.testing.assert_allclose(logs.mean(), np.log(median), atol=5 * sigma / np.sqrt(20_000))
        np.testing.assert_allclose(logs.std(), sigma, rtol=0.03)
    fewer = profiles.lognormal(3, 10, (100.0, 0.0, 50.0), 0.5, 1.0)
    np.testing.assert_array_equal(fewer[0], speed[:10])
    assert not np.array_equal(profiles.lognormal(4, 10, (100.0, 0.0, 50.0), 0.5, 1.0)[0], fewer[0])
    both = profiles.lognormal(3, 10, (100.0, 20.0, 50.0), 0.5, 1.0)
    np.testing.assert_allclose(both[2] / both[1], 2.5, rtol=1e-6)  # a slow line is slow both ways


def test_diurnal_windows_begin_around_the_evening():
    windows = profiles.diurnal(0, 20_000, window=7200, spread=3600, period=86_400)
    assert windows.shape == (20_000, 1, 2)
    begin, end = windows[:, 0].T
    np.testing.assert_allclose(end - begin, 7200, atol=0.01)
    assert begin.min() >= 0
    assert begin.max() < 86_400
    np.testing.assert_allclose(np.median(begin), 20 * 3600, atol=200)
    np.testing.assert_allclose(np.mean(np.abs(begin - 20 * 3600) < 3600), 0.683, atol=0.02)


def test_a_trace_of_a_file(tmp_path):
    windows = profiles.read_windows(written(tmp_path, TRACE), 4, 86_400)
    expected = np.zeros((4, 2, 2), np.float32)
    expected[0, 0], expected[2] = (3600, 7200), [(0, 100), (80_000, 90_000.5)]
    np.testing.assert_array_equal(windows, expected)
    assert profiles.read_windows(written(tmp_path, "client,start,end\n"), 4, 10).shape == (4, 1, 2)


def test_windows_that_do_not_fit_into_memory_are_refused(tmp_path, monkeypatch):
    path = written(tmp_path, TRACE)
    size = profiles.read_windows(path, 4, 86_400).nbytes
    monkeypatch.setattr(profiles, "free_bytes", lambda: size)
    assert profiles.read_windows(path, 4, 86_400).nbytes == size
    monkeypatch.setattr(profiles, "free_bytes", lambda: size - 1)
    with pytest.raises(ValueError, match=r"csv: got 2 windows of client 2, 6.4e-08 GB .*, accepted: what fits into 6.3e-08"):
        profiles.read_windows(path, 4, 86_400)


def test_rates_of_a_file(tmp_path):
    speed, up, down = profiles.read_rates(written(tmp_path, RATES), 2)
    assert (speed.tolist(), up.tolist(), down.tolist()) == ([10, 20], [1000, 2000], [2000, 4000])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "got the header nothing, accepted: client,start,end"),
        ("client,end,start\n", "got the header client,end,start, accepted: client,start,end"),
        (TRACE + "4,0,1\n", "row 5: got 4,0,1, accepted: a client from 0 to 3, then 0 <= start < 86400"),
        (TRACE + "-1,0,1\n", "row 5"),
        (TRACE + "1.5,0,1\n", "row 5"),
        (TRACE + "1,0\n", "row 5: got 1,0, accepted"),
        (TRACE + "1,0,1,2\n", "row 5"),
        (TRACE + "1,nan,1\n", "row 5"),
        (TRACE + "1,5,5\n", "row 5"),
        (TRACE + "1,86400,86401\n", "row 5"),
        (TRACE + "1,5,86406\n", "row 5"),
        (TRACE + "one,5,6\n", "row 5: got one,5,6"),
        (TRACE + "\n\none,5,6\n", "row 7: got one,5,6"),
    ],
)
def test_what_a_bad_trace_says(tmp_path, text, says):
    with pytest.raises(ValueError) as error:
        profiles.read_windows(written(tmp_path, text), 4, 86_400)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (RATES + "0,1,1,1\n", "got 2 rows of client 0, accepted: one of each client"),
        (RATES.replace("0,10,1e3,2000\n", ""), "got 0 rows of client 0"),
        (RATES.replace(",2000", ",0"), "row 3: got 0,10,1e3,0, accepted: a client from 0 to 1, then numbers in [1e-09, 1e+30]"),
        (RATES.replace(",2000", ",inf"), "row 3"),
        (TRACE, "accepted: client,examples_per_s,up_bytes_per_s,down_bytes_per_s"),
    ],
)
def test_what_bad_rates_say(tmp_path, text, says):
    with pytest.raises(ValueError) as error:
        profiles.read_rates(written(tmp_path, text), 2)
    assert says in str(error.value)


def test_a_pipe_which_may_never_end_is_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe.csv")
    with pytest.raises(ValueError, match=r"pipe.csv, which is no file, accepted: a CSV file in UTF-8"):
        profiles.read_windows(str(tmp_path / "pipe.csv"), 2, 10)


def test_what_a_missing_or_binary_file_says(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere.csv .*accepted: a CSV file in UTF-8"):
        profiles.read_rates(str(tmp_path / "nowhere.csv"), 2)
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00client")
    with pytest.raises(ValueError, match="accepted: a CSV file in UTF-8"):
        profiles.read_rates(str(tmp_path / "binary.csv"), 2)
