// The report is in a shadow root, so that its style and anchors do not affect the notebook.
const REM = 14, REM_OF_PROJECTOR = 20; // pixels: the size of JupyterLab's text
const WAITING = "is drawn once it is visible …";

const ask = (model, question, signal) => new Promise((resolve) => {
  const id = crypto.randomUUID?.() ?? String(Math.random());
  const answer = (content, buffers) => {
    if (content.answer !== id) return;
    model.off("msg:custom", answer);
    resolve([content, buffers]);
  };
  model.on("msg:custom", answer);
  signal.addEventListener("abort", () => model.off("msg:custom", answer));
  model.send({ ...question, id });
});

// Adapts the style of the full page to a part of the notebook, with its theme and the text size of the widget.
function fitted(css, el) {
  const rem = el.closest(".workbench-projector") ? REM_OF_PROJECTOR : REM;
  const isLight = document.body.dataset.jpThemeLight;
  const dark = "@media (prefers-color-scheme: dark)";
  return css
    .replaceAll(dark, isLight === undefined ? dark : isLight === "true" ? "@media not all" : "@media all")
    .replaceAll(":root", ":host")
    .replaceAll(":target", ".marked")
    .replaceAll("@media (max-width", "@container report (max-width")
    .replace(/\bbody\b/g, ".page")
    .replace(/([\d.])vw\b/g, "$1cqw")
    .replace(/(\d*\.?\d+)rem\b/g, (_, size) => `${size * rem}px`);
}

const OWN = `
:host { --page: var(--jp-layout-color0, #fff); }
.box { position: relative; container: report / inline-size; max-height: 720px; overflow-y: auto; overscroll-behavior: contain; color: var(--ink); }
.page { background: none; max-width: none; margin: 0; padding: 0 1.2rem 1rem; }
p, li, dd, figcaption, .items > li { max-width: 60rem; }
table { width: 100%; }
td { max-width: none; }
.top, .verdict .word, .verdict .summary { display: none; } /* shown above the report */
.verdict { margin-top: 1rem; }
.facts { margin-top: .3rem; }
h2 { margin-top: 2rem; }
nav { position: sticky; top: 0; z-index: 1; background: var(--page); border-bottom: 1px solid var(--line); margin-top: 1rem; }
nav ol { margin: 0; padding: .35rem 0; }
nav li { max-width: none; }
@container report (max-width: 34rem) { nav { position: static; } }
.waiting { min-height: 13rem; margin: 0; padding: .8rem 1rem; color: var(--quiet); background: var(--card); border-radius: .35rem; }
.failed { min-height: 0; }
.back { position: sticky; bottom: .6rem; left: 100%; display: block; margin: 0 .6rem 0 auto; padding: .35rem .9rem; cursor: pointer;
  font: inherit; font-size: .92rem; color: var(--ink); background: var(--card); border: 1px solid var(--line); border-radius: 1rem;
  box-shadow: 0 1px 5px rgba(0, 0, 0, .25); }
.back[hidden] { display: none; }
.marked { scroll-margin-top: 3rem; }
`;

const made = (tag, name, text) => {
  const element = document.createElement(tag);
  if (name) element.className = name;
  if (text !== undefined) element.textContent = text;
  return element;
};

// The figure of the previous report stays until the new one is drawn.
function frame({ title, caption, alternative }, before) {
  const figure = made("figure"), scroll = made("div", "scroll"), words = made("figcaption");
  scroll.append(before ?? made("p", "waiting", `${title} ${WAITING}`));
  words.append(made("b", "", `${title}.`), ` ${caption}`);
  figure.append(scroll, words);
  figure.dataset.alternative = alternative;
  figure.dataset.title = title;
  return figure;
}

function render({ model, el, signal }) {
  el.classList.add("workbench-report");
  const root = el.attachShadow({ mode: "open" });
  const style = made("style"), box = made("div", "box");
  root.append(style, box);
  box.tabIndex = 0;
  box.setAttribute("role", "region");
  box.setAttribute("aria-label", "Report");
  box.append(made("p", "", "The report appears when its cell has run."));
  let css = "", cameFrom = null, seen = null, markedAt = 0;
  const addresses = [];
  const forget = () => { while (addresses.length) URL.revokeObjectURL(addresses.pop()); seen?.disconnect(); };

  const back = made("button", "back", "↩ Back to the sentence");
  back.type = "button";
  back.onclick = () => {
    back.hidden = true;
    if (!cameFrom) return;
    box.scrollTop = cameFrom.place;
    cameFrom.link.focus({ preventScroll: true });
    cameFrom = null;
  };

  // Scrolls only the box, not the notebook.
  const bring = (target) => {
    const way = target.getBoundingClientRect().top - box.getBoundingClientRect().top;
    box.scrollTop += way - (target.matches("section") ? 0 : box.clientHeight / 3);
  };
  const mark = () => {
    const anchor = model.get("marked");
    root.querySelectorAll(".marked").forEach((old) => old.classList.remove("marked"));
    const target = anchor && root.getElementById(anchor);
    if (!target) return;
    for (let fold = target.closest("details"); fold; fold = fold.parentElement.closest("details")) fold.open = true;
    target.classList.add("marked");
    bring(target);
    markedAt = performance.now();
    target.tabIndex = -1;
    target.focus({ preventScroll: true });
  };
  root.addEventListener("click", (event) => {
    const link = event.target.closest?.("a[href^='#']");
    if (!link) return;
    event.preventDefault();
    event.stopPropagation(); // JupyterLab would handle such links differently
    const anchor = decodeURIComponent(link.getAttribute("href").slice(1));
    cameFrom = { place: box.scrollTop, link };
    back.hidden = !link.matches(".n");
    const isSame = model.get("marked") === anchor;
    model.set("marked", anchor);
    model.save_changes();
    if (isSame) mark();
  });

  const draw = async (figure, number) => {
    const [content, buffers] = await ask(model, { question: "picture", number }, signal);
    if (signal.aborted || !figure.isConnected) return;
    const place = figure.querySelector(".scroll");
    if (content.failure !== undefined) {
      place.replaceChildren(made("p", "waiting failed", `This figure cannot be drawn. ${content.failure}`));
      return;
    }
    const address = URL.createObjectURL(new Blob([buffers[0]], { type: content.mime }));
    addresses.push(address);
    const picture = made("img");
    picture.alt = figure.dataset.alternative;
    picture.src = address;
    await picture.decode().catch(() => {});
    place.tabIndex = 0;
    place.setAttribute("role", "region");
    place.setAttribute("aria-label", figure.dataset.title);
    place.replaceChildren(picture);
    // A figure drawn above the row that was just scrolled to must not move it.
    const marked = root.querySelector(".marked");
    if (marked && performance.now() - markedAt < 3000) bring(marked);
  };

  const show = async () => {
    const [{ text, frames }] = await ask(model, { question: "text" }, signal);
    if (signal.aborted) return;
    forget();
    const page = new DOMParser().parseFromString(text, "text/html");
    css = page.querySelector("style").textContent;
    style.textContent = fitted(css, el) + fitted(OWN, el);
    const article = made("article", "page");
    article.setAttribute("aria-label", page.title);
    article.append(...page.body.childNodes);
    article.querySelector(".skip")?.remove();
    const main = article.querySelector("main"); // the notebook page has its own main element
    main?.replaceWith(...main.childNodes);
    const before = new Map([...root.querySelectorAll("figure")].map((old) => [old.dataset.title, old.querySelector("img")]));
    const place = box.scrollTop;
    const places = new Map([...article.querySelectorAll("p.lead")].map((line) => [line.textContent, line]));
    seen = new IntersectionObserver((entries) => {
      for (const { isIntersecting, target } of entries) {
        if (!isIntersecting) continue;
        seen.unobserve(target);
        draw(target, Number(target.dataset.number));
      }
    }, { root: box, rootMargin: "300px" });
    frames.forEach((one, number) => {
      const figure = frame(one, before.get(one.title));
      figure.dataset.number = number;
      places.get(one.line).replaceWith(figure);
      seen.observe(figure);
    });
    back.hidden = true;
    box.replaceChildren(article, back);
    box.scrollTop = place;
    mark();
  };

  model.on("change:marked", mark);
  const hear = (content) => { if (content.is_new) show(); };
  model.on("msg:custom", hear);
  const theme = new MutationObserver(() => { style.textContent = fitted(css, el) + fitted(OWN, el); });
  theme.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-light"] });
  signal.addEventListener("abort", () => {
    theme.disconnect();
    forget();
    model.off("change:marked", mark);
    model.off("msg:custom", hear);
  });
  show();
}
export default { render };
