"""Pictures of the chat page for README.md and docs/serving.md: desktop, phone, dark.

    codechat serve --ckpt released/mini --tools examples/my_tools.py
    python tools/page_pictures.py http://127.0.0.1:8000

writes docs/pictures/chat.png and page-*.png; needs Chromium"""

import sys
import tempfile
from pathlib import Path

from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from browser import Browser  # noqa: E402

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "pictures"
COLOURS = 128  # a page has few: half of the bytes, and no difference that is seen


def main(url: str) -> None:
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as profile, Browser(Path(profile)) as page:
        page.fresh(820, 400)
        page.open(url)
        page.until("model !== ''")
        page.ask("$('say').focus()")
        page.type("What is the weather in Beijing?")
        page.enter()
        page.until("document.querySelector('.ask') !== null")
        page.enter()  # the focus is on Run
        page.until("running === null && messages.length === 4")
        picture(page, "chat")
        page.resize(1000, 760)
        page.type("write quicksort")
        page.enter()
        page.until("running === null && messages.length === 6")
        picture(page, "page-desktop")
        page.ask("$('view').click(), document.querySelectorAll('.tokens')[1].firstChild.focus()")
        page.prefer("dark")
        picture(page, "page-dark")
        page.prefer("light")
        page.resize(390, 760)
        picture(page, "page-phone")
        assert page.problems == [], page.problems


def picture(page: Browser, name: str) -> None:
    page.ask("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    path = FOLDER / f"{name}.png"
    page.shot(path)
    with Image.open(path) as image:
        image.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)


if __name__ == "__main__":
    main(sys.argv[1])
