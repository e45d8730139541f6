"""The controls of one architecture, and the model that they describe."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import ipywidgets
from torch import nn

from workbench import zoo
from workbench.errors import OptionError

if TYPE_CHECKING:
    from workbench.tasks import Task

#: Layout of every row of controls.
ROW = {"flex_flow": "row wrap", "align_items": "center", "grid_gap": "2px 10px"}
LABEL = {"description_width": "initial"}
NATURAL = {"width": "max-content", "max_width": "98%"}
#: Layout of a field for a number, so that a row has room for several.
NARROW = {"width": "134px", "max_width": "98%"}


class ArchitectureControls:
    """Controls of family, norm, width and depth; or the name of a given model.

    Args:
        architecture: A configuration of the zoo, which the controls can change; or a model, which is copied for each
            run and never changed.
        title: Label of the architecture on the page.

    Attributes:
        controls: All controls; empty for a model.
        box: The widget.

    Raises:
        OptionError: If the architecture has another type.
    """

    def __init__(self, architecture: zoo.ArchitectureConfig | nn.Module, *, title: str = "architecture") -> None:
        if not isinstance(architecture, zoo.ArchitectureConfig | nn.Module):
            raise OptionError.of(title, architecture, "a wb.zoo.ArchitectureConfig or a model")
        self.model = architecture if isinstance(architecture, nn.Module) else None
        self._config = architecture if isinstance(architecture, zoo.ArchitectureConfig) else zoo.ArchitectureConfig()
        config = self._config
        self.family = ipywidgets.Dropdown(
            options=zoo.FAMILIES, value=config.family, description=title, style=LABEL, layout=NATURAL
        )
        norms = ("rms_norm",) if config.family == "mamba" else zoo.NORMS
        look, small = {"style": LABEL, "layout": NATURAL}, {"style": LABEL, "layout": NARROW}
        self.norm = ipywidgets.Dropdown(options=norms, value=config.norm, description="norm", **look)
        self.d_model = ipywidgets.BoundedIntText(config.d_model, min=1, max=1 << 14, description="width", **small)
        self.n_layers = ipywidgets.BoundedIntText(config.n_layers, min=1, max=256, description="layers", **small)
        self.controls = [] if self.model is not None else [self.family, self.norm, self.d_model, self.n_layers]
        label = ipywidgets.Label(f"{title}: {type(self.model).__name__}")
        self.box = ipywidgets.HBox(self.controls or [label], layout=ROW)

    @property
    def is_vision(self) -> bool | None:
        """Whether it reads images; None if unknown, as for a given model."""
        return None if self.model is not None else self.family.value == "vit"

    @property
    def names(self) -> tuple[str, str]:
        """A short and a longer name of the architecture; either is used as the name of a run and of its files."""
        if self.model is not None:
            n_parameters = sum(parameter.numel() for parameter in self.model.parameters())
            return type(self.model).__name__, f"{type(self.model).__name__}, {n_parameters:,} weights"
        norm = "no norm" if self.norm.value == "none" else self.norm.value.replace("_", " ")
        short = f"{self.family.value}, {norm}"
        return short, f"{short}, {self.d_model.value} wide, {self.n_layers.value} layers"

    def adapt(self) -> None:
        """Offer the norms of the family."""
        norms = ("rms_norm",) if self.family.value == "mamba" else zoo.NORMS
        if self.norm.options != norms:
            norm = self.norm.value
            self.norm.options = norms
            self.norm.value = norm if norm in norms else norms[0]

    def build(self, task: Task, seed: int) -> nn.Module:
        """Return a new model for a task, with the same initial parameters on each call.

        Raises:
            OptionError: If the architecture is invalid.
        """
        if self.model is not None:
            return copy.deepcopy(self.model)
        kind: Any = task  # tasks of images and of tokens have different fields
        options = {"seed": seed, "d_model": self.d_model.value, "n_layers": self.n_layers.value}
        options["norm"] = self.norm.value
        if self.family.value == "vit":
            options |= {"image_size": kind.image_size, "n_channels": 1, "n_classes": kind.n_classes, "patch_size": 2}
        elif hasattr(task, "vocab_size"):
            options |= {"vocab_size": kind.vocab_size, "max_length": kind.length}
        if self.family.value == self._config.family:
            return zoo.build(replace(self._config, **options))
        return zoo.build(zoo.ArchitectureConfig(family=self.family.value, **options))


def names_of(first: ArchitectureControls, second: ArchitectureControls) -> tuple[str, str]:
    """Return different names of two architectures, which are also used as file names."""
    for one, other in zip(first.names, second.names, strict=True):
        if one != other:
            return one, other
    return f"{first.names[0]}, first", f"{second.names[0]}, second"
