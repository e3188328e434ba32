"""The report of a run in a browser: nothing is blocked, nothing overflows a phone's screen."""

import json
import re

import pytest

from tests.browser.chromium import needs_browser, rendered
from tests.observe.report.folders import EVIL, IMPORTANCE, written
from vafl.observe.report import write_report

# The page's policy forbids scripts. Frames as wide as a phone and a screen measure it from outside.
_FRAMES = """<!doctype html><body><script>
const widths = [360, 1200];
for (const width of widths) {
  const frame = document.createElement("iframe");
  frame.width = width; frame.height = 800; frame.src = "report.html";
  frame.onload = () => {
    const page = frame.contentDocument, found = document.createElement("p");
    const small = [...page.querySelectorAll("svg text")].filter(
      text => text.getBoundingClientRect().height < 9 && text.textContent && !text.hasAttribute("transform"));
    const style = frame.contentWindow.getComputedStyle(page.querySelector("h1"));
    found.textContent = `measured ${width}: page ${page.documentElement.scrollWidth}, ` +
      `small ${small.length}, drawings ${page.querySelectorAll("svg").length}, ` +
      `h1 ${parseFloat(style.fontSize)}, scripts ${page.scripts.length}`;
    document.body.append(found);
  };
  document.body.append(frame);
}
</script>"""


@needs_browser
@pytest.mark.parametrize("kind", ["two", "several", "numbers"])
def test_it_fits_a_phone_and_its_style_is_applied(tmp_path, kind):
    classes = {"two": ["no", EVIL], "several": [f"class number {n}" for n in range(14)], "numbers": []}[kind]
    folder = written(tmp_path / "run", kind, classes=classes)
    (folder / "importance.json").write_text(json.dumps(IMPORTANCE))
    write_report(folder)
    (folder / "frames.html").write_text(_FRAMES)
    flags = ("--allow-file-access-from-files",)  # or a page from a file may not look into another
    page = rendered(f"file://{folder / 'frames.html'}", tmp_path / "profile", *flags)
    measured = re.findall(
        r"measured (\d+): page (\d+), small (\d+), drawings (\d+), h1 ([\d.]+), scripts (\d+)", page
    )
    assert len(measured) == 2
    for width, scroll, small, drawings, heading, scripts in measured:
        assert int(scroll) <= int(width)
        assert (int(small), int(scripts)) == (0, 0)
        assert int(drawings) >= 3
        assert float(heading) in (26.4, 33.6)  # the style sheet's, not the browser's 32
