"""The table of the page of the course is that of the recorded practice cases."""

import numpy as np
import pytest
import xarray as xr

from tests.docs.page_numbers import ROOT, page_module, text_of

pytestmark = pytest.mark.recorded


@pytest.fixture(scope="module")
def cases():
    return xr.load_dataset(ROOT / "data" / "patients.nc")


def test_the_board_has_the_means_of_the_cases(cases):
    table = page_module("docs/course.md").board().set_index(["level", "program"])
    for (level, player), row in table.iterrows():
        at = np.ones(cases.sizes["patient"], bool) if level == "all" else cases["level"].values == level
        of = cases.sel(player=player).isel(patient=at)
        assert row["cases"] == at.sum()
        assert float(row["points"]) == pytest.approx(of["board_points"].values.mean(), abs=0.06)
        assert float(row["causes right"]) == pytest.approx(of["board_are_causes_right"].values.mean(), abs=0.006)
        assert float(row["cures that work"]) == pytest.approx(of["board_does_cure_work"].values.mean(), abs=0.006)


def test_what_the_page_says_about_the_settings_alone_is_so(cases):
    assert "From level 3 on, the settings alone get as many points" in text_of("docs/course.md")

    def mean(name, player, level):
        of = cases[f"board_{name}"].sel(player=player).values
        return of[cases["level"].values == level].mean()

    for level in (3, 4, 5):
        assert mean("points", "settings alone", level) >= mean("points", "wb.diagnose", level)
        assert (
            mean("are_causes_right", "wb.diagnose", level) >= mean("are_causes_right", "settings alone", level) - 1e-9
        )
        assert mean("spent", "wb.diagnose", level) > 0.5
