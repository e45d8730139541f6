"""Learning rates and risk."""

import numpy as np

import workbench as wb


def rate_curve():
    """The held-out loss against the learning rate, with the band of useful rates.

    Recorded runs of two designs. The large mark is the best rate, the dashed line the loss of a model that knows only
    the frequencies of its targets.
    """
    study = wb.samples.open("rate_study", "fit").query(run="n_steps == 480 and d_model == 64 and n_layers == 3")
    designs = {name: study.query(run=f"architecture == '{name}'") for name in ("Pre-LN", "No norm")}
    return wb.plots.rate_curve({name: wb.rates.loss_over_rates(runs) for name, runs in designs.items()})


def rate_bands():
    """The useful learning rates of several designs, one row for each.

    Recorded runs of four architectures. The bar extends from the slow edge to the useful edge; the mark
    is the best rate.
    """
    study = wb.samples.open("rate_study", "fit").query(run="stage == 'coarse'")
    runs = study.isel(run=study["architecture"].isin(["GPT-2", "Llama", "Pre-LN", "No norm"]).values)
    return wb.plots.rate_bands(wb.rates.rate_outcomes(runs))


def pilot_losses():
    """The held-out losses of a pilot: short runs on copies of a model.

    The green band is the estimated range of useful rates of the full training.
    """
    model = wb.zoo.transformer(d_model=16, n_layers=2, n_heads=2, vocab_size=16, max_length=8)
    task = wb.tasks.associative_recall(length=8, vocab_size=16, n_pairs=2, batch_size=8)
    found = wb.find_rate(model, task, n_steps=1000, budget=200, progress=False)
    return wb.plots.pilot_losses(found.data)


def risk_curve():
    """The probability of not learning well against the learning rate.

    A design of the recorded sweep with a plan of 400 updates. The green band holds the rates that are predicted to
    learn well.
    """
    case = wb.samples.open("divergence_sweep", "norms").isel(run=[0])
    risk = wb.risk.over_rates(wb.sweeps.replan(case, n_steps=400), np.geomspace(1e-4, 1, 40))
    return wb.plots.risk_curve(risk, learning_rate=0.01)
