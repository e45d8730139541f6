"""Spectra of a model."""

import workbench as wb


def eigenvalue_map():
    """The eigenvalues of each layer in the complex plane, next to the unit circle.

    Two models before training. With Pre-LN the eigenvalues of twelve blocks spread around 1; without normalization
    all of them are close to 1. The color is the depth of the layer.
    """
    text, _ = wb.tasks.text_bytes(batch_size=32, seed=1).batch(0)
    spectra = {}
    for norm in ("pre_ln", "none"):
        model = wb.zoo.transformer(norm, d_model=32, n_layers=12, n_heads=4, vocab_size=256)
        spectra[norm] = wb.profile(model, text, n_snapshots=2048, progress=False)
    return wb.plots.eigenvalue_map(spectra)


def layer_profile():
    """Spectral measures of each layer against depth, one line for each model.

    Two trained models that ship with the package. Layers whose update is too small for a spectrum have hollow markers.
    """
    text, _ = wb.tasks.text_bytes(batch_size=32, seed=1).batch(0)
    names = ("pre_ln", "no_norm")
    spectra = {name: wb.profile(wb.samples.load(name), text, n_snapshots=2048, progress=False) for name in names}
    return wb.plots.layer_profile(spectra)


def radar():
    """A comparison of architectures as radar charts, ours and the published values.

    Normalizations at initialization: the mean over the recorded seeds, next to the values of RKSP (dashed).
    """
    comparison = wb.samples.open("initialization/norms").mean("seed")
    names = ["Pre-LN", "Post-LN", "DeepNorm", "No-Norm"]
    return wb.plots.radar(comparison.sel(architecture=names), columns=2)


def comparison_table():
    """The values of a comparison as a table, ours next to the published ones.

    The same data as in the radar charts. The function returns a pandas table.
    """
    comparison = wb.samples.open("initialization/norms").mean("seed")
    return wb.plots.comparison_table(comparison, measures=["near_unit_mass", "spectral_radius"])


def flow_map():
    """The growth of the signal and the decay of the gradient from block to block.

    Two models before training. The color of a box states whether a sub-layer amplifies or attenuates.
    """
    task = wb.tasks.associative_recall(length=16)
    flows = {}
    for norm in ("pre_ln", "none"):
        model = wb.zoo.transformer(norm, d_model=32, n_layers=4, n_heads=2)
        flows[norm] = wb.flow.measure(model, task, jacobian=False)
    return wb.plots.flow_map(flows)


def weight_spectra():
    """A measure of every weight matrix against depth, and the eigenvalue density of one matrix.

    A trained model that ships with the package. The lower panel has the power law that was fitted to the tail.
    """
    spectra = wb.weights.weight_spectra(wb.samples.load("pre_ln"), progress=False)
    return wb.plots.weight_spectra(spectra, measure="stable_rank")
