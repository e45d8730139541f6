"""Files: stores of runs, the writer in the background, logs of other tools; everything appears whole or not at all."""
