// Decoding of the kernel's message, and the colors, keys and legends of the figure.
const arrayOf = (Kind, view) => new Kind(view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength));

const tracesFrom = (own) => Object.fromEntries(TRACES.map((trace, i) => [
  trace.name,
  { step: arrayOf(Float32Array, own[2 * i]), value: arrayOf(Float32Array, own[2 * i + 1]) },
]));

// Runs with their modes and traces, and earlier runs; traces that were not sent are kept from the previous state.
function unpacked(content, buffers, before) {
  const perTrace = content.has_traces ? 2 * TRACES.length : 0, perRun = 3 + perTrace;
  const runs = content.runs.map((run, index) => {
    const own = buffers.slice(index * perRun, (index + 1) * perRun);
    const modes = { points: arrayOf(Float32Array, own[0]), layer: arrayOf(Uint8Array, own[1]), isReliable: arrayOf(Uint8Array, own[2]) };
    return { ...run, modes, traces: content.has_traces ? tracesFrom(own.slice(3)) : before.runs[index].traces };
  });
  const rest = buffers.slice(content.runs.length * perRun);
  const earlier = content.has_traces
    ? content.earlier.map((run, index) => ({ ...run, traces: tracesFrom(rest.slice(index * perTrace, (index + 1) * perTrace)) }))
    : before.earlier;
  return { runs, earlier };
}

function themeOf(element) {
  const style = getComputedStyle(element);
  const read = (name, otherwise) => style.getPropertyValue(name).trim() || otherwise;
  return {
    ink: read("--jp-content-font-color1", "#7a7a7a"),
    ground: read("--jp-layout-color0", "transparent"),
    font: style.fontFamily,
    size: 0.85 * parseFloat(style.fontSize),
    faint: "rgba(122, 122, 122, 0.32)",
    band: "rgba(122, 122, 122, 0.24)",
    kss: "rgba(31, 119, 212, 0.16)",
    fault: "rgba(211, 47, 47, 0.1)",
    faultEdge: "rgba(211, 47, 47, 0.8)",
  };
}

const threeDigits = (value) => (value === null ? "–" : value < 1e4 ? String(Number(value.toPrecision(3))) : short(Number(value.toPrecision(2))));

function swatch(run, isPale) {
  const key = made("span", "workbench-live-key");
  key.innerHTML = `<svg width="26" height="8" aria-hidden="true"><path d="M0 4H26" stroke="${run.color}"
    stroke-width="${isPale ? 1.4 : 2.2}" ${isPale ? 'opacity="0.5"' : ""} stroke-dasharray="${run.dash.join(" ")}"/></svg>`;
  key.append(isPale && run.verdict ? `${run.name}: ${run.verdict}` : run.name);
  return key;
}

function legendOf(runs, earlier, broken) {
  const key = (html) => {
    const made_ = made("span", "workbench-live-key");
    made_.innerHTML = html;
    return made_;
  };
  const parts = [...runs.map((run) => swatch(run, false)), ...earlier.map((run) => swatch(run, true))];
  parts.push(key('<i class="workbench-live-shade"></i>KSS on'));
  if (runs.some((run) => run.fault_spans.length)) parts.push(key('<i class="workbench-live-fault"></i>fault on'));
  if (runs.some((run) => run.sound.length || run.broken.length)) parts.push(key(`probe: ▏no fault <b style="color:${broken}">■</b> fault`));
  if (runs.some((run) => run.is_broken)) parts.push(key("<b>×</b> diverged or failed"));
  return parts;
}

function depthKeyOf(run, isNear) {
  const n = run.depth_colors.length;
  if (!run.n_layers) return "";
  const cells = run.depth_colors.map((color) => `<i style="background:${color};width:${Math.max(0.3, 5.5 / n)}em"></i>`).join("");
  const layers = n === 1 ? `layer 0 ${cells}` : `layer 0 ${cells} ${n - 1}`;
  const [lower, upper] = run.near_unit ?? [0.9, 1.05];
  return `<span>${layers}</span><span>● reliable ○ not reliable</span>
    <span><i class="workbench-live-band"></i> near-unit band, ${lower}–${upper}</span>
    <span>${isNear ? "linear scale" : `┄ log scale for |λ| > ${KNEE}`}</span>`;
}
