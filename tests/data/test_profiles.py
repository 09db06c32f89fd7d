"""Clients' devices: drawn by each client's id, or read from files that are as documented, or refused in one line."""

import os

import numpy as np
import pytest

from fedjax_ssl.data import profiles
from tests.data.common import message_of

TRACE = "client,start,end\n2,0,100\n0,3600,7200\n2,80000,90000.5\n"
RATES = "client,examples_per_s,up_bytes_per_s,down_bytes_per_s\n1,20,2e3,4000\n0,10,1e3,2000\n"


def written(folder, text):
    """The path of a file with this text, in Latin-1; None: of a pipe, which may never end."""
    path = folder / "clients.csv"
    os.mkfifo(path) if text is None else path.write_text(text, encoding="latin-1")
    return str(path)


def windows_of(path):
    return profiles.read_windows(path, 4, 86_400)


def rates_of(path):
    return profiles.read_rates(path, 2)


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
    windows = windows_of(written(tmp_path, TRACE))
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
    ("read", "text", "says"),
    [
        (windows_of, "", "got the header nothing, accepted: client,start,end"),
        (windows_of, "client,end,start\n", "got the header client,end,start, accepted: client,start,end"),
        (windows_of, TRACE + "4,0,1\n", "row 5: got 4,0,1, accepted: a client from 0 to 3, then 0 <= start < 86400"),
        (windows_of, TRACE + "-1,0,1\n", "row 5"),
        (windows_of, TRACE + "1.5,0,1\n", "row 5"),
        (windows_of, TRACE + "1,0\n", "row 5: got 1,0, accepted"),
        (windows_of, TRACE + "1,0,1,2\n", "row 5"),
        (windows_of, TRACE + "1,nan,1\n", "row 5"),
        (windows_of, TRACE + "1,5,5\n", "row 5"),
        (windows_of, TRACE + "1,86400,86401\n", "row 5"),
        (windows_of, TRACE + "1,5,86406\n", "row 5"),
        (windows_of, TRACE + "one,5,6\n", "row 5: got one,5,6"),
        (windows_of, TRACE + "\n\none,5,6\n", "row 7: got one,5,6"),
        (windows_of, None, "clients.csv is a named pipe: give a regular file"),
        (windows_of, TRACE + "0_1,0,1\n", "row 5"),
        (windows_of, TRACE + "1,1_0,20\n", "row 5"),
        (rates_of, RATES + "0,1,1,1\n", "got 2 rows of client 0, accepted: one of each client"),
        (rates_of, RATES.replace("0,10,1e3,2000\n", ""), "got 0 rows of client 0"),
        (rates_of, RATES.replace(",2000", ",0"), "row 3: got 0,10,1e3,0, accepted: a client from 0 to 1, then numbers in [1"),
        (rates_of, RATES.replace(",2000", ",inf"), "row 3"),
        (rates_of, TRACE, "accepted: client,examples_per_s,up_bytes_per_s,down_bytes_per_s"),
        (rates_of, "\xff\xfe\0client", "clients.csv is not a CSV file in UTF-8"),
    ],
)
def test_what_is_wrong_in_a_file_is_one_line(tmp_path, read, text, says):
    assert says in message_of(ValueError, read, written(tmp_path, text))
