"""A bokeh figure as a Jupyter widget: offline, following the notebook's theme, and with nothing in the saved notebook.

BokehJS comes from the kernel when the page does not have it yet, so no extension call, no network and no copy of the
library in each notebook is needed. The figure itself is fetched from the kernel too: a reloaded page shows what
the kernel holds now, not what it held when the cell ran.
"""

from __future__ import annotations

import gzip
import tempfile
import threading
from contextlib import contextmanager
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anywidget
import bokeh
import ipywidgets
import traitlets
from bokeh.core.json_encoder import serialize_json
from bokeh.document import Document
from bokeh.protocol import Protocol

from workbench import plots
from workbench.plots.figure_files import bokeh_plot, drawn_backends

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bokeh.document.events import DocumentPatchedEvent
    from bokeh.models import LayoutDOM

_ESM = """
const ask = (model, question, signal) => new Promise((resolve) => {
  const id = crypto.randomUUID?.() ?? String(Math.random());
  const answer = (content, buffers) => {
    if (content.answer !== id) return;
    model.off("msg:custom", answer);
    resolve([content, buffers]);
  };
  model.on("msg:custom", answer);
  signal.addEventListener("abort", () => model.off("msg:custom", answer));
  model.send({ question, id });
});

async function library(model, signal) {
  const version = model.get("bokeh_version");
  if (!window.Bokeh?.[version]) {
    const [, buffers] = await ask(model, "library", signal);
    const unzipped = new Blob([buffers[0]]).stream().pipeThrough(new DecompressionStream("gzip"));
    const source = await new Response(unzipped).text();
    if (!window.Bokeh?.[version]) {
      const script = document.createElement("script");
      script.textContent = source;
      document.head.append(script);
      script.remove();
    }
  }
  return window.Bokeh[version];
}

const repaint = (view) => {
  view.request_repaint?.();
  for (const child of view.child_views ?? []) repaint(child);
};

async function render({ model, el, signal }) {
  el.classList.add("workbench-figure");
  el.textContent = "The figure appears when its cell has run.";
  const Bokeh = await library(model, signal);
  const { Document } = Bokeh.require("document");
  const { Serializer } = Bokeh.require("core/serialization");
  const { add_document_standalone } = Bokeh.require("embed/standalone");
  let figure = null, is_patching = false, timer = null;
  const draw = (content, buffers) => {
    if (content.patch === undefined || figure === null) return;
    const named = new Map(content.buffers.map((id, i) => [id, buffers[i].buffer.slice(
      buffers[i].byteOffset, buffers[i].byteOffset + buffers[i].byteLength)]));
    is_patching = true;
    try { figure.apply_json_patch(JSON.parse(content.patch), named); } finally { is_patching = false; }
  };
  model.on("msg:custom", draw);
  signal.addEventListener("abort", () => model.off("msg:custom", draw));
  const [content] = await ask(model, "document", signal);
  if (signal.aborted) return;
  figure = Document.from_json(JSON.parse(content.document));
  el.textContent = "";
  const views = await add_document_standalone(figure, el);

  // Sent to the kernel: selections and the visible range; the latest of each, at most 20 times a second.
  const changed = new Map();
  figure.on_change((event) => {
    if (is_patching || event.kind !== "ModelChanged" || !["indices", "start", "end"].includes(event.attr)) return;
    changed.set(`${event.model.id}.${event.attr}`, event);
    timer ??= setTimeout(() => {
      timer = null;
      const references = new Map([...figure._all_models.values()].map((item) => [item, item.ref()]));
      model.send({ changes: new Serializer({ references }).encode([...changed.values()]) });
      changed.clear();
    }, 50);
  });

  const theme = new MutationObserver(() => setTimeout(() => { for (const view of views) repaint(view); }, 50));
  theme.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-name"] });
  signal.addEventListener("abort", () => { theme.disconnect(); clearTimeout(timer); figure.clear(); });
}
export default { render };
"""

# bokeh reads these variables where it paints: text and lines take the colours of JupyterLab's theme.
_CSS = """
.workbench-figure {
  overflow-x: auto;
  color: var(--jp-ui-font-color2, #7a7a7a);
  --workbench-ink: var(--jp-content-font-color1, #7a7a7a);
  --bk-text-color: var(--workbench-ink);
  --bk-axis-label-text-color: var(--workbench-ink);
  --bk-major-label-text-color: var(--workbench-ink);
  --bk-label-text-color: var(--workbench-ink);
}
"""


class Figure(anywidget.AnyWidget):
    """One bokeh layout on the page; changes to its models in Python are drawn at once.

    Args:
        root: The layout to show; alone in its document, if it has one.
        lock: Held while the figure's models change; give the one that callbacks of these models take too.
    """

    _esm = _ESM
    _css = _CSS
    _is_open = False
    bokeh_version = traitlets.Unicode(bokeh.__version__).tag(sync=True)

    def __init__(self, root: LayoutDOM, *, lock: Any = None, **kwargs: Any) -> None:
        self.root = root
        self.document = root.document or Document()
        if root.document is None:
            self.document.add_root(root)
        # JupyterLab may run callbacks in a separate thread, in parallel to the cells.
        self.lock = lock or threading.RLock()
        self._batch: list[DocumentPatchedEvent] | None = None
        super().__init__(**kwargs)
        self.document.on_change_dispatch_to(self)
        self._is_open = True
        self.on_msg(self._receive)

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Send all changes made inside as one message, so that the page paints once."""
        with self.lock:
            if self._batch is not None:
                yield
                return
            self._batch = []
            try:
                yield
            finally:
                events, self._batch = self._batch, None
                if events:
                    self._send_patch(events)

    def close(self) -> None:
        """Remove the figure from the page and stop following its models."""
        if self._is_open:
            self._is_open = False
            self.document.remove_on_change(self)
        super().close()

    def _document_patched(self, event: DocumentPatchedEvent) -> None:
        if event.setter is self:
            return
        with self.lock:
            if self._batch is not None:
                self._batch.append(event)
            else:
                self._send_patch([event])

    def _send_patch(self, events: list[DocumentPatchedEvent]) -> None:
        message = Protocol().create("PATCH-DOC", events)
        content = {"patch": message.content_json, "buffers": [buffer.id for buffer in message.buffers]}
        self.send(content, [buffer.to_bytes() for buffer in message.buffers])

    def _receive(self, _: Any, content: dict[str, Any], buffers: list[Any]) -> None:
        question = content.get("question")
        if question == "library":
            self.send({"answer": content["id"]}, [_library()])
        elif question == "document":
            with self.lock:
                self.send({"answer": content["id"], "document": serialize_json(self.document.to_json(deferred=False))})
        elif "changes" in content:
            with self.lock:
                self.document.apply_json_patch({"events": content["changes"]}, setter=self)


def show(figure: Any) -> ipywidgets.DOMWidget:
    """Turn a figure into a widget that JupyterLab displays.

    Args:
        figure: Figure from a function of ``workbench.plots``, for either backend.

    Returns:
        A `Figure` (backend bokeh), or an image (backend matplotlib).
    """
    if drawn_backends(figure) == ["matplotlib"]:
        with tempfile.TemporaryDirectory() as folder:
            path = plots.save(figure, Path(folder) / "figure.png", dpi=110)
            return ipywidgets.Image(
                value=path.read_bytes(), format="png", layout={"max_width": "100%", "object_fit": "contain"}
            )
    return Figure(bokeh_plot(figure).state)


@cache
def _library() -> bytes:
    """BokehJS of the installed bokeh, compressed: a third of a megabyte."""
    source = files("bokeh").joinpath("server/static/js/bokeh.min.js").read_bytes()
    return gzip.compress(source, 6)
