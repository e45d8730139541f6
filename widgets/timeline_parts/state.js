// Decoding of the kernel's message, and the style of the page.
const EVIDENCE = "evidence of "; // followed by the name of the run: the name of its evidence panel
const floats = (view) => new Float32Array(view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength));
const bytes = (view) => new Uint8Array(view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength));

// The message of the kernel, with its arrays inserted.
function filled(content, buffers) {
  const arrays = (item, names) => ({ ...item, ...Object.fromEntries(names.map((name) => [name, floats(buffers[item[name]])])) });
  const shown = content.runs.filter((run) => run.is_shown).map((run) => run.name);
  const panels = content.panels.map((panel) => panel.is_seen ? {
    ...panel,
    note: [panel.note, ...remarksOf(panel, shown)].filter(Boolean).join("; "),
    lines: panel.lines.map((line) => arrays(line, ["step", "value"])),
    bands: panel.bands.map((band) => arrays(band, ["step", "lower", "upper"])),
  } : panel);
  const runs = content.runs.map((run) => ({ ...run, checks: arrays(run.checks, ["sound", "broken"]) }));
  const detailed = (detail) => ({
    ...detail,
    heat: detail.heat === null ? null : floats(buffers[detail.heat]),
    modes: detail.modes === null ? null
      : { points: floats(buffers[detail.modes[0]]), layer: bytes(buffers[detail.modes[1]]), isReliable: bytes(buffers[detail.modes[2]]) },
  });
  const selection = content.selection && { ...content.selection, details: content.selection.details.map(detailed) };
  return { ...content, runs, panels, selection };
}

const remarksOf = (panel, shown) => panel.remarks.filter(([run]) => shown.includes(run))
  .map(([run, words]) => (shown.length > 1 ? `${run} ${words}` : words));

// Colors, font and text size of the page.
function themeNow(element) {
  const style = getComputedStyle(element), read = (name, otherwise) => style.getPropertyValue(name).trim() || otherwise;
  return {
    ink: read("--jp-content-font-color1", "#7a7a7a"),
    ground: read("--jp-layout-color0", "#ffffff"),
    font: style.fontFamily,
    size: (11 / 13) * parseFloat(style.fontSize), // slightly smaller than the surrounding text
    faint: "rgba(122, 122, 122, 0.28)",
    checks: "rgb(122, 122, 122)",
    band: "rgba(122, 122, 122, 0.24)",
  };
}

const numberText = (value) => {
  if (value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  return size && (size >= 1e5 || size < 1e-3) ? value.toExponential(2) : String(Number(value.toPrecision(4)));
};

// Evidence relative to that of an alarm, with two digits; values beyond the axis are given as bounds.
const evidenceText = (value, panel) => (value <= 1.001 * panel.low ? `< ${panel.low}` : value >= panel.farthest ? `> ${panel.farthest}` : String(Number(value.toPrecision(2))));

const stepText = (step) => Math.round(step).toLocaleString("en");

// A piece of a run's line, whose dashes identify it without its color.
function swatch(run) {
  const box = made("span", "workbench-timeline-swatch");
  box.innerHTML = `<svg viewBox="0 0 28 8" aria-hidden="true"><path d="M0 4H28" stroke="${run.color}" stroke-width="2.4"
    stroke-dasharray="${(run.dash ?? []).join(" ")}"/></svg>`;
  return box;
}

const isSame = (one, other) => Boolean(one && other && one.run === other.run && one.step === other.step && one.source === other.source);

// The first row of increasing steps that is not before a step.
function rowAt(steps, step) {
  let low = 0, high = steps.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle] < step) low = middle + 1;
    else high = middle;
  }
  return low;
}

function nearestRow(steps, step) {
  const row = Math.min(rowAt(steps, step), steps.length - 1);
  return row > 0 && step - steps[row - 1] < steps[row] - step ? row - 1 : row;
}

// The rows in view, and one more row on either side.
const inView = (steps, view) => [Math.max(0, rowAt(steps, view[0]) - 1), Math.min(steps.length, rowAt(steps, view[1]) + 2)];
