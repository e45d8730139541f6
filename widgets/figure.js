// A bokeh document of the kernel on the page: fetched, patched, and kept in sync with selections and ranges.
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
  let figure = null, is_patching = false, timer = null, fit = () => {};
  const draw = (content, buffers) => {
    if (content.patch === undefined || figure === null) return;
    const named = new Map(content.buffers.map((id, i) => [id, buffers[i].buffer.slice(
      buffers[i].byteOffset, buffers[i].byteOffset + buffers[i].byteLength)]));
    is_patching = true;
    try { figure.apply_json_patch(JSON.parse(content.patch), named); } finally { is_patching = false; }
    fit();
  };
  model.on("msg:custom", draw);
  signal.addEventListener("abort", () => model.off("msg:custom", draw));
  const [content] = await ask(model, "document", signal);
  if (signal.aborted) return;
  figure = Document.from_json(JSON.parse(content.document));
  el.textContent = "";
  const views = await add_document_standalone(figure, el);
  fit = fittedWidth([...views], el);
  const width = new ResizeObserver(() => fit());
  width.observe(el);
  el.classList.add("workbench-alive");
  requestAnimationFrame(() => model.send({ drawn: true }));

  // Selections and visible ranges are sent to the kernel: the latest of each, at most 20 times a second.
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
  signal.addEventListener("abort", () => { theme.disconnect(); width.disconnect(); clearTimeout(timer); figure.clear(); });
}
export default { render };
