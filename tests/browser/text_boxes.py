"""Text on canvases: checks for overlapping texts, and for texts cut by the canvas or a clipping rectangle.

Call `record_text` before the page is opened, then `assert_text_fits`. Canvases in shadow roots, such as bokeh's, are
seen too. Text that is drawn on a hidden canvas, which is then copied to a visible one, counts where it is copied to.
"""

from itertools import combinations

#: Wraps what a 2D context does with text; transformations it knows itself. Boxes are in pixels of the canvas.
_RECORDER = """(() => {
  const texts = new Map(), proto = CanvasRenderingContext2D.prototype, clips = new WeakMap(), paths = new WeakMap();
  const clipsOf = ({ canvas }) => clips.get(canvas) ?? clips.set(canvas, [null]).get(canvas);
  const forget = (canvas) => {
    texts.delete(canvas);
    clips.delete(canvas);
  };
  const boxOf = (context, corners) => {
    const places = corners.map(([x, y]) => context.getTransform().transformPoint({ x, y }));
    const [xs, ys] = [places.map(({ x }) => x), places.map(({ y }) => y)];
    return { left: Math.min(...xs), right: Math.max(...xs), top: Math.min(...ys), bottom: Math.max(...ys) };
  };
  const rectangle = (context, x, y, w, h) => boxOf(context, [[x, y], [x + w, y], [x, y + h], [x + w, y + h]]);
  const wrap = (name, before) => {
    const own = proto[name];
    proto[name] = function (...given) {
      before(this, ...given);
      return own.apply(this, given);
    };
  };
  const add = (canvas, entry) => {
    const all = texts.get(canvas) ?? texts.set(canvas, new Map()).get(canvas);
    all.set([entry.text, entry.left.toFixed(1), entry.top.toFixed(1)].join(), entry); // once with its outline
  };
  const draw = (context, text, x, y, most = Infinity) => {
    if (!String(text).trim()) return;
    const size = context.measureText(text), wide = size.actualBoundingBoxLeft + size.actualBoundingBoxRight;
    const shrunk = Math.min(1, most / (wide || 1)), left = x - shrunk * size.actualBoundingBoxLeft;
    const high = size.actualBoundingBoxAscent + size.actualBoundingBoxDescent;
    add(context.canvas, { text: String(text), clip: clipsOf(context).at(-1),
      ...rectangle(context, left, y - size.actualBoundingBoxAscent, shrunk * wide, high) });
  };
  wrap("fillText", draw);
  wrap("strokeText", draw);
  wrap("clearRect", (context, ...place) => {
    const box = rectangle(context, ...place), { canvas } = context;
    const isWhole = box.left < 1 && box.top < 1 && box.right > canvas.width - 1 && box.bottom > canvas.height - 1;
    if (isWhole) texts.delete(canvas);
  });
  wrap("drawImage", (context, image, x, y) => {
    if (!texts.has(image)) return;
    const at = boxOf(context, [[x, y]]);
    const moved = ({ left, right, top, bottom }) =>
      ({ left: left + at.left, right: right + at.left, top: top + at.top, bottom: bottom + at.top });
    for (const one of texts.get(image).values()) {
      add(context.canvas, { text: one.text, clip: one.clip && moved(one.clip), ...moved(one) });
    }
  });
  wrap("save", (context) => clipsOf(context).push(clipsOf(context).at(-1)));
  wrap("restore", (context) => clipsOf(context).length > 1 && clipsOf(context).pop());
  wrap("beginPath", (context) => paths.set(context, null));
  wrap("rect", (context, ...place) => paths.set(context, rectangle(context, ...place)));
  wrap("clip", (context, path) => {
    const box = path instanceof Path2D ? null : paths.get(context);
    if (box) clipsOf(context)[clipsOf(context).length - 1] = box;
  });
  wrap("reset", ({ canvas }) => forget(canvas));
  for (const side of ["width", "height"]) { // setting one resets a canvas
    const own = Object.getOwnPropertyDescriptor(HTMLCanvasElement.prototype, side);
    Object.defineProperty(HTMLCanvasElement.prototype, side, { ...own, set(value) {
      forget(this);
      own.set.call(this, value);
    } });
  }
  const isVisible = (canvas) => canvas.checkVisibility({ visibilityProperty: true });
  const isShown = (canvas) => isVisible(canvas) && canvas.getBoundingClientRect().width > 0;
  window.drawnTexts = () => [...texts].filter(([canvas]) => isShown(canvas)).map(([canvas, all]) => ({
    label: canvas.getAttribute("aria-label") ?? canvas.className, width: canvas.width, height: canvas.height,
    ratio: canvas.width / canvas.getBoundingClientRect().width, texts: [...all.values()],
  }));
})();"""

#: Pixels of the screen by which boxes may touch: the outlines of letters are blurred.
_TOLERANCE = 1.0


def record_text(page):
    """Record the text on the canvases of all pages that are opened from now on."""
    page.add_init_script(_RECORDER)


def drawn_texts(page):
    """Return the canvases of the page that contain text, with the box of each text in pixels of the canvas."""
    return page.evaluate("drawnTexts()")


def complaints_of(canvas):
    """Return the problems of the text on a canvas as sentences."""
    least, found = _TOLERANCE * canvas["ratio"], []
    whole = {"left": 0, "top": 0, "right": canvas["width"], "bottom": canvas["height"]}
    seen = []
    for text in canvas["texts"]:
        frame = text["clip"] or whole
        if _shared(text, frame) == (0, 0):
            continue  # outside of the clipping rectangle, where nothing is drawn
        for name, limits in {"the canvas": whole, "its frame": frame}.items():
            beyond = max(
                limits["left"] - text["left"],
                limits["top"] - text["top"],
                text["right"] - limits["right"],
                text["bottom"] - limits["bottom"],
            )
            if beyond > least:
                found.append(f"'{text['text']}' reaches {beyond:.1f} pixels beyond {name}")
                break
        seen.append(text)
    pairs = combinations(seen, 2)
    found += [f"'{a['text']}' and '{b['text']}' overlap" for a, b in pairs if min(_shared(a, b)) > least]
    return [f"{canvas['label']}: {sentence}" for sentence in found]


def assert_text_fits(page, *, at_least=1):
    """Assert that no texts on canvases overlap or are cut, and that the page is not wider than its window."""
    canvases = drawn_texts(page)
    assert sum(len(canvas["texts"]) for canvas in canvases) >= at_least, "no text was drawn"
    assert [sentence for canvas in canvases for sentence in complaints_of(canvas)] == []
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0, "the page is wider than its window"


def _shared(one, other):
    """Return width and height of the intersection of two boxes; zeros if it is empty."""
    wide = min(one["right"], other["right"]) - max(one["left"], other["left"])
    high = min(one["bottom"], other["bottom"]) - max(one["top"], other["top"])
    return (wide, high) if wide > 0 and high > 0 else (0, 0)
