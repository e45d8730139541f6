// Loss, gradient norm, near-unit mass, spectral radius and evidence over steps, one canvas each.
const TRACES = [
  { name: "loss", title: "loss (nat)", isLog: true },
  { name: "grad_norm", title: "gradient norm", isLog: true },
  { name: "near_unit_mass", title: "near-unit mass M, mean over layers", isLog: false },
  { name: "spectral_radius", title: "spectral radius ρ, largest over layers", isLog: true },
  { name: "evidence", title: "strongest evidence of a change (1: alarm)", isLog: true, limit: 1 },
];

// The frame of the lines, which leaves space for text of the theme's size.
function frameOf(theme, width, height) {
  const size = sizeOf(theme);
  return { left: 4 * size, right: width - 0.9 * size, top: 1.8 * size, bottom: height - 1.5 * size };
}

const short = (value) => {
  if (value === 0) return "0";
  const power = Math.floor(Math.log10(Math.abs(value)) + 1e-9);
  if (power < -2 || power > 3) {
    const lead = Math.round(value / 10 ** power);
    const sign = power < 0 ? "⁻" : "";
    return (lead === 1 ? "" : lead + "·") + "10" + sign + [...String(Math.abs(power))].map((d) => SUPERSCRIPTS[d]).join("");
  }
  return String(Number(value.toPrecision(2)));
};

// The nearest 1, 2 or 5 times a power of ten at or beyond a value, so that axes change rarely.
function round125(value, isUp) {
  const power = 10 ** Math.floor(Math.log10(value) + 1e-9);
  const rest = value / power;
  const steps = [1, 2, 5, 10];
  if (isUp) return power * steps.find((step) => step >= rest * (1 - 1e-6));
  return power * steps.findLast((step) => step <= rest * (1 + 1e-6));
}

function valueAxis(trace, runs) {
  if (!trace.isLog) return { low: 0, high: 1, ticks: [0, 0.5, 1], place: (v) => v };
  let low = Infinity, high = 0;
  for (const run of runs) {
    for (const value of run.traces[trace.name].value) {
      if (!(value > 0)) continue;
      low = Math.min(low, value);
      high = Math.max(high, value);
    }
  }
  if (trace.limit) [low, high] = [0.1 * trace.limit, 2 * Math.max(high, trace.limit)]; // the limit is the alarm threshold
  if (!(high > 0)) [low, high] = [0.1, 10];
  low = round125(low, false);
  high = round125(high, true);
  if (high / low < 4) [low, high] = [round125(low / 2, false), round125(high * 2, true)];
  const span = Math.log10(high / low);
  const place = (v) => Math.log10(v / low) / span;
  let ticks = [];
  const every = Math.max(1, Math.ceil(span / 3));
  for (let k = Math.ceil(Math.log10(low) - 1e-9); k <= Math.log10(high) + 1e-9; k++) if (k % every === 0) ticks.push(10 ** k);
  if (ticks.length < 2) ticks = [low, high];
  return { low, high, ticks, place };
}

// The length of the step axis doubles until it contains the full run.
function lastStep(runs, nSteps) {
  const done = Math.max(1, ...runs.map((run) => run.n_done ?? (run.traces.loss.step.at(-1) ?? 0) + 1));
  let last = 25;
  while (last < done) last *= 2;
  return Math.min(last, Math.max(nSteps, done));
}

function paintAxes(context, theme, trace, axis, last, frame) {
  const { left, right, top, bottom } = frame, size = sizeOf(theme);
  context.textAlign = "right";
  context.textBaseline = "middle";
  context.lineWidth = 1;
  context.strokeStyle = theme.faint;
  context.fillStyle = theme.ink;
  for (const tick of axis.ticks) {
    const y = bottom - axis.place(tick) * (bottom - top);
    context.beginPath();
    context.moveTo(left, y);
    context.lineTo(right, y);
    context.stroke();
    context.fillText(short(tick), left - 0.5 * size, Math.max(y, top + 0.3 * size));
  }
  context.textAlign = "left";
  context.textBaseline = "alphabetic";
  context.fillText(trace.title, left, size, right - left);
  context.textBaseline = "top";
  for (const fraction of [0, 0.5, 1]) {
    context.textAlign = fraction === 0 ? "left" : fraction === 1 ? "right" : "center";
    context.fillText((fraction === 0 ? "step " : "") + Math.round(fraction * last), left + fraction * (right - left), bottom + 0.35 * size);
  }
}

function drawLine(context, { step, value }, x, y, lowest) {
  context.beginPath();
  for (let i = 0; i < step.length; i++) context.lineTo(x(step[i]), y(Math.max(value[i], lowest)));
  context.stroke();
}

// Earlier runs, from which the current ones branched, are pale and thin.
function drawTrace(canvas, theme, trace, runs, earlier, nSteps) {
  const axis = valueAxis(trace, [...runs, ...earlier]), last = lastStep([...runs, ...earlier], nSteps);
  const { context, width, height } = sheet(canvas, theme, [axis.low, axis.high, last].join(), (below, wide, high) =>
    paintAxes(below, theme, trace, axis, last, frameOf(theme, wide, high)));
  const frame = frameOf(theme, width, height), { left, right, top, bottom } = frame;
  const x = (step) => left + (step / last) * (right - left);
  const y = (value) => bottom - axis.place(value) * (bottom - top);

  context.fillStyle = theme.kss;
  for (const [from, to] of runs[0]?.kss_spans ?? []) context.fillRect(x(from), top, Math.max(x(to) - x(from), 1), bottom - top);
  // Faults are paler than KSS and have a solid edge, so that both can be distinguished where they overlap.
  for (const [from, to] of runs[0]?.fault_spans ?? []) {
    const wide = Math.max(x(to) - x(from), 1);
    context.fillStyle = theme.fault;
    context.fillRect(x(from), top, wide, bottom - top);
    context.fillStyle = theme.faultEdge;
    context.fillRect(x(from), top, wide, 3);
  }

  context.save();
  context.beginPath();
  context.rect(left - 1, top - 2, right - left + 2, bottom - top + 4);
  context.clip();
  context.lineJoin = "round";
  const lowest = axis.low * 1e-3 || -1;
  for (const [lines, wide, alpha] of [[earlier, 1.2, 0.45], [runs, 1.7, 1]]) {
    for (const run of lines) {
      context.strokeStyle = run.color;
      context.lineWidth = wide;
      context.globalAlpha = alpha;
      context.setLineDash(run.dash);
      drawLine(context, run.traces[trace.name], x, y, lowest);
    }
  }
  context.restore();
  context.setLineDash([]);
  if (trace.limit) drawEvidenceMarks(context, theme, runs, x, y(trace.limit), frame);
  for (const run of [...earlier, ...runs]) {
    const { step, value } = run.traces[trace.name];
    if (!step.length) continue;
    const end = [x(step[step.length - 1]), y(value[value.length - 1])], isEarlier = earlier.includes(run);
    context.fillStyle = context.strokeStyle = run.color;
    context.globalAlpha = isEarlier ? 0.55 : 1;
    if (isEarlier ? run.verdict.startsWith("diverged") : run.is_broken) drawCross(context, theme, ...end);
    else if (!isEarlier && !run.verdict) {
      ring(context, ...end, 2.6);
      context.fill();
    }
    context.globalAlpha = 1;
  }
  return { left, right, last };
}

// The alarm threshold, the signal with the strongest evidence in the first run, and a row of probe marks for each run.
function drawEvidenceMarks(context, theme, runs, x, limit, { left, right, top }) {
  const below = limit + 1.1 * sizeOf(theme);
  context.strokeStyle = theme.ink;
  context.lineWidth = 1;
  context.setLineDash([6, 4]);
  context.beginPath();
  context.moveTo(left, Math.round(limit) + 0.5);
  context.lineTo(right, Math.round(limit) + 0.5);
  context.stroke();
  context.setLineDash([]);
  context.textBaseline = "alphabetic";
  context.textAlign = "left";
  writtenOn(context, theme, "alarm", left + 4, below);
  context.textAlign = "right";
  if (runs[0]?.nearest) writtenOn(context, theme, `latest: ${runs[0].nearest}`, right - 4, below);
  runs.forEach((run, i) => {
    const y = top + 5.5 + 5.5 * i;
    context.fillStyle = run.color;
    for (const step of run.sound) context.fillRect(x(step) - 1, y - 1.5, 2, 3);
    context.fillStyle = theme.broken;
    for (const step of run.broken) context.fillRect(x(step) - 2.5, y - 2.5, 5, 5);
  });
}

function drawCross(context, theme, x, y) {
  const cross = new Path2D(`M${x - 4.5} ${y - 4.5}l9 9m0 -9l-9 9`);
  const color = context.strokeStyle;
  context.lineCap = "round";
  for (const [style, wide] of [[theme.ground, 5.5], [color, 2.6]]) {
    context.strokeStyle = style;
    context.lineWidth = wide;
    context.stroke(cross);
  }
  context.lineCap = "butt";
}
