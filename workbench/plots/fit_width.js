// Fits the width of a bokeh layout to its element: all frames of a figure are scaled by one factor. Frames with the tag
// "fixed aspect" keep their aspect ratio and fit into the window; the height of the others changes less than the width.
// bokeh aligns the frames of a column, but a plot with shorter labels is not made wider by that, and would be cut.
function fittedWidth(views, element) {
  const natural = new Map(); // plot -> original size, and the width that was set here
  const plotViews = (view) => (view.model.type === "Figure" ? [view] : (view.child_views ?? []).flatMap(plotViews));
  const keepsShape = (model) => model.tags.includes("fixed aspect");
  const fit = () => {
    const shown = views.flatMap(plotViews).filter((view) => view.model.frame_width && view.el.offsetWidth);
    const width = element.clientWidth;
    if (!width || !shown.length) return;
    const rows = new Map();
    let factor = Infinity;
    for (const view of shown) {
      const { model } = view, was = natural.get(model);
      if (!was || was.setTo !== model.frame_width) natural.set(model, { width: model.frame_width, height: model.frame_height });
      const { top, width: outer } = view.el.getBoundingClientRect(), place = Math.round(top / 8);
      const row = rows.get(place) ?? { around: 8, frames: 0 };
      row.around += outer - model.frame_width;
      row.frames += natural.get(model).width;
      rows.set(place, row);
      if (keepsShape(model)) factor = Math.min(factor, Math.max(0.72 * window.innerHeight, 260) / natural.get(model).height);
    }
    for (const row of rows.values()) factor = Math.min(factor, (width - row.around) / row.frames);
    factor = Math.max(factor, 0.5);
    const cut = shown.filter((view) => view.frame.bbox.right + 8 > view.el.offsetWidth && view.frame.bbox.left > (view.model.min_border_left ?? 0));
    for (const { model, frame } of cut) model.min_border_left = frame.bbox.left;
    if (cut.length) requestAnimationFrame(fit);
    for (const { model } of shown) {
      const size = natural.get(model), wide = Math.floor(factor * size.width);
      size.setTo = wide;
      if (Math.abs(model.frame_width - wide) < 2) size.setTo = model.frame_width;
      else model.setv({ frame_width: wide, frame_height: keepsShape(model) ? Math.round((wide * size.height) / size.width) : Math.round(size.height * Math.min(Math.max(factor, 1), 1.5)) });
    }
  };
  return fit;
}
