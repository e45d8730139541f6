"""Risk of divergence before training starts: `risk` is the way in.

features.py says what is known of a run, design.py how it enters a linear model, fitting.py finds its weights,
model.py predicts, over_rates.py does so for many rates, familiarity.py says how far a case is from the training runs,
neighbours.py which runs are most like it, model_file.py and card.py keep and describe the model; scores.py,
predictors.py, stable_rates.py and validation.py say how good it is.
"""
