"""Risk of divergence before training starts: `risk` is the way in.

features.py says what is known of a run, design.py how it enters a linear model, fitting.py finds its weights,
model.py predicts, familiarity.py says how far a case is from the training runs, model_file.py and card.py keep and
describe it; scores.py, predictors.py, stable_rates.py and validation.py say how good it is.
"""
