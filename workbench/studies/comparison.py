"""Comparison of architectures: the spectra of each run at one step, with the published figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from workbench.errors import OptionError, SchemaError
from workbench.io.store import at_step, by_subject, divergence_step, named_runs, spectra_of
from workbench.koopman.measures import MASSES, Thresholds
from workbench.models.profile import profile
from workbench.models.subject import Subject
from workbench.schema.runs import SPECTRA, Variable
from workbench.studies import published as papers

if TYPE_CHECKING:
    import xarray as xr

#: Measures that have no meaning while a layer is the identity; averaged over the informative layers.
SPECTRAL = (*MASSES, "spectral_radius", "eigenvector_condition", "nonlinearity_ratio", "kreiss_constant")
#: Measures that are meaningful for every layer; averaged over all layers.
ENERGETIC = ("energy_gain", "update_norm")
SOURCES = ("ours", "published")

_OURS = ("architecture",)
_BOTH = ("architecture", "source")
#: Variables of `compare` in addition to the measures of the schema.
VARIABLES: dict[str, Variable] = {
    **{name: Variable(_BOTH, "f", long_name, "1", meaning) for name, (long_name, meaning) in papers.SHARES.items()},
    "is_informative": Variable(
        _OURS, "b", "informative", "1", "whether the update of at least one layer is informative"
    ),
    "has_diverged": Variable(
        _OURS, "b", "diverged", "1", "whether a divergence was recorded; unknown where divergence_rate is NaN"
    ),
    "divergence_step": Variable(_OURS, "f", "step of divergence", "1", "first divergence; NaN if there is none"),
    "final_loss": Variable(_OURS, "f", "final loss", "nat", "mean over the last tenth of the recorded losses"),
    "final_accuracy": Variable(
        _OURS, "f", "final accuracy", "1", "mean over the last tenth of the recorded accuracies"
    ),
    "best_accuracy": Variable(_OURS, "f", "best accuracy", "1", "largest recorded accuracy"),
}
_COORDS: dict[str, Variable] = {
    "step": Variable(_OURS, "f", "step", "1", "optimizer updates before the spectra; NaN if unknown"),
    "n_layers": Variable(_OURS, "i", "layers", "1", "number of layers"),
    "n_informative": Variable(_OURS, "i", "informative layers", "1", "layers in the spectral averages"),
    "rank": Variable(
        _OURS, "f", "rank", "1", "modes used, mean over layers; M depends on it, so compare runs of equal rank"
    ),
}

#: Further names of published rows, normalized by `_plain`.
_ALIASES = {"none": "No-Norm"}


def compare(
    runs: Any,
    *others: Any,
    inputs: Any = None,
    at: int | str = "first",
    published: Mapping[str, str] | bool = True,
    progress: bool | Callable[[str], None] = True,
) -> xr.Dataset:
    """Compare architectures with each other and with the published figures (RKSP, architecture tables).

    Args:
        runs: Name -> run: a tree with ``spectra`` (dims ``layer``, ``mode``, possibly ``step``) and, if it was trained,
            ``monitors`` and ``events``; or a dataset of spectra; or a model or subject, which is profiled on
            ``inputs``. Without names, as in ``compare(a, b)``, each is named after its subject.
        others: Further ones, if ``runs`` has no names.
        inputs: Inputs on which models are profiled, as in `workbench.profile`.
        at: Step of the spectra: ``"first"``, ``"last"``, or a number, which selects the latest recorded step up to that
            number. The coordinate ``step`` holds the selected step.
        published: True finds the published row by the name of the run, ignoring case and punctuation ("pre_ln" matches
            "Pre-LN"). A mapping from names of runs to names of `workbench.published.architectures` has precedence.
            False omits the published figures.
        progress: Whether to show the progress of the profiles of models, as in `workbench.profile`.

    Returns:
        Dataset with dims ``architecture`` (in the given order) and ``source`` ("ours", "published"). Every variable has
        ``long_name``, ``units`` and ``meaning``.

        - By both dims, NaN where unknown: the measures of a layer, averaged over layers as in the paper, and
          ``reliable_fraction`` and ``divergence_rate`` (ours: 0 or 1, for this run). The published figures are those at
          initialization, for any ``at``.
        - By ``architecture``, ours only: ``is_informative``, ``has_diverged``, ``divergence_step``, ``final_loss``,
          ``final_accuracy``, ``best_accuracy``.
        - Coordinates: ``step``, ``n_layers``, ``n_informative``, ``rank`` and ``published_as`` (empty if no row
          matches).

        Layers whose update is too small to be informative (an identity initialization has M = 1 and no risk) are
        excluded from the spectral averages, which are NaN if no layer remains; ``energy_gain`` and ``update_norm`` are
        averaged over all layers. A measure that is infinite in one layer is infinite. A run with monitors and without a
        recorded divergence counts as converged.

    Raises:
        SchemaError: If there is no run, a run has no spectra or does not follow the schema, or a published name is
            unknown.
        OptionError: If a run has no such step, or the runs were measured with different thresholds.

    Example:
        >>> import numpy as np
        >>> import workbench as wb
        >>> states = np.random.default_rng(0).normal(size=(64, 4))
        >>> spectra = wb.koopman.whitened_dmd(states, 0.95 * states)
        >>> comparison = wb.compare({"Pre-LN": spectra})
        >>> comparison["near_unit_mass"].sel(architecture="Pre-LN").to_series().to_dict()
        {'ours': 1.0, 'published': 0.16}

    See Also:
        `workbench.profile`: Measures the spectra of a model.
        `workbench.published.architectures`: The published figures.
        `workbench.remeasure`: Applies other thresholds to measured spectra.
    """
    given = by_subject((runs, *others)) if others or isinstance(runs, Subject | nn.Module) else runs
    given = by_subject(given) if isinstance(given, list | tuple) else given
    if isinstance(given, Mapping):
        given = {name: _measured(str(name), run, inputs, progress) for name, run in given.items()}
    trees = named_runs(given)
    spectra = {name: at_step(spectra_of(tree), at, name=name) for name, tree in trees.items()}
    return compare_checked(trees, spectra, published=published).assign_attrs(at=str(at))


def _measured(name: str, run: Any, inputs: Any, progress: bool | Callable[[str], None]) -> Any:
    """Return a run, or the spectra of a model."""
    if not isinstance(run, Subject | nn.Module):
        return run
    if inputs is None:
        raise SchemaError.of(
            "inputs", None, f"given, because '{name}' is a model",
            remedy="pass inputs=, such as texts or a task of wb.tasks, or spectra from wb.profile(model, inputs)",
        )  # fmt: skip
    return profile(run, inputs, progress=progress)


def compare_checked(
    runs: Mapping[str, xr.DataTree], spectra: Mapping[str, xr.Dataset], *, published: Mapping[str, str] | bool = True
) -> xr.Dataset:
    """Compare runs that are known to follow the schema; see `compare`."""
    import xarray as xr

    _check_thresholds(spectra)
    rows = _published_rows(list(spectra), published)
    ours = {name: _averages(data) | _outcome(runs[name]) for name, data in spectra.items()}

    table = papers.architectures()
    theirs = {name: table.sel(architecture=row) if row else None for name, row in rows.items()}
    rules = {name: replace(SPECTRA[name], dims=_BOTH) for name in (*SPECTRAL, *ENERGETIC)} | VARIABLES
    variables = {}
    for name, rule in rules.items():
        values = np.array([ours[run][name] for run in ours])
        if rule.dims == _BOTH:
            read = [float(row[name]) if row is not None and name in row else np.nan for row in theirs.values()]
            values = np.stack([values, read], axis=1)
        variables[name] = (rule.dims, values, _attrs(rule))
    coords: dict[str, Any] = {"architecture": list(spectra), "source": list(SOURCES)}
    coords |= {name: (_OURS, [ours[run][name] for run in ours], _attrs(rule)) for name, rule in _COORDS.items()}
    coords["published_as"] = (_OURS, list(rows.values()), {"long_name": "published as"})
    first = next(iter(spectra.values()))
    return xr.Dataset(variables, coords, {"source": table.attrs["source"], **_threshold_attrs(first)})


def _check_thresholds(spectra: Mapping[str, xr.Dataset]) -> None:
    """Raise an error if the spectra have different thresholds, because their masses are not comparable."""
    names = list(spectra)
    for name in names[1:]:
        here, there = _threshold_attrs(spectra[names[0]]), _threshold_attrs(spectra[name])
        for key, value in here.items():
            if there[key] != value:
                raise OptionError(
                    f"'{names[0]}' was measured with {key} {value:g} and '{name}' with {there[key]:g}; "
                    "apply wb.remeasure() with the same thresholds first."
                )


def _threshold_attrs(spectra: xr.Dataset) -> dict[str, float]:
    return Thresholds.of(spectra).as_attrs()


def _published_rows(names: list[str], published: Mapping[str, str] | bool) -> dict[str, str]:
    """Return run -> name of its published row, which is empty if there is none."""
    if published is False:
        return dict.fromkeys(names, "")
    known = papers.architectures()["architecture"].values.tolist()
    given = published if isinstance(published, Mapping) else {}
    for run, row in given.items():
        if run not in names:
            raise SchemaError(f"published= names the run '{run}', but the runs are {', '.join(names)}; use one.")
        if row not in known:
            raise SchemaError(f"There are no published figures for '{row}'; choose from {', '.join(known)}.")
    found = {_plain(name): name for name in known} | _ALIASES
    return {name: given.get(name) or found.get(_plain(name), "") for name in names}


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


def _averages(spectra: xr.Dataset) -> dict[str, float | int | bool]:
    """Return the means over layers of one run at one step, and the number of averaged layers."""
    informative = spectra["is_informative"].values.astype(bool)
    exists = np.isfinite(spectra["eigenvalue"].transpose("layer", "mode").values)
    reliable = spectra["is_reliable"].transpose("layer", "mode").values & exists
    fraction = reliable.sum(1) / np.where(exists.any(1), exists.sum(1), np.nan)
    spectral = {name: spectra[name].values.astype(float) for name in SPECTRAL} | {"reliable_fraction": fraction}
    return {
        **{name: _mean(values[informative]) for name, values in spectral.items()},
        **{name: _mean(spectra[name].values.astype(float)) for name in ENERGETIC},
        "is_informative": bool(informative.any()),
        "step": float(spectra["step"]) if "step" in spectra.coords else np.nan,
        "n_layers": spectra.sizes["layer"],
        "n_informative": int(informative.sum()),
        "rank": _mean(spectra["rank"].values.astype(float)),
    }


def _outcome(run: xr.DataTree) -> dict[str, float | bool]:
    """Return the outcome of one run; NaN where it was not recorded."""
    monitors = run["monitors"].to_dataset() if "monitors" in run.children else {}
    step = divergence_step(run)
    was_recorded = "monitors" in run.children or "events" in run.children
    values = {name: monitors[name].values if name in monitors else np.zeros(0) for name in ("loss", "accuracy")}
    accuracy = values["accuracy"][np.isfinite(values["accuracy"])]
    return {
        "has_diverged": step is not None,
        "divergence_step": np.nan if step is None else float(step),
        "divergence_rate": float(step is not None) if was_recorded else np.nan,
        "final_loss": _final(values["loss"]),
        "final_accuracy": _final(accuracy),
        "best_accuracy": float(accuracy.max()) if len(accuracy) else np.nan,
    }


def _final(values: np.ndarray) -> float:
    """Return the mean over the last tenth of the recorded values, at least one; NaN entries are ignored."""
    recorded = values[~np.isnan(values)]
    return _mean(recorded[-max(1, len(recorded) // 10) :])


def _mean(values: np.ndarray) -> float:
    """Return the mean of the values that are not NaN; NaN if there are none."""
    defined = values[~np.isnan(values)]
    return float(defined.mean()) if len(defined) else np.nan


def _attrs(rule: Variable) -> dict[str, str]:
    return {"long_name": rule.long_name, "units": rule.units, "meaning": rule.meaning}
