// The page's side of LatestState. Every view of a model draws the same state. It is painted in an animation frame, and the
// kernel is notified afterwards. Notifications are at least MILLISECONDS apart, which leaves time for training.
const MILLISECONDS = 60;
const links = new WeakMap();

function linkTo(model) {
  if (links.has(model)) return links.get(model);
  const link = { views: new Set(), content: null, buffers: [], painted: 0, toldAt: 0, isDue: false, heardAt: performance.now(), least: MILLISECONDS };
  const tell = () => {
    link.toldAt = performance.now();
    model.send({ painted: link.painted });
  };
  const paint = () => {
    link.isDue = false;
    if (link.content === null) return;
    for (const draw of link.views) draw(link.content, link.buffers);
    if (link.painted === link.content.number) return;
    link.painted = link.content.number;
    const rest = Math.max(0, link.least - (performance.now() - link.toldAt));
    setTimeout(tell, rest); // a separate task, which runs after this frame has been painted
  };
  link.schedule = () => {
    if (link.isDue) return;
    link.isDue = true;
    requestAnimationFrame(paint);
  };
  model.on("msg:custom", (content, buffers) => {
    link.heardAt = performance.now(); // {is_alive: true} has no other effect
    if (content.are_you_there) model.send({ painted: link.painted, again: true });
    if (content.number === undefined) return;
    link.content = content;
    link.buffers = buffers;
    link.schedule();
  });
  links.set(model, link);
  return link;
}

// Calls `draw(content, buffers)` whenever there is new content, until the view is removed; returns a function that redraws
// the current content. Two states are at least `least` milliseconds apart.
function follow(model, signal, draw, least = MILLISECONDS) {
  const link = linkTo(model);
  link.least = least;
  link.views.add(draw);
  signal.addEventListener("abort", () => link.views.delete(draw));
  // The request is repeated until there is an answer, because a reopened notebook shows widgets before they are connected.
  const ask = (wait) => {
    if (signal.aborted || link.content !== null) return;
    try {
      model.send({ painted: 0 });
    } catch {
      // not connected yet
    }
    setTimeout(ask, wait, Math.min(2 * wait, 10_000));
  };
  if (link.content === null) ask(1000);
  else link.schedule();
  return link.schedule;
}

// Milliseconds since the last message of the kernel.
const silenceOf = (model) => performance.now() - linkTo(model).heardAt;

// Calls a function after JupyterLab's theme has changed and its colors are loaded.
function onTheme(signal, act) {
  const theme = new MutationObserver(() => setTimeout(act, 50));
  theme.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-name", "data-jp-theme-light"] });
  signal.addEventListener("abort", () => theme.disconnect());
}

const made = (tag, name, text) => {
  const element = document.createElement(tag);
  if (name) element.className = name;
  if (text !== undefined) element.textContent = text;
  return element;
};
