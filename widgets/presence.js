// JupyterLab intercepts arrow keys and Enter unless a control opts out. ipywidgets gives the handles of its sliders, and some fields, no accessible name.
const nameOf = (control) => {
  const box = control.closest(".widget-inline-hbox, .widget-inline-vbox, .jupyter-widgets");
  return box?.querySelector(".widget-label")?.textContent.trim() || box?.title || control.title || control.placeholder || "";
};

function nameControls(root) {
  for (const control of root.querySelectorAll(":is(input, select, button, [tabindex]):not([data-lm-suppress-shortcuts])")) {
    control.setAttribute("data-lm-suppress-shortcuts", "true");
  }
  for (const handle of root.querySelectorAll(".noUi-handle:not([aria-label])")) {
    const name = nameOf(handle), handles = handle.closest(".noUi-target").querySelectorAll(".noUi-handle");
    const end = handles.length < 2 ? "" : handle === handles[0] ? ", from" : ", to";
    if (name) handle.setAttribute("aria-label", name + end);
  }
  for (const [icon, name] of [["play", "Play"], ["pause", "Pause"], ["stop", "Go to the first"], ["retweet", "Repeat"]]) {
    for (const button of root.querySelectorAll(`.widget-play button:not([aria-label]):has(.fa-${icon})`)) button.setAttribute("aria-label", name);
  }
  for (const field of root.querySelectorAll("input:not([type=hidden], [aria-label]), select:not([aria-label]), textarea:not([aria-label])")) {
    const isNamed = [...(field.labels ?? [])].some((label) => label.textContent.trim());
    if (!isNamed && nameOf(field)) field.setAttribute("aria-label", nameOf(field));
  }
}

// Adds accessible names to the controls of the widget around an element, now and whenever controls are added, until the signal is aborted.
function nameControlsAround(element, signal) {
  const root = element.closest(".workbench-widget");
  if (!root) { // not on the page yet
    if (!signal.aborted) setTimeout(() => nameControlsAround(element, signal), 100);
    return;
  }
  let isDue = false;
  const later = new MutationObserver(() => {
    if (isDue) return;
    isDue = true;
    requestAnimationFrame(() => { isDue = false; nameControls(root); });
  });
  later.observe(root, { childList: true, subtree: true });
  nameControls(root);
  signal.addEventListener("abort", () => later.disconnect());
}

function render({ model, el, signal }) {
  const hear = (content) => el.classList.toggle("workbench-alive", Boolean(content.alive));
  model.on("msg:custom", hear);
  signal.addEventListener("abort", () => model.off("msg:custom", hear));
  try {
    model.send({ here: true });
  } catch { // restored from a saved notebook, without a kernel
    return;
  }
  nameControlsAround(el, signal);
}
export default { render };
