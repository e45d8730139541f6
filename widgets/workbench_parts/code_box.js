// Python with a button that copies it. The older way of copying works without a secure page and without a permission.
function copied(text) {
  const field = document.createElement("textarea");
  field.value = text;
  field.setAttribute("aria-hidden", "true");
  field.style.cssText = "position:fixed;top:0;left:0;opacity:0";
  document.body.append(field);
  const before = document.activeElement;
  field.select();
  let isDone = false;
  try {
    isDone = document.execCommand("copy");
  } catch { /* not available */ }
  field.remove();
  before?.focus?.();
  return isDone;
}

function render({ model, el }) {
  el.classList.add("workbench-code");
  el.dataset.lmSuppressShortcuts = "true";
  const box = document.createElement("details"), head = document.createElement("summary"), code = document.createElement("pre");
  const button = document.createElement("button"), said = document.createElement("span");
  box.open = true;
  head.textContent = "The same in Python";
  button.type = "button";
  button.textContent = "Copy";
  button.title = "Copy these lines";
  said.setAttribute("role", "status");
  code.tabIndex = 0;
  code.setAttribute("role", "region");
  code.setAttribute("aria-label", "Lines of Python that do the same");
  const bar = document.createElement("div");
  bar.className = "bar";
  bar.append(button, said);
  box.append(head, bar, code);
  el.append(box);
  const draw = () => {
    code.textContent = model.get("value") || model.get("empty");
    button.disabled = !model.get("value");
    said.textContent = "";
  };
  button.onclick = async () => {
    const text = model.get("value");
    let isDone = copied(text);
    if (!isDone && navigator.clipboard) isDone = await navigator.clipboard.writeText(text).then(() => true, () => false);
    said.textContent = isDone ? "Copied." : "Press Ctrl+C to copy the marked lines.";
    if (!isDone) getSelection().selectAllChildren(code);
  };
  model.on("change:value change:empty", draw);
  draw();
  return () => model.off("change:value change:empty", draw);
}
export default { render };
