const SHAPES = {
  circle: '<circle r="3.6"/>',
  square: '<rect x="-3.3" y="-3.3" width="6.6" height="6.6"/>',
  triangle: '<path d="M0-4.2 4.2 3.4-4.2 3.4Z"/>',
  diamond: '<path d="M0-4.6 4.6 0 0 4.6-4.6 0Z"/>',
  inverted_triangle: '<path d="M0 4.2 4.2-3.4-4.2-3.4Z"/>',
  star: '<path d="M0-5 1.2-1.6 4.8-1.5 1.9.6 3 4 0 2-3 4-1.9.6-4.8-1.5-1.2-1.6Z"/>',
};
const DASHES = { solid: "", dashed: "6", dotted: "2 4", dashdot: "2 4 6 4" };

const swatch = ({ color, marker, dash }) => `<svg width="34" height="12" viewBox="-17 -6 34 12" aria-hidden="true"
  fill="${color}" stroke="${color}"><path d="M-17 0H17" stroke-width="1.8" stroke-dasharray="${DASHES[dash]}"/>
  <g stroke="none">${SHAPES[marker]}</g></svg>`;

function render({ model, el }) {
  el.classList.add("workbench-tags");
  const choose = (names) => {
    const chosen = new Set(names);
    model.set("value", model.get("options").map((option) => option.name).filter((name) => chosen.has(name)));
    model.save_changes();
  };
  const button = (text, tip, act) => {
    const made = document.createElement("button");
    made.type = "button";
    made.title = tip;
    made.textContent = text;
    made.onclick = act;
    return made;
  };
  const draw = () => {
    const focused = [...el.querySelectorAll("button")].indexOf(document.activeElement);
    const options = model.get("options"), chosen = new Set(model.get("value"));
    const label = document.createElement("span");
    label.className = "workbench-tags-label";
    label.textContent = model.get("label");
    el.setAttribute("role", "group");
    el.setAttribute("aria-label", model.get("label"));
    const tags = options.map((option) => {
      const tip = (option.tip ? option.tip + "\n" : "") + "Click to show or hide; Alt-click to show only this one.";
      const tag = button(option.text, tip, (event) => {
        const rest = [...chosen].filter((name) => name !== option.name);
        choose(event.altKey ? [option.name] : chosen.has(option.name) ? rest : [...chosen, option.name]);
      });
      tag.className = "workbench-tag";
      tag.setAttribute("aria-pressed", chosen.has(option.name));
      if (option.color) tag.insertAdjacentHTML("afterbegin", swatch(option));
      return tag;
    });
    const is_full = options.every((option) => chosen.has(option.name));
    const all = button("All", "Show all", () => choose(options.map((option) => option.name)));
    all.className = "workbench-tags-all";
    all.disabled = is_full;
    const list = document.createElement("div");
    list.append(...tags, ...(options.length > 2 ? [all] : []));
    el.replaceChildren(label, list);
    el.querySelectorAll("button")[focused]?.focus();
  };
  model.on("change:options change:value change:label", draw);
  draw();
  return () => model.off("change:options change:value change:label", draw);
}
export default { render };
