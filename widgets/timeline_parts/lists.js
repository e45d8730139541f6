// The text around the panels of the timeline; each part is rebuilt only when it has changed, because it may be in use.
const PARTS_OF = { monitors: "every step", attention: "attention", router: "router", optimizer: "optimizer", activations: "activations", curvature: "curvature", spectra: "spectra" };

const setText = (element, text) => {
  if (element.textContent !== text) element.textContent = text;
};

const once = (element, key, make) => {
  const whole = JSON.stringify(key);
  if (element.madeOf === whole) return;
  element.madeOf = whole;
  // The focused control is replaced, and its replacement receives the focus.
  const place = [...element.querySelectorAll("button, input")].indexOf(document.activeElement);
  make();
  if (place >= 0) element.querySelectorAll("button, input")[place]?.focus({ preventScroll: true });
};

function buttonOf(text, tip, act) {
  const one = made("button", "workbench-timeline-button", text);
  return Object.assign(one, { type: "button", title: tip, onclick: act });
}

// The first alarm and its likely cause, which stay visible.
function showAccounts(box, state) {
  const told = state.runs.filter((run) => run.is_shown && run.account);
  once(box, told.map((run) => [run.name, run.account, run.has_alarm]), () => box.replaceChildren(...told.map((run) => {
    const line = made("div", "", run.account);
    line.style.borderColor = run.color;
    line.classList.toggle("workbench-timeline-alarmed", run.has_alarm);
    if (state.runs.length > 1) line.prepend(made("span", "workbench-timeline-note", `${run.name}  `));
    return line;
  })));
}

function showRuns(box, state, ask) {
  once(box, state.runs.map((run) => [run.name, run.words, run.is_shown]), () => {
    const shown = state.runs.filter((run) => run.is_shown).map((run) => run.name);
    box.replaceChildren(...state.runs.map((run) => {
      const tag = buttonOf("", "Show or hide this run", () =>
        ask({ shown: run.is_shown ? shown.filter((name) => name !== run.name) : [...shown, run.name] }));
      tag.classList.add("workbench-timeline-run");
      tag.setAttribute("aria-pressed", run.is_shown);
      const words = made("span", "workbench-timeline-note", run.is_shown ? run.words : "hidden");
      words.classList.toggle("workbench-timeline-bad", run.is_shown && ["diverged", "removed", "unreadable"].includes(run.state));
      tag.append(swatch(run), made("b", "", run.name), " ", words);
      return tag;
    }));
  });
}

function showChoice(summary, groups, state, ask) {
  once(groups, [state.signals, state.chosen], () => {
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
}

function showKeys(box, state) {
  const runs = state.runs.filter((run) => run.is_shown), onsets = runs.flatMap((run) => run.onsets);
  const shape = (path, fill) => `<svg viewBox="0 0 13 12" aria-hidden="true"><path d="${path}" stroke="currentColor" stroke-width="1.5" fill="${fill}"/></svg>`;
  const words = [
    [onsets.some((mark) => !mark.is_established), shape("M1 2h11l-5.5 9z", "currentColor") + "first alarm of a mechanism signal"],
    [onsets.some((mark) => mark.is_established), shape("M1 2h11l-5.5 9z", "none") + "first alarm of loss, gradient norm or spikes"],
    [runs.some((run) => run.later.length), shape("M6 1v10", "none") + "later alarm"],
    [runs.some((run) => run.actions.length), shape("M6.5 1l5 5l-5 5l-5 -5z", "currentColor") + "action"],
    [runs.some((run) => run.diverged), shape("M2 2l9 9m0 -9l-9 9", "none") + "divergence"],
    [runs.some((run) => run.faults.length), '<i class="workbench-timeline-shade"></i>fault on'],
    [runs.some((run) => run.checks.sound.length), '<svg viewBox="0 0 13 12" aria-hidden="true"><path d="M6 4v4" stroke="#7a7a7a" stroke-width="2"/></svg>probe: no fault'],
    [runs.some((run) => run.checks.broken.length), `<svg viewBox="0 0 13 12" aria-hidden="true"><path d="M3 3h7v7h-7z" fill="${state.broken}"/></svg>probe: fault`],
  ];
  once(box, [words, state.band], () => {
    box.innerHTML = words.filter(([occurs]) => occurs).map(([, html]) => `<span>${html}</span>`).join("");
    if (state.band) {
      const band = made("span");
      band.append(made("i", "workbench-timeline-band"), state.band);
      box.append(band);
    }
  });
}

function showAlarms(box, state, ask) {
  once(box, [state.alarms, state.no_alarms, state.selection?.event], () => {
    if (!state.alarms.length) {
      box.replaceChildren(made("div", "workbench-timeline-note", `${state.no_alarms}; click any step to see its layers and spectra`));
      return;
    }
    const named = Object.fromEntries(state.runs.map((run) => [run.name, run]));
    const list = state.alarms.map((mark) => {
      const one = buttonOf("", mark.message, () => ask({ select: { step: mark.step, signal: mark.source, run: mark.run } }));
      one.classList.add("workbench-timeline-alarm");
      one.setAttribute("aria-pressed", isSame(mark, state.selection?.event));
      const number = made("span", "workbench-timeline-step", stepText(mark.step)), words = made("span");
      words.append(made("b", "", mark.source), mark.place ? ` ${mark.place}` : "", made("span", "workbench-timeline-note", ` ${mark.run}`));
      one.append(swatch(named[mark.run]), number, words);
      return one;
    });
    box.replaceChildren(made("div", "workbench-timeline-part", "first alarms, by step"), ...list);
  });
}

// The values of the lines at a step, above a panel; null for the last ones in view.
function readPanel(one, state, view, step) {
  const { panel } = one, lines = panel.lines.filter((line) => line.step.length);
  const values = lines.map((line) => {
    const last = Math.max(0, rowAt(line.step, view[1] + 1e-9) - 1);
    const value = line.value[step === null ? last : nearestRow(line.step, step)];
    const run = state.runs.find(({ name }) => name === line.run);
    // A line of evidence is labeled; other lines have the style of their run.
    return line.signal ? [`${line.signal} ${evidenceText(value, panel)}`, line.color, line.dash, ""] : [numberText(value), run?.color, run?.dash, line.run];
  });
  once(one.readout, values, () => one.readout.replaceChildren(...values.map(([text, color, dash, name]) => {
    const part = made("span", "", text);
    if (name) part.title = name;
    part.prepend(swatch({ color, dash }));
    return part;
  })));
  return values.map(([text, , , name]) => `${name} ${text}`.trim()).join(", ");
}
