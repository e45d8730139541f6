function render({ model, el, signal }) {
  el.classList.add("workbench-alarms");
  const none = made("div", "workbench-alarms-none", "No alarms so far"), first = made("div"), newest = made("div");
  for (const [list, name] of [[first, "First alarms"], [newest, "Newest alarms"]]) {
    list.setAttribute("role", "log");
    list.setAttribute("aria-label", name);
  }
  el.replaceChildren(none, first, newest);

  // Existing lines are not changed, so that a screen reader reads only new ones.
  const listIn = (list, put) => {
    const rows = new Map();
    return (lines, title) => {
      const numbers = new Set(lines.map((line) => line.number));
      for (const [number, row] of rows) {
        if (numbers.has(number)) continue;
        row.remove();
        rows.delete(number);
      }
      for (const line of lines) {
        if (rows.has(line.number)) continue;
        const row = made("div", `workbench-alarms-${line.kind}`), name = title(line);
        if (name) row.append(made("span", "workbench-alarms-first", name));
        row.append(made("b", "", `step ${line.step}`), made("span", "workbench-alarms-run", ` ${line.run} `), made("span", "", line.text));
        rows.set(line.number, row);
        put(list, row);
      }
    };
  };
  const titles = { alarm: "first alarm ", attribution: "first cause " };
  const showFirst = listIn(first, (list, row) => list.append(row)), showNewest = listIn(newest, (list, row) => list.prepend(row));
  follow(model, signal, (content) => {
    showFirst(content.first, (line) => titles[line.kind]);
    showNewest([...content.lines].reverse(), () => "");
    none.hidden = content.lines.length + content.first.length > 0;
  });
}
export default { render };
