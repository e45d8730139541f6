// The complex plane with the modes of one run. `script` adds the constants of `workbench.plots.plane_view`: beyond |lambda| =
// KNEE, a decade has the length PER_DECADE; NEAR is half the side of the square around 1; MANY modes are drawn as a density.
const drawnRadius = (r) => (r <= KNEE ? r : KNEE + PER_DECADE * Math.log10(r / KNEE));
const SUPERSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸⁹";
const powerOfTen = (k) => (k <= 2 ? String(10 ** k) : "10" + SUPERSCRIPTS[k]);

// Text on canvases has the size of the page's text; the default is that of a notebook.
const sizeOf = (theme) => theme.size ?? 11;
const fontOf = (theme) => `${sizeOf(theme)}px ${theme.font}`;

// A canvas at the resolution of the screen, in CSS pixels, with a backdrop drawn by `paint(context, width, height)`. The
// backdrop is redrawn when the size, the theme or the key changes, and copied otherwise.
const backdrops = new WeakMap();

function sheet(canvas, theme, key, paint) {
  const ratio = window.devicePixelRatio || 1;
  const width = canvas.clientWidth, height = canvas.clientHeight;
  const wide = Math.round(width * ratio), high = Math.round(height * ratio);
  if (canvas.width !== wide || canvas.height !== high) Object.assign(canvas, { width: wide, height: high });
  const context = canvas.getContext("2d");
  context.setTransform(1, 0, 0, 1, 0, 0);
  context.clearRect(0, 0, wide, high);
  const version = [wide, high, theme.ink, theme.ground, fontOf(theme), key].join();
  let kept = backdrops.get(canvas);
  if (kept?.version !== version) {
    kept = { version, layer: Object.assign(made("canvas"), { width: wide, height: high }) };
    const below = kept.layer.getContext("2d");
    below.setTransform(ratio, 0, 0, ratio, 0, 0);
    below.font = fontOf(theme);
    paint(below, width, height);
    backdrops.set(canvas, kept);
  }
  if (wide && high) context.drawImage(kept.layer, 0, 0);
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.font = fontOf(theme);
  return { context, width, height };
}

const ring = (context, x, y, radius) => {
  context.beginPath();
  context.arc(x, y, radius, 0, 2 * Math.PI);
};

function writtenOn(context, theme, text, x, y) {
  context.lineWidth = 3.5;
  context.lineJoin = "round";
  context.strokeStyle = theme.ground;
  context.strokeText(text, x, y);
  context.fillStyle = theme.ink;
  context.fillText(text, x, y);
}

// The power of ten that contains all modes; it grows immediately and shrinks with a delay.
function decadesFor(points, recent) {
  let largest = 0;
  for (let i = 0; i < points.length; i += 2) largest = Math.max(largest, points[i] ** 2 + points[i + 1] ** 2);
  const needed = Math.ceil(Math.log10(Math.max(largest, 1)) / 2 - 1e-9);
  recent.push(Math.min(Math.max(needed, 1), FARTHEST));
  if (recent.length > 60) recent.shift();
  return Math.max(...recent);
}

// The mark of a mode as a small image, because copying images is faster than drawing thousands of circles.
const dots = new Map();

function dot(color, isFilled, size) {
  const ratio = window.devicePixelRatio || 1, key = [color, isFilled, size, ratio].join();
  if (dots.has(key)) return dots.get(key);
  const side = 2 * Math.ceil(size + 1.5);
  const canvas = Object.assign(made("canvas"), { width: Math.ceil(side * ratio), height: Math.ceil(side * ratio) });
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  context.fillStyle = context.strokeStyle = color;
  context.lineWidth = 1.1;
  ring(context, side / 2, side / 2, size);
  context.globalAlpha = 0.8;
  if (isFilled) context.fill();
  context.globalAlpha = 0.95;
  context.stroke();
  dots.set(key, { canvas, side });
  return dots.get(key);
}

function viewOf(width, height, decades, isNear) {
  const half = Math.min(width, height) / 2;
  if (isNear) return { scale: half / NEAR, x0: width / 2 - half / NEAR, y0: height / 2, radius: (r) => r };
  return { scale: half / (1.05 * drawnRadius(10 ** decades)), x0: width / 2, y0: height / 2, radius: drawnRadius };
}

function paintPlane(context, theme, width, height, decades, isNear, nearUnit) {
  const { scale, x0, y0, radius } = viewOf(width, height, decades, isNear);
  const [lower, upper] = nearUnit, end = radius(10 ** decades) * scale;
  context.beginPath();
  context.arc(x0, y0, radius(upper) * scale, 0, 2 * Math.PI);
  context.arc(x0, y0, radius(lower) * scale, 0, 2 * Math.PI, true);
  context.fillStyle = theme.band;
  context.fill();

  context.strokeStyle = theme.faint;
  context.lineWidth = 1;
  context.beginPath();
  context.moveTo(x0 - end, y0);
  context.lineTo(x0 + end, y0);
  context.moveTo(x0, y0 - end);
  context.lineTo(x0, y0 + end);
  context.stroke();
  ring(context, x0, y0, 0.5 * scale);
  context.stroke();
  context.setLineDash([3, 4]);
  for (let k = 1; k <= decades; k++) {
    ring(context, x0, y0, radius(10 ** k) * scale);
    context.stroke();
  }
  context.setLineDash([]);
  context.strokeStyle = theme.ink;
  context.lineWidth = 1.25;
  ring(context, x0, y0, scale);
  context.stroke();

  context.textAlign = "center";
  context.textBaseline = "middle";
  if (isNear) {
    for (const re of [0.8, 1, 1.2]) writtenOn(context, theme, String(re), x0 + re * scale, height - 0.8 * sizeOf(theme));
  } else {
    // Labels are on a diagonal, where few modes are, with enough space between them.
    const room = (PER_DECADE * scale) * Math.SQRT1_2, every = Math.max(1, Math.ceil((1.15 * sizeOf(theme)) / room));
    for (let k = 0; k <= decades; k += every) {
      const far = radius(10 ** k) * scale * Math.SQRT1_2;
      writtenOn(context, theme, powerOfTen(k), x0 - far, y0 - far);
    }
    context.textBaseline = "alphabetic";
    context.textAlign = "left";
    writtenOn(context, theme, "Im λ", x0 + 6, y0 - end + 4);
  }
  context.textBaseline = "alphabetic";
  context.textAlign = "right";
  writtenOn(context, theme, "Re λ", width - 3, y0 - 6);
}

// Of many modes the density is drawn, because overlapping marks could not be distinguished.
const CELL = 3;

function drawDensity(context, run, modes, place, width, height) {
  const wide = Math.ceil(width / CELL), high = Math.ceil(height / CELL), last = run.depth_colors.length - 1;
  const count = new Uint32Array(wide * high), layers = new Float32Array(wide * high);
  for (let i = 0; i < modes.layer.length; i++) {
    const [x, y] = place(i), column = Math.floor(x / CELL), row = Math.floor(y / CELL);
    if (column < 0 || row < 0 || column >= wide || row >= high) continue;
    count[row * wide + column] += 1;
    layers[row * wide + column] += Math.min(modes.layer[i], last);
  }
  const most = Math.log1p(count.reduce((a, b) => Math.max(a, b), 1));
  for (let cell = 0; cell < count.length; cell++) {
    if (!count[cell]) continue;
    context.globalAlpha = 0.25 + (0.75 * Math.log1p(count[cell])) / most;
    context.fillStyle = run.depth_colors[Math.round(layers[cell] / count[cell])];
    context.fillRect((cell % wide) * CELL, Math.floor(cell / wide) * CELL, CELL, CELL);
  }
  context.globalAlpha = 1;
}

// Returns a function from the index of a mode to its position on a plane, in CSS pixels.
function placesOn(width, height, modes, decades, isNear) {
  const { scale, x0, y0, radius } = viewOf(width, height, decades, isNear), rim = radius(10 ** decades);
  return (i) => {
    const re = modes.points[2 * i], im = modes.points[2 * i + 1], r = Math.hypot(re, im);
    const shown = (Math.min(radius(r), rim) / (r || 1)) * scale;
    return [x0 + re * shown, y0 - im * shown, r];
  };
}

function drawPlane(canvas, theme, run, modes, decades, isNear) {
  const nearUnit = run.near_unit ?? [0.9, 1.05], key = [decades, isNear, ...nearUnit].join();
  const { context, width, height } = sheet(canvas, theme, key, (below, wide, high) =>
    paintPlane(below, theme, wide, high, decades, isNear, nearUnit));
  const place = placesOn(width, height, modes, decades, isNear), n = modes.layer.length;
  const size = n > 800 ? 2.1 : 3.1, last = run.depth_colors.length - 1;
  const marks = [false, true].map((isFilled) => run.depth_colors.map((color) => dot(color, isFilled, size)));
  let nOutside = 0;
  if (n > MANY) drawDensity(context, run, modes, place, width, height);
  for (let i = 0; i < n; i++) {
    const [x, y, r] = place(i);
    nOutside += isNear ? x < 0 || y < 0 || x > width || y > height : r > 10 ** decades;
    if (n > MANY) continue;
    const mark = marks[modes.isReliable[i]][Math.min(modes.layer[i], last)];
    context.drawImage(mark.canvas, x - mark.side / 2, y - mark.side / 2, mark.side, mark.side);
  }
  const words = [];
  if (n > MANY) words.push(`density of ${n.toLocaleString("en")} modes`);
  if (nOutside) words.push(isNear ? `${nOutside} outside` : `${nOutside} beyond ${powerOfTen(decades)}, drawn at the edge`);
  if (words.length) {
    context.textAlign = "center";
    writtenOn(context, theme, words.join("; "), width / 2, isNear ? 1.3 * sizeOf(theme) : height - 5);
  }
}
