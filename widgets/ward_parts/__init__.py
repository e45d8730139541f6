"""Parts of `widgets.Ward`: the table of the answer, the figures of the record, the score, and the lines of Python."""
