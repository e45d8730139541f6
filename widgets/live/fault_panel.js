function render({ model, el, signal }) {
  el.classList.add("workbench-faults");
  el.setAttribute("role", "group");
  el.setAttribute("aria-label", "Faults");
  let switches = new Map();

  const makeSwitches = (faults) => {
    switches = new Map();
    for (const fault of faults) {
      const toggle = made("button", "workbench-faults-switch"), word = made("span", "workbench-faults-word");
      toggle.type = "button";
      toggle.setAttribute("role", "switch");
      toggle.title = "Switch this fault of the run “with faults” on or off, from its next step";
      word.setAttribute("aria-hidden", "true"); // the state of a switch is already accessible
      toggle.append(made("span", "workbench-faults-knob"), word, made("b", "", fault.name), `: ${fault.effect}`);
      toggle.onclick = () => model.send({ turn: { [fault.name]: toggle.getAttribute("aria-checked") !== "true" } });
      switches.set(fault.name, { toggle, word });
    }
    el.replaceChildren(made("span", "", "Faults"), ...[...switches.values()].map((each) => each.toggle));
  };

  follow(model, signal, ({ faults }) => {
    if (switches.size !== faults.length) makeSwitches(faults);
    for (const fault of faults) {
      const { toggle, word } = switches.get(fault.name);
      toggle.setAttribute("aria-checked", fault.enabled);
      word.textContent = fault.enabled ? "on" : "off";
    }
  });
}
export default { render };
