function render({ model, el, signal }) {
  el.classList.add("workbench-alarms");
  el.setAttribute("role", "log");
  el.setAttribute("aria-label", "Alarms");
  const none = made("div", "workbench-alarms-none", "no alarm so far");
  el.replaceChildren(none);
  // Existing lines are not changed, so that a screen reader reads only new ones.
  const rows = new Map();
  follow(model, signal, ({ lines }) => {
    const numbers = new Set(lines.map((line) => line.number));
    for (const [number, row] of rows) {
      if (numbers.has(number)) continue;
      row.remove();
      rows.delete(number);
    }
    for (const line of [...lines].reverse()) {
      if (rows.has(line.number)) continue;
      const row = made("div", `workbench-alarms-${line.kind}`);
      row.append(made("b", "", `step ${line.step}`), made("span", "workbench-alarms-run", ` ${line.run} `), made("span", "", line.text));
      rows.set(line.number, row);
      el.prepend(row);
    }
    none.hidden = lines.length > 0;
  });
}
export default { render };
