// Replaces the kernel in a saved page: it answers the requests of the figure from the data in the file.

// Unpacks the record of the page: JSON and arrays from `saved_page.py`.
async function unpacked(text) {
  const bytesOf = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytesOf]).stream().pipeThrough(new DecompressionStream("deflate"));
  const whole = await new Response(stream).arrayBuffer(), size = new DataView(whole).getUint32(0, true);
  const { sizes, ...content } = JSON.parse(new TextDecoder().decode(new Uint8Array(whole, 4, size)));
  let at = 4 + size;
  const buffers = sizes.map((length) => new DataView(whole, (at += length) - length, length));
  return { content, buffers };
}

// A model with the interface of anywidget and the same answers as the kernel.
function keptModel({ content, buffers }) {
  const hears = new Set(), named = Object.fromEntries(content.panels.map((panel) => [panel.name, panel]));
  const [first, last] = content.extent, space = 0.015 * (last - first), whole = [first - space, last + space];
  const settings = { signals: content.chosen, shown: content.runs.filter((run) => run.is_shown).map((run) => run.name), view: content.is_whole ? null : content.view, select: content.select };
  let number = 0;

  // The panel of a signal with the displayed runs, and its axis fitted to the view.
  const fitted = (panel, view) => {
    const isShown = ({ run }) => run === null || settings.shown.includes(run);
    const lines = panel.lines.filter(isShown), marks = panel.marks.filter(isShown), bands = panel.bands.filter(isShown);
    if (panel.limit !== undefined) return { ...panel, lines, marks };
    let low = Infinity, high = -Infinity;
    for (const line of lines) {
      const step = floats(buffers[line.step]), value = floats(buffers[line.value]);
      for (let i = rowAt(step, view[0]); i < step.length && step[i] <= view[1]; i++) {
        low = Math.min(low, value[i]);
        high = Math.max(high, value[i]);
      }
    }
    if (low > high) [low, high] = [0, 1];
    return { ...panel, lines, marks, bands, low, high, is_log: panel.is_log && low > 0 };
  };

  // The details of an alarm, or those nearest to a step; for a signal without layers, those of another signal.
  const momentOf = (wanted) => {
    if (!wanted) return null;
    const own = content.moments.find(({ event }) => event && wanted.run === event.run && wanted.step === event.step && wanted.signal === event.source);
    if (own) return own;
    const signal = content.mappable.includes(wanted.signal) ? wanted.signal : content.mappable[0], asked = Math.round(wanted.step);
    const near = content.moments.filter((moment) => !moment.event && moment.signal === signal);
    const best = near.reduce((a, b) => (Math.abs(b.step - asked) < Math.abs(a.step - asked) ? b : a), near[0]);
    const { findings = [] } = content.runs.find((run) => run.name === wanted.run) ?? {};
    const found = findings.find((one) => one.source === wanted.signal && one.step <= asked && asked <= one.last);
    return best ? { ...best, asked, ...(found && { run: found.run, event: found }) } : null;
  };

  const answer = (token) => {
    const view = settings.view ?? whole, isShown = (run) => settings.shown.includes(run), selection = momentOf(settings.select);
    const evidence = content.panels.filter((panel) => panel.limit !== undefined && isShown(panel.run));
    const state = {
      ...content, token, view, number: ++number, is_whole: settings.view === null, is_saved: true, chosen: settings.signals,
      runs: content.runs.map((run) => ({ ...run, is_shown: isShown(run.name) })),
      panels: [...evidence, ...settings.signals.map((name) => named[name])].map((panel) => fitted(panel, view)),
      alarms: content.alarms.filter((mark) => isShown(mark.run)),
      selection: selection && { ...selection, details: selection.details.filter(({ run }) => isShown(run)) },
    };
    setTimeout(() => hears.forEach((hear) => hear(state, buffers)));
  };

  return {
    on: (_, hear) => hears.add(hear),
    off: (_, hear) => hears.delete(hear),
    send({ ask, token = "", painted }) {
      if (ask) Object.assign(settings, ask); // the width and the visible panels do not change the answer
      if (ask || painted === 0) answer(token);
    },
  };
}

const dark = matchMedia("(prefers-color-scheme: dark)");
const followScheme = () => (document.body.dataset.jpThemeLight = String(!dark.matches));
dark.addEventListener("change", followScheme);
const place = document.getElementById("timeline");
followScheme();
try {
  const record = await unpacked(document.getElementById("record").textContent);
  render({ model: keptModel(record), el: place, signal: new AbortController().signal });
} catch (error) {
  place.textContent = `The figure cannot be drawn by this browser: ${error}`;
  throw error;
}
