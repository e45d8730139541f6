"""Parts of `widgets.AssessmentReport`.

``page.py`` shows the text of the report and draws a figure once it is visible. ``choice_table.py`` is a table with a
selectable row, which the views ``criteria.py``, ``side_by_side.py`` and ``experiment_list.py`` use. ``evidence.py``
shows a criterion and the data that support it.
"""
