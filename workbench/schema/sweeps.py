"""Variables of a sweep: for each run, its settings, the measurements before its first update, and its outcome.

A sweep without outcomes is a set of *cases*: the information available before training, on which risk models are based.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from workbench.schema.runs import SPECTRA, variables

SWEEP_VERSION = 1

#: Settings, stored as coordinates.
SETTINGS = variables("""
study | run | U | study | | label of the study; empty if there is none
architecture | run | U | architecture | | label of the model
configuration | run | U | configuration | | identifies the model without its seed; empty if not part of a design
cell | run | U | cell | | identifies all settings except learning rate and seed; empty if not part of a design
family | run | U | family | | family of the zoo; empty for other models
norm | run | U | norm | | normalization of the zoo; empty for other models
initialization | run | U | initialization | | initialization of the zoo; empty for other models
init_std | run | f | init scale | 1 | standard deviation of the initial weights; NaN if unknown
d_model | run | i | width | 1 | width of the residual stream
n_layers | run | i | layers | 1 | number of blocks
n_weights | run | i | parameters | 1 | number of parameter values
task | run | U | task | | name of the task
batch_size | run | i | batch size | example | examples of a batch
n_tokens | run | i | tokens per batch | token | targets of a batch, including ignored ones
learning_rate | run | f | learning rate | 1 | peak rate
warmup | run | i | warm-up | step | steps in which the rate increases
schedule | run | U | schedule | | schedule of the rate after the warm-up
mean_rate_share | run | f | mean relative rate | 1 | mean over the steps of the rate over its peak
optimizer | run | U | optimizer | | name of its class; empty if unknown
momentum | run | f | momentum | 1 | of SGD or RMSprop, beta1 of Adam; 0 if there is none
weight_decay | run | f | weight decay | 1 | of the optimizer; 0 if there is none
clip_norm | run | f | clip norm | 1 | largest norm of all gradients together; NaN without clipping
n_steps | run | i | steps | step | planned updates
seed | run | i | seed | 1 | of parameters, data and training
settings | run | U | settings | | all settings that determine the run, as JSON
""")

_OF_SPECTRA = (
    "eigenvalue", "near_unit_mass", "expansive_mass", "contractive_mass", "intermediate_mass", "spectral_radius",
    "eigenvector_condition", "nonlinearity_ratio", "kreiss_constant", "rank", "energy_gain", "update_norm",
    "is_informative",
)  # fmt: skip

#: Measurements of the model at initialization. All are floats, as NaN marks layers that a run does not have.
MEASURES = {
    name: replace(SPECTRA[name], dims=("run", *SPECTRA[name].dims), kind="c" if name == "eigenvalue" else "f")
    for name in _OF_SPECTRA
} | variables("""
initial_loss | run | f | initial loss | nat | of the first batch
initial_accuracy | run | f | initial accuracy | 1 | on the first batch; NaN if not defined
logit_std | run | f | logit standard deviation | 1 | standard deviation over classes, mean over tokens
scale_response | run | f | scale response | 1 | log2 of the factor of the logit scale when the stream entering the \
first block doubles
stream_rms_first | run | f | stream RMS, first block | 1 | of the states that enter the first block
stream_rms_last | run | f | stream RMS, last block | 1 | of the states that leave the last block
initial_grad_norm | run | f | initial gradient norm | 1 | of all gradients together; NaN if not measured
overshoot_rate | run | f | overshoot rate | 1 | rate at which the first update increases the loss of its batch; inf if \
there is none, NaN if unknown
breaking_rate | run | f | one-update divergence rate | 1 | rate at which the first update diverges; inf if there is \
none, NaN if unknown
unit_change_rate | run | f | unit-change rate | 1 | rate at which the first update changes the logits by 1 nat; inf if \
there is none, NaN if unknown
rehearsed_rate | run | f | ten-update divergence rate | 1 | constant rate at which a copy diverges within ten \
updates; inf if there is none, NaN if not tried
""")

#: Results of training. The first three are predictors of RKSP Table 2 that need a part of the run.
OUTCOMES = variables("""
grad_norm_step_100 | run | f | gradient norm at step 100 | 1 | or at the last step of a shorter run
grad_norm_variance | run | f | gradient norm variance | 1 | variance of the gradient norm over steps 1 to 100, or fewer
n_loss_spikes | run | i | loss spikes | 1 | steps among the first 500 whose loss is an outlier among the previous ones
has_diverged | run | b | diverged | | loss above 50, gradient norm above 500, or not finite
cause | run | U | cause | | of the divergence: loss, grad_norm, non-finite; empty if there is none
divergence_step | run | f | divergence step | step | updates before the divergence; NaN if there is none
final_loss | run | f | final loss | nat | of the last batch; NaN if not finite
accuracy | run | f | accuracy | 1 | mean over the last eighth of the steps; NaN if diverged or not defined
seconds | run | f | duration | s | of the run; not reproducible
""")

#: Updates in a window of the training loss.
LOSS_WINDOW = 10
#: Losses over the updates of a run.
CURVES = variables("""
training_loss | run window | f | training loss | nat | mean over each window of 10 updates; inf if not finite, NaN \
after the end
held_out_loss | run evaluation | f | held-out loss | nat | on the same held-out batch each time; inf if not finite, \
NaN after the end
trivial_loss | run | f | trivial loss | nat | of the predictor that knows the frequencies of the targets alone
evaluation_step | run evaluation | f | evaluation step | step | updates before the evaluation; NaN after the end
""")


def dtype_of(name: str, kind: str) -> type:
    """Return the type in which a variable of a sweep is stored: settings in double precision, measures in single."""
    if kind == "f" and name in SETTINGS:
        return np.float64
    return {"f": np.float32, "c": np.complex64, "i": np.int64, "b": np.bool_, "U": np.str_}[kind]
