"""Pictures of the chat page for docs/serving.md: desktop, phone, dark, as released/mini answers.

codechat serve --ckpt released/mini python tools/page_pictures.py http://127.0.0.1:8000
writes docs/pictures/page-*.png; needs Chromium
"""

import sys
import tempfile
from pathlib import Path

from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from browser import Browser  # noqa: E402

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "pictures"
COLOURS = 64  # a page has few: a quarter of the bytes, and no difference that is seen


def main(url: str) -> None:
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as profile, Browser(Path(profile)) as page:
        page.fresh(1000, 760)
        page.open(url)
        page.until("model !== ''")
        for text in ("What is 12 squared?", "write quicksort"):
            page.ask("$('say').focus()")
            page.type(text)
            page.enter()
            page.until(f"running === null && messages.some(m => m.content === {text!r})")
        picture(page, "desktop")
        page.ask("$('view').click(), document.querySelectorAll('.tokens')[1].firstChild.focus()")
        page.prefer("dark")
        picture(page, "dark")
        page.prefer("light")
        page.resize(390, 760)
        picture(page, "phone")
        assert page.problems == [], page.problems


def picture(page: Browser, name: str) -> None:
    page.ask("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    path = FOLDER / f"page-{name}.png"
    page.shot(path)
    with Image.open(path) as image:
        image.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)


if __name__ == "__main__":
    main(sys.argv[1])
