const LOWEST = -3, HIGHEST = 3; // range of the slider, in powers of ten

const SIGNIFICANT = (value) => Number(value.toPrecision(3));

function render({ model, el, signal }) {
  el.classList.add("workbench-kss");
  el.setAttribute("role", "group");
  el.setAttribute("aria-label", "Koopman Spectral Shaping");

  const toggle = made("button", "workbench-kss-switch");
  toggle.type = "button";
  toggle.setAttribute("role", "switch");
  toggle.setAttribute("aria-label", "KSS");
  toggle.title = "Switch Koopman Spectral Shaping of the run “with KSS” on or off, from its next step";
  const word = made("b");
  toggle.append(made("span", "workbench-kss-knob"), word);

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
  el.replaceChildren(toggle, strengthBox, intervalBox);

  // Dragging produces many values: the first is sent immediately, then the latest, at most 20 times a second.
  let waiting = null, timer = null;
  const send = (controls) => {
    waiting = { ...waiting, ...controls };
    if (timer !== null) return;
    model.send({ set: waiting });
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

  // A value that the user is dragging stays until it is released.
  let isHeld = false;
  slider.onpointerdown = () => (isHeld = true);
  const again = follow(model, signal, (control) => {
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
