"""Files: stores of runs, the background writer, logs of other tools. No write leaves a partial file."""
