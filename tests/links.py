"""Whether the addresses that the pages link to answer: ``python -m tests.links``, or ``make links``.

It needs the internet, so no test calls it. Each address is asked for once; some sites answer a program with 403 or 429
where they would show a browser the page, which is reported and counts as an answer.
"""

from __future__ import annotations

import re
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md"), ROOT / "bench" / "README.md", ROOT / "pyproject.toml"]
ADDRESS = re.compile(r"https?://[^\s)>\]\"'`|]+")
SHY = (403, 429)  # statuses by which a site turns programs away
TIMEOUT = 20  # seconds


def addresses(pages: Iterable[Path]) -> dict[str, list[str]]:
    """Each address, without its anchor, and the names of the files that have it."""
    found: dict[str, list[str]] = {}
    for page in sorted(pages):
        for address in ADDRESS.findall(page.read_text(encoding="utf-8")):
            names = found.setdefault(address.partition("#")[0].rstrip(".,;:"), [])
            if page.name not in names:
                names.append(page.name)
    return found


def answer(address: str) -> str:
    """ "" if the address answers, else why not; may start with "shy", for a site that turns programs away."""
    request = urllib.request.Request(address, headers={"User-Agent": "Mozilla/5.0 (link check)"})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT):
            return ""
    except urllib.error.HTTPError as error:
        return f"shy: status {error.code}" if error.code in SHY else f"status {error.code}"
    except (OSError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def dead(pages: Iterable[Path], ask: Callable[[str], str] = answer) -> list[str]:
    """A line for each address that does not answer. Prints a line for every address."""
    found = addresses(pages)
    with ThreadPoolExecutor(4) as pool:
        answers = dict(zip(found, pool.map(ask, found), strict=True))
    for address, said in answers.items():
        print(f"{said or 'ok':30} {address}")
    silent = {address: said for address, said in answers.items() if said and not said.startswith("shy")}
    return [f"{address} ({', '.join(found[address])}): {said}" for address, said in silent.items()]


if __name__ == "__main__":
    sys.exit("\n".join(dead(PAGES)) or 0)
