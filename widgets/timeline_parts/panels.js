// The panels over the shared step axis: the events, and one signal each.
const CROWDED = 3; // from this number of runs on, overlapping shades could not be distinguished

// Sizes follow the text: `unit` is 1 on a page.
function insetOf(theme) {
  const unit = sizeOf(theme) / 11;
  return { unit, left: 58 * unit, right: 14 * unit, top: 5 * unit, bottom: 5 * unit, row: 44 * unit };
}

// Clears a canvas at the resolution of the screen; drawing is in CSS pixels.
function cleared(canvas, theme) {
  const ratio = window.devicePixelRatio || 1, width = canvas.clientWidth, height = canvas.clientHeight;
  const wide = Math.round(width * ratio), high = Math.round(height * ratio);
  if (canvas.width !== wide || canvas.height !== high) Object.assign(canvas, { width: wide, height: high });
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = fontOf(theme);
  context.lineJoin = "round";
  return { context, width, height };
}

const stepAxis = (theme, view, width) => {
  const { left, right } = insetOf(theme), scale = (width - left - right) / (view[1] - view[0]);
  return { x: (step) => left + (step - view[0]) * scale, step: (x) => view[0] + (x - left) / scale };
};

// At most n round numbers from low to high, 1, 2 or 5 times a power of ten apart.
function roundTicks(low, high, n) {
  const gap = round125(Math.max((high - low) / n, Number.MIN_VALUE), true), ticks = [];
  for (let k = Math.ceil(low / gap - 1e-9); k <= high / gap + 1e-9 && ticks.length < 50; k++) ticks.push(k * gap || 0);
  return ticks;
}

// Decimal numbers with enough digits to distinguish neighbors.
function tickText(value, ticks) {
  const largest = Math.max(...ticks.map(Math.abs)), gap = ticks.length > 1 ? Math.abs(ticks[1] - ticks[0]) : largest;
  if (largest && (largest >= 1e5 || largest < 1e-3)) return value === 0 ? "0" : value.toExponential(Math.max(0, Math.min(2, Math.round(Math.log10(largest / gap)))));
  return String(Number(value.toFixed(Math.min(8, Math.max(0, Math.ceil(-Math.log10(gap) + 0.01) + 1)))));
}

function verticalAxis(panel, top, bottom) {
  let { low, high } = panel;
  if (panel.is_log) {
    const room = Math.max((high / low) ** 0.07, 1.02);
    low /= room;
    high *= room;
    const span = Math.log(high / low), y = (value) => bottom - (Math.log(Math.max(value, low * 1e-6) / low) / span) * (bottom - top);
    const texts = (ticks) => ticks.map((tick) => (high < 100 * low ? tickText(tick, ticks) : short(tick)));
    // A few powers of ten; for fewer than two, also 2 and 5 times these; otherwise round numbers.
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

// The subset of ordered positions that are at least a gap apart.
function spread(places, gap) {
  const kept = [];
  for (const place of places) if (!kept.length || Math.abs(place.at - kept.at(-1).at) >= gap) kept.push(place);
  return kept;
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

// The start and end of the lead time in all panels; without a lead time, the first alarm.
function drawLandmarks(context, run, x, top, bottom) {
  if (run.lead) {
    upright(context, x(run.lead[0]), top, bottom, faded(run.color, 0.75), [5, 3]);
    upright(context, x(run.lead[1]), top, bottom, faded(run.color, 0.75), [1.5, 3]);
  } else if (run.onsets.length) upright(context, x(run.onsets[0].step), top, bottom, faded(run.color, 0.75), [5, 3]);
}

// First alarms: filled for mechanism signals, hollow for loss, gradient norm and spikes.
function drawAlarm(context, theme, mark, color, x, y, isChosen) {
  const { unit } = insetOf(theme), side = (isChosen ? 7.5 : 6) * unit, shape = new Path2D(`M${x - side} ${y - side * 0.8}h${2 * side}l${-side} ${1.7 * side}z`);
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
    ring(context, x, y, 12 * unit);
    context.stroke();
  }
}

function drawDiamond(context, theme, color, x, y) {
  const side = 6 * insetOf(theme).unit, shape = new Path2D(`M${x} ${y - side}l${side} ${side}l${-side} ${side}l${-side} ${-side}z`);
  context.lineWidth = 4;
  context.strokeStyle = theme.ground;
  context.stroke(shape);
  context.fillStyle = color;
  context.fill(shape);
}

function clipToFrame(context, inset, width, height) {
  context.save();
  context.beginPath();
  context.rect(inset.left, 0, width - inset.left - inset.right, height);
  context.clip();
}

// One signal of all runs; returns the positions of its marks.
function drawPanel(canvas, theme, panel, runs, view, chosen) {
  const { context, width, height } = cleared(canvas, theme), inset = insetOf(theme), size = sizeOf(theme);
  const { x } = stepAxis(theme, view, width), { top } = inset, bottom = height - inset.bottom, right = width - inset.right;
  const axis = verticalAxis(panel, top, bottom), named = Object.fromEntries(runs.map((run) => [run.name, run]));
  context.textAlign = "right";
  context.textBaseline = "middle";
  context.lineWidth = 1;
  context.strokeStyle = theme.faint;
  context.fillStyle = theme.ink;
  const ticks = axis.ticks.map((tick, i) => ({ y: Math.round(axis.y(tick)) + 0.5, text: axis.texts[i] }));
  for (const tick of ticks) {
    context.beginPath();
    context.moveTo(inset.left, tick.y);
    context.lineTo(right, tick.y);
    context.stroke();
    tick.at = Math.min(Math.max(tick.y, 0.6 * size), height - 0.6 * size);
  }
  for (const { at, text } of spread(ticks, 1.2 * size)) context.fillText(text, inset.left - 0.55 * size, at);
  clipToFrame(context, inset, width, height);
  const ofPanel = panel.run === undefined ? runs : runs.filter((run) => run.name === panel.run);
  // The lane of events also shows faults, each in the row of its run.
  if (ofPanel.filter((run) => run.faults.length).length < CROWDED) for (const run of ofPanel) drawSpans(context, run, x, 0, height, 0.1);
  for (const band of panel.bands) if (band.step.length) drawBand(context, band, named[band.run], x, axis.y, panel.bands.length >= CROWDED);
  for (const run of ofPanel) drawLandmarks(context, run, x, 0, height);
  if (panel.limit !== undefined) drawLimit(context, theme, axis.y(panel.limit), inset.left, right);
  for (const { run, step, value, color, dash } of panel.lines) {
    if (!named[run]) continue;
    const [first, last] = inView(step, view), isDense = last - first > width;
    context.strokeStyle = context.fillStyle = color ?? named[run].color;
    // Joints and dashes are slow to draw and not visible on a dense line.
    context.lineWidth = isDense ? 1.2 : 1.5;
    context.lineJoin = isDense ? "bevel" : "round";
    context.setLineDash(isDense ? [] : dash ?? named[run].dash);
    context.beginPath();
    for (let i = first; i < last; i++) context.lineTo(x(step[i]), axis.y(value[i]));
    context.stroke();
    context.setLineDash([]);
    if (!color && last - first < width / 40) {
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

// The band of healthy values: filled, or only its edges.
function drawBand(context, band, run, x, y, isEdge) {
  const color = run?.color ?? "#7a7a7a", n = band.step.length, way = Array.from({ length: n }, (_, i) => i);
  const upper = new Path2D(), lower = new Path2D(), whole = new Path2D();
  for (const i of way) {
    upper.lineTo(x(band.step[i]), y(band.upper[i]));
    lower.lineTo(x(band.step[i]), y(band.lower[i]));
    whole.lineTo(x(band.step[i]), y(band.upper[i]));
  }
  for (const i of way.reverse()) whole.lineTo(x(band.step[i]), y(band.lower[i]));
  context.fillStyle = faded(color, run ? 0.17 : 0.3);
  if (!isEdge) return context.fill(whole);
  context.strokeStyle = faded(color, 0.8);
  context.lineWidth = 0.8;
  context.setLineDash(run?.dash ?? []);
  context.stroke(upper);
  context.stroke(lower);
  return context.setLineDash([]);
}

// The alarm threshold of the evidence.
function drawLimit(context, theme, y, left, right) {
  context.strokeStyle = theme.ink;
  context.lineWidth = 1;
  context.setLineDash([6, 4]);
  context.beginPath();
  context.moveTo(left, Math.round(y) + 0.5);
  context.lineTo(right, Math.round(y) + 0.5);
  context.stroke();
  context.setLineDash([]);
  context.textAlign = "left";
  context.textBaseline = "alphabetic";
  writtenOn(context, theme, "alarm", left + 4, y - 4);
}

// Measurements of probes: small marks, and large marks where they found a fault.
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

// The height of the lane, and of the row of a run in it.
const laneHeight = (theme, runs) => insetOf(theme).row * runs.length + insetOf(theme).unit * 20;
const rowOf = (theme, i) => insetOf(theme).row * i + 27 * insetOf(theme).unit;

// Step numbers below the rows, each centered below its line if there is enough space.
function drawSteps(context, theme, x, view, width, bottom) {
  const inset = insetOf(theme), { unit } = inset, most = Math.max(2, Math.floor(width / (110 * unit)));
  const ticks = roundTicks(view[0], view[1], most).filter((tick) => Number.isInteger(tick) || view[1] - view[0] < 4);
  context.textAlign = "right";
  context.textBaseline = "top";
  context.fillStyle = theme.ink;
  context.fillText("step", inset.left - 12 * unit, bottom + 4 * unit);
  context.textAlign = "center";
  let taken = inset.left - 6 * unit;
  for (const tick of ticks) {
    upright(context, Math.round(x(tick)) + 0.5, 0, bottom, theme.faint, []);
    const text = tick.toLocaleString("en"), half = context.measureText(text).width / 2;
    const at = Math.min(Math.max(x(tick), taken + half), width - half - 1);
    if (at - half < taken) continue;
    context.fillText(text, at, bottom + 4 * unit);
    taken = at + half + 6 * unit;
  }
}

// The events, one row per run; returns the positions of its marks.
function drawLane(canvas, theme, runs, view, chosen, broken) {
  const { context, width, height } = cleared(canvas, theme), inset = insetOf(theme), { unit } = inset;
  const { x } = stepAxis(theme, view, width), places = [], bottom = height - 18 * unit;
  drawSteps(context, theme, x, view, width, bottom);
  clipToFrame(context, inset, width, height);
  runs.forEach((run, i) => {
    const y = rowOf(theme, i);
    drawSpans(context, run, x, y - 6 * unit, y + 6 * unit, 0.24);
    context.strokeStyle = run.color;
    context.lineWidth = 2;
    context.setLineDash(run.dash);
    context.beginPath();
    context.moveTo(x(run.first), y);
    context.lineTo(x(run.diverged?.step ?? run.last), y);
    context.stroke();
    context.setLineDash([]);
    drawChecks(context, theme, run, x, y + 9.5 * unit, view, broken, places);
    for (const step of run.later) if (step >= view[0] && step <= view[1]) upright(context, x(step), y - 5, y + 5, run.color, []);
  });
  runs.forEach((run, i) => {
    const y = rowOf(theme, i);
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
    if (run.lead) drawLead(context, theme, run.lead, x, y - 11 * unit, width);
  });
  context.restore();
  drawChosen(context, theme, chosen, x, view, bottom);
  return places;
}

// An arrow with its length from the first alarm of a mechanism signal to the first alarm of the loss or gradient norm.
function drawLead(context, theme, [start, stop, words], x, y, width) {
  const [from, to] = [x(start), x(stop)], way = Math.sign(to - from) || 1, inset = insetOf(theme), { unit } = inset;
  context.strokeStyle = context.fillStyle = theme.ink;
  context.lineWidth = 1.4;
  context.stroke(new Path2D(`M${from} ${y - 3.5}v7M${from} ${y}H${to}`));
  context.fill(new Path2D(`M${to} ${y}l${-6 * way} -3.5v7z`));
  if (Math.max(from, to) < inset.left || Math.min(from, to) > width - inset.right) return;
  const half = context.measureText(words).width / 2, middle = (Math.max(from, inset.left) + Math.min(to, width)) / 2;
  const ends = [inset.left + half + 4, width - inset.right - half - 4];
  if (ends[0] > ends[1]) return; // the label of the lane contains the same text
  context.textAlign = "center";
  context.textBaseline = "alphabetic";
  writtenOn(context, theme, words, Math.min(Math.max(middle, ends[0]), ends[1]), y - 4 * unit);
}
