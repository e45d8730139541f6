// The details of a chosen step: layers and heads as a map, the modes in the complex plane.
const HEAT = ["#fde725", "#a0da39", "#4ac16d", "#1fa187", "#277f8e", "#365c8d", "#46327e", "#440154"]; // viridis, backwards

function heatColor(share) {
  const place = Math.min(Math.max(share, 0), 1) * (HEAT.length - 1), i = Math.min(Math.floor(place), HEAT.length - 2);
  const channel = (color, at) => parseInt(color.slice(at, at + 2), 16);
  const mixed = [1, 3, 5].map((at) => Math.round(channel(HEAT[i], at) * (1 - place + i) + channel(HEAT[i + 1], at) * (place - i)));
  return `rgb(${mixed.join()})`;
}

// Bad values are dark, in any theme: 0 is the best value of all maps, 1 the worst.
function badness(selection, value) {
  const { low, high, is_log: isLog, is_low_bad: isLowBad } = selection;
  if (!(high > low)) return 0;
  const share = isLog ? Math.log(value / low) / Math.log(high / low) : (value - low) / (high - low);
  return isLowBad ? 1 - share : share;
}

function heatPlaces(detail, width) {
  const left = 62, top = 18, n = detail.columns.length;
  const cell = Math.max(4, Math.min(30, (width - left - 8) / n)), tall = Math.max(4, Math.min(22, 330 / detail.rows.length));
  return { left, top, cell, tall };
}

function drawHeat(canvas, theme, selection, detail, values) {
  const places = heatPlaces(detail, canvas.clientWidth);
  canvas.style.height = `${places.top + places.tall * detail.rows.length + 6}px`;
  const { context } = cleared(canvas, theme), { left, top, cell, tall } = places, n = detail.columns.length;
  context.fillStyle = theme.ink;
  context.textBaseline = "middle";
  const skipRows = Math.ceil(13 / tall), skipColumns = Math.ceil(20 / cell);
  detail.rows.forEach((row, i) => {
    context.textAlign = "right";
    const text = selection.dims[0] === "layer" ? (i ? row : `layer ${row}`) : row;
    if (i % skipRows === 0) context.fillText(text.length > 9 ? text.slice(0, 8) + "…" : text, left - 6, top + (i + 0.5) * tall);
  });
  context.textAlign = "center";
  detail.columns.forEach((column, j) => {
    if (column && j % skipColumns === 0 && (j || cell >= 20)) context.fillText(column, left + (j + 0.5) * cell, top / 2 + 1);
  });
  if (selection.dims[1]) {
    context.textAlign = "right";
    context.fillText(selection.dims[1], left - 6, top / 2 + 1);
  }
  values.forEach((value, k) => {
    const x = left + (k % n) * cell, y = top + Math.floor(k / n) * tall;
    const inside = [x + 0.5, y + 0.5, cell - 1, tall - 1];
    if (Number.isFinite(value)) {
      context.fillStyle = heatColor(badness(selection, value));
      context.fillRect(...inside);
    } else {
      context.strokeStyle = theme.faint;
      context.strokeRect(...inside);
    }
  });
  const { layer, head } = selection;
  if (selection.run === detail.run && layer !== null && selection.dims[0] === "layer") {
    const row = detail.rows.indexOf(String(layer)), column = head === null ? 0 : detail.columns.indexOf(String(head));
    const wide = head === null ? n * cell : cell;
    if (row >= 0 && column >= 0) {
      for (const [color, width] of [[theme.ground, 5], ["#e00b4b", 2.4]]) {
        context.strokeStyle = color;
        context.lineWidth = width;
        context.strokeRect(left + column * cell, top + row * tall, wide, tall);
      }
    }
  }
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
  if (worst < 0) return "nothing recorded here";
  return `${selection.is_low_bad ? "lowest" : "highest"}: ${numberText(values[worst])} at ${cellName(selection, detail, worst)}`;
}

// Builds the details next to the panels; returns a function that redraws them.
function detailsOf(box, selection, runs, act) {
  const head = made("div", "workbench-timeline-chosen"), title = made("b", "", `step ${selection.step.toLocaleString("en")}`);
  const close = made("button", "workbench-timeline-button", "close");
  close.type = "button";
  close.onclick = () => act({ select: null });
  head.append(title, close);
  const parts = [head];
  if (selection.event) {
    const { run, source, place, score, message } = selection.event;
    const words = [`alarm of ${source}`, run, place, score === null ? "" : `${numberText(score)} × threshold`].filter(Boolean).join(" · ");
    parts.push(made("div", "", words), made("div", "workbench-timeline-note", message));
  }
  const paints = [], named = Object.fromEntries(runs.map((run) => [run.name, run]));
  if (selection.signal) parts.push(made("div", "workbench-timeline-part", selection.signal), scaleOf(selection));
  const maps = made("div", "workbench-timeline-maps");
  for (const detail of selection.details) {
    const figure = made("figure"), caption = made("figcaption"), name = made("b", "", detail.run);
    name.style.borderColor = named[detail.run]?.color ?? "transparent";
    caption.append(name);
    figure.append(caption);
    if (detail.heat) {
      const canvas = made("canvas"), line = made("div", "workbench-timeline-note"), worst = worstCell(selection, detail, detail.heat);
      const resting = `step ${detail.step.toLocaleString("en")} · ${worst}`;
      line.textContent = resting;
      canvas.setAttribute("role", "img");
      canvas.setAttribute("aria-label", `${selection.signal} of ${detail.run} by ${selection.dims.filter(Boolean).join(" and ")}: ${worst}`);
      canvas.onmousemove = (event) => {
        const { left, top, cell, tall } = heatPlaces(detail, canvas.clientWidth), n = detail.columns.length;
        const column = Math.floor((event.offsetX - left) / cell), row = Math.floor((event.offsetY - top) / tall), k = row * n + column;
        const isIn = column >= 0 && column < n && row >= 0 && row < detail.rows.length;
        line.textContent = isIn ? `${cellName(selection, detail, k)}: ${numberText(detail.heat[k])}` : resting;
      };
      canvas.onmouseleave = () => (line.textContent = resting);
      figure.append(canvas, line);
      paints.push((theme) => drawHeat(canvas, theme, selection, detail, detail.heat));
    } else if (selection.signal) figure.append(made("div", "workbench-timeline-note", `no ${selection.signal} at this step`));
    maps.append(figure);
  }
  parts.push(maps);
  const withModes = selection.details.filter((detail) => detail.modes);
  if (withModes.length) {
    const planes = made("div", "workbench-timeline-maps");
    for (const detail of withModes) {
      const figure = made("figure"), caption = made("figcaption"), name = made("b", "", detail.run), canvas = made("canvas", "workbench-timeline-plane");
      const mass = detail.near_unit_mass === null ? "–" : detail.near_unit_mass.toFixed(2);
      const numbers = `step ${detail.modes_step.toLocaleString("en")} · M ${mass} · ρ ${numberText(detail.spectral_radius ?? undefined)}`;
      name.style.borderColor = named[detail.run]?.color ?? "transparent";
      caption.append(name, made("span", "workbench-timeline-note", numbers));
      canvas.setAttribute("role", "img");
      canvas.setAttribute("aria-label", `Eigenvalues of ${detail.run}: ${numbers}`);
      figure.append(caption, canvas);
      planes.append(figure);
      paints.push((theme) => drawPlane(canvas, theme, detail, detail.modes, decadesFor(detail.modes.points, []), false));
    }
    parts.push(made("div", "workbench-timeline-part", "eigenvalues, nearest spectra"), planes);
  }
  box.replaceChildren(...parts);
  return (theme) => paints.forEach((paint) => paint(theme));
}

function scaleOf(selection) {
  const box = made("div", "workbench-timeline-keys"), bar = made("i", "workbench-timeline-scale");
  bar.style.background = `linear-gradient(to right, ${HEAT.join()})`;
  const [best, worst] = selection.is_low_bad ? [selection.high, selection.low] : [selection.low, selection.high];
  box.append(made("span", "", numberText(best)), bar, made("span", "", `${numberText(worst)} ${selection.is_low_bad ? "(low is bad)" : ""}`));
  return box;
}
