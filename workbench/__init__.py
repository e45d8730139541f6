"""Stability Workbench: Koopman spectra of transformers, and training stability.

The public names are listed in ``__init__.pyi``. Each is loaded when it is first used, so that ``import workbench`` is
fast and needs no display.
"""

from typing import Any

from workbench.lazy_names import attach_stub

_load, __dir__, __all__ = attach_stub(__name__, __file__, optional="widgets")
#: What other libraries call it -> the name here.
_MEANT = {"savefig": "plots.save", "to_netcdf": "export_netcdf", "load": "open_run", "fit": "train"}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("stability-workbench")
    if name in _MEANT:
        raise AttributeError(f"No workbench attribute {name}; did you mean wb.{_MEANT[name]}?", name=name)
    return _load(name)
