// The panels over the common axis of steps: the events, and one signal each.
const INSET = { left: 58, right: 14, top: 5, bottom: 5 };
const ROW = 42; // of a run in the lane

// A canvas as sharp as the screen, cleared; drawing is in CSS pixels.
function cleared(canvas, theme) {
  const ratio = window.devicePixelRatio || 1, width = canvas.clientWidth, height = canvas.clientHeight;
  const wide = Math.round(width * ratio), high = Math.round(height * ratio);
  if (canvas.width !== wide || canvas.height !== high) Object.assign(canvas, { width: wide, height: high });
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = `11px ${theme.font}`;
  context.lineJoin = "round";
  return { context, width, height };
}

const stepAxis = (view, width) => {
  const scale = (width - INSET.left - INSET.right) / (view[1] - view[0]);
  return { x: (step) => INSET.left + (step - view[0]) * scale, step: (x) => view[0] + (x - INSET.left) / scale };
};

// At most n round numbers from low to high, 1, 2 or 5 times a power of ten apart.
function roundTicks(low, high, n) {
  const gap = round125(Math.max((high - low) / n, Number.MIN_VALUE), true), ticks = [];
  for (let k = Math.ceil(low / gap - 1e-9); k <= high / gap + 1e-9 && ticks.length < 50; k++) ticks.push(k * gap || 0);
  return ticks;
}

// Plain numbers, with as many digits as distinguish neighbours.
function tickText(value, ticks) {
  const largest = Math.max(...ticks.map(Math.abs)), gap = ticks.length > 1 ? Math.abs(ticks[1] - ticks[0]) : largest;
  if (largest && (largest >= 1e5 || largest < 1e-3)) return value === 0 ? "0" : value.toExponential(Math.max(0, Math.min(3, Math.round(Math.log10(largest / gap)))));
  return String(Number(value.toFixed(Math.min(8, Math.max(0, Math.ceil(-Math.log10(gap) + 0.01) + 1)))));
}

const numberText = (value) => {
  if (value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  return size && (size >= 1e5 || size < 1e-3) ? value.toExponential(2) : String(Number(value.toPrecision(4)));
};

function verticalAxis(panel, top, bottom) {
  let { low, high } = panel;
  if (panel.is_log) {
    const room = Math.max((high / low) ** 0.07, 1.02);
    low /= room;
    high *= room;
    const span = Math.log(high / low), y = (value) => bottom - (Math.log(Math.max(value, low * 1e-6) / low) / span) * (bottom - top);
    const texts = (ticks) => ticks.map((tick) => (high < 100 * low ? tickText(tick, ticks) : short(tick)));
    // Powers of ten, not too many; over less than two of them 1, 2 and 5 times these; else round numbers.
    const powers = Array.from({ length: 80 }, (_, k) => 10 ** (k - 40)), inside = (ticks) => ticks.filter((tick) => tick >= low && tick <= high);
    let ticks = inside(powers);
    if (ticks.length > 4) ticks = ticks.filter((_, k) => (ticks.length - 1 - k) % Math.ceil(ticks.length / 4) === 0);
    if (ticks.length < 2) ticks = inside(powers.flatMap((power) => [power, 2 * power, 5 * power]));
    if (ticks.length < 2) ticks = roundTicks(low, high, 3);
    return { y, ticks, texts: texts(ticks) };
  }
  const room = 0.07 * (high - low) || 0.5 * Math.abs(high) || 0.5;
  low -= room;
  high += room;
  const ticks = roundTicks(low, high, 3);
  return { y: (value) => bottom - ((value - low) / (high - low)) * (bottom - top), ticks, texts: ticks.map((tick) => tickText(tick, ticks)) };
}

const faded = (color, alpha) => color + Math.round(alpha * 255).toString(16).padStart(2, "0");

function drawSpans(context, run, x, top, bottom, alpha) {
  context.fillStyle = faded(run.color, alpha);
  for (const { start, stop } of run.faults) context.fillRect(x(start), top, Math.max(x(stop ?? run.last) - x(start), 1.5), bottom - top);
}

function upright(context, at, top, bottom, color, dash) {
  context.strokeStyle = color;
  context.lineWidth = 1;
  context.setLineDash(dash);
  context.beginPath();
  context.moveTo(at, top);
  context.lineTo(at, bottom);
  context.stroke();
  context.setLineDash([]);
}

// The begin and end of the lead time, through all panels; without one, the first alarm.
function drawLandmarks(context, run, x, top, bottom) {
  if (run.lead) {
    upright(context, x(run.lead[0]), top, bottom, faded(run.color, 0.75), [5, 3]);
    upright(context, x(run.lead[1]), top, bottom, faded(run.color, 0.75), [1.5, 3]);
  } else if (run.onsets.length) upright(context, x(run.onsets[0].step), top, bottom, faded(run.color, 0.75), [5, 3]);
}

// First alarms: filled for a mechanism, hollow for loss, gradient norm and spikes.
function drawAlarm(context, theme, mark, color, x, y, isChosen) {
  const side = isChosen ? 7.5 : 6, shape = new Path2D(`M${x - side} ${y - side * 0.8}h${2 * side}l${-side} ${1.7 * side}z`);
  context.lineWidth = 4;
  context.strokeStyle = theme.ground;
  context.stroke(shape);
  context.fillStyle = mark.is_established ? theme.ground : color;
  context.fill(shape);
  context.lineWidth = 1.8;
  context.strokeStyle = color;
  context.stroke(shape);
  if (isChosen) {
    context.strokeStyle = theme.ink;
    context.lineWidth = 1.4;
    ring(context, x, y, 12);
    context.stroke();
  }
}

function drawDiamond(context, theme, color, x, y) {
  const shape = new Path2D(`M${x} ${y - 6.5}l6 6.5l-6 6.5l-6 -6.5z`);
  context.lineWidth = 4;
  context.strokeStyle = theme.ground;
  context.stroke(shape);
  context.fillStyle = color;
  context.fill(shape);
}

const isSame = (one, other) => Boolean(one && other && one.run === other.run && one.step === other.step && one.source === other.source);

// The first row of rising steps that is not before a step.
function rowAt(steps, step) {
  let low = 0, high = steps.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle] < step) low = middle + 1;
    else high = middle;
  }
  return low;
}

// The rows in view, and one more on either side.
const inView = (steps, view) => [Math.max(0, rowAt(steps, view[0]) - 1), Math.min(steps.length, rowAt(steps, view[1]) + 2)];

function clipToFrame(context, width, height) {
  context.save();
  context.beginPath();
  context.rect(INSET.left, 0, width - INSET.left - INSET.right, height);
  context.clip();
}

// One signal of all runs; returns the positions of its marks.
function drawPanel(canvas, theme, panel, runs, view, chosen) {
  const { context, width, height } = cleared(canvas, theme);
  const { x } = stepAxis(view, width), top = INSET.top, bottom = height - INSET.bottom, right = width - INSET.right;
  const axis = verticalAxis(panel, top, bottom), named = Object.fromEntries(runs.map((run) => [run.name, run]));
  context.textAlign = "right";
  context.textBaseline = "middle";
  context.lineWidth = 1;
  context.strokeStyle = theme.faint;
  context.fillStyle = theme.ink;
  axis.ticks.forEach((tick, i) => {
    const y = Math.round(axis.y(tick)) + 0.5;
    context.beginPath();
    context.moveTo(INSET.left, y);
    context.lineTo(right, y);
    context.stroke();
    context.fillText(axis.texts[i], INSET.left - 6, Math.min(Math.max(y, 6), height - 6));
  });
  clipToFrame(context, width, height);
  const ofPanel = panel.run === undefined ? runs : runs.filter((run) => run.name === panel.run);
  for (const run of ofPanel) drawSpans(context, run, x, 0, height, 0.1);
  for (const band of panel.bands) {
    if (!band.step.length) continue;
    context.fillStyle = band.run === null ? "rgba(122, 122, 122, 0.3)" : faded(named[band.run]?.color ?? "#7a7a7a", 0.17);
    context.beginPath();
    for (let i = 0; i < band.step.length; i++) context.lineTo(x(band.step[i]), axis.y(band.upper[i]));
    for (let i = band.step.length - 1; i >= 0; i--) context.lineTo(x(band.step[i]), axis.y(band.lower[i]));
    context.fill();
  }
  for (const run of ofPanel) drawLandmarks(context, run, x, 0, height);
  if (panel.limit !== undefined) drawLimit(context, theme, axis.y(panel.limit), right);
  for (const { run, step, value, color } of panel.lines) {
    if (!named[run]) continue;
    const [first, last] = inView(step, view), isDense = last - first > width;
    context.strokeStyle = context.fillStyle = color ?? named[run].color;
    // Joints and dashes, which cost most, are not visible on a dense line.
    context.lineWidth = isDense ? 1.2 : 1.5;
    context.lineJoin = isDense ? "bevel" : "round";
    context.setLineDash(isDense || color ? [] : named[run].dash);
    context.beginPath();
    for (let i = first; i < last; i++) context.lineTo(x(step[i]), axis.y(value[i]));
    context.stroke();
    context.setLineDash([]);
    if (last - first < width / 40) {
      for (let i = first; i < last; i++) {
        ring(context, x(step[i]), axis.y(value[i]), 2.4);
        context.fill();
      }
    }
  }
  context.restore();
  const places = [];
  for (const mark of panel.marks) {
    if (!named[mark.run] || mark.step < view[0] || mark.step > view[1]) continue;
    const at = [x(mark.step), Math.min(Math.max(axis.y(mark.value), top + 4), bottom - 4)];
    context.strokeStyle = named[mark.run].color;
    if (mark.kind === "cross") drawCross(context, theme, ...at);
    else drawAlarm(context, theme, mark, named[mark.run].color, ...at, isSame(mark, chosen));
    places.push({ mark, x: at[0], y: at[1] });
  }
  drawChosen(context, theme, chosen, x, view, height);
  return places;
}

// The evidence at which an alarm is raised.
function drawLimit(context, theme, y, right) {
  context.strokeStyle = theme.ink;
  context.lineWidth = 1;
  context.setLineDash([6, 4]);
  context.beginPath();
  context.moveTo(INSET.left, Math.round(y) + 0.5);
  context.lineTo(right, Math.round(y) + 0.5);
  context.stroke();
  context.setLineDash([]);
  context.textAlign = "left";
  context.textBaseline = "alphabetic";
  writtenOn(context, theme, "alarm", INSET.left + 4, y - 4);
}

// Measurements of probes: small where sound, strong where they found a fault.
function drawChecks(context, theme, run, x, y, view, broken, places) {
  context.fillStyle = theme.checks;
  const { sound } = run.checks, [first, last] = inView(sound, view);
  for (let i = first; i < last; i++) context.fillRect(x(sound[i]) - 1, y - 1.5, 2, 3);
  context.fillStyle = broken;
  for (const step of run.checks.broken) {
    if (step < view[0] || step > view[1]) continue;
    context.fillRect(x(step) - 3, y - 3, 6, 6);
    const mark = run.findings.find((found) => found.step <= step && step <= found.last);
    if (mark) places.push({ mark: { ...mark, at: step }, x: x(step), y });
  }
}

function drawChosen(context, theme, chosen, x, view, height) {
  if (chosen && chosen.step >= view[0] && chosen.step <= view[1]) upright(context, x(chosen.step), 0, height, theme.ink, [2, 2]);
}

// The events, one row per run; returns the positions of its marks.
function drawLane(canvas, theme, runs, view, chosen, broken) {
  const { context, width, height } = cleared(canvas, theme);
  const { x } = stepAxis(view, width), places = [], bottom = height - 18;
  context.textAlign = "center";
  context.textBaseline = "top";
  context.fillStyle = theme.ink;
  const ticks = roundTicks(view[0], view[1], Math.max(2, Math.floor(width / 110))).filter((tick) => Number.isInteger(tick) || view[1] - view[0] < 4);
  for (const tick of ticks) {
    upright(context, Math.round(x(tick)) + 0.5, 0, bottom, theme.faint, []);
    context.fillText(tick.toLocaleString("en"), Math.min(Math.max(x(tick), INSET.left), width - 24), bottom + 4);
  }
  context.textAlign = "right";
  context.fillText("step", INSET.left - 12, bottom + 4);
  clipToFrame(context, width, height);
  runs.forEach((run, i) => {
    const y = ROW * i + (runs.some((one) => one.lead) ? 26 : 17);
    drawSpans(context, run, x, y - 7, y + 7, 0.24);
    context.strokeStyle = run.color;
    context.lineWidth = 2;
    context.setLineDash(run.dash);
    context.beginPath();
    context.moveTo(x(run.first), y);
    context.lineTo(x(run.diverged?.step ?? run.last), y);
    context.stroke();
    context.setLineDash([]);
    drawChecks(context, theme, run, x, y + 11.5, view, broken, places);
    for (const step of run.later) if (step >= view[0] && step <= view[1]) upright(context, x(step), y - 5, y + 5, run.color, []);
  });
  runs.forEach((run, i) => {
    const y = ROW * i + (runs.some((one) => one.lead) ? 26 : 17);
    const put = (mark, draw) => {
      if (mark.step < view[0] || mark.step > view[1]) return;
      draw(x(mark.step));
      places.push({ mark, x: x(mark.step), y });
    };
    for (const mark of run.onsets) put(mark, (at) => drawAlarm(context, theme, mark, run.color, at, y, isSame(mark, chosen)));
    for (const mark of run.actions) put(mark, (at) => drawDiamond(context, theme, run.color, at, y));
    if (run.diverged) {
      put(run.diverged, (at) => {
        context.strokeStyle = run.color;
        drawCross(context, theme, at, y);
      });
    }
    if (run.lead) drawLead(context, theme, run.lead, x, y - 11, width);
  });
  context.restore();
  drawChosen(context, theme, chosen, x, view, bottom);
  return places;
}

// An arrow from the first mechanism's alarm to the first established signal, with its length.
function drawLead(context, theme, [start, stop, words], x, y, width) {
  const [from, to] = [x(start), x(stop)], way = Math.sign(to - from) || 1;
  context.strokeStyle = context.fillStyle = theme.ink;
  context.lineWidth = 1.4;
  context.stroke(new Path2D(`M${from} ${y - 3.5}v7M${from} ${y}H${to}`));
  context.fill(new Path2D(`M${to} ${y}l${-6 * way} -3.5v7z`));
  const half = context.measureText(words).width / 2, middle = (Math.max(from, INSET.left) + Math.min(to, width)) / 2;
  if (Math.max(from, to) < INSET.left || Math.min(from, to) > width) return;
  context.textAlign = "center";
  context.textBaseline = "alphabetic";
  writtenOn(context, theme, words, Math.min(Math.max(middle, INSET.left + half + 4), width - INSET.right - half - 4), y - 6);
}
