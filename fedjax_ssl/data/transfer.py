"""One HTTP transfer into a file that may already hold the beginning."""

import re
from pathlib import Path

import requests
import tqdm
import urllib3

_CHUNK = 1 << 18
_TIMEOUT = (10, 60)  # seconds to connect, and between bytes
MOST = 1 << 30
"""The most bytes of a file whose size nobody publishes. Such files are much smaller, but a server's answer may never end."""
_BUSY = (408, 429)  # ask again; so do all from 500 on


class CutError(Exception):
    """A transfer ended early, or did not begin, and another attempt may go on with it."""


class RefusedError(Exception):
    """Another attempt would end likewise."""


def transfer(url: str, part: Path, size: int, label: str) -> None:
    """Appends to `part` what it lacks of the file at `url`, of `size` bytes (0: as the server says), under a progress bar.

    A server that cannot begin in the middle sends the whole file again. Raises CutError if the transfer ends early (`part` has
    what arrived), RefusedError if the server has no such file or one of another size or kind, and OSError if the disk is full.
    """
    have = part.stat().st_size if part.exists() else 0
    if size and have == size:
        return
    if size and have > size:
        part.unlink()
        have = 0
    # A proxy or server that packs what it sends, or calls a .gz file packed, would change its bytes and their number.
    headers = {"Accept-Encoding": "identity", "User-Agent": "fedjax_ssl"} | ({"Range": f"bytes={have}-"} if have else {})
    try:
        with requests.get(url, headers=headers, stream=True, timeout=_TIMEOUT) as response:
            have, whole = _accepted(response, url, part, have, size)
            _receive(response, part, have, whole, label)
    except (
        requests.ConnectionError, requests.Timeout, requests.exceptions.ChunkedEncodingError, urllib3.exceptions.HTTPError,
    ) as error:  # fmt: skip
        raise CutError(_reason(error)) from None
    except requests.RequestException as error:  # no address, too many redirects
        raise RefusedError(f"{url} cannot be fetched ({_reason(error)}): correct the address") from None


def _accepted(response: requests.Response, url: str, part: Path, have: int, size: int) -> tuple[int, int]:
    """How many bytes precede those that an answer brings, and how many there are in all (0: unknown).

    Where the server cannot go on from the end of `part`, that is deleted, and the next attempt begins anew.
    """
    status, headers = response.status_code, response.headers
    parts = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", headers.get("Content-Range", "")) if status == 206 else None
    if status == 416 or (status == 206 and (parts is None or int(parts[1]) != have)):
        part.unlink(missing_ok=True)  # as long as the server's file, or longer
        raise CutError("the server has no more of it")
    if status in _BUSY or status >= 500:
        raise CutError(f"HTTP status {status}")
    if status not in (200, 206):
        raise RefusedError(f"{url} answers with HTTP status {status}: set FEDJAX_SSL_MIRROR to another copy")
    have = have if parts else 0
    length = headers.get("Content-Length", "")
    whole = int(parts[2]) if parts and parts[2] != "*" else have + int(length) if length.isdecimal() else 0
    kind = headers.get("Content-Type", "").partition(";")[0]
    if kind == "text/html" or (size and whole and whole != size) or (not size and whole > MOST):
        got = f"{whole:,} bytes of {kind or 'unknown kind'}" if whole else kind
        wanted = f"{size:,} bytes are expected" if size else f"a file of at most {MOST:,} bytes is expected"
        raise RefusedError(
            f"{url} answers with {got}, and {wanted}: the file has moved, or a login page is in between; try another network, "
            "or set FEDJAX_SSL_MIRROR to another copy"
        )
    return have, size or whole


def _receive(response: requests.Response, part: Path, have: int, whole: int, label: str) -> None:
    bar = {"unit": "B", "unit_scale": True, "desc": label, "leave": False, "disable": None}
    with part.open("ab" if have else "wb") as file, tqdm.tqdm(total=whole or None, initial=have, **bar) as progress:
        for chunk in response.raw.stream(_CHUNK, decode_content=False):
            file.write(chunk)
            have += len(chunk)
            progress.update(len(chunk))
            if have > (whole or MOST):
                break
    if whole and have < whole:
        raise CutError(f"the connection ended after {have:,} of {whole:,} bytes")
    if not whole and have > MOST:
        part.unlink()
        raise RefusedError(
            f"{response.url} sends more than {MOST:,} bytes of a file whose size nobody publishes; nothing was kept: set "
            "FEDJAX_SSL_MIRROR to another copy, or give the file's size in FEDJAX_SSL_CHECKSUMS"
        )


def _reason(error: BaseException) -> str:
    """The innermost reason of an error of requests, which it has at its end, in a line."""
    text = " ".join(str(error).rpartition(": ")[2].strip("()'\"").split())[:200]
    return text + ")" * (text.count("(") - text.count(")")) if text else type(error).__name__
