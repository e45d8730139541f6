// The controls of a saved page, and the updates of its figures.
const content = JSON.parse(document.getElementById("content").textContent);
const page = document.getElementById("page");

const made = (tag, attributes = {}, ...children) => {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
};
const bytes = (text) => Uint8Array.from(atob(text), (one) => one.charCodeAt(0)).buffer;

// Converts a recorded value to the form that bokeh expects.
function unpacked(value) {
  if (value === null || typeof value !== "object") return value;
  if (Array.isArray(value)) return value.map(unpacked);
  if (value.float32 !== undefined) return new Float32Array(bytes(value.float32));
  if (value.int32 !== undefined) return new Int32Array(bytes(value.int32));
  if (value.image !== undefined) return Bokeh.require("core/util/ndarray").ndarray(bytes(value.image), { dtype: "uint32", shape: value.shape });
  return Object.fromEntries(Object.entries(value).map(([name, column]) => [name, unpacked(column)]));
}

const state = {
  step: Math.max(content.steps.indexOf(content.step), 0), layers: [...content.layers], zoom: "all modes", highlight: null,
  hidden: new Set(), view: content.views[0].name,
};

class View {
  constructor(saved) {
    this.saved = saved;
    this.shown = new Set(saved.shown);
    this.figure = made("div", { class: "figure" });
    this.above = made("div", { class: "text" });
    this.below = made("div", { class: "text", "aria-live": "polite" });
    this.above.innerHTML = saved.above;
    this.signals = made("div");
    this.box = made("section", { "aria-label": saved.name }, this.signals, this.above, this.figure, this.below);
    this.sources = new Map(); // columns with layers, before filtering
    this.isWriting = false;
  }

  async start() {
    if (this.document || !this.saved.item) return;
    const views = await Bokeh.embed.embed_item(this.saved.item, this.figure);
    this.document = [...views][0].model.document;
    for (const model of this.document._all_models.values()) {
      if (model.type !== "ColumnDataSource" || !model.data.layer) continue;
      this.sources.set(model, { ...model.data });
      model.selected.change.connect(() => this.readSelection(model));
    }
    this.ranges = this.planes().map((plane) => [plane.x_range.start, plane.x_range.end, plane.y_range.start, plane.y_range.end]);
    const fit = fittedWidth([...views], this.figure);
    new ResizeObserver(fit).observe(this.figure);
    this.fit = fit;
  }

  planes() {
    return this.saved.planes.map((id) => this.document.get_model_by_id(id));
  }

  write() {
    const { saved } = this, text = saved.texts[Math.min(state.step, saved.texts.length - 1)] ?? "";
    if (this.below.innerHTML !== text) this.below.innerHTML = text;
    if (!this.document) return;
    this.isWriting = true;
    for (const [id, values] of Object.entries(saved.frames[state.step] ?? {})) {
      const model = this.document.get_model_by_id(id);
      for (const [name, value] of Object.entries(values)) {
        const plain = unpacked(value);
        if (this.sources.has(model)) this.sources.set(model, plain);
        else if (plain !== null && !(state.zoom === "near 1" && this.planes().some((p) => model === p.x_range || model === p.y_range))) model[name] = plain;
      }
    }
    const [first, last] = state.layers;
    for (const [model, columns] of this.sources) {
      const layers = [...columns.layer], kept = layers.flatMap((layer, i) => (layer >= first && layer <= last ? [i] : []));
      const pick = (column) => {
        const some = kept.map((i) => column[i]);
        return ArrayBuffer.isView(column) ? column.constructor.from(some) : some;
      };
      model.data = Object.fromEntries(Object.entries(columns).map(([name, column]) => [name, pick(column)]));
      model.selected.indices = state.highlight === null ? [] : kept.flatMap((i, k) => (layers[i] === state.highlight ? [k] : []));
    }
    const show = (ids, isShown) => ids.forEach((id) => { this.document.get_model_by_id(id).visible = isShown; });
    for (const [name, ids] of Object.entries(saved.models)) show(ids, !state.hidden.has(name));
    for (const [name, ids] of Object.entries(saved.signals)) show(ids, this.shown.has(name));
    this.planes().forEach((plane, i) => {
      const isNear = state.zoom === "near 1", [x0, x1, y0, y1] = isNear ? [0.7, 1.3, -0.3, 0.3] : this.ranges[i];
      if (this.zoomed !== state.zoom) {
        plane.x_range.setv({ start: x0, end: x1 });
        plane.y_range.setv({ start: y0, end: y1 });
      }
      for (const part of [...plane.left, ...plane.below, ...plane.center]) if (/Axis|Grid/.test(part.type)) part.visible = isNear;
    });
    this.zoomed = state.zoom;
    this.isWriting = false;
    this.fit();
  }

  readSelection(source) {
    if (this.isWriting) return;
    const picked = source.selected.indices;
    state.highlight = picked.length ? source.data.layer[picked[0]] : null;
    setTimeout(update);
  }
}

const views = new Map(content.views.map((saved) => [saved.name, new View(saved)]));

async function update() {
  const view = views.get(state.view);
  if (![...page.children].includes(view.box)) page.replaceChildren(...controls, view.box);
  drawControls();
  await view.start();
  view.write();
}

// Controls; those without a choice are hidden.
const toggle = (text, isOn, act) => {
  const button = made("button", { type: "button", "aria-pressed": isOn }, text);
  button.onclick = act;
  return button;
};
const group = (label, ...children) => made("fieldset", { class: "row" }, made("legend", {}, label), ...children);
const switched = (set, name) => (set.has(name) ? set.delete(name) : set.add(name));
const numberOf = (value) => made("output", {}, String(value));

function redraw(box, build) { // the focus stays where it is
  const focused = [...box.querySelectorAll("button, input, select")].indexOf(document.activeElement);
  box.replaceChildren(...build());
  if (focused >= 0) box.querySelectorAll("button, input, select")[focused]?.focus();
}

const tabs = made("div"), models = made("div"), steps = made("div"), layers = made("div");
const controls = [tabs, models, steps, layers].filter(Boolean);

function drawControls() {
  const view = views.get(state.view), { saved } = view;
  if (views.size > 1) redraw(tabs, () => [group("view", ...[...views.keys()].map((name) => toggle(name, name === state.view, () => { state.view = name; update(); })))]);
  const names = Object.keys(saved.models);
  redraw(models, () => (names.length > 1 ? [group("models", ...names.map((name) => toggle(name, !state.hidden.has(name), () => { switched(state.hidden, name); update(); })))] : []));
  redraw(view.signals, () => {
    const signals = Object.keys(saved.signals);
    return signals.length > 1 ? [group("signals", ...signals.map((name) => toggle(name, view.shown.has(name), () => { switched(view.shown, name); update(); })))] : [];
  });
  if (content.steps.length > 1 && !steps.firstChild) {
    const slider = made("input", { type: "range", min: 0, max: content.steps.length - 1, value: state.step, "aria-label": "step" });
    const readout = numberOf(content.steps[state.step]);
    slider.oninput = () => { state.step = Number(slider.value); readout.value = content.steps[state.step]; slider.setAttribute("aria-valuetext", `step ${readout.value}`); update(); };
    steps.append(group("step", slider, readout));
  }
  if (!layers.firstChild) {
    const choose = (label, at) => {
      const select = made("select", { "aria-label": `${label} layer` }, ...Array.from({ length: content.n_layers }, (_, i) => made("option", { value: i }, String(i))));
      select.value = state.layers[at];
      select.onchange = () => { state.layers[at] = Number(select.value); state.layers.sort((a, b) => a - b); drawLayers(); update(); };
      return select;
    };
    const zoom = made("select", { "aria-label": "zoom of eigenvalues" }, made("option", {}, "all modes"), made("option", {}, "near 1"));
    zoom.onchange = () => { state.zoom = zoom.value; update(); };
    const drawLayers = () => redraw(layers, () => [group("layers", choose("first", 0), "to", choose("last", 1), ...([...views.values()].some((one) => one.saved.planes.length) ? ["eigenvalues", zoom] : []))]);
    drawLayers();
  }
}

update();
