const LOWEST = -3, HIGHEST = 3; // range of the slider, in powers of ten

const SIGNIFICANT = (value) => Number(value.toPrecision(3));

const groupOf = (name, label) => {
  const group = made("div", `workbench-${name}`);
  group.setAttribute("role", "group");
  group.setAttribute("aria-label", label);
  return group;
};

const switchOf = (tip) => {
  const button = made("button", "workbench-switch");
  button.type = "button";
  button.title = tip;
  button.setAttribute("role", "switch");
  button.append(made("span", "workbench-switch-knob"));
  return button;
};

function render({ model, el, signal }) {
  const kss = groupOf("kss", "Koopman Spectral Shaping"), faults = groupOf("faults", "Faults");
  const toggle = switchOf("Switch Koopman Spectral Shaping of the run “with KSS” on or off, from its next step"), word = made("b");
  toggle.setAttribute("aria-label", "KSS");
  toggle.append(word);

  const field = (label, tip, lowest, step) => {
    const box = made("label", "", label), input = made("input");
    input.setAttribute("aria-label", label);
    Object.assign(input, { type: "number", min: lowest, step, title: tip });
    box.append(input);
    return [box, input];
  };
  const [strengthBox, strength] = field("strength", "Regularization strength", 0, "any");
  const [intervalBox, interval] = field("every", "Steps between two applications", 1, 1);
  intervalBox.append("steps");
  const slider = made("input");
  Object.assign(slider, { type: "range", min: LOWEST, max: HIGHEST, step: 0.05, title: "Regularization strength, logarithmic scale" });
  slider.setAttribute("aria-label", "strength of KSS, logarithmic");
  strengthBox.prepend(strengthBox.firstChild, slider);
  kss.append(toggle, strengthBox, intervalBox);
  el.replaceChildren(kss, faults);

  // Dragging produces many values: the first is sent immediately, then the latest, at most 20 times a second.
  let waiting = null, timer = null;
  const send = (controls) => {
    waiting = { ...waiting, ...controls };
    if (timer !== null) return;
    model.send({ kss: waiting });
    waiting = null;
    timer = setTimeout(() => {
      timer = null;
      if (waiting) send({});
    }, 50);
  };
  toggle.onclick = () => send({ enabled: toggle.getAttribute("aria-checked") !== "true" });
  slider.oninput = () => send({ strength: SIGNIFICANT(10 ** Number(slider.value)) });

  // Typed text stays until Enter or until the field loses focus; the notebook must not receive the Enter key.
  const typed = new Set();
  for (const [name, input] of [["strength", strength], ["interval", interval]]) {
    const commit = () => {
      if (!typed.delete(input) || input.value.trim() === "") again();
      else send({ [name]: Number(input.value) });
    };
    input.oninput = () => typed.add(input);
    input.onblur = commit;
    input.onkeydown = (event) => {
      if (event.key === "Enter") commit();
    };
    input.onchange = commit; // the arrows of the field
  }

  let shown = new Map();
  const showFaults = (all) => {
    faults.hidden = !all.length;
    if (shown.size !== all.length) {
      shown = new Map(all.map((fault) => {
        const button = switchOf("Switch this fault of the run “with faults” on or off, from its next step"), word = made("span", "workbench-switch-word");
        word.setAttribute("aria-hidden", "true"); // the state of a switch is already accessible
        button.append(word, made("b", "", fault.name), `: ${fault.effect}`);
        button.onclick = () => model.send({ faults: { [fault.name]: button.getAttribute("aria-checked") !== "true" } });
        return [fault.name, { button, word }];
      }));
      faults.replaceChildren(made("span", "", "Faults"), ...[...shown.values()].map((each) => each.button));
    }
    for (const fault of all) {
      const { button, word } = shown.get(fault.name);
      button.setAttribute("aria-checked", fault.enabled);
      word.textContent = fault.enabled ? "on" : "off";
    }
  };

  // A value that the user is dragging stays until it is released.
  let isHeld = false;
  slider.onpointerdown = () => (isHeld = true);
  const again = follow(model, signal, (content) => {
    showFaults(content.faults);
    const control = content.kss;
    toggle.setAttribute("aria-checked", control.enabled);
    word.textContent = control.enabled ? "KSS on" : "KSS off";
    if (!isHeld) slider.value = Math.log10(Math.max(control.strength, 10 ** LOWEST));
    slider.setAttribute("aria-valuetext", SIGNIFICANT(control.strength));
    if (!typed.has(strength)) strength.value = SIGNIFICANT(control.strength);
    if (!typed.has(interval)) interval.value = control.interval;
  });
  const letGo = () => {
    if (isHeld) again();
    isHeld = false;
  };
  for (const name of ["pointerup", "pointercancel"]) window.addEventListener(name, letGo, { signal });
}
export default { render };
