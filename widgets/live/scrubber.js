// The slider over the recorded steps. At its end the figure follows the newest step.
function makeScrubber(model, signal) {
  const box = made("div", "workbench-live-scrubber"), label = made("label", "", "modes at step"), slider = made("input");
  const readout = made("output"), latest = made("button", "workbench-live-zoom", "Latest");
  slider.type = "range";
  slider.min = 0;
  slider.title = "Steps with recorded eigenvalues; arrow keys move by one, Page Up and Page Down by 10 %";
  latest.type = "button";
  latest.title = "Follow the newest step";
  label.append(slider);
  box.append(label, readout, latest);

  // Dragging produces many positions: the first is sent immediately, then the latest, at most 12 times a second.
  let waiting, timer = null, isHeld = false;
  const go = (where) => {
    if (timer !== null) {
      waiting = where;
      return;
    }
    model.send({ go: where });
    timer = setTimeout(() => {
      timer = null;
      if (waiting === undefined) return;
      const next = waiting;
      waiting = undefined;
      go(next);
    }, 80);
  };
  const isMoving = () => isHeld || timer !== null;
  slider.oninput = () => go(Number(slider.value) >= Number(slider.max) ? null : { place: Number(slider.value) });
  slider.onpointerdown = () => (isHeld = true);
  for (const name of ["pointerup", "pointercancel"]) window.addEventListener(name, () => (isHeld = false), { signal });
  latest.onclick = () => go(null);
  signal.addEventListener("abort", () => clearTimeout(timer));

  const show = (content, titles) => {
    box.hidden = content.n_recorded === 0;
    const last = Math.max(content.n_recorded - 1, 0), isFollowing = content.step === null;
    if (!isMoving()) {
      slider.max = last;
      slider.value = content.place ?? last;
    }
    latest.setAttribute("aria-pressed", isFollowing);
    const words = isFollowing ? `${content.newest ?? 0} (latest)` : `${content.step} of ${content.newest}`;
    if (readout.textContent !== words) readout.textContent = words;
    const values = Object.entries(content.values ?? {}).map(([run, of]) =>
      `${run}: ${titles.map(([name, title]) => `${title} ${of[name] === null ? "unknown" : threeDigits(of[name])}`).join(", ")}`);
    slider.setAttribute("aria-valuetext", [`step ${words}`, ...values].join("; "));
  };
  return { box, show, go };
}
