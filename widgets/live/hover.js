// A tooltip for the object under the pointer.
function makeTip(root) {
  const box = made("div", "workbench-live-tip");
  box.hidden = true;
  box.setAttribute("aria-hidden", "true"); // the slider and the labels of the figures contain the same text
  root.append(box);
  return {
    box,
    show(event, lines) {
      const at = root.getBoundingClientRect(), isRight = event.clientX > at.left + 0.6 * at.width;
      box.replaceChildren(...lines.map((line) => made("div", "", line)));
      box.hidden = false;
      box.style.left = `${event.clientX - at.left + (isRight ? -12 : 14)}px`;
      box.style.top = `${event.clientY - at.top + 14}px`;
      box.style.transform = isRight ? "translateX(-100%)" : "";
    },
    hide() {
      box.hidden = true;
    },
  };
}

const signed = (value) => `${value < 0 ? "−" : "+"} ${Math.abs(value).toPrecision(3)}i`;

// The nearest mode within a few pixels of a position on a plane; null if there is none.
function modeNear(canvas, modes, decades, isNear, x, y) {
  const place = placesOn(canvas.clientWidth, canvas.clientHeight, modes, decades, isNear);
  let best = null, least = 14 ** 2;
  for (let i = 0; i < modes.layer.length; i++) {
    const at = place(i), far = (at[0] - x) ** 2 + (at[1] - y) ** 2;
    if (far < least) [best, least] = [i, far];
  }
  return best;
}

function hoverPlane(canvas, tip, signal, now) {
  canvas.addEventListener("pointermove", (event) => {
    const { modes, decades, isNear } = now() ?? {};
    const i = modes ? modeNear(canvas, modes, decades, isNear, event.offsetX, event.offsetY) : null;
    if (i === null) return tip.hide();
    const re = modes.points[2 * i], im = modes.points[2 * i + 1];
    return tip.show(event, [
      `layer ${modes.layer[i]}, ${modes.isReliable[i] ? "reliable" : "not reliable"}`,
      `λ = ${re.toPrecision(3)} ${signed(im)}`,
      `|λ| = ${Math.hypot(re, im).toPrecision(4)}`,
    ]);
  }, { signal });
  canvas.addEventListener("pointerleave", tip.hide, { signal });
}

// The value of a trace at a step, or at the previous drawn step.
function valueAt({ step, value }, at) {
  let low = 0, high = step.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (step[middle] <= at) low = middle + 1;
    else high = middle;
  }
  return low ? value[low - 1] : null;
}
