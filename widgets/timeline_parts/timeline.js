const PARTS_OF = { monitors: "every step", attention: "attention", router: "router", optimizer: "optimizer", activations: "activations", curvature: "curvature", spectra: "spectra" };
const EVIDENCE = "evidence of "; // and the name of the run: the name of its panel
const floats = (view) => new Float32Array(view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength));
const bytes = (view) => new Uint8Array(view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength));

// Evidence over that of an alarm, in two digits; beyond the axis it is not known.
const evidenceText = (value, panel) => (value <= 1.001 * panel.low ? `< ${panel.low}` : value >= panel.farthest ? `> ${panel.farthest}` : String(Number(value.toPrecision(2))));

// The message of the kernel, with its arrays inserted.
function filled(content, buffers) {
  const arrays = (item, names) => ({ ...item, ...Object.fromEntries(names.map((name) => [name, floats(buffers[item[name]])])) });
  const panels = content.panels.map((panel) => panel.is_seen ? {
    ...panel,
    lines: panel.lines.map((line) => arrays(line, ["step", "value"])),
    bands: panel.bands.map((band) => arrays(band, ["step", "lower", "upper"])),
  } : panel);
  const runs = content.runs.map((run) => ({ ...run, checks: arrays(run.checks, ["sound", "broken"]) }));
  const detailed = (detail) => ({
    ...detail,
    heat: detail.heat === null ? null : floats(buffers[detail.heat]),
    modes: detail.modes === null ? null
      : { points: floats(buffers[detail.modes]), layer: bytes(buffers[detail.modes + 1]), isReliable: bytes(buffers[detail.modes + 2]) },
  });
  const selection = content.selection && { ...content.selection, details: content.selection.details.map(detailed) };
  return { ...content, runs, panels, selection };
}

function themeNow(element) {
  const style = getComputedStyle(element), read = (name, otherwise) => style.getPropertyValue(name).trim() || otherwise;
  return {
    ink: read("--jp-content-font-color1", "#7a7a7a"),
    ground: read("--jp-layout-color0", "#ffffff"),
    font: style.fontFamily,
    faint: "rgba(122, 122, 122, 0.28)",
    checks: "rgb(122, 122, 122)",
    band: "rgba(122, 122, 122, 0.24)",
  };
}

function render({ model, el, signal }) {
  el.classList.add("workbench-timeline");
  const button = (text, tip, act) => {
    const one = made("button", "workbench-timeline-button", text);
    Object.assign(one, { type: "button", title: tip, onclick: act });
    return one;
  };
  const accountBox = made("div", "workbench-timeline-accounts"), runBox = made("div", "workbench-timeline-runs"), tools = made("div", "workbench-timeline-tools"), keys = made("div", "workbench-timeline-keys");
  const choice = made("details", "workbench-timeline-choice"), summary = made("summary"), groups = made("div", "workbench-timeline-groups");
  choice.append(summary, groups);
  const reduceBox = made("label", "", "over layers and heads "), reduce = made("select");
  reduce.setAttribute("aria-label", "reduction over layers and heads");
  for (const name of ["worst", "min", "max", "mean"]) reduce.append(made("option", "", name));
  reduceBox.append(reduce);
  const all = button("all steps", "Show everything, also what comes (double-click, or the key 0)", () => ask({ view: null }));
  const hint = made("span", "workbench-timeline-note", "drag to zoom · click, then wheel · shift-drag to move · click a mark for details");
  tools.append(choice, reduceBox, all, hint);
  const stack = made("div", "workbench-timeline-stack"), laneBox = made("div", "workbench-timeline-lane"), lane = made("canvas");
  const cursor = made("div", "workbench-timeline-cursor"), zone = made("div", "workbench-timeline-zone"), flag = made("span");
  cursor.append(flag);
  stack.tabIndex = 0;
  stack.setAttribute("role", "application");
  stack.setAttribute("aria-label", "Timeline. Arrow keys move, plus and minus zoom, 0 shows all, n and p go to the next and previous alarm.");
  lane.setAttribute("role", "img");
  laneBox.append(lane);
  const panelBox = made("div");
  stack.append(laneBox, panelBox, cursor, zone);
  const side = made("div", "workbench-timeline-side"), detailBox = made("div"), alarmBox = made("div", "workbench-timeline-alarms");
  detailBox.setAttribute("aria-live", "polite");
  side.append(detailBox, alarmBox);
  const body = made("div", "workbench-timeline-body");
  body.append(stack, side);
  accountBox.setAttribute("role", "note");
  accountBox.setAttribute("aria-label", "First alarms");
  el.replaceChildren(accountBox, runBox, tools, keys, body);

  let state = null, view = null, panels = [], lanePlaces = [], paintDetails = null, theme = null, isDue = false, readAt = null;
  // A request is sent at once or, while one is pending, after its answer: the latest of each kind.
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
  const ask = (wish) => {
    waiting = { ...waiting, ...wish };
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
  const widthNow = () => Math.max(50, lane.clientWidth - INSET.left - INSET.right);

  const paint = () => {
    isDue = false;
    if (state === null || !el.isConnected) return;
    theme ??= themeNow(el);
    const runs = state.runs.filter((run) => run.is_shown), chosen = state.selection && (state.selection.event ?? { step: state.selection.step });
    lane.style.height = `${ROW * runs.length + (runs.some((run) => run.lead) ? 30 : 20)}px`;
    lanePlaces = drawLane(lane, theme, runs, view, chosen, state.broken);
    el.style.setProperty("--workbench-timeline-accounts", `${accountBox.offsetHeight}px`); // what is sticky is below it
    for (const one of panels) {
      const { top, bottom } = one.canvas.getBoundingClientRect();
      one.isOut = bottom < -120 || top > window.innerHeight + 120; // drawn when it comes into sight
      if (!one.isOut && one.panel) one.places = drawPanel(one.canvas, theme, one.panel, runs, view, chosen);
    }
    tellSeen();
    if (paintDetails) paintDetails(theme);
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

  const makePanels = () => {
    panels = state.panels.map((panel) => {
      const box = made("div", "workbench-timeline-panel"), head = made("div", "workbench-timeline-head");
      const one = { name: panel.name, panel: null, places: [], title: made("b"), note: made("span", "workbench-timeline-note"), readout: made("span", "workbench-timeline-readout"), canvas: made("canvas") };
      const drop = button("×", `Remove ${panel.name}`, () => ask({ signals: state.chosen.filter((name) => name !== panel.name) }));
      drop.classList.add("workbench-timeline-drop");
      drop.setAttribute("aria-label", `Remove ${panel.name}`);
      one.canvas.setAttribute("role", "img");
      const isEvidence = panel.name.startsWith(EVIDENCE);
      head.classList.toggle("workbench-timeline-evidence", isEvidence);
      head.append(one.title, one.note, one.readout, ...(isEvidence ? [] : [drop]));
      box.append(head, one.canvas);
      one.box = box;
      return one;
    });
    panelBox.replaceChildren(...panels.map((one) => one.box));
  };
  const setText = (element, text) => {
    if (element.textContent !== text) element.textContent = text;
  };
  const once = (element, key, make) => { // rebuild only what has changed: the user may be using it
    const whole = JSON.stringify(key);
    if (element.madeOf === whole) return;
    element.madeOf = whole;
    make();
  };

  // The first alarm and its likely cause, which stay in sight.
  const showAccounts = () => {
    const told = state.runs.filter((run) => run.is_shown && run.account);
    once(accountBox, told.map((run) => [run.name, run.account, run.has_alarm]), () => accountBox.replaceChildren(...told.map((run) => {
      const line = made("div", "", run.account);
      line.style.borderColor = run.color;
      line.classList.toggle("workbench-timeline-alarmed", run.has_alarm);
      if (state.runs.length > 1) line.prepend(made("span", "workbench-timeline-note", `${run.name}  `));
      return line;
    })));
  };

  const showRuns = () => once(runBox, state.runs.map((run) => [run.name, run.words, run.is_shown]), () => {
    const shown = state.runs.filter((run) => run.is_shown).map((run) => run.name);
    runBox.setAttribute("role", "group");
    runBox.setAttribute("aria-label", "runs");
    runBox.replaceChildren(...state.runs.map((run) => {
      const tag = button("", "Show or hide this run", () =>
        ask({ shown: run.is_shown ? shown.filter((name) => name !== run.name) : [...shown, run.name] }));
      tag.classList.add("workbench-timeline-run");
      tag.setAttribute("aria-pressed", run.is_shown);
      tag.insertAdjacentHTML("afterbegin", `<svg width="28" height="8" aria-hidden="true"><path d="M0 4H28" stroke="${run.color}"
        stroke-width="2.4" stroke-dasharray="${run.dash.join(" ")}"/></svg>`);
      const words = made("span", "workbench-timeline-note", run.words);
      words.classList.toggle("workbench-timeline-bad", ["diverged", "removed", "unreadable"].includes(run.state));
      tag.append(made("b", "", run.name), words);
      return tag;
    }));
  });

  const showChoice = () => once(groups, [state.signals, state.chosen], () => {
    summary.textContent = `signals: ${state.chosen.length} of ${state.signals.length}`;
    const parts = [...new Set(state.signals.map((one) => one.part))];
    groups.replaceChildren(...parts.map((part) => {
      const box = made("fieldset"), title = made("legend", "", PARTS_OF[part] ?? part);
      box.append(title, ...state.signals.filter((one) => one.part === part).map((one) => {
        const label = made("label"), input = made("input");
        Object.assign(input, { type: "checkbox", checked: state.chosen.includes(one.name) });
        input.onchange = () => {
          const names = state.chosen.filter((name) => name !== one.name);
          state.chosen = input.checked ? [...names, one.name] : names;
          ask({ signals: state.chosen });
        };
        label.append(input, one.title);
        label.title = one.name;
        return label;
      }));
      return box;
    }));
  });

  const showKeys = () => {
    const runs = state.runs.filter((run) => run.is_shown), onsets = runs.flatMap((run) => run.onsets);
    const shape = (path, fill) => `<svg width="13" height="12" aria-hidden="true"><path d="${path}" stroke="currentColor" stroke-width="1.5" fill="${fill}"/></svg>`;
    const words = [
      [onsets.some((mark) => !mark.is_established), shape("M1 2h11l-5.5 9z", "currentColor") + "first alarm of a mechanism"],
      [onsets.some((mark) => mark.is_established), shape("M1 2h11l-5.5 9z", "none") + "of loss, gradient norm, spikes"],
      [runs.some((run) => run.later.length), shape("M6 1v10", "none") + "later alarm"],
      [runs.some((run) => run.actions.length), shape("M6.5 1l5 5l-5 5l-5 -5z", "currentColor") + "action"],
      [runs.some((run) => run.diverged), shape("M2 2l9 9m0 -9l-9 9", "none") + "divergence"],
      [runs.some((run) => run.faults.length), '<i class="workbench-timeline-shade"></i>fault on'],
      [runs.some((run) => run.checks.sound.length), '<svg width="8" height="12" aria-hidden="true"><path d="M4 4.5v3" stroke="#7a7a7a" stroke-width="2"/></svg>probe: sound'],
      [runs.some((run) => run.checks.broken.length), `<svg width="8" height="12" aria-hidden="true"><path d="M1 3h6v6h-6z" fill="${state.broken}"/></svg>probe: broken`],
      [state.band, `<i class="workbench-timeline-band"></i>${state.band}`],
    ];
    once(keys, words, () => {
      keys.innerHTML = words.filter(([occurs]) => occurs).map(([, html]) => `<span>${html}</span>`).join("");
    });
  };

  const showAlarms = () => once(alarmBox, [state.alarms, state.selection?.event], () => {
    if (!state.alarms.length) {
      alarmBox.replaceChildren(made("div", "workbench-timeline-note", "no alarms recorded; click any step for its layers and spectra"));
      return;
    }
    const colors = Object.fromEntries(state.runs.map((run) => [run.name, run.color]));
    const list = state.alarms.map((mark) => {
      const one = button("", mark.message, () => ask({ select: { step: mark.step, signal: mark.source, run: mark.run } }));
      one.classList.add("workbench-timeline-alarm");
      one.setAttribute("aria-pressed", isSame(mark, state.selection?.event));
      const number = made("span", "workbench-timeline-step", mark.step.toLocaleString("en")), words = made("span");
      words.append(made("b", "", mark.source), mark.place ? ` ${mark.place}` : "", made("span", "workbench-timeline-note", ` ${mark.run}`));
      const swatch = made("i", "workbench-timeline-swatch");
      swatch.style.borderColor = colors[mark.run];
      swatch.style.background = mark.is_established ? "transparent" : colors[mark.run];
      one.append(swatch, number, words);
      return one;
    });
    alarmBox.replaceChildren(made("div", "workbench-timeline-part", "first alarms, by step"), ...list);
  });

  const showSelection = () => {
    const key = state.selection && [state.selection.step, state.selection.signal, state.selection.run, state.selection.event?.source, state.selection.details.map((detail) => [detail.run, detail.step, detail.modes_step])];
    once(detailBox, key, () => {
      if (state.selection) paintDetails = detailsOf(detailBox, state.selection, state.runs, ask);
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
    if (state.panels.map((panel) => panel.name).join("\n") !== panels.map((one) => one.name).join("\n")) makePanels();
    state.panels.forEach((panel, i) => {
      const one = panels[i];
      if (!panel.is_seen) return;
      const ends = panel.lines.map((line) => `${line.run} ${numberText(line.value.at(-1))}`);
      one.panel = panel;
      setText(one.title, panel.title);
      setText(one.note, panel.note);
      one.canvas.setAttribute("aria-label", `${panel.title} over the steps; last in view: ${ends.join(", ")}`);
    });
    const runs = state.runs.filter((run) => run.is_shown);
    lane.setAttribute("aria-label", "What happened: " + runs.map((run) => `${run.name} ${run.words}${run.lead ? ", " + run.lead[2] : ""}`).join("; "));
    showAccounts();
    showRuns();
    showChoice();
    showKeys();
    showAlarms();
    showSelection();
    read(readAt);
    if (reduce.value !== state.reduce) reduce.value = state.reduce;
    all.disabled = state.is_whole;
    el.dataset.view = view.map((end) => end.toFixed(2)).join(" ");
    theme = null;
    paint(); // in the frame that follow() draws in
    if (isMine) el.dataset.answered = content.token.slice(page.length + 1);
    if (lane.clientWidth && Math.abs(widthNow() - (el.toldWidth ?? 800)) > 40) {
      el.toldWidth = widthNow();
      ask({ width: el.toldWidth });
    }
  };
  const replay = follow(model, signal, draw);
  reduce.onchange = () => ask({ reduce: reduce.value });

  // The cursor runs through all panels and reads the lines.
  const nearest = (steps, step) => {
    const row = Math.min(rowAt(steps, step), steps.length - 1);
    return row > 0 && step - steps[row - 1] < steps[row] - step ? row - 1 : row;
  };
  const read = (step) => {
    readAt = step;
    for (const one of panels) {
      if (one.isOut || !one.panel) continue;
      // The lines of the evidence are named at all times, with their last value.
      const lines = one.panel.lines.filter((line) => line.step.length && (step !== null || line.signal));
      const values = lines.map((line) => {
        const value = line.value[step === null ? line.value.length - 1 : nearest(line.step, step)], text = numberText(value);
        return line.signal ? [line.color, `${line.signal} ${evidenceText(value, one.panel)}`] : [state.runs.find((run) => run.name === line.run)?.color, text];
      });
      once(one.readout, values, () => one.readout.replaceChildren(...values.map(([color, text]) => {
        const part = made("span", "", text);
        part.style.borderColor = color;
        return part;
      })));
    }
  };
  const stepAt = (event) => stepAxis(view, lane.clientWidth).step(event.clientX - lane.getBoundingClientRect().left);
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
  const hideCursor = () => {
    cursor.style.display = "none";
    read(null);
  };
  let drag = null;
  const isOverPlot = (event) => event.target instanceof HTMLCanvasElement && event.target.closest(".workbench-timeline-stack") !== null;
  stack.addEventListener("pointermove", (event) => {
    if (state === null) return;
    const left = stack.getBoundingClientRect().left, frame = lane.getBoundingClientRect();
    if (drag) {
      const moved = event.clientX - drag.x;
      if (Math.abs(moved) > 4) drag.isMoved = true;
      if (drag.isMoved && drag.pans) {
        const shift = (moved / widthNow()) * (drag.view[1] - drag.view[0]);
        look(drag.view[0] - shift, drag.view[1] - shift);
      } else if (drag.isMoved) {
        const ends = [drag.x, Math.min(Math.max(event.clientX, frame.left + INSET.left), frame.right - INSET.right)].sort((a, b) => a - b);
        Object.assign(zone.style, { display: "block", left: `${ends[0] - left}px`, width: `${ends[1] - ends[0]}px` });
      }
      return;
    }
    const x = event.clientX - frame.left;
    if (!isOverPlot(event) || x < INSET.left || x > frame.width - INSET.right) return hideCursor();
    const step = stepAt(event), mark = markAt(event);
    Object.assign(cursor.style, { display: "block", left: `${event.clientX - left}px` });
    cursor.classList.toggle("workbench-timeline-flip", x > frame.width * 0.8);
    setText(flag, `step ${Math.round(step).toLocaleString("en")}`);
    read(step);
    const words = { alarm: "alarm of", action: "action", cross: "divergence:", probe: "probe of" };
    const said = mark && [`step ${(mark.at ?? mark.step).toLocaleString("en")}: ${words[mark.kind]} ${mark.source}`, mark.run, mark.place, mark.score === null ? "" : `score ${numberText(mark.score)}`, mark.at > mark.step ? `as at step ${mark.step.toLocaleString("en")}:` : "", mark.message].filter(Boolean).join("\n");
    event.target.title = said ?? "";
    stack.style.cursor = mark?.kind === "alarm" ? "pointer" : "";
  });
  stack.addEventListener("pointerleave", hideCursor);
  stack.addEventListener("pointerdown", (event) => {
    if (state === null || !isOverPlot(event) || event.button > 1) return;
    drag = { x: event.clientX, view: [...view], pans: event.shiftKey || event.button === 1, isMoved: false, mark: markAt(event), step: stepAt(event), panel: panels.find((one) => one.canvas === event.target) };
    stack.setPointerCapture(event.pointerId);
    stack.focus({ preventScroll: true });
    event.preventDefault();
  });
  stack.addEventListener("pointerup", (event) => {
    if (!drag) return;
    const { isMoved, pans, mark, step, panel } = drag;
    drag = null;
    zone.style.display = "none";
    if (isMoved && !pans) {
      const end = Math.min(Math.max(stepAt(event), view[0]), view[1]);
      look(Math.min(step, end), Math.max(step, end));
    } else if (!isMoved && event.detail < 2) {
      if (mark?.kind === "alarm") ask({ select: { step: mark.step, signal: mark.source, run: mark.run } });
      else if (mark || panel) ask({ select: { step: mark?.at ?? mark?.step ?? step, signal: panel && !panel.name.startsWith(EVIDENCE) ? panel.name : null } });
    }
  });
  stack.addEventListener("pointercancel", () => {
    drag = null;
    zone.style.display = "none";
  });
  stack.addEventListener("dblclick", (event) => isOverPlot(event) && ask({ view: null }));
  stack.addEventListener("wheel", (event) => {
    // Scrolling the notebook past the panels must stay possible: the wheel zooms after a click, or with Ctrl.
    if (state === null || !isOverPlot(event) || !(event.ctrlKey || event.metaKey || stack.contains(document.activeElement))) return;
    event.preventDefault();
    event.stopPropagation();
    const size = event.deltaMode === 1 ? 16 : 1;
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      const shift = ((event.deltaX * size) / widthNow()) * (view[1] - view[0]);
      look(view[0] + shift, view[1] + shift);
    } else zoom(stepAt(event), Math.exp(Math.max(-120, Math.min(120, event.deltaY * size)) * 0.0022));
  }, { passive: false });
  stack.addEventListener("keydown", (event) => {
    if (state === null || event.ctrlKey || event.metaKey || event.altKey || event.target !== stack) return;
    const middle = (view[0] + view[1]) / 2, shift = 0.2 * (view[1] - view[0]);
    const next = (way) => {
      const marks = state.alarms, at = marks.findIndex((mark) => isSame(mark, state.selection?.event));
      const mark = marks[at < 0 ? (way > 0 ? 0 : marks.length - 1) : Math.min(Math.max(at + way, 0), marks.length - 1)];
      if (mark) ask({ select: { step: mark.step, signal: mark.source, run: mark.run } });
    };
    const acts = {
      ArrowLeft: () => look(view[0] - shift, view[1] - shift),
      ArrowRight: () => look(view[0] + shift, view[1] + shift),
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
    event.stopPropagation(); // JupyterLab has keys of its own
  });

  const again = () => {
    theme = null;
    if (state !== null) schedule();
    else replay();
  };
  onTheme(signal, again);
  const size = new ResizeObserver(() => {
    again();
    if (state !== null && lane.clientWidth && Math.abs(widthNow() - (el.toldWidth ?? 800)) > 40) {
      el.toldWidth = widthNow();
      ask({ width: el.toldWidth });
    }
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
  seen.observe(stack);
  signal.addEventListener("abort", () => {
    size.disconnect();
    seen.disconnect();
    clearTimeout(timer);
  });
}
export default { render };
