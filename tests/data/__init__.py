"""Tests of what makes and judges the recorded studies."""

import tests.data_scripts  # noqa: F401  (so that tests can import the scripts)
