// The widget: its elements, its requests to the kernel, and pointer and keyboard control of its panels.
const HELP = "Timeline. Arrow keys move, plus and minus zoom, 0 shows all; with Shift, arrow keys move the cursor, and Enter shows its step; n and p go to the next and previous alarm.";

function render({ model, el, signal }) {
  el.classList.add("workbench-timeline");
  const accountBox = made("div", "workbench-timeline-accounts"), runBox = made("div", "workbench-timeline-runs"), tools = made("div", "workbench-timeline-tools"), keys = made("div", "workbench-timeline-keys");
  const choice = made("details", "workbench-timeline-choice"), summary = made("summary"), groups = made("div", "workbench-timeline-groups");
  choice.append(summary, groups);
  const reduceBox = made("label", "", "over layers and heads "), reduce = made("select");
  reduce.setAttribute("aria-label", "reduction over layers and heads");
  for (const name of ["worst", "min", "max", "mean"]) reduce.append(made("option", "", name));
  reduceBox.append(reduce);
  const all = buttonOf("All steps", "Show all steps, including future ones (double-click, or key 0)", () => ask({ view: null }));
  const hint = made("span", "workbench-timeline-note", "drag to zoom · click, then wheel · shift-drag to move · click a mark for details");
  tools.append(choice, reduceBox, all, hint);
  const stack = made("div", "workbench-timeline-stack"), laneBox = made("div", "workbench-timeline-lane"), lane = made("canvas");
  const cursor = made("div", "workbench-timeline-cursor"), zone = made("div", "workbench-timeline-zone"), flag = made("span");
  cursor.append(flag);
  stack.tabIndex = 0;
  stack.setAttribute("role", "application");
  stack.setAttribute("aria-label", HELP);
  lane.setAttribute("role", "img");
  laneBox.append(lane);
  const panelBox = made("div"), spoken = made("div", "workbench-timeline-spoken");
  spoken.setAttribute("role", "status");
  stack.append(laneBox, panelBox, cursor, zone);
  const side = made("div", "workbench-timeline-side"), detailBox = made("div"), alarmBox = made("div", "workbench-timeline-alarms");
  side.tabIndex = 0; // it may scroll
  side.setAttribute("role", "region");
  side.setAttribute("aria-label", "details and alarms");
  side.append(detailBox, alarmBox);
  const body = made("div", "workbench-timeline-body");
  body.append(stack, side);
  for (const [box, role, label] of [[accountBox, "note", "First alarms"], [runBox, "group", "runs"]]) {
    box.setAttribute("role", role);
    box.setAttribute("aria-label", label);
  }
  el.replaceChildren(accountBox, runBox, tools, keys, body, spoken);

  let state = null, view = null, panels = [], lanePlaces = [], paintDetails = null, theme = null, isDue = false;
  // A request is sent immediately or, after a recent one, with a delay; of each kind only the latest is sent.
  let waiting = null, token = "", toldAt = 0, timer = null;
  const page = crypto.randomUUID?.() ?? String(Math.random());
  let n = 0;
  const tell = () => {
    timer = null;
    toldAt = performance.now();
    token = `${page}.${++n}`;
    el.dataset.asked = n;
    model.send({ ask: waiting, token });
    waiting = null;
  };
  const ask = (request) => {
    waiting = { ...waiting, ...request };
    if (timer === null) timer = setTimeout(tell, Math.max(0, toldAt + 40 - performance.now()));
  };
  const look = (from, to) => {
    const [first, last] = state.extent, least = 2;
    if (to - from < least) [from, to] = [(from + to - least) / 2, (from + to + least) / 2];
    if (to - from > 3 * (last - first)) return;
    view = [from, to];
    ask({ view });
    schedule();
  };
  const zoom = (at, factor) => look(at - (at - view[0]) * factor, at + (view[1] - at) * factor);
  const themed = () => (theme ??= themeNow(el));
  const widthNow = () => Math.max(50, lane.clientWidth - insetOf(themed()).left - insetOf(themed()).right);

  const paint = () => {
    isDue = false;
    if (state === null || !el.isConnected) return;
    themed();
    const runs = state.runs.filter((run) => run.is_shown), chosen = state.selection && (state.selection.event ?? { step: state.selection.step });
    lane.style.height = `${laneHeight(theme, runs)}px`;
    lanePlaces = drawLane(lane, theme, runs, view, chosen, state.broken);
    // The fixed parts must leave space for the panels that scroll below them.
    const told = accountBox.offsetHeight, isTall = told > 0.25 * window.innerHeight;
    accountBox.classList.toggle("workbench-timeline-scrolls", isTall);
    laneBox.classList.toggle("workbench-timeline-scrolls", told + laneBox.offsetHeight > 0.45 * window.innerHeight);
    el.style.setProperty("--workbench-timeline-accounts", `${isTall ? 0 : told}px`);
    el.style.setProperty("--workbench-timeline-left", `${insetOf(theme).left}px`);
    for (const one of panels) {
      const { top, bottom } = one.canvas.getBoundingClientRect();
      one.isOut = bottom < -120 || top > window.innerHeight + 120; // drawn once it is visible
      if (!one.isOut && one.panel) one.places = drawPanel(one.canvas, theme, one.panel, runs, view, chosen);
    }
    tellSeen();
    if (paintDetails) paintDetails(theme);
    showCursor();
  };
  const schedule = () => {
    if (isDue) return;
    isDue = true;
    requestAnimationFrame(paint);
  };

  // The kernel sends only the lines on the screen.
  const tellSeen = () => {
    const seen = panels.filter((one) => !one.isOut).map((one) => one.name), said = seen.join("\n");
    if (el.toldSeen === said || !panels.length) return;
    el.toldSeen = said;
    ask({ seen });
  };
  const tellWidth = () => {
    if (!lane.clientWidth || Math.abs(widthNow() - (el.toldWidth ?? 800)) <= 40) return;
    el.toldWidth = widthNow();
    ask({ width: el.toldWidth });
  };

  const makePanels = () => {
    panels = state.panels.map((panel) => {
      const box = made("div", "workbench-timeline-panel"), head = made("div", "workbench-timeline-head");
      const one = { name: panel.name, panel: null, places: [], title: made("b"), note: made("span", "workbench-timeline-note"), readout: made("span", "workbench-timeline-readout"), canvas: made("canvas") };
      const drop = buttonOf("×", `Remove ${panel.name}`, () => ask({ signals: state.chosen.filter((name) => name !== panel.name) }));
      drop.classList.add("workbench-timeline-drop");
      drop.setAttribute("aria-label", `Remove ${panel.name}`);
      one.canvas.setAttribute("role", "img");
      head.append(one.title, ...(panel.name.startsWith(EVIDENCE) ? [] : [drop]), one.note, one.readout);
      box.append(head, one.canvas);
      one.box = box;
      return one;
    });
    const nothing = state.signals.length ? "No signal is chosen" : "No signal has been recorded yet";
    panelBox.replaceChildren(...(panels.length ? panels.map((one) => one.box) : [made("div", "workbench-timeline-note", nothing)]));
  };

  const showSelection = () => {
    const { selection } = state;
    const key = selection && [selection.step, selection.asked, selection.signal, selection.run, selection.event?.source, selection.details.map((detail) => [detail.run, detail.step, detail.modes_step])];
    once(detailBox, key, () => {
      if (selection) paintDetails = detailsOf(detailBox, selection, state.runs, ask);
      else {
        paintDetails = null;
        detailBox.replaceChildren();
      }
    });
  };

  const draw = (content, buffers) => {
    const isMine = content.token.startsWith(page);
    state = filled(content, buffers);
    // While the latest request is pending, the page keeps its own view.
    if (view === null || (timer === null && (content.token === token || !isMine || token === ""))) view = content.view;
    if (state.panels.map((panel) => panel.name).join("\n") !== panels.map((one) => one.name).join("\n") || !panels.length) makePanels();
    state.panels.forEach((panel, i) => {
      const one = panels[i];
      if (!panel.is_seen) return;
      const ends = panel.lines.map((line) => `${line.run} ${numberText(line.value.at(-1))}`);
      one.panel = panel;
      setText(one.title, panel.title);
      setText(one.note, panel.note);
      one.canvas.setAttribute("aria-label", `${panel.title} over steps; last in view: ${ends.join(", ")}`);
    });
    const runs = state.runs.filter((run) => run.is_shown);
    lane.setAttribute("aria-label", "Events: " + runs.map((run) => `${run.name} ${run.words}${run.lead ? ", " + run.lead[2] : ""}`).join("; "));
    showAccounts(accountBox, state);
    showRuns(runBox, state, ask);
    showChoice(summary, groups, state, ask);
    showKeys(keys, state);
    showAlarms(alarmBox, state, ask);
    showSelection();
    if (state.is_saved) setText(reduceBox, `over layers and heads: ${state.reduce}`);
    else if (reduce.value !== state.reduce) reduce.value = state.reduce;
    all.disabled = state.is_whole;
    el.dataset.view = view.map((end) => end.toFixed(2)).join(" ");
    theme = null;
    paint(); // in the frame that follow() draws in
    if (isMine) el.dataset.answered = content.token.slice(page.length + 1);
    tellWidth();
  };
  const replay = follow(model, signal, draw);
  reduce.onchange = () => ask({ reduce: reduce.value });

  // The cursor spans all panels and shows the values of the lines. When the view changes, it stays under the pointer or at
  // the step chosen by keys.
  let pointerX = null, keyStep = null;
  const stepAt = (clientX) => stepAxis(themed(), view, lane.clientWidth).step(clientX - lane.getBoundingClientRect().left);
  const cursorStep = () => (pointerX === null ? keyStep : stepAt(pointerX));
  const showCursor = () => {
    const step = cursorStep(), frame = lane.getBoundingClientRect(), { left, right } = insetOf(themed());
    const isIn = step !== null && step >= view[0] && step <= view[1];
    const values = panels.filter((one) => !one.isOut && one.panel).map((one) => [one.panel.title, readPanel(one, state, view, isIn ? step : null)]);
    cursor.style.display = isIn ? "block" : "none";
    if (!isIn) return "";
    const x = stepAxis(themed(), view, lane.clientWidth).x(step);
    cursor.style.left = `${x + frame.left - stack.getBoundingClientRect().left}px`;
    setText(flag, `step ${stepText(step)}`);
    cursor.classList.toggle("workbench-timeline-flip", x > left + 0.8 * (frame.width - left - right));
    return `step ${stepText(step)}: ${values.map((pair) => pair.join(" ")).join("; ")}`;
  };
  const hideCursor = () => {
    pointerX = keyStep = null;
    if (state !== null) showCursor();
  };
  const markAt = (event) => {
    const canvas = event.target.closest("canvas");
    const places = canvas === lane ? lanePlaces : panels.find((one) => one.canvas === canvas)?.places ?? [];
    let best = null, least = 12;
    for (const place of places) {
      const far = Math.hypot(place.x - event.offsetX, place.y - event.offsetY);
      if (far < least) [best, least] = [place.mark, far];
    }
    return best;
  };
  let drag = null;
  const isOverPlot = (event) => event.target instanceof HTMLCanvasElement && event.target.closest(".workbench-timeline-stack") !== null;
  stack.addEventListener("pointermove", (event) => {
    if (state === null) return;
    const left = stack.getBoundingClientRect().left, frame = lane.getBoundingClientRect(), inset = insetOf(themed());
    if (drag) {
      const moved = event.clientX - drag.x;
      if (Math.abs(moved) > 4) drag.isMoved = true;
      if (drag.isMoved && drag.pans) {
        const shift = (moved / widthNow()) * (drag.view[1] - drag.view[0]);
        look(drag.view[0] - shift, drag.view[1] - shift);
      } else if (drag.isMoved) {
        const ends = [drag.x, Math.min(Math.max(event.clientX, frame.left + inset.left), frame.right - inset.right)].sort((a, b) => a - b);
        Object.assign(zone.style, { display: "block", left: `${ends[0] - left}px`, width: `${ends[1] - ends[0]}px` });
      }
      return;
    }
    const x = event.clientX - frame.left;
    if (!isOverPlot(event) || x < inset.left || x > frame.width - inset.right) return hideCursor();
    [pointerX, keyStep] = [event.clientX, null];
    showCursor();
    const mark = markAt(event), words = { alarm: "alarm of", action: "action", cross: "divergence:", probe: "probe of" };
    const said = mark && [`step ${stepText(mark.at ?? mark.step)}: ${words[mark.kind]} ${mark.source}`, mark.run, mark.place, mark.score === null ? "" : `score ${numberText(mark.score)}`, mark.at > mark.step ? `since step ${stepText(mark.step)}:` : "", mark.message].filter(Boolean).join("\n");
    event.target.title = said ?? "";
    stack.style.cursor = ["alarm", "probe"].includes(mark?.kind) ? "pointer" : "";
  });
  stack.addEventListener("pointerleave", hideCursor);
  stack.addEventListener("pointerdown", (event) => {
    if (state === null || !isOverPlot(event) || event.button > 1) return;
    drag = { x: event.clientX, view: [...view], pans: event.shiftKey || event.button === 1, isMoved: false, mark: markAt(event), step: stepAt(event.clientX), panel: panels.find((one) => one.canvas === event.target) };
    stack.setPointerCapture(event.pointerId);
    stack.focus({ preventScroll: true });
    event.preventDefault();
  });
  const choose = (mark) => ask({ select: { step: mark.at ?? mark.step, signal: mark.source, run: mark.run } });
  stack.addEventListener("pointerup", (event) => {
    if (!drag) return;
    const { isMoved, pans, mark, step, panel } = drag;
    drag = null;
    zone.style.display = "none";
    if (isMoved && !pans) {
      const end = Math.min(Math.max(stepAt(event.clientX), view[0]), view[1]);
      look(Math.min(step, end), Math.max(step, end));
    } else if (!isMoved && event.detail < 2) {
      if (["alarm", "probe"].includes(mark?.kind)) choose(mark);
      else if (mark || panel) ask({ select: { step: mark?.at ?? mark?.step ?? step, signal: panel && !panel.name.startsWith(EVIDENCE) ? panel.name : null } });
    }
  });
  stack.addEventListener("pointercancel", () => {
    drag = null;
    zone.style.display = "none";
  });
  stack.addEventListener("dblclick", (event) => isOverPlot(event) && ask({ view: null }));
  stack.addEventListener("wheel", (event) => {
    // The wheel zooms only after a click or with Ctrl, so that the notebook can be scrolled past the panels.
    if (state === null || !isOverPlot(event) || !(event.ctrlKey || event.metaKey || stack.contains(document.activeElement))) return;
    event.preventDefault();
    event.stopPropagation();
    const size = event.deltaMode === 1 ? 16 : 1;
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      const shift = ((event.deltaX * size) / widthNow()) * (view[1] - view[0]);
      look(view[0] + shift, view[1] + shift);
    } else zoom(stepAt(event.clientX), Math.exp(Math.max(-120, Math.min(120, event.deltaY * size)) * 0.0022));
  }, { passive: false });
  stack.addEventListener("keydown", (event) => {
    if (state === null || event.ctrlKey || event.metaKey || event.altKey || event.target !== stack) return;
    const middle = (view[0] + view[1]) / 2, long = view[1] - view[0];
    const next = (way) => {
      const marks = state.alarms, at = marks.findIndex((mark) => isSame(mark, state.selection?.event));
      const mark = marks[at < 0 ? (way > 0 ? 0 : marks.length - 1) : Math.min(Math.max(at + way, 0), marks.length - 1)];
      if (mark) choose(mark);
    };
    const move = (way) => {
      if (!event.shiftKey) return look(view[0] + 0.2 * way * long, view[1] + 0.2 * way * long);
      const from = cursorStep() ?? middle, gap = Math.max(1, 0.01 * long);
      [pointerX, keyStep] = [null, Math.min(Math.max(Math.round(from + way * gap), Math.ceil(view[0])), Math.floor(view[1]))];
      return setText(spoken, showCursor());
    };
    const acts = {
      ArrowLeft: () => move(-1),
      ArrowRight: () => move(1),
      Enter: () => ask({ select: { step: cursorStep() ?? middle, signal: null } }),
      "+": () => zoom(middle, 0.6),
      "=": () => zoom(middle, 0.6),
      "-": () => zoom(middle, 1 / 0.6),
      0: () => ask({ view: null }),
      Home: () => ask({ view: null }),
      n: () => next(1),
      p: () => next(-1),
      Escape: () => ask({ select: null }),
    };
    if (!acts[event.key]) return;
    acts[event.key]();
    event.preventDefault();
    event.stopPropagation(); // JupyterLab would handle these keys too
  });

  const again = () => {
    theme = null;
    if (state !== null) schedule();
    else replay();
  };
  onTheme(signal, again);
  const size = new ResizeObserver(() => {
    again();
    if (state !== null) tellWidth();
  });
  size.observe(stack);
  const seen = new IntersectionObserver((changes) => changes.some((change) => change.isIntersecting) && schedule(), { rootMargin: "150px" });
  const scrolled = () => panels.some((one) => one.isOut) && schedule();
  document.addEventListener("pointerdown", (event) => {
    if (!choice.contains(event.target)) choice.open = false;
  }, { capture: true, signal });
  choice.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    choice.open = false;
    summary.focus();
  });
  document.addEventListener("scroll", scrolled, { capture: true, passive: true, signal });
  window.addEventListener("resize", schedule, { signal });
  seen.observe(stack);
  signal.addEventListener("abort", () => {
    size.disconnect();
    seen.disconnect();
    clearTimeout(timer);
  });
}
export default { render };
