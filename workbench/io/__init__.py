"""Files: stores of runs, the background writer, logs of other tools. Files are written atomically."""
