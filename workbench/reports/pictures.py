"""Figures of a report: `workbench.plots` applied to the parts of a tree, also as embedded images."""

from __future__ import annotations

import base64
import io
import json
from typing import Any

import numpy as np
import xarray as xr

from workbench.reports.document import Block, Picture

#: With more marks than this, a PNG is smaller than an SVG.
_MOST_MARKS = 1500
_DPI = 110
# fmt: off
#: Picture -> function of `workbench.plots`, title, caption, and the text for those who do not see it.
_PICTURES = {
    "criteria": ("criteria_bands", "Criteria against their healthy bands",
        "Each mark is a criterion; the shaded column is its healthy band. Outside of the band the axis is compressed. "
        "A triangle is at risk, a square is failing, and a hollow mark has no band or was not measured.",
        "Marks of all criteria relative to a shaded healthy band; the table below contains the same numbers."),
    "causes": ("cause_bars", "Causes by their evidence",
        "The length of a bar is the score over that of the first cause; causes that are not excluded are colored.",
        "One bar per cause, the first at the top; the table below contains them in the same order."),
    "evidence": ("evidence_bars", "Evidence for and against each cause",
        "Bars to the right are evidence for the cause, bars to the left against it; +0.69 doubles the odds.",
        "Diverging bars of the log-odds of every symptom, grouped by cause."),
    "steps": ("evidence_timeline", "Steps at which symptoms were observed",
        "Each mark is a symptom at the step at which it was observed; its size is the weight of the symptom.",
        "Marks of the symptoms along the steps of the run."),
    "pilot": ("pilot_losses", "Held-out loss vs. learning rate in the pilot",
        "Each line is a round: held-out losses of the model that was run, after the updates of the round. The box "
        "holds the rates estimated to be useful for the planned updates.",
        "Held-out losses of the pilot runs against their learning rates."),
    "eigenvalues": ("eigenvalue_map", "Eigenvalues of every block",
        "Each dot is a mode of one block in the complex plane, colored by depth. A mode outside of the unit circle "
        "grows from block to block, a mode inside decays.",
        "{n_modes} eigenvalues of {n_layers} blocks around the unit circle of the complex plane."),
    "profile": ("layer_profile", "Spectral measures by depth",
        "One panel per measure, from the first block on the left to the last on the right. A hollow mark is a block "
        "whose update is too small for a spectrum.",
        "Near-unit mass, spectral radius, eigenvector condition and nonlinearity ratio of each block."),
    "flow": ("flow_map", "Flow of signal and gradient through the blocks",
        "Size of the signal in the forward pass and of the gradient in the backward pass, from block to block.",
        "Sizes of signal and gradient at every block."),
    "hazards": ("criteria_bands", "Hazards of precision and parallelism against their limits",
        "Each mark is the emulated effect of one hazard; the shaded column is the harmless range.",
        "Marks of the applicable hazards relative to a shaded harmless range."),
}
# fmt: on


def picture(name: str, path: str, *, at: str = "", has_many_marks: bool = False, **words: int) -> Picture:
    """Return a figure of the part of a tree at a path."""
    figure, title, caption, alternative = _PICTURES[name]
    path = "/".join(filter(None, (at.strip("/"), path)))
    # A path may contain a name from a file, which must not become code.
    data = f"tree[{json.dumps(path, ensure_ascii=False)}].to_dataset()"
    data = f"pictures.hazards_as_criteria({data})" if name == "hazards" else data

    def draw(tree: xr.DataTree, backend: str) -> Any:
        from workbench import plots

        part = tree[f"/{path}"].to_dataset()
        return getattr(plots, figure)(hazards_as_criteria(part) if name == "hazards" else part, backend=backend)

    code = f"wb.plots.{figure}({data})"
    return Picture(title, caption, alternative.format(**words), draw, code, has_many_marks)


def of_part(name: str, data: xr.Dataset, *, at: str = "") -> list[Block]:
    """Return the figures of a part of a tree; empty if there are none."""
    if name == "pilot" and "loss" in data and np.isfinite(data["loss"].values).any():
        return [picture("pilot", name, at=at)]
    if name == "spectra":
        n_modes = int(np.isfinite(data["eigenvalue"].values).sum())
        words = {"n_modes": n_modes, "n_layers": data.sizes["layer"]}
        modes = picture("eigenvalues", name, at=at, has_many_marks=n_modes > _MOST_MARKS, **words)
        return [modes, picture("profile", name, at=at)]
    if name == "flow":
        n_marks = sum(int(np.isfinite(values).sum()) for values in data.data_vars.values() if values.dtype.kind == "f")
        return [picture("flow", name, at=at, has_many_marks=n_marks > _MOST_MARKS)]
    if name == "hardware" and data["applies"].values.astype(bool).any():
        return [picture("hazards", name, at=at)]
    return []


def evidence(evidence: xr.Dataset) -> list[Block]:
    """Return the figures of the evidence for and against the causes, and of its steps."""
    if not evidence.sizes.get("evidence", 0):
        return []
    has_steps = (np.asarray(evidence["step"].values, dtype=float) >= 0).any()
    return [picture("evidence", "evidence"), *([picture("steps", "evidence")] if has_steps else [])]


def image(picture: Picture, tree: xr.DataTree, *, pixels: bool = False) -> tuple[str, bytes]:
    """Return a picture drawn for print, as PNG if ``pixels``, otherwise as the format expected to be smaller."""
    from workbench.plots import style

    kind = "png" if pixels or picture.has_many_marks else "svg"
    with style.drawing("matplotlib") as hv:
        renderer = hv.renderer("matplotlib").instance(fig=kind, dpi=_DPI)
        content, _ = renderer(picture.draw(tree, "matplotlib"), fmt=kind)
    content = content if isinstance(content, bytes) else content.encode()
    return ("image/png", _smaller(content)) if kind == "png" else ("image/svg+xml", content)


def as_address(mime: str, content: bytes) -> str:
    """Return an image as a data URL."""
    return f"data:{mime};base64,{base64.b64encode(content).decode()}"


def hazards_as_criteria(hardware: xr.Dataset) -> xr.Dataset:
    """Return the applicable hazards of a part ``hardware`` as criteria for `workbench.plots.criteria_bands`."""
    data = hardware.isel(hazard=hardware["applies"].values.astype(bool))
    renamed = {"title": "title", "value": "effect", "units": "unit", "high": "healthy_limit", "state": "state"}
    columns = {new: ("criterion", data[old].values) for new, old in renamed.items()}
    columns["low"] = ("criterion", np.full(data.sizes["hazard"], np.nan))
    return xr.Dataset(columns, {"criterion": data["hazard"].values})


def _smaller(png: bytes) -> bytes:
    """Return a PNG with at most 256 colors if it is smaller; few figures have more colors."""
    from PIL import Image

    picture = Image.open(io.BytesIO(png)).convert("RGB").quantize(256, dither=Image.Dither.NONE)
    content = io.BytesIO()
    picture.save(content, "PNG", optimize=True)
    return min(content.getvalue(), png, key=len)
