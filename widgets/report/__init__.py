"""Parts of `widgets.AssessmentReport`.

page.py shows the report's text and draws its pictures when they are seen; choice_table.py is a table to choose a row
of, which criteria.py, side_by_side.py and experiments.py fill, each a view; evidence.py shows a criterion and what it
rests on.
"""
