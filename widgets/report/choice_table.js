const SIGNS = {
  healthy: '<circle cx="8" cy="8" r="7"/><path class="cut" d="M4.6 8.3l2.3 2.4 4.6-5"/>',
  "at risk": '<path d="M8 1.2 15.4 14.4H.6z"/><path class="cut" d="M8 6v4M8 12.2v.2"/>',
  failing: '<path d="M5 1h6l4 4v6l-4 4H5l-4-4V5z"/><path class="cut" d="M5.4 5.4l5.2 5.2M10.6 5.4l-5.2 5.2"/>',
  "not measured": '<circle class="open" cx="8" cy="8" r="6.2"/>',
};
const made = (tag, name, text) => {
  const element = document.createElement(tag);
  if (name) element.className = name;
  if (text !== undefined) element.textContent = text;
  return element;
};

function filled(element, { text, state, is_number }) {
  if (is_number) element.classList.add("number");
  if (!state) {
    element.append(text);
    return element;
  }
  const word = made("span", `state ${state.replaceAll(" ", "-")}`);
  word.innerHTML = `<svg viewBox="0 0 16 16" width="13" height="13" aria-hidden="true">${SIGNS[state] ?? ""}</svg>`;
  word.append(text);
  element.append(word);
  return element;
}

function render({ model, el }) {
  el.classList.add("workbench-choice");
  const choose = (name) => {
    model.set("value", name);
    model.save_changes();
  };
  const mark = () => {
    for (const line of el.querySelectorAll("tbody tr")) {
      const isChosen = line.dataset.name === model.get("value");
      line.classList.toggle("chosen", isChosen);
      line.querySelector("button").setAttribute("aria-pressed", isChosen);
    }
  };
  const draw = () => {
    const focused = el.querySelector("button:focus")?.closest("tr").dataset.name;
    const place = el.firstElementChild?.scrollTop ?? 0;
    const scroll = made("div", "scroll"), table = made("table"), head = made("tr"), body = made("tbody");
    scroll.tabIndex = 0;
    scroll.setAttribute("role", "region");
    scroll.setAttribute("aria-label", model.get("label"));
    const rows = model.get("rows");
    model.get("columns").forEach((title, i) => {
      const column = made("th", rows[0]?.cells[i]?.is_number ? "number" : "", title);
      column.scope = "col";
      head.append(column);
    });
    for (const { id, cells } of rows) {
      const line = made("tr"), name = made("th"), button = made("button", "", cells[0].text);
      line.dataset.name = id;
      line.onclick = () => choose(id);
      name.scope = "row";
      button.type = "button";
      name.append(button);
      line.append(name, ...cells.slice(1).map((one) => filled(made("td"), one)));
      body.append(line);
    }
    const top = made("thead");
    top.append(head);
    table.append(top, body);
    scroll.append(rows.length ? table : made("p", "", model.get("empty")));
    el.replaceChildren(scroll);
    scroll.scrollTop = place;
    mark();
    [...el.querySelectorAll("tbody tr")].find((line) => line.dataset.name === focused)?.querySelector("button").focus();
  };
  model.on("change:rows change:columns change:label", draw);
  model.on("change:value", mark);
  draw();
  return () => {
    model.off("change:rows change:columns change:label", draw);
    model.off("change:value", mark);
  };
}
export default { render };
