// Drawing takes about 40 ms of a core, so six drawings a second leave most of it to training.
const PICTURE_MS = 160;
const TRACES_EVERY_MS = 300;
// Maximum time without a message; the kernel sends one at least every 5 seconds while runs are active.
const SILENT_MS = 20_000;

// A trace with the lines that mark the displayed step and the step under the pointer.
function makeTraceBox(trace) {
  const box = made("div", "workbench-live-trace"), canvas = made("canvas");
  const shown = made("i", "workbench-live-shown"), under = made("i", "workbench-live-under");
  canvas.setAttribute("role", "img");
  shown.hidden = under.hidden = true;
  box.append(canvas, shown, under);
  return { trace, box, canvas, shown, under, axis: null };
}

function makePanel(run, tip, signal) {
  const box = made("figure", "workbench-live-map"), title = made("b", "", run.name), note = made("span", "workbench-live-note");
  const line = made("div", "workbench-live-numbers"), canvas = made("canvas"), head = made("figcaption");
  canvas.setAttribute("role", "img");
  title.style.borderColor = run.color;
  head.append(title, note);
  box.append(head, line, canvas);
  const panel = { name: run.name, box, note, line, canvas, drawn: null, now: null };
  hoverPlane(canvas, tip, signal, () => panel.now);
  return panel;
}

function render({ model, el, signal }) {
  el.classList.add("workbench-live");
  const accounts = made("div", "workbench-live-accounts"), status = made("div", "workbench-live-status", "The figure appears when its cell has run.");
  status.setAttribute("role", "status");
  const maps = made("div", "workbench-live-maps"), key = made("div", "workbench-live-keys");
  const zoom = made("button", "workbench-live-zoom", "Zoom to 1"), words = made("div", "workbench-live-keys");
  zoom.type = "button";
  zoom.title = "Show only the square around 1 on a linear scale, where most modes are, or the full plane";
  zoom.setAttribute("aria-pressed", "false");
  key.append(words, zoom);
  const plots = made("div", "workbench-live-plots"), legend = made("div", "workbench-live-keys");
  const left = made("div", "workbench-live-left"), side = made("div", "workbench-live-side"), body = made("div", "workbench-live-body");
  const scrubber = makeScrubber(model, signal), tip = makeTip(el);
  left.append(maps, key);
  side.append(legend, plots);
  const traces = TRACES.map(makeTraceBox);
  plots.append(...traces.map((each) => each.box));
  body.append(left, side);
  accounts.setAttribute("role", "note");
  accounts.setAttribute("aria-label", "First alarms");
  el.replaceChildren(accounts, status, scrubber.box, body, tip.box);

  // Painting is the slowest part: a map is redrawn only when its modes are new, the traces a few times a second.
  let panels = [], recent = [], isStale = true, tracesAt = 0, later = null, latest = null, told = null;
  const setText = (element, text) => {
    if (element.textContent !== text) element.textContent = text;
  };
  const setHtml = (element, html) => {
    if (element.madeOf !== html) element.innerHTML = element.madeOf = html;
  };
  const mark = (line, axis, step) => {
    line.hidden = step === null || !axis || step > axis.last;
    if (!line.hidden) line.style.left = `${axis.left + (step / axis.last) * (axis.right - axis.left)}px`;
  };

  const drawTraces = (theme) => {
    const { runs, earlier, content } = latest;
    tracesAt = performance.now();
    for (const each of traces) {
      if (each.box.hidden) continue;
      each.axis = drawTrace(each.canvas, theme, each.trace, runs, earlier, content.n_steps);
      mark(each.shown, each.axis, content.step);
      const ends = runs.map((run) => `${run.name} ${threeDigits(run.traces[each.trace.name].value.at(-1) ?? null)}`);
      each.canvas.setAttribute("aria-label", `${each.trace.title} over steps; latest: ${ends.join(", ")}`);
    }
  };

  // The first alarm of each run and its likely cause, which stay visible.
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

  const drawMaps = (theme, runs) => {
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
      const { points } = run.modes, drawn = [decades, isNear, run.modes_step, points.length, ...points.slice(0, 16)].join();
      if (isStale || panel.drawn !== drawn) drawPlane(panel.canvas, theme, run, run.modes, decades, isNear);
      panel.drawn = drawn;
      panel.now = { modes: run.modes, decades, isNear };
      panel.canvas.setAttribute("aria-label", `Eigenvalues of the run ${run.name} ${run.note}: ${numbers}`);
    });
  };

  const draw = (content, buffers) => {
    if (!content.has_traces && !latest) return;
    latest = { ...unpacked(content, buffers, latest), content };
    const { runs, earlier } = latest, theme = { ...themeOf(el), broken: content.broken };
    showAccounts(runs);
    for (const each of traces) each.box.hidden = Boolean(each.trace.limit) && !runs.some((run) => run.is_watched);
    if (runs.map((run) => run.name).join("|") !== panels.map((panel) => panel.name).join("|")) {
      panels = runs.map((run) => makePanel(run, tip, signal));
      recent = [];
      isStale = true;
      maps.replaceChildren(...panels.map((panel) => panel.box));
    }
    showStatus();
    body.classList.toggle("workbench-live-empty", !runs.length);
    scrubber.show(content, TRACES.slice(0, 4).map((trace) => [trace.name, trace.title.split(",")[0]]));
    if (!runs.length) return;
    const said = JSON.stringify([runs.map((run) => [run.name, run.is_broken, run.fault_spans.length > 0, run.sound.length + run.broken.length > 0]), earlier.map((run) => [run.name, run.verdict])]);
    if (legend.madeOf !== said) legend.replaceChildren(...legendOf(runs, earlier, content.broken));
    legend.madeOf = said;
    drawMaps(theme, runs);
    clearTimeout(later);
    const wait = tracesAt + TRACES_EVERY_MS - performance.now();
    if (isStale || wait <= 0 || told !== content.step) drawTraces(theme);
    else later = setTimeout(() => drawTraces(theme), wait);
    told = content.step;
    isStale = false;
  };

  // A kernel that has ended sends no messages, and the page must not continue to show "training".
  const showStatus = () => {
    if (!latest && silenceOf(model) > SILENT_MS / 2) setText(status, "The kernel does not respond. If the cell has run, reload the page; otherwise run the cell again.");
    if (!latest) return;
    const isCut = el.closest(".jupyter-widgets-disconnected") !== null, silence = silenceOf(model);
    const isGone = isCut || (latest.content.is_active && silence > SILENT_MS);
    el.classList.toggle("workbench-live-gone", isGone);
    const what = isCut ? "The kernel has ended" : `No message from the kernel for ${Math.round(silence / 1000)} s: it has ended, or its machine is suspended`;
    setText(status, isGone ? `${what}. The figure shows the last state received; run the cell again.` : latest.content.status);
  };
  const watch = setInterval(() => {
    showStatus();
  }, 2000);

  for (const each of traces) {
    const stepAt = (event) => {
      if (!each.axis) return null;
      const fraction = (event.offsetX - each.axis.left) / (each.axis.right - each.axis.left);
      return fraction < -0.02 || fraction > 1.02 ? null : Math.min(Math.max(Math.round(fraction * each.axis.last), 0), each.axis.last);
    };
    const leave = () => {
      tip.hide();
      for (const other of traces) other.under.hidden = true;
    };
    each.canvas.addEventListener("pointermove", (event) => {
      const step = stepAt(event);
      if (step === null || !latest) return leave();
      for (const other of traces) mark(other.under, other.axis, step);
      const of = [...latest.runs, ...latest.earlier].map((run) => [run.name, run.traces[each.trace.name]]).filter(([, line]) => line.step.length && line.step[0] <= step && step <= line.step.at(-1));
      return tip.show(event, [`step ${step}`, ...of.map(([name, line]) => `${name}: ${threeDigits(valueAt(line, step))}`)]);
    }, { signal });
    each.canvas.addEventListener("pointerleave", leave, { signal });
    each.canvas.addEventListener("click", (event) => {
      const step = stepAt(event);
      if (step !== null && latest?.content.n_recorded) scrubber.go({ step });
    }, { signal });
  }

  const replay = follow(model, signal, draw, PICTURE_MS);
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
    clearInterval(watch);
  });
}
export default { render };
