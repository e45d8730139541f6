// The list of sources: groups of tick boxes, a filter, and a place for files. Files are sent to the kernel in slices,
// because the server closes the connection at a message that is too large.
const SLICE = 2 ** 22;

const made = (tag, name, text) => {
  const element = document.createElement(tag);
  if (name) element.className = name;
  if (text !== undefined) element.textContent = text;
  return element;
};

async function sendFile(model, file) {
  try {
    if (!file.size) throw new Error("nothing to read");
    for (let start = 0; start < file.size; start += SLICE) {
      const end = Math.min(start + SLICE, file.size);
      const content = await file.slice(start, end).arrayBuffer();
      model.send({ file: file.name, start, isLast: end === file.size }, undefined, [content]);
    }
  } catch { // the browser cannot read folders
    model.send({ failed: `${file.name} is a folder, or an empty or unreadable file; enter its path instead.` });
  }
}

function render({ model, el }) {
  el.classList.add("workbench-sources");
  el.dataset.lmSuppressShortcuts = "true";
  const filter = made("input"), list = made("div", "list"), drop = made("label", "drop"), file = made("input");
  filter.type = "search";
  filter.placeholder = "Filter";
  filter.setAttribute("aria-label", "Filter the list");
  list.tabIndex = 0;
  list.setAttribute("role", "group");
  list.setAttribute("aria-label", "Samples, checkpoints, runs and sweeps");
  file.type = "file";
  file.multiple = true;
  file.setAttribute("aria-label", "Choose files to open");
  drop.append(made("span", "", "Drop files here, or choose some"), file);
  el.append(filter, list, drop);

  const opened = new Map(); // what the user opened and closed
  const tick = (name, isTicked) => {
    const others = model.get("value").filter((one) => one !== name);
    model.set("value", isTicked ? [...others, name] : others);
    model.save_changes();
  };
  const mark = () => {
    const ticked = new Set(model.get("value"));
    for (const box of list.querySelectorAll("input")) box.checked = ticked.has(box.value);
    for (const group of list.querySelectorAll("details")) {
      const n = group.querySelectorAll("input:checked").length;
      group.querySelector(".count").textContent = n ? `${n} ticked` : group.dataset.size;
    }
  };
  const draw = () => {
    const focused = list.contains(document.activeElement) ? document.activeElement.value : null;
    const place = list.scrollTop, words = filter.value.trim().toLowerCase();
    const groups = model.get("groups").map(({ title, isOpen, items }) => {
      const shown = items.filter(({ name, tip }) => `${name} ${tip} ${title}`.toLowerCase().includes(words));
      const group = made("details"), head = made("summary", "", title);
      group.dataset.size = String(items.length);
      group.hidden = !shown.length && Boolean(words);
      group.open = Boolean(words) || (opened.get(title) ?? isOpen);
      head.append(made("span", "count"));
      head.onclick = () => words || opened.set(title, !group.open);
      group.append(head, ...shown.map(({ name, text, tip, mark }) => {
        const row = made("label", "row"), box = made("input"), label = made("span", "name", text);
        box.type = "checkbox";
        box.value = name;
        box.onchange = () => tick(name, box.checked);
        row.title = tip;
        row.append(box, label);
        if (mark) row.append(made("span", mark === "live" ? "mark live" : "mark", mark));
        return row;
      }));
      if (!items.length) group.append(made("div", "none", "none found"));
      return group;
    });
    list.replaceChildren(...groups);
    list.scrollTop = place;
    mark();
    if (focused) [...list.querySelectorAll("input")].find((box) => box.value === focused)?.focus();
  };
  filter.oninput = draw;
  filter.onkeydown = (event) => {
    if (event.key !== "Enter") return;
    const boxes = list.querySelectorAll("details:not([hidden]) input");
    if (boxes.length === 1) boxes[0].click(); // Enter ticks the only match
  };
  file.onchange = async () => {
    for (const one of file.files) await sendFile(model, one);
    file.value = "";
  };
  const over = (event) => {
    if (!event.dataTransfer?.types.includes("Files")) return;
    event.preventDefault();
    event.stopPropagation();
    el.classList.toggle("over", event.type === "dragover");
  };
  el.ondragover = over;
  el.ondragleave = over;
  el.ondrop = async (event) => {
    over(event);
    for (const one of [...event.dataTransfer.files]) await sendFile(model, one);
  };
  model.on("change:groups", draw);
  model.on("change:value", mark);
  draw();
  return () => {
    model.off("change:groups", draw);
    model.off("change:value", mark);
  };
}
export default { render };
