"""What is wrong with a page, as a browser shows it: sentences, each about one place.

A page is right if no text lies on another, nothing stands out of the window, what is too wide
scrolls in a box of its own that the keyboard reaches, all text can be read, and the page loads
nothing and raises nothing.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WIDTHS, THEMES = (1440, 390), ("light", "dark")
# No traffic of its own: what the browser asks for is then what the page asks for.
_OPTIONS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
_OPTIONS += ["--disable-component-update", "--disable-sync"]

_IN_THE_PAGE = """
() => {
  document.querySelectorAll('details').forEach(hidden => { hidden.open = true; });
  const findings = [], say = text => findings.push(text);
  const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const rgba = colour => {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = '#000'; canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data].map((v, i) => i < 3 ? v : v / 255);
  };
  const over = (top, below) => [0, 1, 2].map(i => top[i] * top[3] + below[i] * (1 - top[3]));
  const luminance = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map(v => (v /= 255) <= .04045 ? v / 12.92
      : ((v + .055) / 1.055) ** 2.4);
    return .2126 * x + .7152 * y + .0722 * z;
  };
  const contrast = (a, b) => {
    const [low, high] = [luminance(a), luminance(b)].sort((p, q) => p - q);
    return (high + .05) / (low + .05);
  };
  const scheme = matchMedia('(prefers-color-scheme: dark)').matches ? 'dark' : 'light';
  const ground = getComputedStyle(document.documentElement).colorScheme.includes(scheme)
    && scheme === 'dark' ? [0, 0, 0] : [255, 255, 255];
  const grounds = element => {  // the colours that may be behind the text of an element
    const chain = [];
    for (let e = element; e; e = e.parentElement) chain.unshift(e);
    let behind = [ground];
    for (const e of chain) {
      const style = getComputedStyle(e);
      const plain = rgba(style.backgroundColor);
      behind = behind.map(colour => over(plain, colour));
      const stripes = style.backgroundImage.match(/(rgba?|color|oklch|oklab)\\([^)]*\\)/g) || [];
      if (stripes.length)
        behind = behind.flatMap(colour => stripes.map(text => over(rgba(text), colour)));
    }
    return behind;
  };
  const scrollBox = element => {
    for (let e = element; e; e = e.parentElement)
      if (e !== document.body && e !== document.documentElement
          && ['auto', 'scroll'].includes(getComputedStyle(e).overflowX)
          && e.scrollWidth > e.clientWidth + 1) return e;
    return null;
  };
  const width = document.documentElement.clientWidth;
  if (document.documentElement.scrollWidth > width + 1)
    say(`the page is ${document.documentElement.scrollWidth} pixels wide in a window of ${width}`);

  const texts = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node; (node = walker.nextNode());) {
    const parent = node.parentElement;
    if (!node.data.trim() || parent.closest('script, style, title, .tip')) continue;
    const style = getComputedStyle(parent);
    if (style.visibility === 'hidden' || style.display === 'none') continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    const rects = [...range.getClientRects()].filter(r => r.width > 0 && r.height > 0);
    if (!rects.length) continue;
    const name = node.data.trim().slice(0, 40), box = scrollBox(parent);
    let opacity = 1;
    for (let e = parent; e; e = e.parentElement) opacity *= +getComputedStyle(e).opacity;
    const paint = rgba(parent instanceof SVGElement ? style.fill : style.color);
    paint[3] *= opacity;
    const size = parseFloat(style.fontSize);
    const isLarge = size >= 24 || (size >= 18.66 && +style.fontWeight >= 700);
    for (const behind of grounds(parent)) {
      const ratio = contrast(over(paint, behind), behind);
      if (ratio < (isLarge ? 3 : 4.5) - .005) {
        say(`the contrast of "${name}" is ${ratio.toFixed(2)}`);
        break;
      }
    }
    if (size < 10.5) say(`"${name}" is ${size} pixels high`);
    for (const rect of rects) {
      if (!box && (rect.right > width + 1 || rect.left < -1))
        say(`"${name}" ends at ${Math.round(rect.right)} in a window of ${width}`);
      const seen = box ? box.getBoundingClientRect() : null;
      if (seen && (rect.right > seen.right || rect.left < seen.left)) continue;
      texts.push({node, name, left: rect.left, right: rect.right,
        top: rect.top + .18 * rect.height, bottom: rect.bottom - .18 * rect.height});
    }
  }
  texts.sort((a, b) => a.top - b.top);
  const reported = new Set();
  texts.forEach((a, i) => {
    for (let j = i + 1; j < texts.length && texts[j].top < a.bottom - .5; j++) {
      const b = texts[j];
      if (a.node === b.node || a.right - b.left < 1 || b.right - a.left < 1) continue;
      const pair = `"${a.name}" and "${b.name}" lie on each other`;
      if (!reported.has(pair)) { reported.add(pair); say(pair); }
    }
  });

  for (const e of document.body.querySelectorAll('*')) {
    if (e instanceof SVGElement || e.closest('.tip')) continue;
    const style = getComputedStyle(e);
    if (style.display === 'inline' || style.display === 'none') continue;
    const name = e.tagName.toLowerCase() + (e.className ? '.' + e.className : '');
    if (e.scrollWidth > e.clientWidth + 1 && e.clientWidth > 0) {
      if (['hidden', 'clip'].includes(style.overflowX)) say(`${name} is cut off`);
      if (['auto', 'scroll'].includes(style.overflowX) && e.tabIndex < 0)
        say(`${name} scrolls, but the keyboard does not reach it`);
    }
    const box = scrollBox(e), rect = e.getBoundingClientRect();
    if (!box && rect.width > 0 && rect.right > width + 1)
      say(`${name} ends at ${Math.round(rect.right)} in a window of ${width}`);
  }
  return findings;
}
"""


def browser_path() -> str:
    """The browser that is installed. Without one the tests fail: ``make test`` leaves them out."""
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        raise FileNotFoundError("there is no chromium (Debian: apt install chromium)")
    return path


@dataclass
class ShownPage:
    """A page in a window.

    Attributes:
        page: of playwright.
        complaints: what the browser has said since it was opened.
    """

    page: Any
    complaints: list[str] = field(default_factory=list)

    def findings(self) -> list[str]:
        """All that is wrong with it."""
        return [*self.page.evaluate(_IN_THE_PAGE), *self.complaints]


@contextmanager
def open_browser() -> Iterator[Any]:
    """A browser without a window."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path(), args=_OPTIONS)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def shown(browser: Any, path: Path, width: int, theme: str) -> Iterator[ShownPage]:
    """A file in a window of this width, for users who prefer light or dark pages."""
    context = browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme=theme, device_scale_factor=1
    )
    try:
        view = ShownPage(context.new_page())
        url = path.resolve().as_uri()
        view.page.on(
            "console",
            lambda line: (
                view.complaints.append(f"console: {line.text}")
                if line.type in ("error", "warning")
                else None
            ),
        )
        view.page.on("pageerror", lambda error: view.complaints.append(f"error: {error}"))
        view.page.on(
            "request",
            lambda request: (
                view.complaints.append(f"the page asks for {request.url}")
                if request.url != url
                else None
            ),
        )
        view.page.goto(url, wait_until="load")
        yield view
    finally:
        context.close()
