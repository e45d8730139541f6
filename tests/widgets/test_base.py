"""Errors under the widget, and cleanup by close()."""

import ipywidgets
import pytest

from workbench.errors import WorkbenchError
from workbench.widgets.base import WorkbenchWidget


@pytest.fixture
def widget():
    return WorkbenchWidget()


def test_an_error_of_the_workbench_is_shown_as_its_sentence_and_cleared_by_success(widget):
    slider = ipywidgets.IntSlider()

    def refuse(change):
        if change["new"] == 1:
            raise WorkbenchError("Choose <another> value.")

    widget._watch(slider, refuse)
    slider.value = 1
    assert widget.error == "Choose <another> value."
    assert "Choose &lt;another&gt; value." in widget.message.value
    slider.value = 2
    assert widget.error == ""
    assert widget.message.value == ""


def test_what_fails_in_a_control_that_another_one_moves_stays(widget):
    first, second = ipywidgets.IntSlider(), ipywidgets.IntSlider()

    def refuse(change):
        if change["new"] == 1:
            raise WorkbenchError("Choose another value.")

    widget._watch(second, refuse)
    widget._watch(second, lambda _: None)
    widget._watch(first, lambda change: setattr(second, "value", change["new"]))
    first.value = 1
    assert widget.error == "Choose another value."
    first.value = 2
    assert widget.error == ""


def test_any_other_exception_is_named_and_logged(widget, caplog):
    button = ipywidgets.Button()
    widget._on_click(button, lambda _: 1 / 0)
    button.click()
    assert widget.error == "ZeroDivisionError: division by zero"
    assert "Traceback" in caplog.text


def test_close_stops_callbacks_and_closes_what_is_inside(widget):
    slider, calls = ipywidgets.IntSlider(), []
    inner = ipywidgets.HBox([slider])
    widget._fill([inner])
    widget._watch(slider, calls.append)
    widget.close()
    slider.value = 5
    assert calls == []
    assert slider.comm is None
    assert inner.comm is None
    widget.close()
