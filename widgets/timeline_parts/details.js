// The details of a selected step: a map of layers and heads, and the modes in the complex plane.
const HEAT = ["#fde725", "#a0da39", "#4ac16d", "#1fa187", "#277f8e", "#365c8d", "#46327e", "#440154"]; // viridis, backwards

function heatColor(fraction) {
  const place = Math.min(Math.max(fraction, 0), 1) * (HEAT.length - 1), i = Math.min(Math.floor(place), HEAT.length - 2);
  const channel = (color, at) => parseInt(color.slice(at, at + 2), 16);
  const mixed = [1, 3, 5].map((at) => Math.round(channel(HEAT[i], at) * (1 - place + i) + channel(HEAT[i + 1], at) * (place - i)));
  return `rgb(${mixed.join()})`;
}

// Bad values are dark in any theme: 0 is the best value of all maps, 1 the worst.
function badness(selection, value) {
  const { low, high, is_log: isLog, is_low_bad: isLowBad } = selection;
  if (!(high > low)) return 0;
  const fraction = isLog ? Math.log(value / low) / Math.log(high / low) : (value - low) / (high - low);
  return isLowBad ? 1 - fraction : fraction;
}

// Positions of the cells of a map on its canvas; row labels take at most a third of the width.
function heatPlaces(canvas, theme, selection, detail) {
  const size = sizeOf(theme), width = canvas.clientWidth, n = detail.columns.length, context = canvas.getContext("2d");
  context.font = fontOf(theme);
  const labels = rowLabels(selection, detail).map((label) => shortened(context, label, width / 3));
  const wide = Math.max(...[...labels, selection.dims[1]].map((label) => context.measureText(label).width));
  const left = Math.ceil(wide + 0.8 * size), top = 1.6 * size;
  const cell = Math.max(4, Math.min(2.7 * size, (width - left - 0.7 * size) / n));
  return { labels, left, top, cell, tall: Math.max(4, Math.min(2 * size, (30 * size) / detail.rows.length)) };
}

const rowLabels = ({ dims }, { rows }) => rows.map((row, i) => (dims[0] === "layer" && i === 0 ? `layer ${row}` : row));

function shortened(context, text, width) {
  if (context.measureText(text).width <= width) return text;
  let n = text.length - 1;
  while (n > 1 && context.measureText(text.slice(0, n) + "…").width > width) n -= 1;
  return text.slice(0, n) + "…";
}

// Draws a map in which the rows of all layers but `focus` are pale; null for no focus.
function drawHeat(canvas, theme, selection, detail, focus) {
  const values = detail.heat, n = detail.columns.length, size = sizeOf(theme);
  const { labels, left, top, cell, tall } = heatPlaces(canvas, theme, selection, detail);
  canvas.style.height = `${top + tall * detail.rows.length + 0.6 * size}px`;
  const { context, width } = cleared(canvas, theme), isIn = (i) => focus === null || detail.row_layers[i] === focus;
  context.fillStyle = theme.ink;
  context.textBaseline = "middle";
  context.textAlign = "right";
  const rows = labels.map((text, i) => ({ text, at: top + (i + 0.5) * tall }));
  for (const { text, at } of spread(rows, 1.2 * size)) context.fillText(text, left - 0.5 * size, at);
  if (selection.dims[1]) context.fillText(selection.dims[1], left - 0.5 * size, top / 2 + 1);
  context.textAlign = "center";
  let taken = left - 0.2 * size;
  detail.columns.forEach((text, j) => {
    const half = context.measureText(text).width / 2, at = left + (j + 0.5) * cell;
    if (!text || at - half < taken || at + half > width) return;
    context.fillText(text, at, top / 2 + 1);
    taken = at + half + 0.5 * size;
  });
  values.forEach((value, k) => {
    const x = left + (k % n) * cell, y = top + Math.floor(k / n) * tall;
    const inside = [x + 0.5, y + 0.5, cell - 1, tall - 1];
    context.globalAlpha = isIn(Math.floor(k / n)) ? 1 : 0.25;
    if (Number.isFinite(value)) {
      context.fillStyle = heatColor(badness(selection, value));
      context.fillRect(...inside);
    } else {
      context.strokeStyle = theme.faint;
      context.strokeRect(...inside);
    }
  });
  context.globalAlpha = 1;
  const framed = (row, column, wide, lines) => {
    for (const [color, thick] of lines) {
      context.strokeStyle = color;
      context.lineWidth = thick;
      context.strokeRect(left + column * cell, top + row * tall, wide, tall);
    }
  };
  const focused = focus === null ? -1 : detail.row_layers.indexOf(focus);
  if (focused >= 0) framed(focused, 0, n * cell, [[theme.ground, 3.5], [theme.ink, 1.5]]);
  const { layer, head } = selection, row = layer === null ? -1 : detail.row_layers.indexOf(layer);
  const column = head === null || selection.dims[1] !== "head" ? 0 : detail.columns.indexOf(String(head));
  if (selection.run === detail.run && row >= 0 && column >= 0) {
    framed(row, column, head === null || selection.dims[1] !== "head" ? n * cell : cell, [[theme.ground, 5], ["#e00b4b", 2.4]]);
  }
}

// Draws the modes in which all layers but `focus` are gray.
function drawModes(canvas, theme, detail, focus) {
  const isIn = (layer) => focus === null || layer === focus || !detail.mode_layers.includes(focus);
  const colors = detail.depth_colors.map((color, i) => (isIn(detail.mode_layers[i]) ? color : "rgba(122, 122, 122, 0.22)"));
  drawPlane(canvas, theme, { ...detail, depth_colors: colors }, detail.modes, decadesFor(detail.modes.points, []), false);
}

// The cell of a map below the pointer; null if there is none.
function cellAt(event, theme, selection, detail) {
  const { left, top, cell, tall } = heatPlaces(event.target, theme, selection, detail), n = detail.columns.length;
  const column = Math.floor((event.offsetX - left) / cell), row = Math.floor((event.offsetY - top) / tall);
  return column >= 0 && column < n && row >= 0 && row < detail.rows.length ? row * n + column : null;
}

function cellName(selection, detail, k) {
  const n = detail.columns.length, [rows, columns] = selection.dims;
  return `${rows} ${detail.rows[Math.floor(k / n)]}` + (columns ? `, ${columns} ${detail.columns[k % n]}` : "");
}

// The worst cell as text.
function worstCell(selection, detail, values) {
  let worst = -1;
  values.forEach((value, k) => {
    if (Number.isFinite(value) && (worst < 0 || (selection.is_low_bad ? value < values[worst] : value > values[worst]))) worst = k;
  });
  if (worst < 0) return "no values recorded";
  return `${selection.is_low_bad ? "lowest" : "highest"}: ${numberText(values[worst])} at ${cellName(selection, detail, worst)}`;
}

// The layer that is highlighted in all maps and planes: the layer of the alarm, of a cell or mode that was clicked, or one
// from the list; while the pointer is on a cell, the layer of the cell.
function layerChoice(selection, redraw) {
  const own = selection.details.flatMap((detail) => [...(detail.heat ? detail.row_layers : []), ...(detail.modes ? detail.mode_layers : [])]);
  const layers = [...new Set(own)].filter((layer) => layer !== null).sort((a, b) => a - b);
  const chosen = layers.includes(selection.layer) ? selection.layer : null;
  const box = made("label", "", "highlight "), list = made("select"), focus = { chosen, hovered: null };
  list.setAttribute("aria-label", "layer to highlight in all maps and eigenvalue planes");
  for (const [text, value] of [["all layers", ""], ...layers.map((layer) => [`layer ${layer}`, layer])]) {
    list.append(Object.assign(made("option", "", text), { value }));
  }
  list.value = chosen ?? "";
  list.onchange = () => focus.choose(list.value === "" ? null : Number(list.value));
  box.append(list);
  const set = (change) => {
    Object.assign(focus, change);
    list.value = focus.chosen ?? "";
    redraw();
  };
  focus.choose = (layer) => set({ chosen: layer, hovered: null });
  focus.toggle = (layer) => layer !== null && focus.choose(focus.chosen === layer ? null : layer);
  focus.hover = (layer) => layer !== focus.hovered && set({ hovered: layer });
  focus.layer = () => focus.hovered ?? focus.chosen;
  return { focus, box: layers.length > 1 ? box : "" };
}

function figureOf(run, detail, note) {
  const figure = made("figure"), caption = made("figcaption"), canvas = made("canvas");
  if (run) caption.append(swatch(run));
  caption.append(made("b", "", detail.run), ...(note ? [made("span", "workbench-timeline-note", note)] : []));
  canvas.setAttribute("role", "img");
  figure.append(caption, canvas);
  return { figure, canvas };
}

function mapFigure(run, selection, detail, focus, theme) {
  if (!detail.heat) {
    const { figure, canvas } = figureOf(run, detail, `no ${selection.signal} at this step`);
    canvas.remove();
    return { figure };
  }
  const { figure, canvas } = figureOf(run, detail), line = made("div", "workbench-timeline-note"), worst = worstCell(selection, detail, detail.heat);
  const resting = `step ${stepText(detail.step)} · ${worst}`;
  line.textContent = resting;
  canvas.setAttribute("aria-label", `${selection.signal} of ${detail.run} by ${selection.dims.filter(Boolean).join(" and ")}: ${worst}`);
  const layerOf = (k) => (k === null ? null : detail.row_layers[Math.floor(k / detail.columns.length)]);
  canvas.onmousemove = (event) => {
    const k = cellAt(event, theme(), selection, detail);
    line.textContent = k === null ? resting : `${cellName(selection, detail, k)}: ${numberText(detail.heat[k])}`;
    focus.hover(layerOf(k));
  };
  canvas.onmouseleave = () => {
    line.textContent = resting;
    focus.hover(null);
  };
  canvas.onclick = (event) => focus.toggle(layerOf(cellAt(event, theme(), selection, detail)));
  figure.append(line);
  return { figure, paint: () => drawHeat(canvas, theme(), selection, detail, focus.layer()) };
}

function planeFigure(run, detail, focus, theme) {
  const mass = detail.near_unit_mass === null ? "–" : detail.near_unit_mass.toFixed(2);
  const numbers = `step ${stepText(detail.modes_step)} · M ${mass} · ρ ${numberText(detail.spectral_radius ?? undefined)}`;
  const { figure, canvas } = figureOf(run, detail, numbers);
  canvas.classList.add("workbench-timeline-plane");
  canvas.setAttribute("aria-label", `Eigenvalues of ${detail.run}: ${numbers}`);
  const modeAt = (event) => modeNear(canvas, detail.modes, decadesFor(detail.modes.points, []), false, event.offsetX, event.offsetY);
  const layerOf = (i) => detail.mode_layers[detail.modes.layer[i]] ?? null;
  canvas.onmousemove = (event) => {
    const i = modeAt(event), [re, im] = [detail.modes.points[2 * i], detail.modes.points[2 * i + 1]];
    canvas.title = i === null ? "" : `layer ${layerOf(i)}: λ = ${numberText(re)} ${signed(im)}, |λ| = ${numberText(Math.hypot(re, im))}`;
    canvas.style.cursor = i === null ? "" : "pointer";
  };
  canvas.onclick = (event) => {
    const i = modeAt(event);
    if (i !== null) focus.toggle(layerOf(i));
  };
  return { figure, paint: () => drawModes(canvas, theme(), detail, focus.layer()) };
}

// Builds the details next to the panels; returns a function that redraws them.
function detailsOf(box, selection, runs, act) {
  const head = made("div", "workbench-timeline-chosen"), title = made("b", "", `step ${stepText(selection.step)}`);
  const close = made("button", "workbench-timeline-button", "close");
  close.type = "button";
  close.setAttribute("aria-label", "close the details");
  close.onclick = () => act({ select: null });
  head.append(title, close);
  const parts = [head], named = Object.fromEntries(runs.map((run) => [run.name, run]));
  if (selection.asked !== undefined && selection.asked !== selection.step) {
    parts.push(made("div", "workbench-timeline-note", `nearest step in this file to step ${stepText(selection.asked)}`));
  }
  if (selection.event) {
    const { run, kind, source, place, score, message } = selection.event;
    const words = [`${kind} of ${source}`, run, place, score === null ? "" : `${numberText(score)} × threshold`].filter(Boolean).join(" · ");
    parts.push(made("div", "", words), made("div", "workbench-timeline-note", message));
  }
  let theme = null;
  const paints = [], now = () => theme, paint = () => theme && paints.forEach((one) => one());
  const { focus, box: choice } = layerChoice(selection, paint);
  const column = (figures) => {
    const maps = made("div", "workbench-timeline-maps");
    maps.append(...figures.map(({ figure }) => figure));
    paints.push(...figures.map((one) => one.paint).filter(Boolean));
    return maps;
  };
  parts.push(choice);
  if (selection.signal) {
    parts.push(made("div", "workbench-timeline-part", selection.signal), scaleOf(selection));
    parts.push(column(selection.details.map((detail) => mapFigure(named[detail.run], selection, detail, focus, now))));
  }
  const withModes = selection.details.filter((detail) => detail.modes);
  if (withModes.length) {
    parts.push(made("div", "workbench-timeline-part", "eigenvalues of the nearest recorded spectra"));
    parts.push(column(withModes.map((detail) => planeFigure(named[detail.run], detail, focus, now))));
  }
  if (!selection.signal && !withModes.length) parts.push(made("div", "workbench-timeline-note", "No signals with layers and no spectra recorded"));
  box.replaceChildren(...parts);
  return (present) => {
    theme = present;
    paint();
  };
}

function scaleOf(selection) {
  const box = made("div", "workbench-timeline-keys"), bar = made("i", "workbench-timeline-scale");
  bar.style.background = `linear-gradient(to right, ${HEAT.join()})`;
  const [best, worst] = selection.is_low_bad ? [selection.high, selection.low] : [selection.low, selection.high];
  box.append(made("span", "", numberText(best)), bar, made("span", "", `${numberText(worst)} ${selection.is_low_bad ? "(low values are bad)" : ""}`));
  return box;
}
