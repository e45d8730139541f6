"""Small trees of every kind of report, with real spectra and synthetic values for the other parts."""

import functools
import json

import numpy as np
import xarray as xr

import workbench as wb
from workbench.flow.flow_measurement import measure
from workbench.schema.statuses import Verdict

STATES = ("healthy", "at risk", "failing", "not measured")


def model_and_batch(seed=0):
    """Return a small transformer without normalization, and a batch."""
    model = wb.zoo.transformer(norm="none", d_model=16, n_layers=3, n_heads=2, vocab_size=32, max_length=16, seed=seed)
    return model, wb.tasks.random_tokens(vocab_size=32, length=16).batch(0)


@functools.cache
def spectra(seed=0):
    model, (inputs, _) = model_and_batch(seed)
    return wb.profile(model, inputs, progress=False)


def text(dim, values):
    return (dim, np.array([str(value) for value in values]))


def columns_of(names, rows):
    """Return rows as columns by name."""
    return {name: list(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}


def number(dim, values, long_name="", units="1"):
    return (
        dim,
        np.array(values, dtype=float),
        {"long_name": long_name, "units": units} if long_name else {"units": units},
    )


#: Factors between an estimated rate and the ends of its interval.
ENDS = {"": 1.0, "_low": 0.5, "_high": 2.2}


def pilot(planned=0.003, edge=0.0021):
    """Return a pilot of a plan whose learning rate is too large."""
    edges = {"slow_edge": edge / 30, "best_rate": edge / 3, "useful_edge": edge}
    values = {f"{name}{end}": by * value for name, value in edges.items() for end, by in ENDS.items()}
    values |= {"planned_rate": planned, "upper_rate_limit": values["useful_edge_high"]}
    values["rate_over_edge"] = planned / values["upper_rate_limit"]
    values["rate_over_slow_edge"] = planned / values["slow_edge_low"]
    data = {name: number((), value, name.replace("_", " ")) for name, value in values.items()}
    rates = np.geomspace(1e-4, 0.1, 7)
    loss = 3 + np.log(rates / edges["best_rate"]) ** 2 / 4
    data["loss"] = number(("n_updates", "rate", "seed"), loss[None, :, None], "held-out loss", "nat")
    data["trivial_loss"] = number((), 5.0, "trivial loss", "nat")
    about = {"n_steps": 1000, "reason": "", "sentence": "A sentence."}
    return xr.Dataset(data, {"n_updates": [80], "rate": rates}, about)


def trials():
    return xr.Dataset({"share_broken": number((), 1 / 3, "fraction of trials that diverged")})


@functools.cache
def flow():
    """Return a measured flow with synthetic growing gradients and narrowing heads."""
    model, (inputs, targets) = model_and_batch()
    measured = measure(model, inputs[:4], targets=targets[:4], jacobian=False)
    synthetic = {"signal_gain": 1.1 + 0.2 * np.arange(3), "gradient_gain": 1.6 + 0.9 * np.arange(3)}
    synthetic["attention_entropy_share"] = np.linspace(0.9, 0.35, 6).reshape(3, 2)
    return measured.assign({name: measured[name].copy(data=values) for name, values in synthetic.items()})


def hardware():
    rows = [
        ("weights", "updates lost in low-precision weights", True, 0.31, "share", 0.1, 0.5, "at risk"),
        ("reduction", "error of the reduced gradient", True, 2e-4, "1", 1e-2, 0.1, "healthy"),
        ("staleness", "stale gradients", False, np.nan, "1", 0.1, 0.5, "not measured"),
    ]
    names = ("hazard", "title", "applies", "effect", "unit", "healthy_limit", "failing_limit", "state")
    columns = columns_of(names, rows)
    data = {name: ("hazard", np.array(columns[name])) for name in names[1:]}
    data |= {name: text("hazard", [""] * 3) for name in ("setting", "meaning", "remedy_setting", "remedy_value")}
    return xr.Dataset(data, {"hazard": columns["hazard"]})


_FIELDS = (
    "criterion", "failure_mode", "title", "low", "high", "n_reference", "layer", "path", "variable", "selection",
    "confidence", "reason",
)  # fmt: skip
_CRITERIA = [
    ("rate_over_edge", "unsuitable_rate", "planned rate over its upper limit", np.nan, 0.5, 0, -1,
     "/pilot", "rate_over_edge", {}, 0.8, "the planned rate is too large to learn well"),
    ("gradient_gain_worst", "gradient_flow_collapse", "largest gradient gain of a block", 0.6, 1.8, 37, 2,
     "/flow", "gradient_gain", {"layer": 2}, 0.93, "the gradient grows from block to block"),
    ("spectral_radius", "initialization_out_of_band", "largest spectral radius", np.nan, 40.0, 37, 1,
     "/spectra", "spectral_radius", {"layer": 1}, 0.9, "a block expands some direction more than in any healthy model"),
    ("entropy", "attention_degeneracy", "smallest attention entropy share", 0.3, np.nan, 37, 2,
     "/flow", "attention_entropy_share", {"layer": 2, "head": 1}, 0.88, "a head attends to one token only"),
    ("hazard_weights", "precision_headroom", "updates lost in low-precision weights", np.nan, 0.1, 0, -1,
     "/hardware", "effect", {"hazard": 0}, 1.0, "small updates are rounded away"),
    ("routing", "routing_oscillation", "largest routing change on trial", np.nan, np.nan, 0, -1,
     "", "", {}, 0.0, "the model has no router"),
]  # fmt: skip
_MODES = {
    "gradient_flow_collapse": ("Gradient flow collapse", "gradients vanish or explode on their way through the depth"),
    "attention_degeneracy": ("Attention degeneracy", "heads attend to one token only, or all tokens become equal"),
    "routing_oscillation": ("Routing oscillation", "tokens keep changing experts"),
    "initialization_out_of_band": (
        "Initialization out of band",
        "the measures at initialization are outside of the healthy bands",
    ),
    "precision_headroom": ("Precision headroom", "number formats lose what the updates need"),
    "unsuitable_rate": ("Unsuitable learning rate", "the planned rate is too small or too large to learn well"),
}


def _state(value, low, high):
    if np.isnan(value):
        return "not measured"
    if (np.isnan(low) or value >= low) and (np.isnan(high) or value <= high):
        return "healthy"
    return "failing" if high == high and value > 1.8 * high else "at risk"


def criteria(parts):
    columns = columns_of(_FIELDS, _CRITERIA)
    values = [
        float(parts[path.strip("/")][variable].isel(selection)) if path else np.nan
        for path, variable, selection in zip(columns["path"], columns["variable"], columns["selection"], strict=True)
    ]
    states = [_state(*row) for row in zip(values, columns["low"], columns["high"], strict=True)]
    data = {name: number("criterion", columns[name]) for name in ("low", "high", "confidence")}
    data |= {name: text("criterion", columns[name]) for name in ("failure_mode", "title", "path", "variable", "reason")}
    data |= {name: ("criterion", np.array(columns[name])) for name in ("n_reference", "layer")}
    data["value"] = number("criterion", values)
    data["units"] = text("criterion", ["1"] * len(values))
    data["state"] = text("criterion", states)
    data["selection"] = text("criterion", [json.dumps(selection) for selection in columns["selection"]])
    return xr.Dataset(data, {"criterion": columns["criterion"]})


def failure_modes(criteria):
    rank = {"failing": 3, "at risk": 2, "healthy": 1, "not measured": 0}
    worst = {}
    for row, mode in enumerate(criteria["failure_mode"].values):
        if (
            str(mode) not in worst
            or rank[str(criteria["state"].values[row])] > rank[str(criteria["state"].values[worst[str(mode)]])]
        ):
            worst[str(mode)] = row
    rows = [worst[mode] for mode in _MODES]
    states = [str(criteria["state"].values[row]) for row in rows]
    ids = [
        "" if state == "not measured" else criteria["criterion"].values[row]
        for row, state in zip(rows, states, strict=True)
    ]
    return xr.Dataset(
        {
            "title": text("failure_mode", [title for title, _ in _MODES.values()]),
            "meaning": text("failure_mode", [meaning for _, meaning in _MODES.values()]),
            "state": text("failure_mode", states),
            "confidence": number("failure_mode", criteria["confidence"].values[rows]),
            "worst_criterion": text("failure_mode", ids),
        },
        {"failure_mode": list(_MODES)},
    )


def decisions(verdict):
    rows = [
        ("change", "learning_rate", "0.003", "0.0021", "rate_over_edge", "lower the peak rate",
         "3 of 3 trials converged"),
        ("kss", "kss", "off", "recommended", "gradient_gain_worst", "switch on Koopman Spectral Shaping", ""),
        ("monitor", "wb.Recorder", "", "optimizer: module_grad_norm", "gradient_gain_worst",
         "record the gradient of each block", ""),
        ("stop rule", "loss", "", "9.3", "", "the loss exceeds 9.3 within the first 50 updates", ""),
    ]  # fmt: skip
    if verdict == "proceed":
        rows = [("proceed", "", "", "", "", "start the run as planned, with the stop rules below", ""), *rows[2:]]
    names = ("kind", "setting", "current", "proposed", "criterion", "text", "effect")
    data = {name: text("decision", column) for name, column in columns_of(names, rows).items()}
    return xr.Dataset(data, {"decision": np.arange(len(rows))})


def assessment(verdict="at risk", *, subject="No-Norm, 3 blocks", edge=0.0021, seed=0):
    """Return a tree as from `wb.assess`."""
    parts = {
        "spectra": spectra(seed),
        "flow": flow(),
        "pilot": pilot(edge=edge),
        "trials": trials(),
        "hardware": hardware(),
    }
    parts["criteria"] = criteria(parts)
    parts["failure_modes"] = failure_modes(parts["criteria"])
    parts["decisions"] = decisions(verdict)
    tree = xr.DataTree.from_dict(parts)
    plan = {"training": {"learning_rate": 0.003, "n_steps": 1000}, "hardware": {"data_parallel": 4}}
    tree.attrs = {
        "kind": "assessment", "subject": subject, "verdict": verdict,
        "exit_status": Verdict(verdict).exit_status,
        "summary": f"{subject} is at risk as planned: the gradient grows from block to block.",
        "plan": json.dumps(plan), "n_weights": 10_432, "width": 16, "depth": 3, "seed": seed,
        "versions": json.dumps({"workbench": "0.1.0"}), "created": "2026-01-01T00:00:00+00:00", "duration": 12.3,
        "schema_version": 1,
    }  # fmt: skip
    return tree


def without_rates(*, is_stand_in=False):
    """Return an assessment whose pilot found no useful rates, optionally of a proxy model."""
    tree = assessment("cannot say", subject="large")
    found = tree["pilot"].to_dataset()
    unknown = [name for name in found.data_vars if str(name).startswith(("slow", "best", "useful", "rate_over"))]
    found = found.assign({name: found[name] * np.nan for name in unknown})
    tree["pilot"] = xr.DataTree(found.assign_attrs(reason="No rate tried was too large.", sentence=""))
    rows = tree["criteria"].to_dataset()
    rows["state"] = text("criterion", ["not measured", *rows["state"].values[1:]])
    rows["value"][0], rows["confidence"][0] = np.nan, np.nan
    rows["path"][0] = rows["variable"][0] = ""
    rows["selection"][0] = "{}"
    tree["criteria"] = xr.DataTree(rows)
    modes = failure_modes(rows)
    modes["reason"] = text("failure_mode", ["trials do not cover smaller rates"] * modes.sizes["failure_mode"])
    tree["failure_modes"] = xr.DataTree(modes)
    tree.attrs["summary"] = "It is unknown whether large will train as planned."
    if is_stand_in:
        tree.attrs |= {"width": 4096, "depth": 32, "measured_width": 64, "measured_depth": 4, "is_stand_in": 1}
    return tree


def diagnosis(*, subject="run 17", failure_step=412, with_outcome=True, is_healthy=False):
    """Return a tree as from `wb.diagnose`."""
    causes = [
        ("learning_rate", "Learning rate too high", "hyperparameter", 0.81, -1, 0.6),
        ("architecture", "No normalization", "architecture", 0.15, 2, 0.3),
        ("precision", "Low precision", "precision", 0.03, -1, 0.06),
        ("data", "Bad data", "data", 0.01, -1, 0.04),
    ]
    if is_healthy:
        causes = [("nothing", "Nothing wrong", "none", 0.9, -1, 0.8)] + [
            (*cause[:3], 0.1 * cause[3], cause[4], 0.2 * cause[5]) for cause in causes
        ]
    ids, titles, kinds, probability, layer, alone = zip(*causes, strict=True)
    evidence = [
        (
            "learning_rate",
            2.1,
            "sharpness_rate",
            2.7,
            "1",
            2.0,
            395.0,
            -1,
            "sharpness times rate passed 2 before the loss moved",
        ),
        ("learning_rate", 0.9, "update_ratio", 0.013, "1", 0.001, 380.0, -1, "updates were 13 times as large as usual"),
        ("learning_rate", -0.4, "warmup", 200.0, "step", np.nan, -1.0, -1, "the warmup was long"),
        ("architecture", -0.7, "gradient_gain", 1.02, "1", 1.0, 300.0, 2, "gradients passed every block unchanged"),
        ("precision", -1.5, "gradient_underflow", 0.0, "1", 0.01, -1.0, -1, "no gradient was rounded to zero"),
    ]
    keys = ("cause", "weight", "quantity", "value", "units", "reference", "step", "layer", "sentence")
    columns = columns_of(keys, evidence)
    floats = {name: number("evidence", columns[name]) for name in ("weight", "value", "reference", "step")}
    texts = {name: text("evidence", columns[name]) for name in ("cause", "quantity", "units", "sentence")}
    texts["symptom"] = text("evidence", [f"odd_{name}" for name in columns["quantity"]])
    is_setting = [name == "warmup" for name in columns["quantity"]]
    texts["kind"] = text("evidence", ["configuration" if one else "mechanism" for one in is_setting])
    experiments = xr.Dataset(
        {
            "cause": text("experiment", ["learning_rate", "architecture"]),
            "change": text("experiment", [json.dumps({"learning_rate": 0.001}), json.dumps({"norm": "pre"})]),
            "title": text("experiment", ["A third of the rate", "The same with normalization"]),
            "n_steps": ("experiment", [120, 500], {"units": "step"}), "from_step": ("experiment", [360, 0]),
            "expected_if_right": text("experiment", ["the loss stays down", "the loss stays down"]),
            "expected_if_wrong": text("experiment", ["it fails again", "it fails again"]),
            "cost": number("experiment", [0.2, 1.0]),
        },
        {"order": ("experiment", [1, 2])},
    )  # fmt: skip
    if with_outcome:
        experiments["outcome"] = text("experiment", ["the run converged", ""])
        experiments["supports"] = ("experiment", [True, False])
        experiments["value"], experiments["twin_value"] = (
            number("experiment", v) for v in ([1.3, np.nan], [55.0, np.nan])
        )
    tree = xr.DataTree.from_dict(
        {
            "causes": xr.Dataset(
                {
                    "title": text("cause", titles), "kind": text("cause", kinds),
                    "probability": number("cause", probability), "layer": ("cause", list(layer)),
                    "is_possible": ("cause", [p >= 0.1 for p in probability]),
                    "mechanism_probability": number("cause", alone),
                },
                {"cause": list(ids)},
            ),
            "evidence": xr.Dataset(floats | texts | {"layer": ("evidence", list(columns["layer"]))}),
            "experiments": experiments,
        }
    )  # fmt: skip
    tree.attrs = {
        "kind": "diagnosis", "subject": subject, "fault": "hyperparameter", "failure_step": failure_step,
        "summary": f"{subject} most likely failed because the learning rate was too high.", "schema_version": 1,
        "coverage": 0.9, "shows_failure": 1,
        "created": "2026-01-01T00:00:00+00:00",
    }  # fmt: skip
    return tree


def with_weak_symptoms(n):
    """Return a diagnosis with many symptoms of small weight."""
    tree = diagnosis()
    data = tree["evidence"].to_dataset()
    weak = data.isel(evidence=np.zeros(n, int))
    weak = weak.assign(weight=("evidence", np.linspace(0.02, 0.39, n), data["weight"].attrs))
    tree["evidence"] = xr.DataTree(xr.concat([data, weak], "evidence"))
    return tree


def comparison():
    """Return a tree as from `wb.compare_designs`."""
    trees = {
        "wide": assessment("at risk", subject="wide", edge=0.0021),
        "deep": assessment("proceed", subject="deep", edge=0.008, seed=1),
    }
    rows = {name: tree.attrs for name, tree in trees.items()}
    designs = xr.Dataset(
        {
            "verdict": text("design", [attrs["verdict"] for attrs in rows.values()]),
            "loss_at_best": number("design", [3.1, 2.9], "loss at the best rate of the pilot", "nat"),
            "useful_edge": number("design", [0.0021, 0.008], "largest useful rate"),
            "useful_edge_low": number("design", [0.00105, 0.004], "largest useful rate, lower end"),
            "useful_edge_high": number("design", [0.0046, 0.0176], "largest useful rate, upper end"),
            "n_weights": ("design", [attrs["n_weights"] for attrs in rows.values()]),
            "flops_per_token": number("design", [6e4, 9e4], "compute cost per token", "FLOP"),
            "relative_step_time": number("design", [1.0, 1.4], "relative time of a step"),
            "steps_in_budget": number("design", [1000, 700], "steps in the budget", "step"),
        },
        {"design": list(trees)},
    )
    tree = xr.DataTree.from_dict({"designs": designs} | trees)
    tree.attrs = {"kind": "comparison", "schema_version": 1, "created": "2026-01-01T00:00:00+00:00"}
    return tree
