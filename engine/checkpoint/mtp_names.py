"""The names of prediction layers (MTP) in a checkpoint, which may be the target's own."""

from __future__ import annotations

_INPUTS = (".eh_proj.weight", ".input_proj.weight", ".e_proj.weight")  # of layers in each layout


def layer_prefixes(names: frozenset[str]) -> tuple[str, ...]:
    """Return `model.layers.61`, ..., `model.mtp_layers.0`, ... or `mtp.0`, ..., by their numbers; none if there is no
    MTP layer."""
    found = {name.rsplit(".", 2)[0] for name in names if name.endswith(_INPUTS)}
    numbers = {prefix: prefix.rpartition(".")[2] for prefix in found}
    return tuple(sorted((each for each in found if numbers[each].isdecimal()), key=lambda each: int(numbers[each])))
