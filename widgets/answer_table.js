const made = (tag, name, text) => {
  const element = document.createElement(tag);
  if (name) element.className = name;
  if (text !== undefined) element.textContent = text;
  return element;
};
let n = 0;

function render({ model, el }) {
  el.classList.add("workbench-answers");
  const group = `workbench-answers-${++n}`;
  const set = (name, value) => {
    model.set(name, value);
    model.save_changes();
  };
  const control = (type, value, label, act) => {
    const input = made("input");
    input.type = type;
    input.value = value;
    input.setAttribute("aria-label", label);
    input.setAttribute("data-lm-suppress-shortcuts", "true");
    input.onchange = act;
    return input;
  };
  const mark = () => {
    for (const box of el.querySelectorAll("input[type=checkbox]")) box.checked = model.get("causes").includes(box.value);
    for (const box of el.querySelectorAll("input[type=radio]")) box.checked = model.get("cure") === box.value;
    for (const box of el.querySelectorAll("input")) box.disabled = model.get("is_locked");
    for (const line of el.querySelectorAll("tbody tr")) {
      line.classList.toggle("chosen", Boolean(line.querySelector('input[type=checkbox]:checked, input[type=radio]:checked:not([value=""])')));
    }
  };
  const draw = () => {
    const table = made("table"), head = made("tr"), top = made("thead"), body = made("tbody");
    for (const title of ["cause", "meaning", "change"]) {
      const column = made("th", "", title);
      column.scope = "col";
      head.append(column);
    }
    const rows = model.get("rows");
    for (const { cause, title, meaning, change } of rows) {
      const line = made("tr"), name = made("th"), cure = made("td"), chosen = cause === "nothing" ? "" : cause;
      const first = made("label", "", title), last = made("label", "", change);
      first.prepend(control("checkbox", cause, `cause: ${title}`, () => {
        const now = new Set([...el.querySelectorAll("input[type=checkbox]:checked")].map((box) => box.value));
        set("causes", rows.map((row) => row.cause).filter((each) => now.has(each)));
      }));
      const radio = control("radio", chosen, `change: ${change}`, () => set("cure", chosen));
      radio.name = group;
      last.prepend(radio);
      name.scope = "row";
      name.append(first);
      cure.append(last);
      line.append(name, made("td", "meaning", meaning), cure);
      body.append(line);
    }
    top.append(head);
    table.append(top, body);
    el.replaceChildren(table);
    mark();
  };
  model.on("change:rows", draw);
  model.on("change:causes change:cure change:is_locked", mark);
  draw();
  return () => {
    model.off("change:rows", draw);
    model.off("change:causes change:cure change:is_locked", mark);
  };
}
export default { render };
