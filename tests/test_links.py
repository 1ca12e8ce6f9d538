"""The check of external addresses finds them, and tells answers from silence. Nothing outside this machine is asked."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tests.links import PAGES, addresses, dead


class Site(BaseHTTPRequestHandler):
    """Answers with the status that its path names."""

    def do_GET(self) -> None:
        self.send_response(int(self.path.strip("/")))
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture
def site() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Site)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_addresses_are_found_once_without_what_surrounds_them(tmp_path: Path) -> None:
    one, two = tmp_path / "one.md", tmp_path / "two.md"
    one.write_text(
        "[a](https://a.example/x#part), `https://b.example/y`. See https://a.example/x.\n| https://c.example |\n"
    )
    two.write_text("<https://b.example/y>")
    assert addresses([one, two]) == {
        "https://a.example/x": ["one.md"],
        "https://b.example/y": ["one.md", "two.md"],
        "https://c.example": ["one.md"],
    }


def test_who_does_not_answer_is_named_and_who_turns_programs_away_is_not(site: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"{site}/200 {site}/404 {site}/403 ftp://x http://127.0.0.1:1/closed")
    gone, closed = dead([page])
    assert gone == f"{site}/404 (page.md): status 404"
    assert closed.startswith("http://127.0.0.1:1/closed (page.md): URLError")


def test_the_pages_of_the_project_are_looked_at() -> None:
    assert {"README.md", "comparison.md", "CHANGELOG.md"} <= {page.name for page in PAGES}
    found = addresses(PAGES)
    assert len(found) > 15 and all(names for names in found.values())
