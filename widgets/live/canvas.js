const TRACES_EVERY_MS = 300;

const arrayOf = (Kind, view) => new Kind(view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength));

// The message of the kernel, as runs with their modes and traces.
function unpacked(content, buffers) {
  const perRun = 3 + 2 * TRACES.length;
  return content.runs.map((run, index) => {
    const own = buffers.slice(index * perRun, (index + 1) * perRun);
    const traces = TRACES.map((trace, i) => [
      trace.name,
      { step: arrayOf(Float32Array, own[3 + 2 * i]), value: arrayOf(Float32Array, own[4 + 2 * i]) },
    ]);
    const modes = { points: arrayOf(Float32Array, own[0]), layer: arrayOf(Uint8Array, own[1]), isReliable: arrayOf(Uint8Array, own[2]) };
    return { ...run, modes, traces: Object.fromEntries(traces) };
  });
}

function themeOf(element) {
  const style = getComputedStyle(element);
  const read = (name, otherwise) => style.getPropertyValue(name).trim() || otherwise;
  return {
    ink: read("--jp-content-font-color1", "#7a7a7a"),
    ground: read("--jp-layout-color0", "transparent"),
    font: style.fontFamily,
    faint: "rgba(122, 122, 122, 0.32)",
    band: "rgba(122, 122, 122, 0.24)",
    kss: "rgba(31, 119, 212, 0.16)",
    fault: "rgba(211, 47, 47, 0.1)",
    faultEdge: "rgba(211, 47, 47, 0.8)",
  };
}

const threeDigits = (value) => (value === null ? "–" : value < 1e4 ? String(Number(value.toPrecision(3))) : short(Number(value.toPrecision(2))));

function legendOf(runs, broken) {
  const swatch = (run) => `<span class="workbench-live-key"><svg width="26" height="8" aria-hidden="true"><path d="M0 4H26"
    stroke="${run.color}" stroke-width="2.2" stroke-dasharray="${run.dash.join(" ")}"/></svg>${run.name}</span>`;
  const shade = '<span class="workbench-live-key"><i class="workbench-live-shade"></i>KSS on</span>';
  const hasFault = runs.some((run) => run.fault_spans.length);
  const fault = hasFault ? '<span class="workbench-live-key"><i class="workbench-live-fault"></i>fault on</span>' : "";
  const probes = runs.some((run) => run.sound.length || run.broken.length)
    ? `<span class="workbench-live-key">probe: ▏sound <b style="color:${broken}">■</b> broken</span>` : "";
  const end = runs.some((run) => run.is_broken) ? '<span class="workbench-live-key"><b>×</b> diverged or failed</span>' : "";
  return runs.map(swatch).join("") + shade + fault + probes + end;
}

function depthKeyOf(run, isNear) {
  const n = run.depth_colors.length;
  if (!run.n_layers) return "";
  const cells = run.depth_colors.map((color) => `<i style="background:${color};width:${Math.max(4, 72 / n)}px"></i>`).join("");
  const layers = n === 1 ? `layer 0 ${cells}` : `layer 0 ${cells} ${n - 1}`;
  const [lower, upper] = run.near_unit;
  return `<span>${layers}</span><span>● reliable ○ not</span>
    <span><i class="workbench-live-band"></i> near unit, ${lower}–${upper}</span>
    <span>${isNear ? "true to scale" : `┄ |λ| beyond ${KNEE} on a log scale`}</span>`;
}

function render({ model, el, signal }) {
  el.classList.add("workbench-live");
  const accounts = made("div", "workbench-live-accounts"), status = made("div", "workbench-live-status", "The picture appears when its cell has run.");
  status.setAttribute("role", "status");
  const maps = made("div", "workbench-live-maps"), key = made("div", "workbench-live-keys");
  const zoom = made("button", "workbench-live-zoom", "zoom to 1"), words = made("div", "workbench-live-keys");
  zoom.type = "button";
  zoom.title = "Show the square around 1, true to scale, where most modes are; or the whole plane";
  zoom.setAttribute("aria-pressed", "false");
  key.append(words, zoom);
  const plots = made("div", "workbench-live-plots"), legend = made("div", "workbench-live-keys");
  const left = made("div"), side = made("div"), body = made("div", "workbench-live-body");
  left.append(maps, key);
  side.append(legend, plots);
  const traces = TRACES.map((trace) => {
    const canvas = made("canvas");
    canvas.setAttribute("role", "img");
    plots.append(canvas);
    return canvas;
  });
  body.append(left, side);
  accounts.setAttribute("role", "note");
  accounts.setAttribute("aria-label", "First alarms");
  el.replaceChildren(accounts, status, body);

  // Painting costs most: a map is redrawn when its modes are new, the traces a few times a second.
  let panels = [], recent = [], isStale = true, tracesAt = 0, later = null;
  const drawTraces = (runs, theme, nSteps) => {
    tracesAt = performance.now();
    TRACES.forEach((trace, i) => {
      if (traces[i].style.display === "none") return;
      drawTrace(traces[i], theme, trace, runs, nSteps);
      const ends = runs.map((run) => `${run.name} ${threeDigits(run.traces[trace.name].value.at(-1) ?? null)}`);
      traces[i].setAttribute("aria-label", `${trace.title} over the steps; now ${ends.join(", ")}`);
    });
  };
  const makePanels = (runs) => {
    panels = runs.map((run) => {
      const box = made("figure", "workbench-live-map"), title = made("b", "", run.name), note = made("span", "workbench-live-note");
      const line = made("div", "workbench-live-numbers"), canvas = made("canvas"), head = made("figcaption");
      canvas.setAttribute("role", "img");
      title.style.borderColor = run.color;
      head.append(title, note);
      box.append(head, line, canvas);
      return { name: run.name, box, note, line, canvas, drawn: null };
    });
    recent = [];
    isStale = true;
    maps.replaceChildren(...panels.map((panel) => panel.box));
  };
  const setText = (element, text) => {
    if (element.textContent !== text) element.textContent = text;
  };
  const setHtml = (element, html) => {
    if (element.madeOf !== html) element.innerHTML = element.madeOf = html;
  };

  // The first alarm of each run and its likely cause, which stay in sight.
  const showAccounts = (runs) => {
    const told = runs.filter((run) => run.account), whole = JSON.stringify(told.map((run) => [run.name, run.account]));
    if (accounts.madeOf === whole) return;
    accounts.madeOf = whole;
    accounts.replaceChildren(...told.map((run) => {
      const line = made("div", run.has_alarm ? "workbench-live-alarmed" : "", run.account);
      line.style.borderColor = run.color;
      line.prepend(made("span", "workbench-live-note", `${run.name}  `));
      return line;
    }));
  };

  const draw = (content, buffers) => {
    const runs = unpacked(content, buffers), theme = { ...themeOf(el), broken: content.broken };
    showAccounts(runs);
    TRACES.forEach((trace, i) => (traces[i].style.display = trace.limit && !runs.some((run) => run.is_watched) ? "none" : ""));
    if (runs.map((run) => run.name).join() !== panels.map((panel) => panel.name).join()) makePanels(runs);
    setText(status, content.status);
    body.classList.toggle("workbench-live-empty", !runs.length);
    if (!runs.length) return;
    setHtml(legend, legendOf(runs, content.broken));
    const isNear = zoom.getAttribute("aria-pressed") === "true";
    setHtml(words, depthKeyOf(runs.find((run) => run.n_layers) ?? runs[0], isNear));
    const decades = Math.max(...runs.map((run, i) => decadesFor(run.modes.points, (recent[i] ??= []))));
    runs.forEach((run, i) => {
      const panel = panels[i], mass = run.near_unit_mass === null ? "–" : run.near_unit_mass.toFixed(2);
      setText(panel.note, run.note);
      panel.note.classList.toggle("workbench-live-broken", run.is_broken);
      const numbers = run.modes_step === null ? "no modes yet" : `step ${run.modes_step}   M ${mass}   ρ ${threeDigits(run.spectral_radius)}`;
      setText(panel.line, numbers);
      panel.box.classList.toggle("workbench-live-over", run.is_broken);
      const { points } = run.modes, shown = [decades, run.is_broken, points.length, ...points.slice(0, 16)].join();
      if (isStale || panel.drawn !== shown) drawPlane(panel.canvas, theme, run, run.modes, decades, isNear);
      panel.drawn = shown;
      panel.canvas.setAttribute("aria-label", `Eigenvalues of the run ${run.name} ${run.note}: ${numbers}`);
    });
    clearTimeout(later);
    const wait = tracesAt + TRACES_EVERY_MS - performance.now();
    if (isStale || wait <= 0) drawTraces(runs, theme, content.n_steps);
    else later = setTimeout(() => drawTraces(runs, theme, content.n_steps), wait);
    isStale = false;
  };
  const replay = follow(model, signal, draw);
  const again = () => {
    isStale = true;
    replay();
  };
  zoom.onclick = () => {
    zoom.setAttribute("aria-pressed", zoom.getAttribute("aria-pressed") !== "true");
    again();
  };
  onTheme(signal, again);
  const size = new ResizeObserver(again);
  size.observe(body);
  signal.addEventListener("abort", () => {
    size.disconnect();
    clearTimeout(later);
  });
}
export default { render };
