"""The flags that the programs here share."""

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from .corpus import Corpus, read_corpus, standard_library

DEMO = Path(__file__).parents[1]
Config = TypeVar("Config")


def parser_of(description: str | None, *configs: Any) -> argparse.ArgumentParser:
    """Return a parser with the flags of the text and the device, and one for each field of the dataclasses."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, default=standard_library(), help="folder of the standard library")
    parser.add_argument("--held-out-fraction", type=float, default=0.02)
    parser.add_argument("--max-files", type=int)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    for field in (field for config in configs for field in dataclasses.fields(config)):
        parser.add_argument("--" + field.name.replace("_", "-"), type=type(field.default), default=field.default)
    return parser


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse a command line; `device` becomes a torch.device."""
    options = parser.parse_args(arguments)
    name = ("cuda" if torch.cuda.is_available() else "cpu") if options.device == "auto" else options.device
    options.device = torch.device(name)
    return options


def config_of(kind: type[Config], options: argparse.Namespace) -> Config:
    """Return the dataclass whose fields are flags."""
    return kind(**{field.name: getattr(options, field.name) for field in dataclasses.fields(kind)})  # pyright: ignore


def corpus_of(options: argparse.Namespace) -> Corpus:
    """Read the text."""
    return read_corpus(options.source, options.held_out_fraction, options.max_files)
