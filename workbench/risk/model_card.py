"""The card of a risk model as Markdown: its form, its quality and its limits, from its own numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from workbench.formatting import fixed, percent, with_interval
from workbench.risk.features import FEATURES, OPTIMIZER

if TYPE_CHECKING:
    import xarray as xr

    from workbench.risk.feature_map import FeatureMap

_N_TELLING = 8


def model_card(
    feature_map: FeatureMap,
    coefficients: xr.DataArray,
    *,
    about: Mapping[str, Any],
    validation: Mapping[str, Any],
    spread: tuple[float, float],
    sizes: Mapping[str, tuple[float, float]],
) -> str:
    """Data, figures and limits of a model; see `RiskModel` for the terms.

    Args:
        feature_map: Feature map of the model.
        coefficients: Coefficients from `RiskModel.coefficients`.
        about: Data and options that it was fitted with.
        validation: Figures of `validate`; empty: not validated, as the card then states.
        spread: Slope within a cell, and standard deviation of the cells' edges.
        sizes: Size -> the smallest and largest one in the training runs; empty: not known.

    Returns:
        Markdown.
    """
    parts = [
        "# Risk of divergence before training",
        "",
        "log-odds of divergence = slope x (log10 learning rate - log10 edge); the edge is linear in what is known of "
        "the fresh model and of the settings.",
        "",
        *_data(about),
        "",
        *_model(coefficients, len(feature_map.features), about["options"], spread),
        "",
        *_validation(validation),
        "",
        *_limits(feature_map, sizes, about.get("n_steps")),
    ]
    return "\n".join(parts) + "\n"


def _data(about: Mapping[str, Any]) -> list[str]:
    low, high = about["rates"]
    return [
        "## Fitted to",
        "",
        f"- {about['n_runs']} runs, {about['n_diverged']} of which diverged, in {about['n_cells']} cells (everything "
        f"but learning rate and seed) of {about['n_configurations']} configurations; learning rates {low:.2g} to "
        f"{high:.2g}. {about['n_started_diverged']} more counted as diverged before any update and were left out.",
        *(f"- {name}: {', '.join(about[name])}." for name in ("architectures", "tasks", "optimizers") if about[name]),
        f"- {about['versions']}.",
    ]


def _model(
    coefficients: xr.DataArray, n_features: int, options: Mapping[str, Any], spread: tuple[float, float]
) -> list[str]:
    features = options["features"] if isinstance(options["features"], str) else "chosen by name"
    order = abs(coefficients).argsort().values[::-1][:_N_TELLING]
    has_interval = bool(coefficients["low"].notnull().any())
    rows = [
        f"| {coefficients['feature'].values[i]} | {coefficients.values[i]:+.2f} |"
        + (
            f" {coefficients['low'].values[i]:+.2f} to {coefficients['high'].values[i]:+.2f} |"
            if has_interval
            else " - |"
        )
        for i in order
    ]
    how = "chosen on held-out groups" if options["is_penalty_chosen"] else "given"
    return [
        "## Model",
        "",
        f"- Method {options['method']}; features {features} ({n_features}); penalty {options['penalty']:g}, "
        f"{how}; groups by {options['by']}, {options['n_folds']} folds; {options['n_bootstrap']} resamples; seed "
        f"{options['seed']}.",
        f"- Slope {coefficients.attrs['slope']:.2f} per factor of ten in the rate over all cells, "
        f"{spread[0]:.1f} within one; the edges of cells lie a factor {10 ** spread[1]:.2f} (one standard "
        "deviation) around what is predicted for them.",
        "",
        f"| most telling | log-odds per standard deviation | {percent(options['level'])} interval |",
        "|---|---|---|",
        *rows,
    ]


def _validation(figures: Mapping[str, Any]) -> list[str]:
    title = "## How good it is"
    if not figures:
        return [title, "", "Not validated: no figures are stored with this model."]
    lines = [
        title,
        "",
        "| held out | runs | diverged | AUROC | within architecture | within cell | ECE | Brier |",
        "|---|---|---|---|---|---|---|---|",
    ]
    held_out = {name: part for name, part in figures.items() if name != "near_unit_mass"}
    for name, part in held_out.items():
        for who, words in (("all", ""), ("familiar", ", familiar ones")):
            lines.append(_row(f"{name}{words}", part[who]))
    if "near_unit_mass" in figures:
        mass = figures["near_unit_mass"]
        lines += [
            f"| configuration, M alone | {mass['n_runs']} | | {_auroc(mass['auroc'])} | "
            f"{fixed(mass['auroc_within_architecture'])} | {fixed(mass['auroc_within_cell'])} | "
            f"{fixed(mass['ece'])} ({fixed(mass['ece_as_probability'])} as it stands) | |"
        ]
    for name, part in held_out.items():
        rates = part["all"].get("stable_rates")
        if rates:
            lines += ["", _stable(name, part["below"], rates)]
    if worst := _architectures(held_out):
        lines += ["", *worst]
    return lines


def _row(name: str, part: Mapping[str, Any]) -> str:
    if "auroc" not in part:
        return f"| {name} | {part['n_runs']} | {part['n_diverged']} | | | | | |"
    return (
        f"| {name} | {part['n_runs']} | {part['n_diverged']} | {_auroc(part['auroc'])} | "
        f"{fixed(part['auroc_within_architecture'])} | {fixed(part['auroc_within_cell'])} | "
        f"{fixed(part['ece'])} | {fixed(part['brier'])} |"
    )


def _stable(name: str, below: float, rates: Mapping[str, Any]) -> str:
    found = (
        f"Largest rate at which less than {percent(below)} diverge, {name} held out: expected over measured has the "
        f"median {fixed(rates['median_ratio'])} over {rates['n_measured']} cells; {percent(rates['share_within_1.5'])} "
        f"lie within a factor of 1.5, {percent(rates['share_within_2'])} within 2, "
        f"{percent(rates['share_in_interval'])} in their interval. The rate at which the risk is {percent(below)} is "
        f"{fixed(rates['median_cautious_ratio'])} times the measured one in "
        f"the median, and stable in {percent(rates['share_cautious_is_stable'])} of the cells."
    )
    if rates["n_bounds"]:
        found += f" The grid of {rates['n_bounds']} more gives a bound alone, which {rates['n_bounds_kept']} keep."
    return found


def _architectures(held_out: Mapping[str, Any]) -> list[str]:
    part: Mapping[str, Any] = held_out.get("architecture") or next(iter(held_out.values()), {})
    if not part.get("architectures"):
        return []
    lines = [
        f"By architecture, {part['by']} held out:",
        "",
        "| architecture | runs | diverged | mean probability | AUROC | familiar | stable rate, median ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in part["architectures"].items():
        lines.append(
            f"| {name} | {row['n_runs']} | {row['n_diverged']} | {fixed(row['mean_probability'])} | "
            f"{fixed(row['auroc'])} | {percent(row['share_familiar'])} | "
            f"{fixed(row['stable_rates']['median_ratio'])} |"
        )
    return lines


def _limits(feature_map: FeatureMap, sizes: Mapping[str, tuple[float, float]], n_steps: int | None) -> list[str]:
    rows = []
    for name in feature_map.features:
        long_name = FEATURES[name].long_name
        rows.append(f"| {name} | {long_name} | {feature_map.range_of(name)} |")
    return [
        "## Limits",
        "",
        "- It knows runs like those above. A case further from them than they are from each other (distance above 1), "
        "or outside of the ranges below by more than an eighth of them, gets no number.",
        _sizes(sizes),
        "- Divergence is RKSP's: loss above 50, norm of all gradients above 500, or either not finite, at any step. "
        "Runs that converge may still learn badly.",
        *(
            [f"- Its runs ended after {n_steps} updates, so it speaks of divergence within the first {n_steps}."]
            if n_steps
            else []
        ),
        "- The interval says how well the model is known, from resampled groups; it is no guarantee for a single run, "
        "whose outcome also depends on its seed.",
        *(
            [f"- It knows no {OPTIMIZER} but {feature_map.range_of(OPTIMIZER)}."]
            if OPTIMIZER in feature_map.features
            else []
        ),
        "",
        "| feature | what | seen |",
        "|---|---|---|",
        *rows,
    ]


def _sizes(sizes: Mapping[str, tuple[float, float]]) -> str:
    if not sizes:
        return "- Its file does not say how large its models were: it answers for models of any size."
    seen = (f"a {FEATURES[name].long_name} of {low:g} to {high:g}" for name, (low, high) in sizes.items())
    return f"- Its models had {' and '.join(seen)}. A larger or a smaller one gets no number."


def _auroc(values: list[float | None]) -> str:
    value, low, high = values
    return fixed(value) if value is None or low is None or high is None else with_interval(value, low, high)
