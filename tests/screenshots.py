"""Pictures of the site's pages in headless Chromium, and whether anything on them overflows: `make screenshots`.

Every page is shown at two widths in a light and in a dark theme. Chromium loads it in a frame of that width, where a
script measures it. A page fails if it is wider than its frame, or if a column of a table is squeezed to a word a line.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from shutil import which

PAGES = ("index", "first-steps", "transformers", "choose", "masks", "results", "comparison", "troubleshooting")
WIDTHS = (1400, 400)
THEMES = {"dark": 0, "light": 1}  # Chromium's numbers of the preferred colour scheme
HEIGHT = 3000
FRAME = """<!doctype html><body style="margin:0"><iframe id="page" style="border:0;width:{width}px;height:{height}px"
 src="/{page}.html"></iframe><pre id="found"></pre><script>
document.getElementById("page").onload = function () {{
  const inside = this.contentDocument, root = inside.documentElement, squeezed = [];
  for (const cell of inside.querySelectorAll("article td")) {{
    const line = parseFloat(inside.defaultView.getComputedStyle(cell).lineHeight) || 20;
    const lines = Math.round(cell.getBoundingClientRect().height / line), row = cell.parentElement.cells;
    const words = cell.innerText.trim().split(/\\s+/).length;
    const tallest = Math.max(...[...row].map(other => other.innerText.trim().split(/\\s+/).length));
    if (words > 5 && words === tallest && lines >= words) squeezed.push(cell.innerText.slice(0, 60));
  }}
  const found = {{scroll: root.scrollWidth, client: root.clientWidth, squeezed}};
  document.getElementById("found").textContent = JSON.stringify(found);
}};</script>"""


class Frames(SimpleHTTPRequestHandler):
    """The site, and at /frame/PAGE/WIDTH one page in a frame of that width."""

    def do_GET(self) -> None:
        asked = re.fullmatch(r"/frame/([\w-]+)/(\d+)", self.path)
        if asked is None:
            return super().do_GET()
        body = FRAME.format(page=asked[1], width=asked[2], height=HEIGHT).encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing, since Chromium's requests are of no interest."""


def shown(chromium: str, url: str, width: int, theme: int, picture: Path) -> dict[str, object]:
    """Take a picture of a page, and return what its script measured."""
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=8000"]
    flags += [f"--window-size={max(width, 500)},{HEIGHT}", f"--blink-settings=preferredColorScheme={theme}"]
    subprocess.run([chromium, *flags, f"--screenshot={picture}", url], check=True, capture_output=True, timeout=120)
    dump = [chromium, *flags, "--dump-dom", url]
    dumped = subprocess.run(dump, check=True, capture_output=True, text=True, timeout=120)
    measured = re.search(r'<pre id="found">(.*?)</pre>', dumped.stdout, re.DOTALL)
    if measured is None or not measured[1]:
        raise RuntimeError(f"{url}: the page did not load")
    return dict(json.loads(measured[1]))


def main() -> int:
    """Take all pictures of the site in the first argument into the folder of the second."""
    site, folder = Path(sys.argv[1]), Path(sys.argv[2])
    chromium = which("chromium") or which("chromium-browser") or which("google-chrome")
    if chromium is None:
        print("no Chromium found; on Debian: apt install chromium")
        return 2
    folder.mkdir(parents=True, exist_ok=True)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Frames, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    bad = 0
    for page in PAGES:
        for width in WIDTHS:
            for theme, number in THEMES.items():
                url = f"http://127.0.0.1:{server.server_port}/frame/{page}/{width}"
                found = shown(chromium, url, width, number, folder / f"{page}-{width}-{theme}.png")
                right = found["scroll"] == found["client"] and not found["squeezed"]
                bad += not right
                print(f"{page:16} {width:5} {theme:6} {'ok' if right else found}", flush=True)
    server.shutdown()
    print(f"pictures are in {folder}; {bad} of {len(PAGES) * len(WIDTHS) * len(THEMES)} overflow")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
